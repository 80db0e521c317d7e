"""The settings that all trainings share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, nearest
from patchlight.evidence.precision import Precision, chosen

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Training(BaseModel):
    """The settings that all trained explainers share; each kind adds its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: ClassVar[str] = "the training"
    """The name of the explainer in errors."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {}}
    """Settings by the name of a preset."""
    removed: ClassVar[frozenset[str]] = frozenset()
    """Settings of earlier versions."""
    free: ClassVar[frozenset[str]] = frozenset(
        {"steps", "epochs", "log_every", "checkpoint_minutes", "checkpoint_steps", "tensorboard"}
    )
    """Settings that may change between a checkpoint and its resumption."""

    steps: Count | None = None
    """Number of batches; by default `epochs` over the data."""
    epochs: Positive = 1.0
    batch_size: Count = 32
    seed: int = 0
    precision: Precision = "full"
    """Precision of the frozen model. The trained network uses float32, with TF32 products on CUDA unless `full`."""
    log_every: Count = 20
    checkpoint_minutes: Positive = 5.0
    checkpoint_steps: Count | None = None
    tensorboard: bool = False

    def with_precision(self, vit: Anatomy) -> Self:
        """The settings, with `auto` replaced by the precision for a model."""
        return self.model_copy(update={"precision": chosen(self.precision, vit.device, vit.dtype)})

    def resume_settings(self) -> dict[str, Any]:
        """The settings that must be the same when a checkpoint is resumed."""
        return {k: v for k, v in self.model_dump().items() if k not in self.free}

    @classmethod
    def preset(cls, name: str = "default", **changes: Any) -> Self:
        """The settings of a preset with changes; an error names the first wrong setting."""
        if name not in cls.presets:
            raise PatchlightError(f"no {cls.title} preset is called '{name}'; {nearest(name, cls.presets)}")
        try:
            return cls(**{**cls.presets[name], **changes})
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            if first["type"] == "extra_forbidden":
                hint = "it was removed" if key in cls.removed else nearest(key, cls.model_fields)
                message = f"{cls.title} has no setting '{key}'; {hint}"
            elif not key:
                message = f"these settings of {cls.title} do not go together: {first['ctx']['error']}"
            else:
                message = f"setting {key}={first['input']!r} of {cls.title} is not valid: {first['msg']}"
            raise PatchlightError(message) from error
