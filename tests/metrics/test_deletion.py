"""Insertion and deletion: literal loops, closed forms and invariants, peers, presets and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import patchlight as pl
from patchlight.evidence.fills import fill_images
from patchlight.metrics.base import resolve_metric
from patchlight.metrics.deletion import area, thresholds
from tests.families import images, shared
from tests.literal.toys import Linear, linear
from tests.metrics import literal

TARGETS = [1, 4]


def without_ties(vit: pl.Anatomy, count: int = 2, seed: int = 0, size: tuple[int, int] | None = None) -> Tensor:
    """Maps [B,H,W] whose values all differ."""
    height, width = size or vit.preprocess.size
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(height * width, generator=generator) for _ in range(count)]
    return torch.stack(rows).view(count, height, width).double()


@pytest.mark.parametrize("fill", ["black", "blur-tis"])
def test_curves_are_the_literal_ones(fill: Any) -> None:
    vit = shared("vit-wide", torch.float64)
    batch, maps = images(vit, 2), without_ties(vit)
    filled = fill_images(fill, batch, vit)
    found = pl.evaluate(vit, batch, maps, ["insertion", "deletion", "ins-del"], TARGETS, steps=7, fill=fill)
    areas = {}
    for name, slow in (("insertion", literal.insertion), ("deletion", literal.deletion)):
        curves = [
            [p[target] for p in slow(vit, image, scores, other, 7)]
            for image, scores, other, target in zip(batch, maps, filled, TARGETS, strict=True)
        ]
        np.testing.assert_allclose(found[name].curve, curves, atol=1e-10)
        areas[name] = np.array([literal.rise_area(curve) for curve in curves])
        np.testing.assert_allclose(found[name].values, areas[name], atol=1e-10)
    np.testing.assert_allclose(found["ins-del"].values, areas["insertion"] - areas["deletion"], atol=1e-10)
    np.testing.assert_allclose(found["ins-del"].parts["deletion"], areas["deletion"], atol=1e-10)


def test_presets_are_their_protocols() -> None:
    vit = shared("vit", torch.float64)
    batch, maps = images(vit, 2), without_ties(vit)
    predicted = vit.logits(batch).argmax(1).tolist()
    other = [(p + 1) % 7 for p in predicted]
    zero = torch.zeros_like(batch)
    rise = pl.evaluate(vit, batch, maps, "deletion", other, preset="rise", steps=8)
    tis = pl.evaluate(vit, batch, maps, "deletion", other, preset="tis", steps=8, fill="black")
    for i in range(2):
        slow = literal.deletion(vit, batch[i], maps[i], zero[i], 8)
        of_prediction = [p[predicted[i]] for p in slow]
        assert float(rise.values[i]) == pytest.approx(literal.rise_area(of_prediction), abs=1e-10)
        of_given = [p[other[i]] for p in slow[1:]]
        assert float(tis.values[i]) == pytest.approx(sum(of_given) / 8, abs=1e-10)
    assert rise.curve is not None
    assert rise.curve.shape == (2, 9)
    assert rise.x is not None
    assert rise.x.tolist() == [i / 8 for i in range(9)]
    assert resolve_metric("insertion", {"preset": "rise"}).settings["steps"] == 224


@pytest.mark.parametrize(
    ("preset", "word", "fill"),
    [
        ("tis", "blur", "blur-tis"),
        ("tis", "random", "noise"),
        ("tis", "black", "zero"),
        ("tis", "mean", "image-mean"),
        ("rise", "blur", "blur-rise"),
        ("rise", "black", "zero"),
        (None, "black", "black"),
        ("tis", "channel-mean", "channel-mean"),
    ],
)
def test_presets_understand_their_papers_words(preset: str | None, word: str, fill: str) -> None:
    for name, key in (("insertion", "fill"), ("deletion", "fill"), ("ins-del", "deletion_fill")):
        asked = {key: word} if preset is None else {key: word, "preset": preset}
        assert resolve_metric(name, asked).settings[key] == fill


def test_four_fills_of_tis_are_four_numbers() -> None:
    vit = shared("vit")
    fills = {f: {"metric": "deletion", "fill": f} for f in ("blur", "random", "black", "mean")}
    found = pl.evaluate(vit, images(vit, 2), without_ties(vit), fills, preset="tis", steps=4)
    assert list(found) == list(fills)
    ends = {float(one.curve[0, -1]) for one in found.values() if one.curve is not None}
    assert len(ends) == 4


def test_a_constant_model_gives_its_probability() -> None:
    vit = Linear(torch.zeros(5, 3, 12, 16))
    batch = torch.randn(2, 3, 12, 16, dtype=torch.float64)
    maps = without_ties(vit)
    found = pl.evaluate(vit, batch, maps, ["insertion", "deletion", "ins-del"], 3, preset="rise", steps=9)
    assert found["insertion"].values.tolist() == pytest.approx([0.2, 0.2])
    assert found["deletion"].values.tolist() == pytest.approx([0.2, 0.2])
    assert found["ins-del"].values.tolist() == pytest.approx([0, 0])


@given(st.integers(0, 10_000), st.sampled_from(["cube", "exp", "scale"]), st.sampled_from(["pixel", "patch"]))
@settings(max_examples=8)
def test_rising_transforms_of_the_map_change_nothing(seed: int, how: str, unit: str) -> None:
    vit = linear(seed=seed)
    batch = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    maps = without_ties(vit, seed=seed, size=vit.grid) / 6 - 1
    other = {"cube": maps**3, "exp": maps.exp(), "scale": 7 * maps - 100}[how]
    same = {"steps": 5, "unit": unit, "upsampling": "nearest", "seed": seed}
    one, two = (pl.evaluate(vit, batch, m, "ins-del", 0, **same) for m in (maps, other))
    assert torch.equal(one.values, two.values)


@pytest.mark.parametrize("unit", ["pixel", "patch", "token"])
def test_deleting_a_map_is_inserting_its_negative(unit: str) -> None:
    vit = shared("deit-distilled", torch.float64)
    batch = images(vit, 2)
    maps = without_ties(vit, size=None if unit == "pixel" else vit.grid)
    same = {"steps": 8, "unit": unit, "fill": "channel-mean"}
    deleted = pl.evaluate(vit, batch, maps, "deletion", TARGETS, **same)
    inserted = pl.evaluate(vit, batch, -maps, "insertion", TARGETS, **same)
    assert deleted.curve is not None
    assert inserted.curve is not None
    torch.testing.assert_close(deleted.curve, inserted.curve.flip(1), atol=1e-12, rtol=0)
    torch.testing.assert_close(deleted.values, inserted.values, atol=1e-12, rtol=0)


def test_end_points_do_not_depend_on_the_map() -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit, 2)
    clean = vit.logits(batch).softmax(1)[range(2), TARGETS]
    bare = vit.logits(fill_images("image-mean", batch, vit)).softmax(1)[range(2), TARGETS]
    for seed in (0, 1):
        maps = without_ties(vit, seed=seed)
        found = pl.evaluate(vit, batch, maps, ["insertion", "deletion"], TARGETS, steps=5, fill="image-mean")
        for name, first, last in (("insertion", bare, clean), ("deletion", clean, bare)):
            curve = found[name].curve
            assert curve is not None
            torch.testing.assert_close(curve[:, 0], first, atol=1e-12, rtol=0)
            torch.testing.assert_close(curve[:, -1], last, atol=1e-12, rtol=0)


def additive(seed: int = 0) -> tuple[Linear, Tensor, Tensor]:
    """A model whose logit 0 is a sum over patches and logit 1 is 0, an image, and what each patch adds [1,h,w]."""
    weight = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 4
    weight[1] = 0
    vit = Linear(weight)
    image = torch.randn(1, 3, 12, 16, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return vit, image, vit.embed(image)[..., 0].detach().view(1, *vit.grid)


@pytest.mark.parametrize("seed", range(3))
def test_the_oracle_of_an_additive_game_cannot_be_beaten(seed: int) -> None:
    """Sorting by what a patch adds lowers deletion and raises insertion more than any other order."""
    vit, image, oracle = additive(seed)
    same = {"steps": 12, "unit": "patch", "fill": "zero"}
    best = pl.evaluate(vit, image, oracle, ["insertion", "deletion"], 0, **same)
    for other in range(20):
        maps = without_ties(vit, 1, seed=other, size=vit.grid)
        found = pl.evaluate(vit, image, maps, ["insertion", "deletion"], 0, **same)
        assert float(found["deletion"].values) >= float(best["deletion"].values) - 1e-12
        assert float(found["insertion"].values) <= float(best["insertion"].values) + 1e-12
    order = oracle.flatten().sort(descending=True).values
    curve = best["deletion"].curve
    assert curve is not None
    expected = torch.sigmoid(torch.stack([order[n:].sum() for n in range(13)]))
    torch.testing.assert_close(curve[0], expected, atol=1e-12, rtol=0)


def test_random_maps_insert_as_they_delete_on_average() -> None:
    vit, image, _ = additive(5)
    many = 400
    maps = torch.rand(many, *vit.grid, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = pl.evaluate(
        vit, image.expand(many, -1, -1, -1), maps, "ins-del", 0, steps=12, unit="patch", fill="zero", batch_size=many
    )
    error = float(found.values.std()) / many**0.5
    assert abs(found.mean) <= 4 * error
    low, high = found.interval()
    assert low <= found.mean <= high


def test_ties_are_drawn_by_the_seed() -> None:
    vit = shared("vit", torch.float64)
    batch, maps = images(vit, 2), torch.zeros(2, *vit.grid, dtype=torch.float64)
    maps[:, 0, 0] = 1
    one, same, other = (
        pl.evaluate(vit, batch, maps, "deletion", 0, steps=16, unit="patch", seed=seed).curve for seed in (0, 0, 1)
    )
    assert one is not None
    assert same is not None
    assert other is not None
    assert torch.equal(one, same)
    torch.testing.assert_close(one[:, :2], other[:, :2], atol=1e-12, rtol=0)
    assert not torch.allclose(one[:, 2:-1], other[:, 2:-1])


def test_tokens_are_really_removed() -> None:
    vit = shared("vit", torch.float64)
    batch, maps = images(vit, 2), without_ties(vit, size=vit.grid)
    found = pl.evaluate(vit, batch, maps, ["deletion", "insertion"], labels=TARGETS, preset="vit-shapley")
    for i, target in enumerate(TARGETS):
        order = literal.falling(maps[i])
        gone = [literal.without_patches(vit, batch[i], order[:n])[target] for n in range(17)]
        kept = [literal.without_patches(vit, batch[i], order[n:])[target] for n in range(17)]
        np.testing.assert_allclose(found["deletion"].curve[i], gone, atol=1e-10)
        np.testing.assert_allclose(found["insertion"].curve[i], kept, atol=1e-10)
        assert float(found["deletion"].values[i]) == pytest.approx(sum(gone) / 17, abs=1e-10)


def test_metrics_of_one_call_share_their_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = linear()
    seen: list[int] = []
    readout = vit.readout
    monkeypatch.setattr(vit, "readout", lambda tokens, keep=None: (seen.append(len(tokens)), readout(tokens, keep))[1])
    batch, maps = torch.randn(2, 3, 12, 16, dtype=torch.float64), without_ties(vit)
    pl.evaluate(vit, batch, maps, ["insertion", "deletion", "ins-del"], 0, steps=4, fill="zero")
    assert sum(seen) == 2 * 2 * 5


class Grey(nn.Module):
    """A model of grey images, so that a pixel is one feature."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.expand(-1, 3, -1, -1))


