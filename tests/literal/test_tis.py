"""TIS against slow versions and the closed forms."""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.core.targets import Score, Targets
from patchlight.evidence.rules import RULES
from patchlight.methods.base import Ask
from patchlight.methods.maps import compute
from patchlight.methods.requests import resolve
from patchlight.methods.tis import activation_points, as_masks, mean_score, ranked_patches, sampled_scores
from tests.evidence.literal import slow_lloyd
from tests.families import build, images, shared
from tests.literal.toys import linear


def asked(vit: Anatomy, batch: Tensor, classes: list[int], score: Score = "probability", seed: int = 0) -> Ask:
    targets = Targets(torch.tensor([classes] * len(batch)), several=True)
    return Ask(vit, batch, targets, score, seed, RULES["plain"])


def outputs_of_blocks(vit: Anatomy, image: Tensor) -> list[Tensor]:
    """The patches [N,D] behind each block; of a Swin, of the stage that it is opened at."""
    if not vit.hierarchical:
        with pl.trace(vit, image) as t:
            return [x[0, vit.prefix :] for x in t.tokens[1:]]
    outputs: list[Tensor] = []
    blocks = next(stage.blocks for stage in vit.model.layers if stage.blocks[0].input_resolution == vit.grid)
    hooks = [block.register_forward_hook(lambda _, __, out: outputs.append(out[0].flatten(0, 1))) for block in blocks]
    with torch.no_grad():
        vit.model(image)
    for hook in hooks:
        hook.remove()
    return outputs


def literal_tis(
    vit: Anatomy, image: Tensor, target: int, samples: int, ratios: list[float], seed: int, variant: str
) -> Tensor:
    """The card's steps, one mask at a time."""
    points = torch.cat(outputs_of_blocks(vit, image), 1).T.float().double().numpy()
    np.random.seed(12345 + seed)
    initial = np.random.choice(len(points), samples, replace=False)
    centroids = slow_lloyd(points, initial, 100, "reseed")
    patches = points.shape[1]
    total, coverage = np.zeros(patches), np.zeros(patches)
    for ratio in ratios:
        for centroid in centroids:
            top = np.argsort(-centroid, kind="stable")[: int(ratio * patches)]
            mask = np.zeros(patches)
            mask[top] = 1
            shown = 1 - mask if variant == "inverted" else mask
            with torch.no_grad():
                if variant == "patch":
                    pixels = torch.from_numpy(shown).view(1, 1, *vit.grid)
                    step = image.shape[-1] // vit.grid[-1]
                    pixels = pixels.repeat_interleave(step, 2).repeat_interleave(step, 3)
                    logits = vit.logits(image * pixels)
                else:
                    keep = torch.from_numpy(shown.nonzero()[0])[None]
                    logits = vit.readout(vit.run(vit.embed(image), keep=keep))
            weight = float(vit.probabilities(logits)[0, target])
            total += (-weight if variant == "inverted" else weight) * mask
            coverage += mask
    assert (coverage > 0).all()
    return torch.from_numpy(total / coverage).view(vit.grid)


@pytest.mark.parametrize(
    ("family", "settings", "variant"),
    [
        ("vit-wide", {}, "token"),
        ("deit-distilled", {"keep": [0.3, 0.6]}, "token"),
        ("reg4-gap", {"inverted": True, "keep": 0.3}, "inverted"),
        ("vit", {"unit": "patch", "fill": "zero"}, "patch"),
        ("swin", {"unit": "patch", "fill": "zero"}, "patch"),
    ],
)
def test_tis_is_the_papers(family: str, settings: dict[str, Any], variant: str) -> None:
    vit = shared(family, torch.float64)
    batch = images(vit, 2)
    targets = Targets(torch.tensor([[1, 4], [0, 2]]), several=True)
    _, (found,) = compute(vit, batch, [resolve("tis", {"samples": 20, **settings})], targets, seed=1)
    keep = settings.get("keep", 0.5)
    ratios = keep if isinstance(keep, list) else [keep]
    for b in range(2):
        for t in range(2):
            expected = literal_tis(vit, batch[b : b + 1], int(targets.index[b, t]), 20, ratios, 1, variant)
            torch.testing.assert_close(found[b, t], expected, atol=1e-10, rtol=0)


def test_points_are_every_blocks_patches_in_float32() -> None:
    vit = shared("deit-distilled", torch.float64)
    ask = asked(vit, images(vit, 2), [0])
    points = activation_points(ask)
    assert points.shape == (2, 3 * 48, 16)
    assert points.dtype == torch.float32
    scaled = activation_points(ask, standardise=True)
    torch.testing.assert_close(scaled.mean(-1), torch.zeros(2, 144), atol=1e-5, rtol=0)
    torch.testing.assert_close(scaled.var(-1, correction=0), torch.ones(2, 144), atol=1e-4, rtol=0)
    centred = points - points.mean(-1, keepdim=True)
    assert (torch.nn.functional.cosine_similarity(scaled, centred, dim=-1) > 0.9999).all()


