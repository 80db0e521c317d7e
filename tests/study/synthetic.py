"""Cells without a model: scores of methods whose true means are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from patchlight.study.recommend.record import RaceRecord

SECONDS = 0.1


def about(methods: Iterable[str], images: int) -> dict[str, Any]:
    return {
        "model": "made up",
        "seed": 0,
        "images": images,
        "metrics": {"gain": {"metric": "srg"}},
        "deciding": ["gain"],
        "lower_is_better": [],
        "worth": 0.01,
        "methods": {name: {"method": name} for name in methods},
    }


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
    cells = []
    for method, mean in means.items():
        values = mean + image + generator.normal(0, spread, images)
        times = {"measure_seconds": SECONDS, "explain_seconds": (seconds or {}).get(method, SECONDS)}
        for place, value in enumerate(values.tolist()):
            cells.append({"place": place, "method": method, "metric": "gain", "value": value, **times})
    return cells


def record(means: Mapping[str, float], images: int, **options: Any) -> RaceRecord:
    """A record of these methods on as many images."""
    return join(RaceRecord.begin(about(means, images)), means, images, **options)


def join(made: RaceRecord, means: Mapping[str, float], images: int, **options: Any) -> RaceRecord:
    """The record with further methods, on images of their own."""
    made.about["methods"] |= {name: {"method": name} for name in means}
    for line in lines(means, images, **options):
        made.add(**line)
    return made
