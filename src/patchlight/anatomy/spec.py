"""A model as options and recipes name it, and its preprocessing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from patchlight.core.recipes import Int64, Number, PositiveInt, Spec, short_for

if TYPE_CHECKING:
    from patchlight.anatomy.opened import Anatomy

Spread = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]


def _both_sides(size: Any) -> Any:
    """Turn one number into the size of a square."""
    return (size, size) if isinstance(size, int) and not isinstance(size, bool) else size


class PreprocessSpec(Spec):
    """Overrides of a model's preprocessing; None keeps the model's value."""

    size: Annotated[tuple[PositiveInt, PositiveInt], BeforeValidator(_both_sides)] | None = None
    mean: Annotated[tuple[Number, ...], Field(min_length=1)] | None = None
    std: Annotated[tuple[Spread, ...], Field(min_length=1)] | None = None
    crop_pct: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"] | None = None
    fit: Literal["crop", "squash", "pad", "pad-mean"] | None = None
    corner: Literal["nearest", "down", "inward"] | None = None


class ModelSpec(Spec):
    """A model by a name that `load` accepts.

    Its classes are those of its classifier, the sentences `texts` (in a `template`), or the reference images
    `similar_to`. `stands_for` is the recipe's model that the user replaced by this one.
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
        """Load the model with this preprocessing."""
        from patchlight.anatomy.heads import head_of  # imports torch; wrong options are reported before
        from patchlight.anatomy.load import load

        head = head_of(self.texts, self.template, self.similar_to)
        options = {key: getattr(self, key) for key in ("weights", "labels", "stage", "sigmoid", "pretrained")}
        options["preprocess"] = self.preprocess if self.preprocess != PreprocessSpec() else None
        given = {key: value for key, value in options.items() if value is not None}
        given |= {"texts": self.texts, "template": self.template} if self.texts else {"head": head}
        return load(self.name, device=device, **given)

    def other(self, name: str | None = None, **changes: Any) -> ModelSpec:
        """This model with all changes that are not None; a changed name discards all other fields."""
        given = {key: value for key, value in changes.items() if value is not None}
        if name is not None and name != self.name:
            return ModelSpec(name=name, **given)
        return self.model_copy(update=given)
