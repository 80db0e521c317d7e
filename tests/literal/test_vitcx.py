"""ViT-CX against a slow version at pixel resolution, and the closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.bench.recipe import read_recipe
from patchlight.core.targets import Score, Targets
from patchlight.evidence.fills import fill_images
from patchlight.evidence.rules import RULES
from patchlight.methods.base import Ask
from patchlight.methods.maps import compute
from patchlight.methods.requests import refusal, resolve
from patchlight.methods.vitcx import (
    _merge_nearest,
    _number_clusters,
    causal_scores,
    cluster_masks,
    clusters,
    cosine_distances,
    feature_maps,
    masked_scores,
    saliency,
    sample_noise,
    scale_to_unit,
    upsampled,
)
from tests.families import build, images, shared
from tests.literal.toys import Linear, linear


def asked(vit: Anatomy, batch: Tensor, classes: list[int], score: Score = "probability", seed: int = 0) -> Ask:
    targets = Targets(torch.tensor([classes] * len(batch)), several=True)
    return Ask(vit, batch, targets, score, seed, RULES["plain"])


def stretched(pixels: Tensor) -> Tensor:
    low, high = pixels.flatten(1).amin(1)[:, None, None], pixels.flatten(1).amax(1)[:, None, None]
    return (pixels - low) / (high - low)


def merged(distances: Tensor, threshold: float) -> list[list[int]]:
    """Complete linkage, two clusters at a time."""
    table = distances.tolist()
    groups = [[i] for i in range(len(table))]
    while len(groups) > 1:
        best = min(
            (max(table[x][y] for x in a for y in b), i, j)
            for i, a in enumerate(groups)
            for j, b in enumerate(groups)
            if i < j
        )
        if best[0] >= threshold:
            break
        groups[best[1]] += groups.pop(best[2])
    return groups


def literal_vit_cx(
    vit: Anatomy, image: Tensor, target: int, threshold: float, sigma: float, noise: Any, variant: Any
) -> Tensor:
    """The card's steps, mask by mask, every mask at pixel resolution."""
    with pl.trace(vit, image) as t:
        features = vit.parts(vit.depth - 1).norm1(t.tokens[-2])[0, vit.prefix :]
    grid = features.T.reshape(1, -1, *vit.grid)
    masks = stretched(F.interpolate(grid, image.shape[-2:], mode="bilinear")[0]).detach()
    flat = masks.flatten(1)
    cosine = (flat @ flat.T) / (flat.norm(dim=1)[:, None] * flat.norm(dim=1))
    groups = [[i] for i in range(len(masks))] if variant == 1 else merged(1 - cosine, threshold)
    groups.sort(key=min)
    if variant != 1:
        masks = stretched(torch.stack([masks[g].sum(0) for g in groups]))

    def f(x: Tensor) -> float:
        return float(vit.probabilities(vit.logits(x))[0, target])

    total = torch.zeros_like(masks[0])
    for k, mask in enumerate(masks):
        e = (1 - mask) * sigma * noise(torch.tensor([k]))[0]
        plain = variant in (3, 5)
        score = f(image * mask) if plain else f(image * mask + e) - f(image + e) + f(image)
        total += score * mask
    return total if variant in (4, 5) else total / masks.sum(0)


