"""ViT-CX taken apart: its parts make the method's own map, and each is what its formula says, one mask at a time."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import patchlight as pl
from patchlight.methods.vitcx import clusters, cosine_distances
from patchlight.report.figures.masks import Impact, ask_about, channel_masks, cluster_channels, impact, similarities
from patchlight.report.figures.vitcx import heat_box
from patchlight.zoo import pocket

DISTANCE = 0.25


@cache
def taken_apart() -> tuple[pl.Anatomy, Tensor, Impact]:
    vit = pl.load("pocket")
    image = vit.batch(pocket.PHOTOS / "cat.jpg")[0]
    return vit, image, impact(ask_about(vit, image, 3), DISTANCE)


def at_pixels(mask: Tensor, vit: pl.Anatomy) -> Tensor:
    return F.interpolate(mask[None, None].double(), vit.preprocess.size, mode="bilinear", align_corners=False)[0, 0]


def probability(vit: pl.Anatomy, image: Tensor) -> float:
    return float(vit.logits(image[None]).double().softmax(-1)[0, 3])


@pytest.mark.parametrize("corrected", [True, False])
def test_the_parts_make_the_methods_own_map(corrected: bool) -> None:
    vit, image, found = taken_apart()
    variant = "full" if corrected else 4
    map_of = pl.explain(vit, image[None], "vit-cx", target=3, distance=DISTANCE, variant=variant, progress=False)
    ours = found.weighted(found.scores, corrected)
    assert torch.allclose(ours.float(), map_of.scores[0], rtol=1e-4, atol=1e-5)


def test_scores_are_those_of_one_image_after_another() -> None:
    vit, image, found = taken_apart()
    plain = found.plain()
    for i in (0, len(found.masks) - 1):
        mask = at_pixels(found.masks[i], vit).clamp(0, 1)
        assert torch.allclose(found.at_size(i).double(), mask, atol=1e-6)
        (masked, before), (noisy, after) = found.through(i, False), found.through(i, True)
        assert torch.allclose(masked, image * mask.float(), atol=1e-6)
        assert before == pytest.approx(probability(vit, masked), abs=1e-5)
        assert float(plain[i]) == pytest.approx(before, abs=1e-5)
        noise = noisy - masked
        assert float((noise / (1 - mask + 1e-3).float()).std()) == pytest.approx(found.sigma, rel=0.2)
        debiased = after - probability(vit, image + noise) + probability(vit, image)
        assert float(found.scores[i]) == pytest.approx(debiased, abs=5e-5)


def test_coverage_is_the_mean_of_the_masks() -> None:
    vit, _, found = taken_apart()
    mean = torch.stack([at_pixels(mask, vit) for mask in found.masks]).mean(0)
    assert torch.allclose(found.coverage(), mean, atol=1e-9)


def test_similarities_are_cosines_of_masks_as_they_are_seen() -> None:
    vit, image, _ = taken_apart()
    channels, clean = channel_masks(ask_about(vit, image, 3))
    assert clean == pytest.approx(probability(vit, image), abs=1e-5)
    some = channels[:5]
    flat = [at_pixels(mask, vit).flatten() for mask in some]
    pairs = [float(a @ b / (a.norm() * b.norm())) for i, a in enumerate(flat) for b in flat[i + 1 :]]
    assert similarities(some, vit.extent).tolist() == pytest.approx(pairs, abs=1e-9)


def test_masks_of_a_cluster_are_closer_than_the_distance() -> None:
    vit, image, _ = taken_apart()
    channels, _ = channel_masks(ask_about(vit, image))
    labels = clusters(cosine_distances(channels, vit.extent)[None], 0.1)[0]
    assert len(cluster_channels(channels, vit.extent, 0.1)) == int(labels.max()) + 1 < len(channels)
    for cluster in range(int(labels.max()) + 1):
        members = channels[labels == cluster]
        assert len(members) == 1 or float(similarities(members, vit.extent).min()) > 0.9


def test_the_box_is_around_the_largest_part_of_the_heat() -> None:
    heat = np.zeros((6, 8))
    heat[0, 0] = 1.0
    heat[2:4, 3:7] = 0.6
    heat[4, 7] = 0.5
    assert heat_box(heat, 0.55) == [3, 2, 7, 4]
    assert heat_box(heat, 0.5) == [3, 2, 8, 5], "corners that touch belong together"
    assert heat_box(heat, 0.9) == [0, 0, 1, 1]
