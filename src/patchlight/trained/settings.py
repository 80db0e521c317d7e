"""What every training can be told: how long, from which seed, how precisely, and how often it is written down."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, nearest
from patchlight.evidence.precision import Precision, chosen

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
S = TypeVar("S", bound=BaseModel)


class Training(BaseModel):
    """The settings that all trained explainers share; each adds its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    free: ClassVar[frozenset[str]] = frozenset(
        {"steps", "epochs", "log_every", "checkpoint_minutes", "checkpoint_steps", "tensorboard"}
    )
    """Settings that may change between a checkpoint and its resumption."""

    steps: Count | None = None
    """Batches in all; by default `epochs` over the data."""
    epochs: Positive = 1.0
    batch_size: Count = 32
    seed: int = 0
    precision: Precision = "full"
    """Of the frozen model; the network beside it stays in float32, with TF32 products on CUDA unless full."""
    log_every: Count = 20
    checkpoint_minutes: Positive = 5.0
    checkpoint_steps: Count | None = None
    tensorboard: bool = False

    def decided(self, vit: Anatomy) -> Self:
        """The same, with the precision that `auto` comes to for this model."""
        return self.model_copy(update={"precision": chosen(self.precision, vit.device, vit.dtype)})

    def fixed(self) -> dict[str, Any]:
        """The settings that a checkpoint must share with the run that takes it up."""
        return {k: v for k, v in self.model_dump().items() if k not in self.free}


def read_settings(kind: type[S], name: str, values: dict[str, Any], removed: Collection[str] = ()) -> S:
    """The settings of the explainer `name` from a dict, or one sentence about the first that is wrong."""
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            hint = "it was taken out" if key in removed else nearest(key, kind.model_fields)
            raise PatchlightError(f"{name} has no setting '{key}'; {hint}") from error
        if not key:
            raise PatchlightError(f"these settings of {name} do not go together: {first['ctx']['error']}") from error
        raise PatchlightError(f"setting {key}={first['input']!r} of {name} is not valid: {first['msg']}") from error
