"""A model as options and recipes name it, and how its images are prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from patchlight.core.recipes import Int64, Number, PositiveInt, Spec, short_for

if TYPE_CHECKING:
    from patchlight.anatomy.opened import Anatomy

Spread = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]


def _both_sides(size: Any) -> Any:
    """One number is the size of a square."""
    return (size, size) if isinstance(size, int) and not isinstance(size, bool) else size


class PreprocessSpec(Spec):
    """Where a model's preprocessing is replaced; None leaves the model's own."""

    size: Annotated[tuple[PositiveInt, PositiveInt], BeforeValidator(_both_sides)] | None = None
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
    stage: Int64 | None = None
    sigmoid: bool | None = None
    pretrained: bool | None = None
    texts: tuple[str, ...] = ()
    template: str | tuple[str, ...] = "{}"
    similar_to: tuple[str, ...] = ()
    preprocess: PreprocessSpec = PreprocessSpec()
    stands_for: str = ""

    _by_name = short_for("name")

    def load(self, device: str = "cpu") -> Anatomy:
        """The model, shown its images as this says."""
        from patchlight.anatomy.heads import head_of  # imports torch, which a wrong option need not wait for
        from patchlight.anatomy.load import load

        head = head_of(self.texts, self.template, self.similar_to)
        options = {key: getattr(self, key) for key in ("weights", "labels", "stage", "sigmoid", "pretrained")}
        options["preprocess"] = self.preprocess if self.preprocess != PreprocessSpec() else None
        given = {key: value for key, value in options.items() if value is not None}
        return load(self.name, device=device, head=head, **given)

    def other(self, name: str | None = None, **changes: Any) -> ModelSpec:
        """This model with those of the changes that are not None; of a model of another name, nothing is this one's."""
        given = {key: value for key, value in changes.items() if value is not None}
        if name is not None and name != self.name:
            return ModelSpec(name=name, **given)
        return self.model_copy(update=given)
