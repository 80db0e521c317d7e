"""What every part of a recipe is: checked values, of which each kind of recipe is made."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from patchlight.core.errors import PatchlightError

Whole = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Many = Annotated[int, Field(strict=True, ge=1)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


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


def short_for(key: str) -> Any:
    """A lone string stands for this key."""
    return model_validator(mode="before")(lambda value: {key: value} if isinstance(value, str) else value)
