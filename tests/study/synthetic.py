"""Cells without a model: scores of methods whose true means are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from patchlight.study.recommend.cells import EXPLANATION, Cells

SECONDS = 0.1


def about(methods: list[str], images: int, **changed: Any) -> dict[str, Any]:
    return {
        "model": "made up",
        "seed": 0,
        "images": images,
        "metrics": {"gain": {"metric": "srg"}},
        "deciding": ["gain"],
        "lower_is_better": [],
        "worth": 0.01,
        "methods": {name: {"method": name} for name in methods},
    } | changed


def lines(
    means: Mapping[str, float],
    images: int,
    seed: int = 0,
    spread: float = 0.1,
    seconds: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """What cells of these methods hold, on as many images: an effect of the image, and noise of each method."""
    generator = np.random.default_rng(seed)
    image = generator.normal(0, 0.2, images)
    found = []
    for method, mean in means.items():
        noise = generator.normal(0, spread, images)
        took = (seconds or {}).get(method, SECONDS)
        for place in range(images):
            one = {"place": place, "image": f"i{place}", "method": method, "seconds": took}
            found.append({**one, "metric": EXPLANATION, "value": None})
            found.append({**one, "metric": "gain", "value": float(mean + image[place] + noise[place])})
    return found


def cells(means: Mapping[str, float], images: int, **options: Any) -> Cells:
    from patchlight.study.recommend.cells import Cell

    made = Cells(about(list(means), images))
    for line in lines(means, images, **options):
        made.add(Cell(**line))
    return made
