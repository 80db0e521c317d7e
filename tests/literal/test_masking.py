"""Masking methods against their papers' formulas, written mask by mask in float64, and the closed forms they obey."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.core.images import Preprocess
from patchlight.core.targets import Targets
from patchlight.evidence.fills import Imputation, fill_images
from patchlight.methods import lime, masking, rise
from patchlight.methods.base import METHODS
from patchlight.methods.maps import compute
from patchlight.methods.requests import resolve
from patchlight.testing import check_method
from tests.close import within
from tests.evidence.literal import imputed
from tests.families import FAMILIES, build, images, shared
from tests.literal.plain import maps

TARGET = [2, 5, 0]
QUICK = ("vit-wide", "siglip", "swin")
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-10}


class Linear(Anatomy):
    """A linear function of the pixels that is also an additive game of its tokens: f = b + sum_i <w_i, patch_i>."""

    library = "tests"

    def __init__(self, grid: tuple[int, int] = (3, 4), patch: int = 2, scale: float = 1.0) -> None:
        torch.manual_seed(5)
        size = (grid[0] * patch, grid[1] * patch)
        net = nn.ParameterDict({"w": torch.randn(3, 3, *size) * scale, "b": torch.randn(3)}).double()
        super().__init__(
            net,
            name="linear",
            grid=grid,
            prefix=0,
            pooling="avg",
            heads=1,
            classes=3,
            preprocess=Preprocess(size=size, mean=(0.0,) * 3, std=(1.0,) * 3),
        )

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return ()

    def embed(self, images: Tensor) -> Tensor:
        return self.per_patch(images[:, None] * self.model["w"]).transpose(1, 2)  # type: ignore[index]

    def per_patch(self, values: Tensor) -> Tensor:
        """Pixel values [B,K,C,H,W] summed over each patch: [B,K,P]."""
        rows, columns = self.grid
        return values.sum(2).unflatten(-1, (columns, -1)).sum(-1).unflatten(-2, (rows, -1)).sum(-2).flatten(2)

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        raise IndexError(index)

    def features(self, tokens: Tensor) -> Tensor:
        return tokens.sum(1) + self.model["b"]  # type: ignore[index]

    def batch_of(self, count: int = 2) -> Tensor:
        return torch.randn(count, 3, *self.preprocess.size, generator=torch.Generator().manual_seed(1)).double()


def f(vit: Anatomy, image: Tensor, target: int) -> Tensor:
    """The class probability of one image [C,H,W]."""
    return vit.logits(image[None])[0].softmax(0)[target]


def kept(vit: Anatomy, image: Tensor, patches: Tensor, target: int) -> Tensor:
    """The class probability with only some patches, the others dropped."""
    with torch.no_grad():
        tokens = vit.run(vit.embed(image[None]), keep=patches[None])
        return vit.readout(tokens)[0].softmax(0)[target]


def mirrored_bilinear(grid: Tensor, height: int, width: int, y: int, x: int) -> float:
    """The value at pixel (y, x) of a grid upsampled to height x width, mirrored beyond its outermost centres."""

    def two(at: int, length: int, cells: int) -> list[tuple[int, float]]:
        place = (at + 0.5) * cells / length - 0.5
        low = math.floor(place)
        found = []
        for cell, weight in ((low, low + 1 - place), (low + 1, place - low)):
            cell = -cell if cell < 0 else cell
            found.append((2 * (cells - 1) - cell if cell > cells - 1 else cell, weight))
        return found

    rows, columns = two(y, height, grid.shape[0]), two(x, width, grid.shape[1])
    return sum(u * v * float(grid[i, j]) for i, u in rows for j, v in columns)


@pytest.mark.parametrize("family", [pytest.param(g, marks=[] if g in QUICK else pytest.mark.slow) for g in FAMILIES])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("rise", {"unit": "token", "level": "token", "samples": 24}),
        ("occlusion", {"unit": "token", "level": "token"}),
        ("occlusion", {"window": (20, 30), "stride": 16}),
        ("pami", {"unit": "token"}),
        ("lime", {"unit": "token", "samples": 64}),
        ("score-cam", {"preset": "vit-cx"}),
    ],
)
def test_contract_of_the_other_settings(name: str, settings: dict[str, Any], family: str) -> None:
    vit = shared(family)
    if vit.can_drop is not None and settings.get("unit") == "token":
        with pytest.raises(pl.Unsupported, match=r"merges patches"):
            pl.explain(vit, images(vit, 1), name, **settings)
        return
    check_method(name, vit, images(vit, 2), double=shared(family, torch.float64), settings=settings)


@pytest.mark.parametrize("normaliser", ["expected", "empirical"])
def test_rise_pixels(normaliser: str) -> None:
    """The masks pixel by pixel, and S(x) = sum_i f(X M_i) M_i(x) over N p or over the coverage."""
    vit = shared("vit-wide", torch.float64)
    batch = images(vit, 2)
    height, width = vit.preprocess.size
    n, s, p = 4, 4, 0.4
    settings = {"samples": n, "grid": s, "keep": p, "normaliser": normaliser, "fill": "channel-mean"}
    found = maps(vit, batch, "rise", TARGET[:2], seed=3, **settings)
    small = rise.draw_grids(n, s, p, (height, width), torch.Generator().manual_seed(3))
    cells = [math.ceil(height / s), math.ceil(width / s)]
    masks = torch.empty(n, height, width, dtype=torch.float64)
    for i in range(n):
        down, right = small.shifts[i].tolist()
        assert 0 <= down < cells[0]
        assert 0 <= right < cells[1]
        for y, x in itertools.product(range(height), range(width)):
            canvas = ((s + 1) * cells[0], (s + 1) * cells[1])
            masks[i, y, x] = mirrored_bilinear(small.grids[i], *canvas, y + down, x + right)
    for b in range(2):
        fill = batch[b].mean((1, 2), keepdim=True)
        total = sum(f(vit, batch[b] * m + fill * (1 - m), TARGET[b]) * m for m in masks)
        expected = total / (n * p) if normaliser == "expected" else total / masks.sum(0)
        expected = expected.nan_to_num(0.0)  # never covered
        torch.testing.assert_close(found[b], expected, **CLOSE)
    coarse = maps(vit, batch, "rise", TARGET[:2], seed=3, level="token", **settings)
    torch.testing.assert_close(coarse, F.avg_pool2d(found, 16), **CLOSE)


def test_rise_tokens() -> None:
    vit = shared("deit-distilled", torch.float64)
    batch = images(vit)
    found = maps(vit, batch, "rise", TARGET, seed=1, preset="vit-shapley", samples=30)
    masks = masking.bernoulli((30, 16), 0.5, torch.Generator().manual_seed(1)).double()
    for b, target in enumerate(TARGET):
        total = sum(kept(vit, batch[b], m.nonzero()[:, 0], target) * m for m in masks)
        torch.testing.assert_close(found[b], (total / masks.sum(0)).view(4, 4), **CLOSE)
    painted = maps(vit, batch, "rise", TARGET, seed=1, preset="vit-shapley", samples=30, level="pixel")
    torch.testing.assert_close(painted, found.repeat_interleave(16, 1).repeat_interleave(16, 2), **CLOSE)


def test_rise_patches() -> None:
    """The patches that `unit="token"` would remove are painted; a mask may show none of them."""
    vit = shared("vit-wide", torch.float64)
    batch = images(vit)[:1]
    settings: dict[str, Any] = {"unit": "patch", "level": "token", "samples": 30, "keep": 0.1, "fill": "black"}
    found = maps(vit, batch, "rise", TARGET[:1], seed=1, **settings)
    masks = masking.bernoulli((30, 15), 0.1, torch.Generator().manual_seed(1), empty=True).double()
    assert not bool(masks.any(1).all())
    black = fill_images("black", batch, vit)[0]
    large = masks.view(30, 3, 5).repeat_interleave(16, 1).repeat_interleave(16, 2).bool()
    total = sum(f(vit, torch.where(m, batch[0], black), TARGET[0]) * z for m, z in zip(large, masks, strict=True))
    torch.testing.assert_close(found[0], (total / (30 * 0.1)).view(3, 5), **CLOSE)


@pytest.mark.filterwarnings("ignore::patchlight.DegenerateMap")
def test_rise_sees_everything_at_p_1_and_a_constant_model_by_its_coverage() -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit)
    whole = torch.stack([f(vit, x, t) for x, t in zip(batch, TARGET, strict=True)])[:, None, None]
    settings: dict[str, Any] = {"samples": 40, "grid": 5}
    found = maps(vit, batch, "rise", TARGET, **settings, keep=1.0, unit="token", level="token")
    torch.testing.assert_close(found, whole.expand(-1, 4, 4), **CLOSE)
    found = maps(vit, batch, "rise", TARGET, **settings, keep=1.0)
    torch.testing.assert_close(found, whole.expand(-1, 64, 64), **CLOSE)
    flat = maps(vit, batch, "rise", TARGET, **settings, keep=0.3, score=lambda logits: logits[:, 0] * 0 + 0.25)
    grids = rise.draw_grids(40, 5, 0.3, (64, 64), torch.Generator().manual_seed(0)).to(batch)
    coverage = grids.masks(torch.arange(40)).mean(0)
    torch.testing.assert_close(flat[0], 0.25 * coverage / 0.3, **CLOSE)
    assert coverage.std() > 0.01, "coverage is not flat, so the empirical normaliser has something to remove"
    even = {**settings, "normaliser": "empirical", "score": lambda logits: logits[:, 0] * 0 + 0.25}
    found = maps(vit, batch, "rise", TARGET, **even)
    torch.testing.assert_close(found, torch.full_like(found, 0.25), **CLOSE)


def test_rise_on_an_additive_game_tends_to_its_closed_form() -> None:
    """E[S_i] = (1-p) a_i + p sum_j a_j + b, within five standard errors."""
    vit, p, n = Linear(), 0.3, 4000
    batch = vit.batch_of(1)
    found = maps(vit, batch, "rise", [1], preset="vit-shapley", normaliser="expected", keep=p, samples=n, score="logit")
    found = found[0].flatten()
    a = vit.embed(batch)[0, :, 1]
    expected = (1 - p) * a + p * a.sum() + vit.model["b"][1]  # type: ignore[index]
    masks = masking.bernoulli((n, 12), p, torch.Generator().manual_seed(0)).double()
    scores = masks @ a + vit.model["b"][1]  # type: ignore[index]
    torch.testing.assert_close(found, (scores @ masks / (n * p)).detach(), **CLOSE)
    error = (scores[:, None] * masks / p).std(0) / n**0.5
    bias = 0.7**12 / p * a.abs().max()  # an empty mask is given one patch
    assert bool(((found - expected).abs() < 5 * error + bias).all())


def test_rise_makes_its_masks_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = shared("vit")
    made: list[int] = []
    inner = rise.RandomGrids.masks
    monkeypatch.setattr(rise.RandomGrids, "masks", lambda self, index: (made.append(len(index)), inner(self, index))[1])
    maps(vit, images(vit), "rise", TARGET, samples=50, chunk=16)
    assert sum(made) == 150
    assert max(made) == 16


@pytest.mark.filterwarnings("ignore::patchlight.DegenerateMap")
@pytest.mark.parametrize(("window", "stride"), [((16, 16), (16, 16)), ((20, 30), (13, 7)), ((48, 80), (1, 1))])
def test_occlusion_pixels(window: tuple[int, int], stride: tuple[int, int]) -> None:
    vit = shared("vit-wide", torch.float64)
    batch = images(vit)[:1]
    height, width = vit.preprocess.size
    found = maps(vit, batch, "occlusion", TARGET[:1], window=window, stride=stride, fill="black")[0]
    black = fill_images("black", batch, vit)[0]
    total, count = torch.zeros(2, height, width, dtype=torch.float64)
    for i in range(math.ceil((height - window[0]) / stride[0]) + 1):
        for j in range(math.ceil((width - window[1]) / stride[1]) + 1):
            at = torch.zeros(height, width, dtype=torch.bool)
            at[i * stride[0] : i * stride[0] + window[0], j * stride[1] : j * stride[1] + window[1]] = True
            covered = torch.where(at, black, batch[0])
            total[at] += f(vit, batch[0], TARGET[0]) - f(vit, covered, TARGET[0])
            count[at] += 1
    assert bool((count > 0).all())
    torch.testing.assert_close(found, total / count, **CLOSE)


def test_leave_one_out() -> None:
    vit = shared("eva02", torch.float64)
    batch = images(vit)
    found = maps(vit, batch, "occlusion", TARGET, preset="leave-one-out")
    every = torch.arange(16)
    for b, target in enumerate(TARGET):
        whole = kept(vit, batch[b], every, target)
        expected = torch.stack([whole - kept(vit, batch[b], every[every != i], target) for i in range(16)])
        torch.testing.assert_close(found[b], expected.view(4, 4), **CLOSE)
    with pytest.raises(pl.PatchlightError, match="would keep no patch"):
        maps(vit, batch, "occlusion", TARGET, unit="token", window=4)


def test_occlusion_of_a_linear_model() -> None:
    """R(w) is the sum of w x over the window; a feature the model ignores gets 0; the whole image f(X) - f(0)."""
    vit = Linear()
    with torch.no_grad():
        vit.model["w"][:, :, :2, :2] = 0  # type: ignore[index]
    batch = vit.batch_of()
    product = (batch * vit.model["w"][1]).sum(1).detach()  # type: ignore[index]
    single = maps(vit, batch, "occlusion", [1, 1], window=1, score="logit")
    torch.testing.assert_close(single, product, **CLOSE)
    patches = F.avg_pool2d(product, 2) * 4
    found = maps(vit, batch, "occlusion", [1, 1], score="logit")
    torch.testing.assert_close(found, patches.repeat_interleave(2, 1).repeat_interleave(2, 2), **CLOSE)
    within(float(found[:, :2, :2].abs().max()), 1e-12)
    for unit in ("token", "patch", "pixel"):
        tokens = maps(vit, batch, "occlusion", [1, 1], unit=unit, level="token", score="logit")
        torch.testing.assert_close(tokens, patches, **CLOSE)
        painted = maps(vit, batch, "occlusion", [1, 1], unit=unit, score="logit")
        torch.testing.assert_close(painted, found, **CLOSE)
    wide = maps(vit, batch, "occlusion", [1, 1], unit="patch", window=(1, 2), level="token", score="logit")
    torch.testing.assert_close(wide, patches.unflatten(2, (2, 2)).sum(3).repeat_interleave(2, 2), **CLOSE)


def channels(vit: Anatomy, batch: Tensor, layer: int, norm: bool) -> Tensor:
    with torch.no_grad():
        x = vit.run(vit.embed(batch), stop=layer)
        x = vit.model.blocks[layer].norm1(x) if norm else x  # type: ignore[index, union-attr]
    return x[:, vit.prefix :].transpose(1, 2).unflatten(2, vit.grid)


@pytest.mark.parametrize(("layer", "norm"), [("blocks[-1].norm1", True), (1, False)])
def test_score_cam(layer: int | str, norm: bool) -> None:
    vit = shared("deit-distilled", torch.float64)
    batch = images(vit)
    found = {
        variant: maps(vit, batch, "score-cam", TARGET, layer=layer, **settings)
        for variant, settings in (("paper", {}), ("relu", {"preset": "paper"}), ("vit-cx", {"preset": "vit-cx"}))
    }
    for b, target in enumerate(TARGET):
        activations = channels(vit, batch, 2 if norm else 1, norm)[b]
        logits, described = [], torch.zeros(64, 64, dtype=torch.float64)
        for a in activations:
            up = F.interpolate(a[None, None], (64, 64), mode="bilinear", align_corners=True)[0, 0]
            mask = (up - up.min()) / (up.max() - up.min() + 1e-8)
            out = vit.logits((batch[b] * mask)[None])[0]
            logits.append(out[target] - vit.logits(0 * batch[:1])[0, target])
            described += out.softmax(0)[target] * mask
        expected = (torch.stack(logits).softmax(0)[:, None, None] * activations).sum(0)
        torch.testing.assert_close(found["paper"][b], expected, **CLOSE)
        torch.testing.assert_close(found["relu"][b], expected.relu(), **CLOSE)
        shown = F.interpolate(found["vit-cx"][b][None, None], (64, 64), mode="bilinear", align_corners=True)[0, 0]
        torch.testing.assert_close(shown, described, **CLOSE)


def test_score_cam_weights_ignore_a_common_shift_and_are_even_for_equal_channels() -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit)
    plain = maps(vit, batch, "score-cam", TARGET, score=lambda logits: logits)
    shifted = maps(vit, batch, "score-cam", TARGET, score=lambda logits: logits + 100)
    torch.testing.assert_close(plain, shifted, **CLOSE)
    even = maps(vit, batch, "score-cam", TARGET, score=lambda logits: logits * 0 + 3)
    torch.testing.assert_close(even, channels(vit, batch, 2, norm=True).mean(1), **CLOSE)


def test_lime() -> None:
    """Sample by sample, with the ridge solved as an ordinary least-squares problem with S extra rows."""
    vit = shared("vit-wide", torch.float64)
    batch = images(vit)
    n, patches, width, ridge = 60, 15, 0.4, 0.7
    settings: dict[str, Any] = {"samples": n, "width": width, "ridge": ridge}
    z = masking.bernoulli((n, patches), 0.5, torch.Generator().manual_seed(0), empty=True).double()
    z[0] = 1
    distance = torch.stack([1 - torch.cosine_similarity(row, torch.ones(patches).double(), dim=0) for row in z])
    root = (torch.exp(-(distance**2) / width**2).sqrt()).sqrt()[:, None]
    for unit in ("patch", "token"):
        found = maps(vit, batch, "lime", TARGET, unit=unit, **settings)
        for b, target in enumerate(TARGET):
            y = torch.stack([_hidden(vit, batch[b], row, target, unit) for row in z])[:, None]
            design = torch.cat([root * torch.cat([z, torch.ones(n, 1).double()], 1), _penalty(patches, ridge)])
            wanted = torch.cat([root * y, torch.zeros(patches, 1).double()])
            expected = torch.linalg.lstsq(design, wanted).solution[:patches, 0]
            torch.testing.assert_close(found[b], expected.view(3, 5), **CLOSE)
    painted = maps(vit, batch, "lime", TARGET, unit="token", level="pixel", **settings)
    torch.testing.assert_close(painted, found.repeat_interleave(16, 1).repeat_interleave(16, 2), **CLOSE)


def _penalty(features: int, ridge: float) -> Tensor:
    rows = torch.cat([torch.eye(features), torch.zeros(features, 1)], 1).double()
    return ridge**0.5 * rows


def _hidden(vit: Anatomy, image: Tensor, shown: Tensor, target: int, unit: str) -> Tensor:
    if unit == "token":
        return kept(vit, image, shown.nonzero()[:, 0], target)
    picture = image.clone()
    for patch in (shown == 0).nonzero()[:, 0].tolist():
        y, x = 16 * (patch // vit.grid[1]), 16 * (patch % vit.grid[1])
        for channel in picture:
            channel[y : y + 16, x : x + 16] = channel[y : y + 16, x : x + 16].mean()
    return f(vit, picture, target)


def test_lime_finds_an_additive_game() -> None:
    """Without shrinkage the coefficients are the game's; equal outputs give zero; a wide kernel is no kernel."""
    vit = Linear()
    batch = vit.batch_of()
    game = vit.embed(batch)[..., 2].detach().view(2, 3, 4)
    settings: dict[str, Any] = {"score": "logit", "samples": 300}
    for unit in ("patch", "token"):
        found = maps(vit, batch, "lime", [2, 2], unit=unit, fill="zero", ridge=1e-9, **settings)
        torch.testing.assert_close(found, game, rtol=0, atol=1e-7)
    shrunk = maps(vit, batch, "lime", [2, 2], fill="zero", **settings)
    assert 0 < float((shrunk - game).abs().max()) < 0.3 * float(game.abs().max())
    with pytest.warns(pl.DegenerateMap):
        silent = maps(vit, batch, "lime", [2, 2], samples=50, score=lambda logits: logits * 0 + 1)
    within(float(silent.abs().max()), 1e-12)
    z = masking.bernoulli((1, 50), 0.5, torch.Generator().manual_seed(0))[None]
    torch.testing.assert_close(lime.kernel(z, torch.tensor([50]), 1e9), torch.ones(1, 1, dtype=torch.float64))
    assert float(lime.kernel(z & False, torch.tensor([50]), 1.0)) == pytest.approx(math.exp(-0.5))


