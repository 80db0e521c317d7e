"""Why are two pictures similar? Photographs composed so that they share one object and nothing else."""

from __future__ import annotations

from functools import cache

import pytest
from PIL import Image
from torch import Tensor

import patchlight as pl
from patchlight.anatomy import heads
from patchlight.anatomy.opened import Anatomy
from patchlight.zoo import pocket

OBJECTS = {"cat": (0.0, 0.0, 1.0, 1.0), "bird": (0.1, 0.08, 0.8, 0.78)}
"""What is shared: parts of photographs (left, top, right, bottom of their central square)."""
GROUNDS = {"kitten": (0.0, 0.62, 0.38, 1.0), "horse": (0.7, 0.0, 1.0, 0.3), "deer": (0.0, 0.0, 0.3, 0.3)}
"""Parts of other photographs without their animal: cloth, sky, leaves."""
SIDE = 16
"""Pixels of the object, of the 32 that the model sees: a quarter of the patches."""


def cut(name: str, box: tuple[float, float, float, float], side: int) -> Image.Image:
    with Image.open(pocket.PHOTOS / f"{name}.jpg") as photo:
        whole = photo.convert("RGB")
    size = min(whole.size)
    left, top = (whole.width - size) // 2, (whole.height - size) // 2
    edges = tuple(round(size * edge) + (top if i % 2 else left) for i, edge in enumerate(box))
    return whole.crop(edges).resize((side, side), Image.Resampling.BICUBIC)  # type: ignore[arg-type]


def composed(thing: str, ground: str, at: tuple[int, int]) -> Image.Image:
    """The object at (left, top) before the ground."""
    picture = cut(ground, GROUNDS[ground], 32)
    picture.paste(cut(thing, OBJECTS[thing], SIDE), at)
    return picture


@cache
def model() -> Anatomy:
    return pl.load("pocket")


def share(heat: Tensor, at: tuple[int, int]) -> float:
    """How much of the positive mass of a map lies on the object."""
    left, top = (edge // 4 for edge in at)
    positive = heat.clamp_min(0)
    return float(positive[top : top + SIDE // 4, left : left + SIDE // 4].sum() / positive.sum())


CASES = [
    ("cat", ("kitten", "deer")),
    ("cat", ("deer", "horse")),
    ("bird", ("kitten", "deer")),
    pytest.param("cat", ("horse", "kitten"), marks=pytest.mark.slow),
]
"""Chosen of more. Of six objects on six pairs of such grounds, GenAtt reached 0.6 on all pairs for cat, kitten and
bird, on 5 for the horse, 3 for the deer, 2 for the dog; on the bird before leaves, asked about the bird before the sky,
it has 0.53. Before whole photographs with another animal it reached 0.6 in 1 of 36 trials (0.12 to 0.64)."""


@pytest.mark.parametrize(("thing", "grounds"), CASES)
def test_the_shared_object_makes_two_pictures_similar(thing: str, grounds: tuple[str, str]) -> None:
    """At least 60 % on the quarter of both pictures that they share; GenAtt has 0.64 to 0.87 here, TIS 0.89 to 1.

    TIS gives every patch the mean score of the variants that keep it, so what a patch adds is what lies above the mean
    of the map.
    """
    places = (0, 0), (16, 16)
    pictures = [composed(thing, ground, at) for ground, at in zip(grounds, places, strict=True)]
    for reference, shown, at in ((0, 1, places[1]), (1, 0, places[0])):
        asked = model().ask(heads.Similar([pictures[reference]]))
        maps = pl.explain(asked, pictures[shown], {"genatt": {}, "tis": {"samples": 256}}, progress=False)
        genatt, tis = maps["genatt"].scores[0], maps["tis"].scores[0]
        assert share(genatt, at) >= 0.6
        assert share(tis - tis.mean(), at) >= 0.6
