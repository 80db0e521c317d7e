"""A training of DiffMask as a TOML recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from patchlight.core.recipes import parse_as, read_text
from patchlight.trained.diffmask.settings import PRESETS, Settings
from patchlight.trained.recipe import TrainingRecipe


class DiffMaskRecipe(TrainingRecipe):
    """Everything `patchlight diffmask train` needs; `held_out` is for the last calibration."""

    command: ClassVar[str] = "diffmask"
    initial: str | None = None
    """An explainer whose gates training begins with."""

    def training(self, preset: str | None = None, **changes: Any) -> Settings:
        """The settings; a preset given here wins over the recipe's preset and settings, and `changes` over all."""
        return Settings.preset(preset or self.preset, **{**self.settings, **PRESETS.get(preset or "", {}), **changes})


def read_recipe(given: str | Path) -> DiffMaskRecipe:
    """The recipe in a TOML file, or the bundled one of that name; else one sentence about what is wrong with it."""
    return parse_as(DiffMaskRecipe, read_text(given, DiffMaskRecipe.command), str(given))
