"""A training of DiffMask as a TOML recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from patchlight.recipes import parse_as, read_text
from patchlight.trained.diffmask.settings import Settings
from patchlight.trained.recipe import TrainingRecipe


class DiffMaskRecipe(TrainingRecipe):
    """Everything `patchlight diffmask train` needs; `held_out` is for the last calibration."""

    command: ClassVar[str] = "diffmask"
    initial: str | None = None
    """An explainer whose gates training begins with."""

    def training(self, **changes: Any) -> Settings:
        """The settings, with these of them changed."""
        return Settings.preset(self.preset, **{**self.settings, **changes})


def read_recipe(given: str | Path) -> DiffMaskRecipe:
    """The recipe in a TOML file, or the bundled one of that name; else one sentence about what is wrong with it."""
    return parse_as(DiffMaskRecipe, read_text(given, DiffMaskRecipe.command), str(given))
