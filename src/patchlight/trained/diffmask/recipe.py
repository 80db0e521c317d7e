"""A training of DiffMask as a TOML recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from patchlight.recipes import parse_as, read_text
from patchlight.trained.diffmask.settings import Settings
from patchlight.trained.recipe import TrainingRecipe


class DiffMaskRecipe(TrainingRecipe):
    """Everything `patchlight diffmask train` needs; `held_out` is for the last calibration."""

    initial: str | None = None
    """An explainer whose gates training begins with."""

    def training(self, **changes: Any) -> Settings:
        """The settings, with these of them changed."""
        return Settings.preset(self.preset, **{**self.settings, **changes})


def read_recipe(path: str | Path) -> DiffMaskRecipe:
    """A recipe from a TOML file, or one sentence about what is wrong with it."""
    return parse_as(DiffMaskRecipe, read_text(path), str(path))
