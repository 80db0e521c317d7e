"""Families of models: each reads the anatomy of its models and may build them by name."""

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
    """The model that `load` requests from a family.

    Args:
        name: Its name, without the family's prefix.
        pretrained: Whether pretrained weights are fetched.
        tag: Which of several pretrained weights, if the user chose.
        weights: The user's tensors that will be loaded; the number of classes is read from them.
        options: Options of the model's constructor.
        overrides: Keywords for `wrap`.
    """

    name: str
    pretrained: bool
    tag: str | None
    weights: Mapping[str, Tensor] | None
    options: Mapping[str, Any]
    overrides: Mapping[str, Any]

    def with_classes(self, option: str, *heads: str) -> dict[str, Any]:
        """The options, with the number of classes of the first of these weights that exists, unless it is given."""
        weight = next((self.weights[head] for head in heads if head in self.weights), None) if self.weights else None
        classes = {} if weight is None else {option: int(weight.shape[0])}
        return {**classes, **self.options}


Creator = Callable[[LoadRequest], nn.Module | tuple[nn.Module, dict[str, Any]]]
"""From a request to a model and keywords of `wrap`, which override those of the user."""


@dataclass(frozen=True)
class Family(Entry):
    """A function from a module and the keywords of `wrap` to its Anatomy, or None.

    `package` is the library whose models it reads; without one, it is tried on every model, before the others. `create`
    builds the models that `load` calls `prefix:NAME`; `names` lists those without a prefix. `tagged`: a name may have
    several pretrained weights.
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
        for room in (
            *("bundled", "timm", "timm_plain", "timm_stages", "hf", "hf_backbones", "detectors", "segmenters", "vlm"),
            *("open_clip", "torchvision"),
        )
    ],
)
Reader = TypeVar("Reader", bound=Callable[..., Anatomy | None])


def register_family(name: str, **more: Any) -> Callable[[Reader], Reader]:
    """Register a family of models, so that `wrap` recognises them.

    Args:
        name: Name of the family.
        more: Fields of `Family`: the `package` whose models it reads; `prefix` and `create`, for `load` to build its
            models as "prefix:NAME"; `names` and `tagged`.
    """

    def register(function: Reader) -> Reader:
        FAMILIES.add(Family(name, function, **more))
        return function

    return register


def in_order() -> list[Family]:
    """The families in the order they are tried: those without a package (plugins), the bundled model's, all others."""
    first = ("", "patchlight")
    return sorted(FAMILIES.values(), key=lambda family: (family.package not in first, family.package))


def family_of(name: str) -> tuple[Family, str]:
    """The family that builds a model of this name, and the name without its prefix; timm's is the default."""
    makers = [family for family in in_order() if family.create is not None]
    prefix, colon, rest = name.partition(":")
    for family in makers:
        if colon and prefix == family.prefix:
            return family, rest
    found = next((family for family in makers if name in family.names()), FAMILIES["timm"])
    return found, name


def read_anatomy(model: nn.Module, overrides: dict[str, Any]) -> Anatomy | None:
    """The anatomy of a model, if a family recognises it."""
    make = type(model).__module__.partition(".")[0]
    known = [family for family in in_order() if not family.package or family.package in sys.modules]
    own = [family for family in known if family.package in ("", make)]
    stage = overrides.pop("stage", None)
    for family in own if any(family.package for family in own) else known:
        staged = (
            {"stage": stage} if stage is not None and "stage" in inspect.signature(family.function).parameters else {}
        )
        anatomy: Anatomy | None = family.function(model, **overrides, **staged)
        if anatomy is not None:
            anatomy.assumed_labels = "labels" not in overrides
            if stage is not None and not anatomy.hierarchical:
                raise PatchlightError(f"{anatomy.name} has no stages, so stage={stage} does not apply")
            return anatomy
    return None
