"""Families of models: each reads the anatomy of its own, or says that a model is none of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.registry import Entry, Registry


@dataclass(frozen=True)
class Family(Entry):
    """A function of a module, and of what `wrap` was told about it, to its Anatomy, or None.

    `package` is the one whose models it reads; with none, it is asked about every model, before the others.
    """

    package: str = ""


FAMILIES: Registry[Family] = Registry(
    "model family",
    [
        f"patchlight.anatomy.{room}"
        for room in ("timm", "timm_plain", "timm_stages", "hf", "hf_backbones", "open_clip", "torchvision")
    ],
)
Reader = TypeVar("Reader", bound=Callable[..., Anatomy | None])


def register_family(name: str, *, package: str = "") -> Callable[[Reader], Reader]:
    """Register a family of models; `wrap` and `load` then read them by themselves."""

    def register(function: Reader) -> Reader:
        FAMILIES.add(Family(name, function, package=package))
        return function

    return register


def read_anatomy(model: nn.Module, about: dict[str, Any]) -> Anatomy | None:
    """The anatomy of a model, where one of the families knows it."""
    make = type(model).__module__.partition(".")[0]
    known = sorted(FAMILIES.values(), key=lambda family: family.package != "")
    own = [family for family in known if family.package in ("", make)]
    stage = about.pop("stage", None)
    for family in own if any(family.package for family in own) else known:
        staged = (
            {"stage": stage} if stage is not None and "stage" in inspect.signature(family.function).parameters else {}
        )
        anatomy: Anatomy | None = family.function(model, **about, **staged)
        if anatomy is not None:
            if stage is not None and not anatomy.hierarchical:
                raise PatchlightError(f"{anatomy.name} has no stages, so stage={stage} means nothing for it")
            return anatomy
    return None