def test_lime_shares_between_duplicates() -> None:
    z = masking.bernoulli((80, 5), 0.5, torch.Generator().manual_seed(0)).double()[None]
    z[..., 4] = z[..., 3]
    y = z @ torch.tensor([1.0, -2, 0, 3, 0]).double()
    found = lime.fit(z, y[..., None], torch.ones(1, 80), 1e-6)[0, 0]
    torch.testing.assert_close(found, torch.tensor([1, -2, 0, 1.5, 1.5]).double(), rtol=0, atol=1e-5)


def test_lime_superpixels_may_differ_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three vertical bands in one image, two halves in the other; each as if alone, and the game is found."""
    bands = torch.zeros(6, 8, dtype=torch.long)
    bands[:, 3:] = 1
    bands[:, 5:] = 2
    halves = (torch.arange(6) >= 3).long()[:, None].expand(6, 8)
    vit = Linear()
    batch = vit.batch_of()
    chosen = {float(batch[0, 0, 0, 0]): bands, float(batch[1, 0, 0, 0]): halves}
    monkeypatch.setattr(lime, "superpixels", lambda image, vit: chosen[float(image[0, 0, 0])])
    settings: dict[str, Any] = {"preset": "paper", "fill": "zero", "ridge": 1e-9, "score": "logit", "samples": 40}
    found = maps(vit, batch, "lime", [0, 0], **settings)
    product = (batch * vit.model["w"][0]).sum(1).detach()  # type: ignore[index]
    for b, labels in enumerate((bands, halves)):
        expected = torch.empty(6, 8, dtype=torch.float64)
        for label in labels.unique():
            expected[labels == label] = product[b][labels == label].sum()
        torch.testing.assert_close(found[b], expected, rtol=0, atol=1e-6)
        alone = maps(vit, batch[b : b + 1], "lime", [0], **settings)
        torch.testing.assert_close(alone[0], found[b], **CLOSE)
    pooled = maps(vit, batch, "lime", [0, 0], **{**settings, "level": "token"})
    torch.testing.assert_close(pooled, F.avg_pool2d(found, 2), **CLOSE)
    means = lime.segment_means(batch, torch.stack([bands, halves]))
    torch.testing.assert_close(means[0, 1, 4, 4], batch[0, 1, :, 3:5].mean())


def test_superpixels_without_scikit_image(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = shared("vit")
    monkeypatch.setitem(sys.modules, "skimage.segmentation", None)
    with pytest.raises(pl.PatchlightError, match=r"need scikit-image: pip install 'patchlight\[lime\]'"):
        pl.explain(vit, images(vit), "lime", preset="paper")


@pytest.mark.parametrize("unit", ["patch", "token"])
@pytest.mark.parametrize("windows", [2, [2, 3]])
def test_pami(unit: str, windows: int | list[int]) -> None:
    vit = shared("vit-wide", torch.float64)
    batch = images(vit)
    found = maps(vit, batch, "pami", TARGET, unit=unit, windows=windows)
    blurred = fill_images("blur-tis", batch, vit)
    for b, target in enumerate(TARGET):
        total, count = torch.zeros(2, 3, 5, dtype=torch.float64)
        for size in [windows] if isinstance(windows, int) else windows:
            for i, j in itertools.product(range(3 - size + 1), range(5 - size + 1)):
                part = torch.zeros(3, 5, dtype=torch.bool)
                part[i : i + size, j : j + size] = True
                if unit == "token":
                    score = kept(vit, batch[b], part.flatten().nonzero()[:, 0], target)
                else:
                    pixels = part.repeat_interleave(16, 0).repeat_interleave(16, 1)
                    score = f(vit, torch.where(pixels, batch[b], blurred[b]), target)
                total[part] += score
                count[part] += 1
        torch.testing.assert_close(found[b], total / count, **CLOSE)


def test_pami_of_the_whole_and_of_an_additive_game() -> None:
    """One part, the whole image: f(X) everywhere; single patches: the null value and the patch's own contribution."""
    vit = Linear()
    batch = vit.batch_of()
    null = vit.model["b"][1].detach()  # type: ignore[index]
    game = vit.embed(batch)[..., 1].detach().view(2, 3, 4)
    for unit in ("patch", "token"):
        single = maps(vit, batch, "pami", [1, 1], windows=1, unit=unit, fill="zero", score="logit")
        torch.testing.assert_close(single, null + game, **CLOSE)
        with pytest.warns(pl.DegenerateMap, match="as large as the grid"):
            whole = maps(vit, batch, "pami", [1, 1], windows=9, unit=unit, fill="zero", score="logit")
        torch.testing.assert_close(whole, (null + game.sum((1, 2)))[:, None, None].expand(2, 3, 4), **CLOSE)


RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "rise": ({"samples": 20}, 20),
    "occlusion": ({}, 17),
    "score-cam": ({}, 48 + 1),
    "lime": ({"samples": 20}, 20),
    "pami": ({"windows": 2}, 9),
}


@pytest.mark.parametrize("name", RUNS)
def test_forwards_and_several_classes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many forwards an image as `cost` says, whatever the number of classes."""
    vit = build("vit", torch.float64)
    batch = images(vit, 2)
    settings, cost = RUNS[name]
    each = [maps(vit, batch, name, [c, c + 1], **settings) for c in (0, 2)]
    seen: list[int] = []
    block: Callable[..., Tensor] = vit.block
    monkeypatch.setattr(vit, "block", lambda i, x, *a: (seen.append(len(x) if i == 0 else 0), block(i, x, *a))[1])
    targets = Targets(torch.tensor([[0, 2], [1, 3]]), several=True)
    both = compute(vit, batch, [resolve(name, settings)], targets, 0)[1][0]
    assert sum(seen) == 2 * cost
    torch.testing.assert_close(both, torch.stack(each, 1), **CLOSE)


def test_presets_of_rise() -> None:
    assert resolve("rise", {"preset": "tis"}).score == "logit"
    assert resolve("rise", {"preset": "vit-shapley"}).level == "token"
    assert resolve("rise").score == "probability"


FILLED = {
    "hsic": {"samples": 20},
    "kernel-shap": {"samples": 60, "unit": "patch"},
    "lime": {"samples": 20},
    "mda": {},
    "occlusion": {},
    "pami": {},
    "posterior": {"samples": 12, "unit": "patch"},
    "rise": {"samples": 12, "unit": "patch"},
    "search": {"prior": "genatt", "unit": "patch"},
    "tis": {"samples": 8, "unit": "patch"},
}
SOFT = {"drise": {"samples": 4}, "rise": {"samples": 4}, "score-cam": {}}
"""Methods whose masks let pixels through in part."""


def test_every_method_with_a_fill_is_here() -> None:
    takes = {name for name, entry in METHODS.items() if "fill" in entry.settings(entry.composition)}
    assert takes == FILLED.keys() | SOFT.keys()


@pytest.mark.parametrize("name", FILLED)
def test_methods_with_a_fill_take_roads(name: str) -> None:
    vit = shared("vit-wide", torch.float64)
    batch = images(vit)[:1]
    one, other = (maps(vit, batch, name, TARGET[:1], fill=fill, **FILLED[name]) for fill in ("road", "zero"))
    assert bool(one.isfinite().all())
    assert float((one - other).abs().max()) > 1e-6


def test_occlusion_with_roads_fill() -> None:
    """R(w) = f(X) - f(X with window w imputed)."""
    vit = shared("vit-wide", torch.float64)
    batch = images(vit)[:1]
    found = maps(vit, batch, "occlusion", TARGET[:1], fill="road", unit="patch", level="token")
    fill = fill_images("road", batch, vit)
    assert isinstance(fill, Imputation)
    for row, column in ((0, 0), (2, 3)):
        missing = torch.zeros(batch.shape[-2:], dtype=torch.bool)
        missing[16 * row : 16 * row + 16, 16 * column : 16 * column + 16] = True
        whole = torch.from_numpy(imputed(batch[0].numpy(), missing.numpy())) + fill.noise
        without = torch.where(missing, whole, batch[0])
        lost = f(vit, batch[0], TARGET[0]) - f(vit, without, TARGET[0])
        torch.testing.assert_close(found[0, row, column], torch.as_tensor(lost).to(found), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SOFT)
def test_soft_masks_over_roads_fill_are_refused(name: str) -> None:
    vit = shared("vit-wide", torch.float64)
    with pytest.raises(pl.PatchlightError, match="soft"):
        maps(vit, images(vit)[:1], name, TARGET[:1], fill="road", **SOFT[name])
