"""Pictures of every method on the same photographs, drawn when the documentation is built."""

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
"""Names with a composition or rule that the gallery also shows."""
SAMPLES = 96
"""Number of samples for methods whose default is higher, so that the pages are built in minutes."""
SIDE = 192


def requests_for(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Settings per method: the defaults, with fewer samples."""
    requests: dict[str, dict[str, Any]] = {}
    for name in names:
        method = METHODS[name.split(".")[0]]
        known = method.settings(method.composition)
        cut = "samples" in known and isinstance(known["samples"].default, int) and known["samples"].default > SAMPLES
        requests[name] = {"samples": SAMPLES} if cut else {}
    return requests


def draw(folder: Path) -> dict[str, Any]:
    """Write overlays `NAME-PHOTO.jpg` of all methods that explain the bundled model, and return the settings used."""
    folder.mkdir(parents=True, exist_ok=True)
    vit = pl.load("pocket")
    requests = requests_for((*(method.name for method in pl.list_methods(vit) if method.supported), *COMPOSED))
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