@pytest.mark.parametrize(
    ("family", "variant"), [("deit-distilled", "full"), ("vit-wide", 4), ("reg4-gap", 1), ("vit", 3), ("vit", 5)]
)
def test_vit_cx_is_the_papers(family: str, variant: Any) -> None:
    vit = shared(family, torch.float64)
    batch = images(vit, 2)
    targets = Targets(torch.tensor([[1, 4], [0, 2]]), several=True)
    settings = {"distance": 0.25, "sigma": 0.7, "variant": variant, "chunk": 7}
    _, (found,) = compute(vit, batch, [resolve("vit-cx", settings)], targets, seed=2)
    noise = sample_noise(asked(vit, batch, [0], seed=2))
    for b in range(2):
        target = int(targets.index[b, b])
        expected = literal_vit_cx(vit, batch[b : b + 1], target, 0.25, 0.7, noise, variant)
        torch.testing.assert_close(found[b, b], expected, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("size", [(64, 48), (30, 45), (7, 100), (5, 6)])
def test_patch_resolution_is_exact(size: tuple[int, int]) -> None:
    """Extremes and cosines of the upsampled maps, without upsampling them."""
    maps = torch.randn(9, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    masks, span = scale_to_unit(maps, size)
    pixels = F.interpolate(maps[None], size, mode="bilinear")[0]
    torch.testing.assert_close(span, pixels.flatten(1).amax(1) - pixels.flatten(1).amin(1), atol=1e-12, rtol=0)
    full = F.interpolate(masks[None], size, mode="bilinear")[0]
    torch.testing.assert_close(full, stretched(pixels), atol=1e-12, rtol=0)
    flat = F.normalize(full.flatten(1))
    torch.testing.assert_close(cosine_distances(masks, size), 1 - flat @ flat.T, atol=1e-12, rtol=0)


def test_a_mask_ignores_shift_and_scale_and_turns_over_with_the_sign() -> None:
    maps = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    masks, _ = scale_to_unit(maps, (40, 48))
    torch.testing.assert_close(scale_to_unit(3 * maps + 7, (40, 48))[0], masks)
    torch.testing.assert_close(scale_to_unit(-maps, (40, 48))[0], 1 - masks)


@pytest.mark.parametrize("on_device", [False, True])
def test_clusters_stay_below_the_threshold(on_device: bool) -> None:
    """By scipy, and by the rounds that an accelerator takes."""

    def found(distances: Tensor, threshold: float) -> list[int]:
        used = torch.ones(1, len(distances), dtype=torch.bool)
        leader = _merge_nearest(distances[None], threshold, used)
        return (_number_clusters(leader, used) if on_device else clusters(distances[None], threshold))[0].tolist()

    masks, _ = scale_to_unit(
        torch.rand(40, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), (32, 32)
    )
    distances = cosine_distances(masks, (32, 32))
    for threshold in (0.1, 0.2, 0.3):
        labels = np.array(found(distances, threshold))
        groups = [np.flatnonzero(labels == k) for k in range(labels.max() + 1)]
        assert {tuple(g) for g in groups} == {tuple(sorted(g)) for g in merged(distances, threshold)}
        assert all(float(distances[g][:, g].max()) < threshold for g in groups)
        assert [g[0] for g in groups] == sorted(g[0] for g in groups), "numbered by their first member"
    assert max(found(distances, 1.5)) == 0
    twice = cosine_distances(torch.cat([masks, masks[:7]]), (32, 32))
    assert max(found(twice, 1e-9)) + 1 == 40, "as many clusters as distinct masks"
    halves = torch.tensor([[0, 0.5], [0.5, 0]], dtype=torch.float64)
    assert found(halves, 0.5) == [0, 1], "merged only below the threshold"
    assert found(halves, 0.5001) == [0, 0]


def test_unused_masks_belong_to_no_cluster() -> None:
    masks, _ = scale_to_unit(torch.rand(2, 30, 4, 4, generator=torch.Generator().manual_seed(3)).double(), (32, 32))
    distances, used = cosine_distances(masks, (32, 32)), torch.rand(2, 30) > 0.3
    labels = clusters(distances, 0.2, used)
    assert torch.equal(labels, _number_clusters(_merge_nearest(distances, 0.2, used), used))
    assert ((labels < 0) == ~used).all()
    alone = [clusters(distances[i : i + 1, used[i]][:, :, used[i]], 0.2)[0] for i in range(2)]
    assert all(torch.equal(labels[i, used[i]], alone[i]) for i in range(2))


def test_full_and_empty_masks() -> None:
    """M = 1 scores f(X); M = 0 scores f(Z) - f(X + Z) + f(X)."""
    vit = shared("vit", torch.float64)
    batch = images(vit, 1)
    ask = asked(vit, batch, [1, 3])

    def f(x: Tensor) -> Tensor:
        return vit.probabilities(vit.logits(x))[:, [1, 3]]

    masks = torch.stack([torch.ones(4, 4), torch.zeros(4, 4)]).double()
    scores = causal_scores(
        ask, upsampled(masks, batch), torch.zeros(2, dtype=torch.long), f(batch), sample_noise(ask), 0.5, samples=3
    )
    torch.testing.assert_close(scores[0], f(batch)[0], atol=1e-10, rtol=0)
    z = 0.5 * sample_noise(ask)(torch.tensor([3, 4, 5]))
    torch.testing.assert_close(scores[1], (f(z) - f(batch + z)).mean(0) + f(batch)[0], atol=1e-10, rtol=0)
    plain = masked_scores(ask, upsampled(masks, batch), torch.zeros(2, dtype=torch.long))
    torch.testing.assert_close(plain, f(torch.cat([batch, 0 * batch])), atol=1e-10, rtol=0)


def test_noise_is_normal_and_its_own_by_index() -> None:
    vit = shared("vit")
    noise = sample_noise(asked(vit, images(vit, 2), [0], seed=4))
    some = noise(torch.arange(40))
    assert some.shape == (40, 3, 64, 64)
    assert abs(float(some.mean())) < 0.01
    assert abs(float(some.std()) - 1) < 0.01
    assert torch.equal(noise(torch.tensor([37, 3, 3, 16])), some[[37, 3, 3, 16]])
    assert len(some.flatten(1)[:, 0].unique()) == 40, "each mask has noise of its own"
    assert not torch.equal(sample_noise(asked(vit, images(vit, 2), [0], seed=5))(torch.arange(2)), some[:2])


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunks_do_not_change_the_map(chunk: int) -> None:
    vit = shared("vit", torch.float64)
    targets = Targets(torch.tensor([[1], [2]]))
    settings = {"distance": 0.3, "samples": 2, "sigma": 0.5}
    whole, cut = (
        compute(vit, images(vit, 2), [resolve("vit-cx", {**settings, "chunk": c})], targets, 0)[1][0]
        for c in (1000, chunk)
    )
    torch.testing.assert_close(cut, whole, atol=1e-12, rtol=0)


def test_no_noise_is_the_third_variant() -> None:
    vit = shared("vit", torch.float64)
    targets = Targets(torch.tensor([[1], [2]]))
    requests = [resolve("vit-cx", s) for s in ({"sigma": 0.0}, {"variant": 3})]
    _, (quiet, third) = compute(vit, images(vit, 2), requests, targets, 0)
    assert torch.equal(quiet, third)


def test_equal_scores_and_the_range_of_the_map() -> None:
    masks, _ = scale_to_unit(
        torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64), (32, 40)
    )
    coverage = F.interpolate(masks[None], (32, 40), mode="bilinear")[0].sum(0)
    same = torch.full((6, 2), 0.3)
    torch.testing.assert_close(
        saliency(same, masks, (32, 40)), torch.full((2, 32, 40), 0.3).double(), rtol=1e-6, atol=0
    )
    raw = saliency(same, masks, (32, 40), corrected=False)
    torch.testing.assert_close(raw[1], 0.3 * coverage, rtol=1e-6, atol=0)
    scores = torch.randn(6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = saliency(scores, masks, (32, 40)).flatten(1)
    assert (found.amin(1) >= scores.amin(0) - 1e-12).all()
    assert (found.amax(1) <= scores.amax(0) + 1e-12).all()
    one = saliency(scores[:1], masks[:1], (32, 40))
    bare = F.interpolate(masks[None, :1], (32, 40), mode="bilinear")[0, 0] < 1e-12
    assert bare.any(), "a stretched mask covers no pixel at its minimum"
    assert (one[:, bare] == 0).all()
    torch.testing.assert_close(one[:, ~bare], scores[0][:, None].expand(-1, int((~bare).sum())))


def test_noise_cancels_in_a_linear_model() -> None:
    """f = <w, x>: s_i = <w, X * M_i> whatever the noise."""
    vit = linear()
    batch = torch.randn(1, 3, 12, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ask = asked(vit, batch, [0, 2], score="logit")
    features, clean = feature_maps(ask)
    masks = cluster_masks(scale_to_unit(features, (12, 16))[0], torch.tensor([[0, 1, 0, 2, 1]]), (12, 16))
    made = upsampled(masks, batch)
    scores = causal_scores(ask, made, torch.zeros(3, dtype=torch.long), clean, sample_noise(ask), sigma=3.0)
    expected = torch.stack([vit.logits(batch * m)[0, [0, 2]] for m in made(torch.arange(3))])
    torch.testing.assert_close(scores, expected, atol=1e-10, rtol=0)


def test_constant_channels_are_left_out() -> None:
    whole = linear(classes=5)
    weight = whole.model.weight.detach().clone()
    weight[2] = 0
    batch = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets = Targets(torch.tensor([[0], [1]]))
    request = resolve("vit-cx", {"distance": 1e-6, "sigma": 0.0}, "logit")
    _, (found,) = compute(Linear(weight), batch, [request], targets, 0)
    features, _ = feature_maps(asked(whole, batch, [0]))
    for b in range(2):
        masks = scale_to_unit(features[b, [0, 1, 3, 4]], (12, 16))[0]
        ask = asked(whole, batch[b : b + 1], [b], score="logit")
        expected = saliency(
            masked_scores(ask, upsampled(masks, batch), torch.zeros(4, dtype=torch.long)), masks, (12, 16)
        )[0]
        torch.testing.assert_close(found[b, 0], expected, atol=1e-10, rtol=0)
    with pytest.warns(pl.DegenerateMap, match="smaller distance"):
        _, (none,) = compute(Linear(torch.zeros(5, 3, 12, 16)), batch, [resolve("vit-cx")], targets, 0)
    assert (none == 0).all()


def test_every_prefix_token_is_left_out() -> None:
    vit = shared("deit-distilled", torch.float64)
    batch = images(vit, 1)
    features, clean = feature_maps(asked(vit, batch, [2]))
    with pl.trace(vit, batch) as t:
        tokens = vit.parts(vit.depth - 1).norm1(t.tokens[-2])
        entering = t.tokens[1]
    torch.testing.assert_close(features[0].flatten(1).T, tokens[0, 2:].detach(), atol=1e-10, rtol=0)
    torch.testing.assert_close(clean[0, 0], vit.probabilities(vit.logits(batch))[0, 2])
    other, _ = feature_maps(asked(vit, batch, [2]), "blocks[1].input")
    torch.testing.assert_close(other[0].flatten(1).T, entering[0, 2:].detach(), atol=1e-10, rtol=0)


def test_classes_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = build("vit")
    seen: list[int] = []
    block = vit.block
    monkeypatch.setattr(vit, "block", lambda i, *a: (seen.append(len(a[0]) if i == 0 else 0), block(i, *a))[1])
    targets = Targets(torch.tensor([[0, 1, 2]]), several=True)
    compute(vit, images(vit, 1), [resolve("vit-cx", {"variant": 1, "samples": 2})], targets, 0)
    assert sum(seen) == 1 + 2 * 48 * 2


def test_random_masks_of_the_second_variant() -> None:
    """RISE's masks with the causal score; in a linear model that is RISE divided by its coverage."""
    vit = linear()
    batch = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets = Targets(torch.tensor([[0, 2], [1, 4]]), several=True)
    requests = [
        resolve("vit-cx", {"variant": 2, "random_masks": 40}, "logit"),
        resolve("rise", {"samples": 40, "grid": 7, "keep": 0.5, "normaliser": "empirical"}, "logit"),
    ]
    _, (found, rise) = compute(vit, batch, requests, targets, 3)
    torch.testing.assert_close(found, rise, atol=1e-9, rtol=0)


def test_a_block_of_a_model_without_blocks_is_refused() -> None:
    assert "no blocks" in str(refusal(resolve("vit-cx", {"layer": "blocks[0].norm1"}), shared("swin")))


@pytest.mark.parametrize("table", ["vitcx-table-1", "vitcx-table-2"])
def test_the_tables_insert_into_an_empty_canvas(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model is given in column Ins: zeros after normalisation, then pixels of the image, nothing else."""
    vit = build("vit")
    batch = images(vit, 1)
    assert (batch != 0).all(), "so that a zero is canvas"
    metrics = read_recipe(table)[0].metrics

    def shown(label: str) -> Tensor:
        """The variants [P,C,H,W] of one image, from the bare canvas to the whole image."""
        seen: list[Tensor] = []
        embed = type(vit).embed
        monkeypatch.setattr(vit, "embed", lambda x: (seen.append(x), embed(vit, x))[1])
        spec = metrics[label].changed(steps=4)
        pl.evaluate(vit, batch, torch.rand(1, *vit.grid), {label: {"metric": spec.metric, **spec.settings}})
        (variants,) = [x for x in seen if len(x) == 5]
        return variants

    canvas = shown("Ins")
    assert (canvas[0] == 0).all()
    assert ((canvas == 0) | (canvas == batch)).all()
    assert [round(float((one != 0).double().mean()), 3) for one in canvas] == [0.0, 0.25, 0.5, 0.75, 1.0]
    blurred = shown("Ins (blur)")
    torch.testing.assert_close(blurred[:1], fill_images("blur-rise", batch, vit))
    assert (blurred[0] != 0).all()


@pytest.mark.parametrize("variant", ["full", 1, 2])
def test_the_number_of_masks_is_reported(variant: Any, tmp_path: Path) -> None:
    """K of each image by itself: in the attribution, in parts of it, on disk, and as a metric."""
    vit = shared("vit", torch.float64)
    batch = images(vit, 3)
    settings = {"distance": 0.25, "variant": variant, "random_masks": 24}
    att = pl.explain(vit, batch, "vit-cx", 1, batch_size=2, **settings)
    channels, _ = scale_to_unit(feature_maps(asked(vit, batch, [1]))[0], vit.extent)
    literal = [len(merged(cosine_distances(one, vit.extent), 0.25)) for one in channels]
    expected = {"full": literal, 1: [48] * 3, 2: [24] * 3}[variant]
    assert list(att.facts["masks"]) == expected
    assert variant != "full" or len(set(expected)) > 1
    assert att[1].facts == {"masks": (expected[1],)}
    assert att[1:].facts == {"masks": tuple(expected[1:])}
    assert pl.Attribution.concat([att[:1], att[1:]]).facts == att.facts
    assert pl.Attribution.load(att.save(tmp_path / "att")).facts == att.facts
    both = {"given": att, "made": {"method": "vit-cx", **settings}}
    for found in pl.evaluate(vit, batch, both, "fact", 1, batch_size=2).values():
        assert found.values.tolist() == expected
    rows = pl.explain(vit, batch, "vit-cx", [[0, 1]] * 3, **settings)
    assert list(rows.facts["masks"]) == expected, "a fact of the image, however many classes"


def test_a_method_without_that_number_has_no_value() -> None:
    vit = shared("vit")
    with pytest.warns(pl.UndefinedMetric, match="'masks' is not known"):
        found = pl.evaluate(vit, images(vit, 2), "genatt", "fact", 1)
    assert found.count == 0
    with pytest.warns(pl.UndefinedMetric, match="reported are masks"):
        pl.evaluate(vit, images(vit, 2), ["vit-cx"], "fact", 1, fact="clusters")
