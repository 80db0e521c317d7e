"""Pictures of every method on the same photographs, drawn when the documentation is made."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from PIL import Image

import patchlight as pl
from patchlight.core.drawing.heat import seen
from patchlight.methods.base import METHODS
from patchlight.zoo import pocket

PHOTOS = ("dog-and-cat", "bird", "horse")
TARGETS = {"dog-and-cat": "dog", "bird": "bird", "horse": "horse"}
COMPOSED = (
    "ixg.plus.libra",
    "decompx.skipplus",
    "decompx.plus",
    "fullgrad-plus.libra",
    "attcat.libra",
    "genatt.rollout",
)
"""Names with a composition or rule that the gallery shows beside the plain ones."""
SAMPLES = 96
"""The masks, coalitions or noises of methods that draw more, so that pages are made in minutes."""
SIDE = 192


def asked(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Each method with its own settings, but fewer samples."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        method = METHODS[name.split(".")[0]]
        known = method.settings(method.composition)
        cut = "samples" in known and isinstance(known["samples"].default, int) and known["samples"].default > SAMPLES
        found[name] = {"samples": SAMPLES} if cut else {}
    return found


def draw(folder: Path) -> dict[str, Any]:
    """Overlays `NAME-PHOTO.jpg` of all methods, one call of `pl.explain` per photograph; gives the settings used."""
    folder.mkdir(parents=True, exist_ok=True)
    vit = pl.load("pocket")
    requests = asked((*METHODS, *COMPOSED))
    for photo in PHOTOS:
        path = pocket.PHOTOS / f"{photo}.jpg"
        seen(path, vit.preprocess.size, vit.preprocess).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(
            folder / f"photo-{photo}.jpg", quality=88
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            maps = pl.explain(vit, path, requests, target=TARGETS[photo], progress=False)
        for name, att in maps.items():
            picture = att.overlay(path).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            picture.save(folder / f"{name}-{photo}.jpg", quality=85)
    return requests
