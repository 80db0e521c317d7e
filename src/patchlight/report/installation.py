"""What is installed, what it runs on, and whether the bundled model can be explained with it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata

from patchlight import __version__
from patchlight.core.errors import first_line
from patchlight.core.extras import EXTRAS, missing_extras

PACKAGES = ("torch", "torchvision", "timm", "numpy", "scipy", "pillow", "safetensors", "pydantic", "typer", "rich")
"""What Patchlight cannot do without, by the names that pip knows; matplotlib too, and then what extras bring."""
DISTRIBUTIONS = {"skimage": "scikit-image", "open_clip": "open_clip_torch"}
"""Packages that are imported by another name than pip's."""
PHOTO, LABEL = "cat.jpg", "cat"


@dataclass(frozen=True)
class DeviceInfo:
    """Where models can run, and what precision `auto` comes to there: with a backward, and for forwards alone."""

    device: str
    name: str
    memory_gb: float | None
    auto_inside: str
    auto_masks: str


@dataclass(frozen=True)
class Check:
    """Something that was tried."""

    what: str
    well: bool
    told: str


@dataclass
class Findings:
    """All that is told."""

    patchlight: str = __version__
    python: str = platform.python_version()
    platform: str = platform.platform()
    versions: dict[str, str] = field(default_factory=dict)
    devices: list[DeviceInfo] = field(default_factory=list)
    missing_extras: list[dict[str, str]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def well(self) -> bool:
        return all(check.well for check in self.checks)


def examine_installation(debug: bool = False) -> Findings:
    """Everything that can be found out; a check that fails is reported, unless `debug` raises its error."""
    found = Findings(versions=dict(_versions()), missing_extras=list(_missing()))
    found.checks.append(_tried("the bundled files are whole", _bundled, debug))
    try:
        names = _devices()
    except Exception as error:
        if debug:
            raise
        found.checks.append(Check("torch can be imported", False, first_line(error)))
        return found
    for name in names:
        checks = {
            f"pocket sees the {LABEL} on {name}": partial(_forward, name),
            f"genatt explains it on {name}": partial(_explained, name),
        }
        found.checks += [_tried(what, check, debug) for what, check in checks.items()]
        try:
            found.devices.append(_device(name))
        except Exception as error:
            if debug:
                raise
            found.checks.append(Check(f"{name} can be described", False, first_line(error)))
    return found


def _tried(what: str, check: Callable[[], str], debug: bool) -> Check:
    try:
        return Check(what, True, check())
    except Exception as error:
        if debug:
            raise
        return Check(what, False, first_line(error))


def _versions() -> Iterator[tuple[str, str]]:
    extras = [DISTRIBUTIONS.get(module, module) for extra in EXTRAS.values() for module in extra.modules]
    for package in dict.fromkeys((*PACKAGES, "matplotlib", *extras)):
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue


def _missing() -> Iterator[dict[str, str]]:
    for extra, absent in missing_extras():
        packages = ", ".join(DISTRIBUTIONS.get(module, module) for module in absent)
        install = f"pip install 'patchlight[{extra.name}]'"
        yield {"extra": extra.name, "packages": packages, "purpose": extra.purpose, "install": install}


def _bundled() -> str:
    from patchlight.zoo.bundled import damaged, expected

    wrong = damaged()
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: install Patchlight again")
    return f"{len(expected())} files"


def _devices() -> list[str]:
    import torch

    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def _forward(name: str) -> str:
    from patchlight.anatomy.load import load
    from patchlight.zoo import pocket

    ((label, probability),) = load("pocket", device=name).predict(pocket.PHOTOS / PHOTO, k=1)[0]
    if label != LABEL:
        raise ValueError(f"it sees '{label}' in {PHOTO}")
    return f"{probability:.1%}"


def _explained(name: str) -> str:
    from patchlight.anatomy.load import load
    from patchlight.engine import explain
    from patchlight.zoo import pocket

    att = explain(load("pocket", device=name), pocket.PHOTOS / PHOTO, "genatt")
    if not bool(att.scores.isfinite().all()) or float(att.scores.amax()) == float(att.scores.amin()):
        raise ValueError("its map says nothing")
    return f"precision {att.precision}"


def _device(name: str) -> DeviceInfo:
    import torch

    from patchlight.evidence.precision import chosen
    from patchlight.methods.requests import resolve

    device = torch.device(name)
    about, memory = platform.processor() or platform.machine(), None
    if device.type == "cuda":
        about = torch.cuda.get_device_name(device)
        memory = round(torch.cuda.get_device_properties(device).total_memory / 1e9, 1)
    elif device.type == "cpu":
        about = f"{about}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()}"
    inside = chosen("auto", device, torch.float32, resolve("genatt").method.precision)
    return DeviceInfo(name, about, memory, inside, chosen("auto", device, torch.float32))