def test_quantus_flips_the_same_pixels() -> None:
    quantus = pytest.importorskip("quantus")
    vit = shared("vit")
    grey, maps = images(vit, 2)[:, :1], without_ties(vit).float()
    flipping = quantus.PixelFlipping(
        features_in_step=512, abs=False, normalise=False, perturb_baseline=0.0, disable_warnings=True
    )
    theirs = flipping(
        model=Grey(vit.model).eval(),
        x_batch=grey.numpy(),
        y_batch=np.array(TARGETS),
        a_batch=maps[:, None].numpy(),
        softmax=True,
        device="cpu",
        channel_first=True,
    )
    batch = grey.expand(-1, 3, -1, -1)
    ours = pl.evaluate(vit, batch, maps, "deletion", TARGETS, steps=8, fill="zero", first=False)
    np.testing.assert_allclose(ours.curve, theirs, atol=1e-5)


def test_areas() -> None:
    x = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    line = (2 * x + 1)[None]
    assert float(area(line, "trapezoid", x)) == pytest.approx(2)
    assert float(area(line, "width", x)) == pytest.approx(2)
    assert float(area(line[:, 1:], "trapezoid", x[1:])) == pytest.approx(2.25)
    assert float(area(line[:, 1:], "width", x[1:])) == pytest.approx(2.25 * 0.75)
    assert float(area(line, "mean", x)) == pytest.approx(7.5 / 4)
    assert float(area(line, "unit", x)) == pytest.approx(7.5 - 2)
    assert float(area(line[:, :1], "trapezoid", x[:1])) == 1


@given(st.integers(1, 3000), st.integers(1, 400), st.booleans())
def test_thresholds_end_with_everything(cells: int, steps: int, first: bool) -> None:
    changed = thresholds(cells, steps, first)
    assert int(changed[-1]) == cells
    assert (int(changed[0]) == 0) == first
    gaps = changed.diff().tolist() if first else [int(changed[0]), *changed.diff().tolist()]
    assert len(gaps) <= steps
    assert all(gap == -(-cells // steps) for gap in gaps[:-1])
    assert 0 < gaps[-1] <= -(-cells // steps)


def test_what_cannot_be_done_is_refused() -> None:
    swin = shared("swin")
    maps = torch.rand(1, *swin.grid)
    with pytest.raises(pl.Unsupported, match=r"cannot drop tokens.*unit='patch'"):
        pl.evaluate(swin, images(swin, 1), maps, "deletion", unit="token")
    assert pl.evaluate(swin, images(swin, 1), maps, "deletion", unit="patch", steps=3).count == 1
    siglip = shared("siglip")
    with pytest.raises(pl.Unsupported, match="reads its class from the patches"):
        pl.evaluate(siglip, images(siglip, 1), torch.rand(1, *siglip.grid), "deletion", preset="vit-shapley")
