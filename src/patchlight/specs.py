"""What a recipe names: a model, the data, a method, a metric. Recipes of the benchmark and of training share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from patchlight.core.errors import PatchlightError

if TYPE_CHECKING:
    from patchlight.anatomy.base import Anatomy
    from patchlight.data import Data
    from patchlight.methods.requests import Request
    from patchlight.metrics.base import MetricRequest

Whole = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Many = Annotated[int, Field(strict=True, ge=1)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Spread = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]


class Spec(BaseModel):
    """A part of a recipe; a key it does not know is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class OpenSpec(BaseModel):
    """A part of a recipe whose other keys are settings of what it names."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    def changed(self, **changes: Any) -> Self:
        """The same with other values."""
        try:
            return type(self).model_validate({**self.model_dump(), **changes})
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise PatchlightError(f"setting {key}={first['input']!r} is not valid: {first['msg']}") from error

    def __reduce__(self) -> Any:
        return type(self).model_validate, (self.model_dump(),)  # another process resolves it for itself


def _short(key: str) -> Any:
    """A lone string stands for this key."""
    return model_validator(mode="before")(lambda value: {key: value} if isinstance(value, str) else value)


def _both_sides(size: Any) -> Any:
    """One number is the size of a square."""
    return (size, size) if isinstance(size, int) and not isinstance(size, bool) else size


class PreprocessSpec(Spec):
    """Where a model's preprocessing is replaced; None leaves the model's own."""

    size: Annotated[tuple[Many, Many], BeforeValidator(_both_sides)] | None = None
    mean: Annotated[tuple[Number, ...], Field(min_length=1)] | None = None
    std: Annotated[tuple[Spread, ...], Field(min_length=1)] | None = None
    crop_pct: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"] | None = None
    fit: Literal["crop", "squash"] | None = None
    corner: Literal["nearest", "down", "inward"] | None = None


class ModelSpec(Spec):
    """A model, by a name `load` knows; `stands_for` is the recipe's model in whose place the user gave this one.

    Its classes are its own, the sentences `texts` (in a `template`), or the reference images `similar_to`.
    """

    name: str
    weights: str | None = None
    labels: str | None = None
    stage: Whole | None = None
    sigmoid: bool | None = None
    pretrained: bool | None = None
    texts: tuple[str, ...] = ()
    template: str | tuple[str, ...] = "{}"
    similar_to: tuple[str, ...] = ()
    preprocess: PreprocessSpec = PreprocessSpec()
    stands_for: str = ""

    _by_name = _short("name")

    def load(self, device: str = "cpu") -> Anatomy:
        """The model, shown its images as the recipe says."""
        from patchlight.anatomy.heads import head_of
        from patchlight.anatomy.load import load

        head = head_of(self.texts, self.template, self.similar_to)
        options = {key: getattr(self, key) for key in ("stage", "sigmoid", "pretrained")}
        options = {key: value for key, value in options.items() if value is not None}
        changed = self.preprocess.model_dump(exclude_none=True)
        if head is not None and changed:  # references are shown as the images are
            options["preprocess"] = changed
        vit = load(self.name, weights=self.weights, labels=self.labels, device=device, head=head, **options)
        size = changed.get("size", vit.preprocess.size)
        if tuple(size) != tuple(vit.preprocess.size):
            asked, own = (" x ".join(map(str, each)) for each in (size, vit.preprocess.size))
            raise PatchlightError(f"images of {asked} do not fit {vit.name}, which takes {own}; leave out size")
        vit.preprocess = replace(vit.preprocess, **changed)
        return vit

    def other(
        self, name: str | None = None, weights: str | None = None, labels: str | None = None, **more: Any
    ) -> ModelSpec:
        """This model with other weights or class names, and whatever else is not None.

        Of a model of another name, nothing else is this one's.
        """
        given = {"weights": weights, "labels": labels, **more}
        given = {key: value for key, value in given.items() if value is not None}
        if name is not None and name != self.name:
            return ModelSpec(name=name, **given)
        return self.model_copy(update=given)


class DataSpec(Spec):
    """The images: kind, path and options for `open_data`, and which of them.

    `list` is a text file of names or indices, one per line; without it, all images in the data set's own order. The
    other keys choose among these: the first `skip` are left out, then every `every`-th is taken, and of the rest
    `images` are picked `spread` evenly, `first`, or at `random` (seeded). `stands_for` is the recipe's kind in whose
    place the user gave this one.
    """

    kind: str
    path: str = ""
    options: dict[str, Any] = {}
    list: str | None = None
    skip: Annotated[int, Field(strict=True, ge=0)] = 0
    every: Annotated[int, Field(strict=True, ge=1)] = 1
    images: Many | None = None
    pick: Literal["spread", "first", "random"] = "spread"
    stands_for: str = ""

    @property
    def meaning(self) -> dict[str, Any]:
        """The options that are no paths: not where the data are, but what is read of them."""
        from patchlight.data import KINDS

        hints = get_type_hints(KINDS.find(self.kind).function)
        return {name: value for name, value in self.options.items() if Path not in get_args(hints.get(name))}

    def at(self, given: str) -> DataSpec:
        """The data at `DIR` or `KIND:DIR`. Another kind has neither these options nor this list of images."""
        from patchlight.data import KINDS

        kind, path = kind_and_path(given)
        if kind == "" or KINDS.find(kind) is KINDS.named(self.kind):
            return self.model_copy(update={"path": path})
        return self.model_copy(
            update={"kind": kind, "path": path, "options": {}, "list": None, "stands_for": self.kind}
        )

    def with_list(self, file: str) -> DataSpec:
        """The images that a file lists, in place of those this chooses."""
        return self.model_copy(update={"list": file, "skip": 0, "every": 1, "images": None})

    def check_given(self) -> None:
        """Refuse data of which nobody has said where they are."""
        from patchlight.data import KINDS

        if not self.path and not KINDS.find(self.kind).made_up:
            raise PatchlightError(
                f"the recipe needs '{self.kind}' data; say where with --data DIR (or --data KIND:DIR)"
            )

    def open(self, **options: Any) -> Data:
        """The whole data set, with these options besides its own."""
        from patchlight.data import open_data

        self.check_given()
        return open_data(self.kind, self.path, **{**self.options, **options})

    def chosen(self, names: Sequence[str], seed: int = 0) -> Sequence[int]:
        """The indices of the images to use, out of all `names` of the data set.

        All that `list`, `skip` and `every` leave are used where `images` is not given, or is larger.
        """
        import torch

        from patchlight.data import read_list

        every = range(len(names)) if self.list is None else read_list(self.list, names)
        listed = every[self.skip :: self.every]
        left = len(listed)
        if left < 1:
            skipped = f" behind the first {self.skip}" if every else ""
            raise PatchlightError(f"there are no images in '{self.list or self.path}'{skipped}")
        count = left if self.images is None else min(self.images, left)
        if self.pick == "random" and count < left:
            drawn = torch.randperm(left, generator=torch.Generator().manual_seed(seed))[:count]
            return [listed[i] for i in sorted(drawn.tolist())]
        reach = left if self.pick == "spread" else count
        return [listed[i * reach // count] for i in range(count)]


def kind_and_path(given: str) -> tuple[str, str]:
    """`KIND:DIR` as kind and path; the kind of a plain `DIR` is empty."""
    from patchlight.data import KINDS

    kind, _, path = given.partition(":")
    return (kind, path) if KINDS.named(kind) is not None and ":" in given else ("", given)


class MethodSpec(OpenSpec):
    """A registered method; all other keys are its settings.

    `upsampling` says how its map becomes pixels where that is the method's own affair; it wins over the metrics'.
    """

    method: str
    upsampling: Literal["nearest", "bilinear", "bicubic"] | None = None

    _by_name = _short("method")

    @cached_property
    def request(self) -> Request:
        """The method with its settings, resolved once."""
        from patchlight.methods.requests import resolve

        return resolve(self.method, self.settings)

    @property
    def registered(self) -> str:
        """The name the method is registered under."""
        return self.request.method.name

    def measured_by(self, metric: MetricSpec) -> MetricRequest:
        """The metric as it measures this method."""
        asked = metric.request
        if self.upsampling is None or "upsampling" not in asked.metric.settings:
            return asked
        return replace(asked, settings={**asked.settings, "upsampling": self.upsampling})


class MetricSpec(OpenSpec):
    """A registered metric; all other keys are its settings. Tables show value x `scale` with `digits` decimals."""

    metric: str
    scale: Number = 1.0
    digits: Annotated[int, Field(strict=True, ge=0, le=8)] = 3

    _by_name = _short("metric")

    @cached_property
    def request(self) -> MetricRequest:
        """The metric with its settings, resolved once."""
        from patchlight.metrics.base import resolve_metric

        return resolve_metric(self.metric, self.settings)

    @property
    def registered(self) -> str:
        """The name the metric is registered under."""
        return self.request.metric.name
