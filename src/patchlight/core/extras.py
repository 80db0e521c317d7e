"""The extras: optional packages, and the error for a missing one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from patchlight.core.errors import PatchlightError


@dataclass(frozen=True)
class Extra:
    """An extra of `pip install 'patchlight[NAME]'`: the modules of its packages, and what they are for."""

    name: str
    modules: tuple[str, ...]
    purpose: str

    def missing(self) -> list[str]:
        """The modules that are not installed."""
        return [module for module in self.modules if find_spec(module) is None]


EXTRAS = {
    extra.name: extra
    for extra in (
        Extra("hf", ("transformers",), "models of transformers, as hf:NAME or hf:FOLDER, and image processors"),
        Extra("open_clip", ("open_clip",), "models of open_clip, as open_clip:NAME"),
        Extra("lime", ("skimage",), "superpixels in the method lime"),
        Extra("train", ("accelerate", "tensorboard"), "training explainers: patchlight diffmask and shapley"),
        Extra("bench", ("pyarrow", "filelock"), "recipes and their tables: patchlight bench"),
        Extra("ray", ("ray",), "patchlight bench run --ray"),
        Extra("web", ("fastapi", "uvicorn", "cachetools"), "the page, patchlight serve"),
        Extra("segmentation", ("h5py",), "ImageNet-Segmentation's file, gtsegs_ijcv.mat"),
        Extra("video", ("av",), "video files as inputs of video models"),
        Extra("medical", ("nibabel",), "NIfTI files as inputs of volume models"),
        Extra("pandas", ("pandas",), "to_frame() of results"),
    )
}
"""By name; `pip install 'patchlight[all]'` installs all of them."""


def missing_extra(subject: str, package: str, extra: str, otherwise: str = "") -> PatchlightError:
    """The error for a package that is not installed; `subject` ends with its verb.

    >>> str(missing_extra("the page needs", "uvicorn", "web"))
    "the page needs uvicorn: pip install 'patchlight[web]'"
    """
    alternative = f", or {otherwise}" if otherwise else ""
    return PatchlightError(f"{subject} {package}: pip install 'patchlight[{EXTRAS[extra].name}]'{alternative}")


def import_extra(module: str, subject: str, extra: str, otherwise: str = "", package: str = "") -> Any:
    """Import a module of an optional package; the arguments after it are those of `missing_extra`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra(subject, package or module, extra, otherwise) from error


def missing_extras() -> Iterator[tuple[Extra, list[str]]]:
    """The extras that are not complete, each with its missing modules."""
    for extra in EXTRAS.values():
        if absent := extra.missing():
            yield extra, absent