def test_masks_keep_the_largest_and_ties_their_order() -> None:
    centroids = torch.tensor([[[0.1, 0.5, 0.3, 0.4], [0.0, 0.0, 0.0, 0.0]]])
    masks = as_masks(ranked_patches(centroids)[..., :2], 4)
    assert masks.tolist() == [[[False, True, False, True], [True, True, False, False]]]


def test_equal_scores_give_a_constant_map_and_uncovered_patches_the_lowest() -> None:
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(2, 30, 9, generator=generator) < 0.4
    masks[1, :, 4] = False
    torch.testing.assert_close(mean_score(torch.full((2, 30, 3), 0.7), masks), torch.full((2, 3, 9), 0.7))
    scores = torch.rand(2, 30, 3, generator=generator)
    found = mean_score(scores, masks)
    assert torch.isfinite(found).all()
    assert torch.equal(found[1, :, 4], found[1].amin(-1))
    assert (found >= scores.amin(1)[..., None] - 1e-6).all()
    assert (found <= scores.amax(1)[..., None] + 1e-6).all()


def test_keeping_every_patch_scores_the_clean_image() -> None:
    vit = shared("siglip", torch.float64)
    batch = images(vit, 2)
    ask = asked(vit, batch, [1, 3])
    centroids = torch.rand(2, 5, 16, generator=torch.Generator().manual_seed(0))
    scores, masks = sampled_scores(ask, centroids, [1.0])
    clean = vit.probabilities(vit.logits(batch))[:, [1, 3]]
    assert masks.all()
    expected = clean[..., None].expand(-1, -1, 16)
    torch.testing.assert_close(mean_score(scores, masks), expected, atol=1e-10, rtol=0)
    with pytest.raises(pl.PatchlightError, match="leave no patch to score"):
        sampled_scores(ask, centroids, [0.5, 1.0], inverted=True)


@pytest.mark.parametrize(("keep", "inverted"), [(4, False), (7, False), (5, True)])
def test_the_additive_game_over_all_subsets(keep: int, inverted: bool) -> None:
    """w(S) = sum of a over S, masks all subsets of size k: the map is a_i (N - k)/(N - 1) and a constant.

    Inverted, minus what is left without a subset holds the patch's value with the same weight, k by k.
    """
    vit = linear()
    batch = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    patches = 12
    rows = torch.tensor(list(combinations(range(patches), keep)))
    centroids = torch.zeros(len(rows), patches).scatter_(1, rows, 1.0).expand(2, -1, -1)
    ask = asked(vit, batch, [0, 3], score="logit")
    scores, masks = sampled_scores(ask, centroids, [keep / patches + 1e-9], inverted=inverted)
    assert masks.sum() == 2 * comb(patches, keep) * keep
    found = mean_score(scores, masks)
    values = vit.embed(batch)[..., [0, 3]].mT.detach()
    kept = (patches - keep) / (patches - 1)
    constant = values.sum(-1, keepdim=True) * (keep - 1) / (patches - 1)
    if inverted:
        constant = -values.sum(-1, keepdim=True) * kept
    torch.testing.assert_close(found, values * kept + constant, atol=1e-9, rtol=0)


def test_several_ratios_pool_their_masks() -> None:
    vit = shared("vit", torch.float64)
    ask = asked(vit, images(vit, 2), [1, 2])
    centroids = torch.rand(2, 6, 16, generator=torch.Generator().manual_seed(0))
    both, masks = sampled_scores(ask, centroids, [0.25, 0.75])
    for i, ratio in enumerate((0.25, 0.75)):
        scores, shown = sampled_scores(ask, centroids, [ratio])
        assert (shown.sum(-1) == int(ratio * 16)).all()
        torch.testing.assert_close(both[:, i::2], scores, atol=1e-12, rtol=0)
        assert torch.equal(masks[:, i::2], shown)


def test_classes_cost_nothing_and_masks_have_an_upper_number(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = build("vit")
    seen: list[int] = []
    block = vit.block
    monkeypatch.setattr(vit, "block", lambda i, *a: (seen.append(len(a[0]) if i == 0 else 0), block(i, *a))[1])
    targets = Targets(torch.tensor([[0, 1, 2], [3, 4, 5]]), several=True)
    _, (maps,) = compute(vit, images(vit, 2), [resolve("tis", {"samples": 1000, "iterations": 1})], targets, 0)
    assert maps.shape == (2, 3, 4, 4)
    assert sum(seen) == 2 + 2 * 144, "a mask for each point at most, and one clean forward"


def test_the_authors_leave_empty_clusters_at_zero() -> None:
    assert resolve("tis", {"preset": "authors"}).settings["empty"] == "zero"
