"""Localisation metrics against closed forms, literal loops, scikit-learn and quantus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage
from sklearn.metrics import average_precision_score, f1_score, jaccard_score
from torch import Tensor

import patchlight as pl
from patchlight.bench.recipe import read_recipe
from patchlight.core.errors import PatchlightError
from patchlight.data import open_data
from patchlight.metrics.localisation import average_precision, heat_overlaps, rank_accuracy
from tests.data.files import picture, save_array
from tests.families import images, shared

SIDE = 64
pytestmark = pytest.mark.filterwarnings("ignore::patchlight.UndefinedMetric")


def measured(maps: Tensor, metric: Any, **options: Any) -> Any:
    vit = shared("vit")
    return pl.evaluate(vit, images(vit, len(maps)), maps, metric, target=0, batch_size=512, **options)


def random_maps(count: int, side: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(count, side, side, generator=torch.Generator().manual_seed(seed))


def random_boxes(count: int, seed: int = 0, most: int = 3) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        low = rng.uniform(0, 40, (rng.integers(1, most + 1), 2))
        found.append(torch.tensor(np.concatenate([low, low + rng.uniform(8, 24, low.shape)], 1)))
    return found


def random_masks(count: int, seed: int = 0) -> Tensor:
    """Blobs of object, with a stripe nobody labelled."""
    smooth = torch.nn.functional.interpolate(random_maps(count, 5, seed)[:, None], (SIDE, SIDE), mode="bilinear")[:, 0]
    masks = (smooth > 0.1).to(torch.int8)
    masks[:, 20:24] = -1
    return masks


def one_hot(y: int, x: int) -> Tensor:
    one = torch.zeros(1, SIDE, SIDE)
    one[0, y, x] = 1
    return one


@pytest.mark.parametrize(
    ("y", "x", "hit"), [(10, 20, 1), (29, 39, 1), (30, 39, 0), (29, 40, 0), (9, 20, 0), (20, 10, 0)]
)
def test_a_point_hits_inside_the_box_alone(y: int, x: int, hit: int) -> None:
    assert measured(one_hot(y, x), "pointing-game", boxes=[[[20.0, 10.0, 40.9, 30.9]]]).mean == hit


def test_pointing_game_is_the_authors_loop() -> None:
    maps, boxes = random_maps(24), random_boxes(24)
    found = measured(maps, "pointing-game", boxes=boxes, preset="tis")
    for i, box in enumerate(boxes):
        canvas = np.zeros((SIDE, SIDE))
        for xmin, ymin, xmax, ymax in box.tolist():
            canvas[int(ymin) : int(ymax), int(xmin) : int(xmax)] = 1
        large = torch.nn.functional.interpolate(maps[i][None, None], (SIDE, SIDE), mode="bilinear")[0, 0]
        y, x = np.unravel_index(large.numpy().argmax(), canvas.shape)
        assert found.values[i] == canvas[y, x]
    assert 0 < found.mean < 1


def test_equal_maxima() -> None:
    flat = torch.ones(1, 4, 4)
    corner, middle = [[[0.0, 0.0, 8.0, 8.0]]], [[[16.0, 16.0, 48.0, 48.0]]]
    assert measured(flat, "pointing-game", boxes=corner, tie="first").mean == 1
    assert measured(flat, "pointing-game", boxes=middle, tie="first").mean == 0
    assert measured(flat, "pointing-game", boxes=middle, tie="any").mean == 1
    drawn = [measured(flat, "pointing-game", boxes=middle, seed=seed).mean for seed in range(200)]
    assert abs(np.mean(drawn) - 0.25) < 4 * (0.25 * 0.75 / 200) ** 0.5


def test_a_random_point_hits_as_often_as_the_boxes_are_large() -> None:
    count = 400
    boxes = random_boxes(count)
    found = measured(random_maps(count, SIDE), {"a": {"metric": "pointing-game", "max_area": None}}, boxes=boxes)["a"]
    area = measured(torch.ones(count, 4, 4), "energy-pointing", boxes=boxes, max_area=None).mean
    assert abs(found.mean - area) < 4 * (area * (1 - area) / count) ** 0.5


def test_tolerance_is_a_distance() -> None:
    box = [[[30.0, 30.0, 34.0, 34.0]]]
    near = {
        (y, x): measured(one_hot(y, x), "pointing-game", boxes=box, preset="original").mean
        for y in (15, 14, 19)
        for x in (31, 19, 20)
    }
    assert near[15, 31] == 1
    assert near[14, 31] == 0
    assert near[19, 20] == 1  # (11, 10) away: 14.9
    assert near[19, 19] == 0  # (11, 11) away: 15.6
    assert measured(one_hot(15, 31), "pointing-game", boxes=box).mean == 0


def test_large_and_missing_objects_have_no_value_but_a_reason() -> None:
    boxes = [[[0.0, 0.0, 64.0, 32.0]], [[0.0, 0.0, 64.0, 31.0]], torch.zeros(0, 4)]
    with pytest.warns(pl.UndefinedMetric, match="2 of 3"):
        found = measured(one_hot(3, 3).expand(3, -1, -1), "pointing-game", boxes=boxes)
    assert found.values[1] == 1
    assert found.values[[0, 2]].isnan().all()
    assert "50%" in found.reasons[0]
    assert "no boxes" in found.reasons[2]
    assert found.mean == 1
    assert found.count == 1
    kept = measured(one_hot(3, 3).expand(3, -1, -1), "pointing-game", boxes=boxes, max_area=None)
    assert kept.count == 2


def test_a_mask_is_an_object_too() -> None:
    boxes = random_boxes(6)
    masks = torch.zeros(6, SIDE, SIDE, dtype=torch.int8)
    for i, box in enumerate(boxes):
        for xmin, ymin, xmax, ymax in box.long().tolist():
            masks[i, ymin:ymax, xmin:xmax] = 1
    maps = random_maps(6)
    for metric in ("pointing-game", "energy-pointing"):
        by_box, by_mask = measured(maps, metric, boxes=boxes), measured(maps, metric, masks=masks)
        assert torch.equal(by_box.values, by_mask.values)
        chosen = measured(maps, metric, boxes=boxes, masks=1 - masks, region="masks", max_area=None)
        assert not torch.equal(chosen.values, by_box.values)
    with pytest.raises(PatchlightError, match="needs boxes or masks; give boxes="):
        measured(maps, "pointing-game")


def test_energy() -> None:
    boxes = [[[16.0, 16.0, 48.0, 48.0]]]
    assert measured(torch.full((1, 4, 4), 3.0), "energy-pointing", boxes=boxes).mean == pytest.approx(0.25)
    assert measured(torch.zeros(1, 4, 4), "energy-pointing", boxes=boxes).mean == pytest.approx(0.25)
    assert measured(one_hot(20, 20), "energy-pointing", boxes=boxes).mean == 1
    signed = one_hot(20, 20) - 3 * one_hot(0, 0)
    assert measured(signed, "energy-pointing", boxes=boxes).mean == pytest.approx(0.25)
    assert measured(signed, "energy-pointing", boxes=boxes, negative="drop").mean == 1


@pytest.mark.parametrize("levels", [3, 40, None])
def test_average_precision_is_scikit_learns(levels: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(12, 300, generator=generator)
    scores = scores if levels is None else (scores * levels).floor()
    positive = torch.rand(12, 300, generator=generator) < torch.linspace(0.02, 0.98, 12)[:, None]
    counted = torch.rand(12, 300, generator=generator) < 0.8
    whole, part = average_precision(scores, positive), average_precision(scores, positive, counted)
    for i in range(12):
        assert whole[i].item() == pytest.approx(average_precision_score(positive[i], scores[i]), abs=1e-12)
        rows = counted[i]
        assert part[i].item() == pytest.approx(average_precision_score(positive[i, rows], scores[i, rows]), abs=1e-12)


def test_average_precision_in_closed_form() -> None:
    scores = torch.arange(50, 0, -1.0)[None]
    positives = 12
    best, worst = torch.zeros(1, 50, dtype=torch.bool), torch.zeros(1, 50, dtype=torch.bool)
    best[:, :positives], worst[:, -positives:] = True, True
    assert average_precision(scores, best).item() == 1
    lowest = sum(j / (50 - positives + j) for j in range(1, positives + 1)) / positives
    assert average_precision(scores, worst).item() == pytest.approx(lowest, abs=1e-12)
    assert average_precision(torch.ones(1, 50), worst).item() == pytest.approx(positives / 50)
    assert average_precision(scores, torch.zeros(1, 50, dtype=torch.bool)).isnan().all()


@pytest.mark.parametrize("upsampling", ["nearest", "bicubic"])
def test_ap(upsampling: str) -> None:
    maps, masks = random_maps(5), random_masks(5)
    found = measured(maps, "ap", masks=masks, upsampling=upsampling)
    as_background = measured(maps, "ap", masks=masks, upsampling=upsampling, unlabelled="background")
    large = torch.nn.functional.interpolate(maps[:, None], (SIDE, SIDE), mode=upsampling)[:, 0]
    for i in range(5):
        rows = masks[i] >= 0
        assert found.values[i].item() == pytest.approx(average_precision_score(masks[i][rows], large[i][rows]))
        assert as_background.values[i].item() == pytest.approx(
            average_precision_score((masks[i] == 1).flatten(), large[i].flatten())
        )
    assert torch.equal(measured(maps.exp(), "ap", masks=masks).values, measured(maps, "ap", masks=masks).values)


def trimap_masks(folder: Path) -> Tensor:
    """A hand-made trimap of 4 x 4 patches, read as pets are: 1 the animal, 2 background, 3 the border."""
    patches = np.array([[1, 3, 3, 1], [2, 1, 2, 2], [2, 2, 2, 2], [2, 2, 2, 2]])
    picture(folder / "images/Beagle_1.jpg", SIDE, SIDE)
    save_array(folder / "trimaps/Beagle_1.png", patches.repeat(16, 0).repeat(16, 1))
    mask = open_data("pets", folder)[0].mask
    assert mask is not None
    return mask.expand(2, -1, -1)


@pytest.mark.parametrize(
    ("recipe", "metric", "values"),
    [
        ("skipplus-segmentation", "AP", [(1 + 2 / 4 + 3 / 6) / 3, (1 + 2 / 3 + 3 / 4) / 3]),
        ("skipplus-segmentation", "AP, border left out", [(1 + 2 / 2 + 3 / 4) / 3, (1 + 2 / 3 + 3 / 4) / 3]),
        ("compare-segmentation", "AP", [(1 + 2 / 2 + 3 / 4) / 3, (1 + 2 / 3 + 3 / 4) / 3]),
        ("posterior-segmentation", "AP", [(1 + 2 / 2 + 3 / 4) / 3, (1 + 2 / 3 + 3 / 4) / 3]),
    ],
)
def test_the_border_of_a_trimap(recipe: str, metric: str, values: list[float], tmp_path: Path) -> None:
    """As background it counts against a map that shows it; left out it does not, and here the better map changes.

    Highest first, a for animal, b for border, g for background: one map shows a b b a g a, the other a g a a b b.
    """
    one = [[16.0, 15, 14, 13], [12, 11, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    other = [[16.0, 12, 11, 14], [15, 13, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    spec = read_recipe(recipe)[0].metrics[metric]
    found = measured(
        torch.tensor([one, other]), {"a": {"metric": spec.metric, **spec.settings}}, masks=trimap_masks(tmp_path)
    )
    assert found["a"].values.tolist() == pytest.approx(values, abs=1e-12)


@pytest.mark.parametrize("metric", ["pixel-accuracy", "miou", "map", "f1"])
def test_other_segmentation_scores_leave_the_border_out(metric: str, tmp_path: Path) -> None:
    """Two maps that differ on the border alone, with the same mean and range, have the same score."""
    one = torch.tensor([[1.0, 0.9, 0.1, 0.7], [0.6, 0.3, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    other = one.clone()
    other[0, 1:3] = torch.tensor([0.1, 0.9])
    masks = trimap_masks(tmp_path)
    near = (
        one.repeat_interleave(16, 0).repeat_interleave(16, 1),
        other.repeat_interleave(16, 0).repeat_interleave(16, 1),
    )
    found = measured(torch.stack(near), metric, masks=masks).values
    assert found[0] == pytest.approx(found[1].item(), abs=1e-12)
    as_object = measured(torch.stack(near), metric, masks=masks.abs()).values
    assert as_object[0] != pytest.approx(found[0].item(), abs=1e-3), "the border is not object either"


def test_a_random_map_has_the_objects_share_as_ap() -> None:
    masks = random_masks(60).clamp_min(0)
    found = measured(random_maps(60, SIDE, 7), "ap", masks=masks)
    assert (found.values - masks.double().mean((1, 2))).abs().max() < 0.05
    assert abs(found.mean - masks.double().mean().item()) < 0.005


def literal_segmentation(maps: Tensor, masks: Tensor) -> dict[str, Any]:
    """The published protocol, image by image."""
    correct = labelled = 0
    inter, union = np.zeros(2), np.zeros(2)
    aps, f1s = [], []
    for map_, mask in zip(maps, masks.numpy(), strict=True):
        large = torch.nn.functional.interpolate(map_[None, None].double(), scale_factor=16, mode="bilinear")[
            0, 0
        ].numpy()
        heat = (large - large.min()) / (large.max() - large.min())
        known = mask >= 0
        shown, truth = (heat > heat.mean())[known], mask[known] == 1
        correct, labelled = correct + (shown == truth).sum(), labelled + known.sum()
        for c in (0, 1):
            inter[c] += ((shown == c) & (truth == c)).sum()
            union[c] += ((shown == c) | (truth == c)).sum()
        aps.append(
            average_precision_score(np.concatenate([~truth, truth]), np.concatenate([1 - heat[known], heat[known]]))
        )
        f1s.append(f1_score(truth, shown))
    return {
        "pixel-accuracy": correct / labelled,
        "miou": (inter / union).mean(),
        "map": np.array(aps),
        "f1": np.array(f1s),
    }


def test_segmentation_is_the_published_protocol() -> None:
    maps, masks = random_maps(7), random_masks(7)
    masks[3] = 0
    masks[3, 5:9, 5:9] = 1
    found = measured(maps.double(), ["pixel-accuracy", "miou", "map", "f1"], masks=masks)
    wanted = literal_segmentation(maps, masks)
    assert found["pixel-accuracy"].mean == pytest.approx(wanted["pixel-accuracy"], abs=1e-12)
    assert found["miou"].mean == pytest.approx(wanted["miou"], abs=1e-12)
    for name in ("map", "f1"):
        np.testing.assert_allclose(found[name].values, wanted[name], atol=1e-9)
    assert found["miou"].mean != pytest.approx(found["miou"].values.mean().item(), abs=1e-4)
    one = measured(maps[:1].double(), "miou", masks=masks[:1])
    heat = torch.nn.functional.interpolate(maps[:1, None].double(), (SIDE, SIDE), mode="bilinear")[0, 0]
    known = masks[0] >= 0
    wanted_one = jaccard_score(masks[0][known], (heat > heat.mean())[known].long(), average="macro")
    assert one.mean == one.values[0].item() == pytest.approx(wanted_one)


def test_perfect_inverted_and_constant_maps() -> None:
    masks = random_masks(3).clamp_min(0)
    names = ["pixel-accuracy", "miou", "map", "f1", "ap"]
    assert all(r.mean == pytest.approx(1) for r in measured(masks.float(), names, masks=masks).values())
    inverted = measured(1 - masks.float(), names, masks=masks)
    assert [inverted[n].mean for n in ("pixel-accuracy", "miou", "f1")] == [0, 0, 0]
    background = 1 - masks.double().mean().item()
    constant = measured(torch.full((3, 4, 4), 2.0), names, masks=masks)
    assert constant["miou"].mean == pytest.approx(background / 2)
    assert constant["pixel-accuracy"].mean == pytest.approx(background)
    assert constant["f1"].mean == 0


def test_two_channels_are_symmetric() -> None:
    maps, masks = random_maps(4).double(), random_masks(4)
    swapped = torch.where(masks >= 0, 1 - masks, masks)
    a, b = measured(maps, "map", masks=masks), measured(-maps, "map", masks=swapped)
    torch.testing.assert_close(a.values, b.values, atol=1e-6, rtol=0)


@pytest.mark.parametrize("metric", ["ap", "pixel-accuracy", "miou", "map", "f1"])
def test_a_mask_without_an_object_has_no_value(metric: str) -> None:
    """Nor, where both kinds are told apart by their order, one of nothing but the object."""
    masks = random_masks(3)
    masks[0], masks[1] = 0, torch.where(masks[1] >= 0, 1, -1)
    found = measured(random_maps(3), metric, masks=masks)
    ordered = metric in ("ap", "map")
    assert found.values.isnan().tolist() == [True, ordered, False]
    assert "no object" in found.reasons[0]
    assert ("nothing but the object" in found.reasons[1]) is ordered
    assert torch.isfinite(torch.tensor(found.mean))


def test_a_full_mask_counts_the_pixels_found() -> None:
    maps, masks = random_maps(1), torch.ones_like(random_masks(1))
    found = {name: measured(maps, name, masks=masks).mean for name in ("pixel-accuracy", "miou", "f1")}
    share = found["pixel-accuracy"]
    assert 0.3 < share < 0.7
    assert found["f1"] == pytest.approx(2 * share / (1 + share))
    assert found["miou"] == pytest.approx(share / 2), "the background that the map shows is not there"


def literal_overlap(heat: np.ndarray, boxes: np.ndarray, level: float, components: str) -> float:
    labels, count = ndimage.label(heat >= level, np.ones((3, 3)))
    sizes = [(labels == k).sum() for k in range(1, count + 1)]
    chosen = range(1, count + 1) if components == "all" else [int(np.argmax(sizes)) + 1] if count else []
    best = 0.0
    for k in chosen:
        ys, xs = np.nonzero(labels == k)
        a = (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)
        for b in boxes:
            w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
            both = max(w, 0) * max(h, 0)
            areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
            best = max(best, both / (areas - both))
    return best


@pytest.mark.parametrize("components", ["largest", "all"])
def test_boxes_around_the_heat(components: Any) -> None:
    levels = np.arange(0, 1.01, 0.1)
    for seed, box in enumerate(random_boxes(5)):
        heat = np.random.default_rng(seed).random((20, 20)) ** 2
        heat = np.kron(heat, np.ones((2, 2)))
        found = heat_overlaps(heat, box.numpy(), levels, components)
        wanted = [literal_overlap(heat, box.numpy(), level, components) for level in levels]
        np.testing.assert_allclose(found, wanted, atol=1e-12)
    assert not heat_overlaps(np.zeros((8, 8)), box.numpy(), np.array([0.5]), components).any()


def test_localisation_of_a_drawn_box() -> None:
    heat = torch.zeros(3, SIDE, SIDE)
    heat[:, 10:30, 20:40] = 1
    heat[:, 40:44, 50:54] = 1  # a smaller second component
    boxes = [[[20.0, 10.0, 40.0, 30.0]], [[0.0, 0.0, 5.0, 5.0], [22.0, 10.0, 40.0, 30.0]], [[50.0, 40.0, 54.0, 44.0]]]
    found = measured(
        heat, {"gt": {"metric": "gt-known-loc"}, "all": {"metric": "gt-known-loc", "components": "all"}}, boxes=boxes
    )
    assert found["gt"].values.tolist() == [1, 1, 0]
    assert found["all"].values.tolist() == [1, 1, 1]
    assert measured(heat, "gt-known-loc", boxes=boxes, iou=0.95).values.tolist() == [1, 0, 0]
    scaled = heat * torch.tensor([1.0, 100.0, 0.01])[:, None, None] - 5
    assert measured(scaled, "gt-known-loc", boxes=boxes).values.tolist() == [1, 1, 0], "each map has a scale of its own"
    vit = shared("vit")
    right = vit.logits(images(vit, 3)).argmax(1)
    labels = torch.where(torch.arange(3) == 1, (right + 1) % vit.classes, right)
    assert measured(heat, "top1-loc", boxes=boxes, labels=labels).values.tolist() == [1, 0, 0]
    with pytest.raises(PatchlightError, match="needs labels"):
        measured(heat, "top1-loc", boxes=boxes)


def test_the_best_threshold_is_the_data_sets() -> None:
    maps = torch.zeros(2, SIDE, SIDE)
    maps[0, 10:30, 10:30], maps[0, 30:64, 10:30] = 1, 0.6  # the box above a threshold of 0.6, too tall below
    maps[1, 10:30, 10:30], maps[1, 15:17, 15:17] = 0.3, 1  # the box up to 0.3, then a dot
    boxes = [[[10.0, 10.0, 30.0, 30.0]]] * 2
    found = measured(maps, "max-box-acc", boxes=boxes)
    assert found.values.tolist() == [1, 1]
    assert found.curve.shape == (2, 101)
    hits = found.parts["hits"].bool()
    assert hits[0, 2, 61:].all()
    assert not hits[0, 2, :61].any()
    assert hits[1, 2, 1:31].all()
    assert not hits[1, 2, 31:].any()
    assert hits[0, 0, 1:].all()  # 400 / 1080 pixels are near enough for an IoU of 0.3: one threshold serves both
    assert found.mean == pytest.approx((1 + 0.5 + 0.5) / 3)
    weights = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    assert found.resampled(weights).item() == 1


def test_intervals_of_micro_averages() -> None:
    found = measured(
        random_maps(30), ["miou", "pixel-accuracy", "max-box-acc"], masks=random_masks(30), boxes=random_boxes(30)
    )
    for result in found.values():
        low, high = result.interval()
        assert low < result.mean < high or result.metric == "max-box-acc"
        assert 0 <= low <= high <= 1
        chosen = torch.arange(30) < 10
        alone = result.resampled(chosen.double()[None])
        assert alone.item() == pytest.approx(
            result.combine({k: v[:10].sum(0)[None] for k, v in result.parts.items()}).item()
        )


def test_quantus_points_alike() -> None:
    quantus = pytest.importorskip("quantus")
    maps = (random_maps(8, SIDE) * 2).round() - 0.5
    masks = random_masks(8).clamp_min(0)
    vit = shared("vit")
    scores = quantus.PointingGame(disable_warnings=True)(
        model=vit.model,
        x_batch=images(vit, 8).numpy(),
        y_batch=np.zeros(8, dtype=int),
        a_batch=maps[:, None].numpy(),
        s_batch=masks[:, None].numpy().astype(bool),
    )
    assert measured(maps, "pointing-game", masks=masks, preset="quantus").values.tolist() == [float(s) for s in scores]


def test_rank_accuracy_by_hand() -> None:
    """Seven of eight, ties in proportion, and pixels that nobody labelled."""
    mask = torch.zeros(1, 4, 4, dtype=torch.int8)
    mask[0, :2] = 1
    masks = mask.repeat_interleave(16, 1).repeat_interleave(16, 2)
    scores = torch.arange(16.0).flip(0).view(1, 4, 4)
    swapped = scores.clone()
    swapped[0, 0, 0], swapped[0, 3, 3] = 0, 20
    flat = torch.ones(1, 4, 4)
    tied = (scores >= 12).float()  # four of eight, and four of the other twelve by chance
    for maps, expected in ((scores, 1), (-scores, 0), (swapped, 7 / 8), (flat, 0.5), (tied, (4 + 4 * 4 / 12) / 8)):
        for settings in ({}, {"unit": "pixel"}):
            assert measured(maps, "relevance-rank", masks=masks, **settings).mean == pytest.approx(expected)
    masks[:, 16:32] = -1
    assert measured(swapped, "relevance-rank", masks=masks).mean == pytest.approx(3 / 4)
    assert measured(scores, "relevance-rank", masks=torch.ones_like(masks)).count == 0


def test_average_precision_of_patches() -> None:
    """That of the pixels where the object is made of patches; a patch is object where half of it is."""
    maps = random_maps(3)
    cells = random_maps(3, seed=1) > 0
    masks = cells.to(torch.int8).repeat_interleave(16, 1).repeat_interleave(16, 2)
    for i in range(3):
        expected = average_precision_score(cells[i].flatten().numpy(), maps[i].flatten().numpy())
        found = measured(maps, "ap", masks=masks, unit="patch").values[i]
        assert float(found) == pytest.approx(expected)
        assert float(measured(maps, "ap", masks=masks).values[i]) == pytest.approx(expected)
    thin = torch.zeros(1, SIDE, SIDE, dtype=torch.int8)
    thin[:, :8] = 1
    rows = torch.zeros(1, 4, 4)
    rows[0, 0] = 1
    assert measured(rows, "ap", masks=thin, unit="patch").mean == 1
    thin[:, 7] = 0
    assert measured(rows, "ap", masks=thin, unit="patch").count == 0


def test_average_precision_in_boxes() -> None:
    """Without masks, the union of an image's boxes is its mask; an image without boxes has no value."""
    maps, boxes = (
        random_maps(3),
        [torch.tensor([[0.0, 0, 32, 16], [16, 0, 32, 48]]), torch.tensor([[16.0, 16, 48, 64]])],
    )
    masks = torch.zeros(2, SIDE, SIDE, dtype=torch.int8)
    masks[0, :16, :32], masks[0, :48, 16:32], masks[1, 16:64, 16:48] = 1, 1, 1
    for settings in ({}, {"unit": "patch"}):
        found = measured(maps, "ap", boxes=[*boxes, torch.zeros(0, 4)], **settings)
        assert torch.equal(found.values[:2], measured(maps[:2], "ap", masks=masks, **settings).values)
        assert found.count == 2


def test_rank_accuracy_shares_ties_image_by_image() -> None:
    """Two positives: the first image has one above and a tie of three for the second place, the other ties four."""
    scores = torch.tensor([[3.0, 2, 2, 2, 0], [1, 1, 1, 1, 0]])
    positive = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 1, 0, 0]]).bool()
    expected = torch.tensor([(1 + 1 / 3) / 2, (2 * 2 / 4) / 2], dtype=torch.float64)
    torch.testing.assert_close(rank_accuracy(scores, positive, torch.ones_like(positive)), expected)
