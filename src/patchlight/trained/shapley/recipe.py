"""A training of ViT-Shapley as a TOML recipe."""

from __future__ import annotations

from typing import Any, ClassVar

from patchlight.trained.recipe import TrainingRecipe
from patchlight.trained.shapley.settings import Settings


class ShapleyRecipe(TrainingRecipe):
    """Everything `patchlight shapley train` needs; `held_out` is for the loss at the end."""

    command: ClassVar[str] = "shapley"

    def training(self, **changes: Any) -> Settings:
        """The settings, with these of them changed."""
        return Settings.preset(self.preset, **{**self.settings, **changes})
