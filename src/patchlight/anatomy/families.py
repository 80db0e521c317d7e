"""Families of models: each reads the anatomy of its own models, and may make them by name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.registry import Entry, Registry


@dataclass(frozen=True)
class LoadRequest:
    """The model that `load` asks a family for.

    Args:
        name: What it is called, without the family's prefix.
        pretrained: Whether its pretrained weights are fetched.
        tag: Which of several pretrained weights, where the user says so.
        weights: Tensors of the user's own that will be filled in; the number of classes can be read from them.
        options: For the constructor of the model.
        about: What `wrap` will be told of the model.
    """

    name: str
    pretrained: bool
    tag: str | None
    weights: Mapping[str, Tensor] | None
    options: Mapping[str, Any]
    about: Mapping[str, Any]

    def with_classes(self, option: str, *heads: str) -> dict[str, Any]:
        """The options, with the number of classes of the first of these weights that is there, unless it is given."""
        weight = next((self.weights[head] for head in heads if head in self.weights), None) if self.weights else None
        classes = {} if weight is None else {option: int(weight.shape[0])}
        return {**classes, **self.options}


Creator = Callable[[LoadRequest], nn.Module | tuple[nn.Module, dict[str, Any]]]
"""From a request to a model, and what is known of it beside: keywords of `wrap`, which win over those of the user."""


@dataclass(frozen=True)
class Family(Entry):
    """A function of a module, and of what `wrap` was told about it, to its Anatomy, or None.

    `package` is the one whose models it reads; with none, it is asked about every model, before the others. `create`
    makes those that `load` calls `prefix:NAME`, and `names` lists those that go without the prefix. `tagged`: a name
    may have several pretrained weights.
    """

    package: str = ""
    prefix: str = ""
    create: Creator | None = None
    names: Callable[[], Sequence[str]] = tuple
    tagged: bool = False


FAMILIES: Registry[Family] = Registry(
    "model family",
    [
        f"patchlight.anatomy.{room}"
        for room in ("bundled", "timm", "timm_plain", "timm_stages", "hf", "hf_backbones", "open_clip", "torchvision")
    ],
)
Reader = TypeVar("Reader", bound=Callable[..., Anatomy | None])


def register_family(name: str, **more: Any) -> Callable[[Reader], Reader]:
    """Register a family of models; `wrap` then reads them by itself.

    Args:
        name: What it is called.
        more: Fields of `Family`: the `package` whose models it reads; `prefix` and `create`, for `load` to make its
            models as "prefix:NAME"; `names` and `tagged`.
    """

    def register(function: Reader) -> Reader:
        FAMILIES.add(Family(name, function, **more))
        return function

    return register


def in_order() -> list[Family]:
    """The families in the order they are tried: those of no package (plugins, say), the bundled model's, the others."""
    first = ("", "patchlight")
    return sorted(FAMILIES.values(), key=lambda family: (family.package not in first, family.package))


def family_of(name: str) -> tuple[Family, str]:
    """The family that makes a model of this name, and the name without its prefix; timm's makes what no other knows."""
    makers = [family for family in in_order() if family.create is not None]
    prefix, colon, rest = name.partition(":")
    for family in makers:
        if colon and prefix == family.prefix:
            return family, rest
    found = next((family for family in makers if name in family.names()), FAMILIES["timm"])
    return found, name


def read_anatomy(model: nn.Module, about: dict[str, Any]) -> Anatomy | None:
    """The anatomy of a model, where one of the families knows it."""
    make = type(model).__module__.partition(".")[0]
    known = [family for family in in_order() if not family.package or family.package in sys.modules]
    own = [family for family in known if family.package in ("", make)]
    stage = about.pop("stage", None)
    for family in own if any(family.package for family in own) else known:
        staged = (
            {"stage": stage} if stage is not None and "stage" in inspect.signature(family.function).parameters else {}
        )
        anatomy: Anatomy | None = family.function(model, **about, **staged)
        if anatomy is not None:
            anatomy.assumed_labels = "labels" not in about
            if stage is not None and not anatomy.hierarchical:
                raise PatchlightError(f"{anatomy.name} has no stages, so stage={stage} means nothing for it")
            return anatomy
    return None
