"""What is installed, what it runs on, and a self-test with the bundled model."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata

from patchlight import __version__
from patchlight.core.errors import first_line
from patchlight.core.extras import EXTRAS, missing_extras

PACKAGES = ("torch", "torchvision", "timm", "numpy", "scipy", "pillow", "safetensors", "pydantic", "typer", "rich")
"""The required packages, by their names on PyPI; matplotlib and the packages of extras follow."""
DISTRIBUTIONS = {"skimage": "scikit-image", "open_clip": "open_clip_torch"}
"""By the name that is imported, the name on PyPI where it differs."""
PHOTO, LABEL = "cat.jpg", "cat"


@dataclass(frozen=True)
class DeviceInfo:
    """A device, and the precision that `auto` chooses there, with and without a backward pass."""

    device: str
    name: str
    memory_gb: float | None
    auto_inside: str
    auto_masks: str


@dataclass(frozen=True)
class Check:
    """A test and its result."""

    what: str
    well: bool
    result: str


@dataclass
class Installation:
    """Everything that `patchlight doctor` shows."""

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


def examine_installation(debug: bool = False) -> Installation:
    """Examine everything; a test that fails is reported, unless `debug` raises its error."""
    installation = Installation(versions=dict(_versions()), missing_extras=list(_missing()))
    checks, names = installation.checks, list[str]()

    @contextmanager
    def failures(what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if debug:
                raise
            checks.append(Check(what, False, first_line(error)))

    def check(what: str, function: Callable[[], str]) -> None:
        with failures(what):
            checks.append(Check(what, True, function()))

    check("bundled files", _check_bundled_files)
    with failures("import torch"):
        names = _devices()
    for name in names:
        check(f"pocket predicts {LABEL} on {name}", partial(_predict, name))
        check(f"explain on {name}", partial(_explain, name))
        with failures(f"properties of {name}"):
            installation.devices.append(_device(name))
    return installation


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


def _check_bundled_files() -> str:
    from patchlight.zoo.bundled import damaged, expected

    wrong = damaged()
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: reinstall Patchlight")
    return f"{len(expected())} files"


def _devices() -> list[str]:
    import torch

    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def _predict(name: str) -> str:
    from patchlight.anatomy.load import load
    from patchlight.zoo import pocket

    ((label, probability),) = load("pocket", device=name).predict(pocket.PHOTOS / PHOTO, k=1)[0]
    if label != LABEL:
        raise ValueError(f"it predicts '{label}' for {PHOTO}")
    return f"{probability:.1%}"


def _explain(name: str) -> str:
    from patchlight.anatomy.load import load
    from patchlight.engine import explain
    from patchlight.zoo import pocket

    att = explain(load("pocket", device=name), pocket.PHOTOS / PHOTO)
    if not bool(att.scores.isfinite().all()) or float(att.scores.amax()) == float(att.scores.amin()):
        raise ValueError(f"the map of {att.method} is constant or not finite")
    return f"{att.method}, precision {att.precision}"


def _device(name: str) -> DeviceInfo:
    import torch

    from patchlight.evidence.precision import chosen
    from patchlight.methods.requests import resolve

    device = torch.device(name)
    description, memory = platform.processor() or platform.machine(), None
    if device.type == "cuda":
        description = torch.cuda.get_device_name(device)
        memory = round(torch.cuda.get_device_properties(device).total_memory / 1e9, 1)
    elif device.type == "cpu":
        description = f"{description}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()}"
    inside = chosen("auto", device, torch.float32, resolve("genatt").method.precision)
    return DeviceInfo(name, description, memory, inside, chosen("auto", device, torch.float32))
