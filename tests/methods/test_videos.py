"""Methods and metrics on videos: units of removal, fills, order and suffix, and one frame as an image."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.core.layout import Geometry, Layout
from patchlight.evidence.fills import Freeze, fill_images
from patchlight.methods.base import METHODS
from patchlight.methods.requests import refusal, resolve
from patchlight.metrics.base import METRICS
from tests.helpers import quick_map, refuses
from tests.videos import clips, tiny_video


def working() -> list[str]:
    vit = tiny_video()
    return [n for n in sorted(METHODS) if refusal(resolve(n, dict(resolve(n).method.quick)).suited(vit), vit) is None]


@pytest.mark.parametrize("name", working())
def test_methods_give_a_map_with_the_axes_of_the_grid(name: str) -> None:
    vit, batch = tiny_video(), clips()
    found = quick_map(vit, batch, name)
    assert tuple(found.shape) in ((2, *vit.grid), (2, *vit.geometry.size))
    assert bool(found.isfinite().all())


def as_image(vit: pl.Anatomy) -> pl.Anatomy:
    """A video model of one frame as one of images, with the same numbers."""
    model: Any = vit.model
    return pl.wrap(
        model,
        embed=_Frames(model.embed),
        blocks=model.blocks,
        readout=model.readout,
        name="tiny",
        grid=(4, 4),
        prefix=1,
        pooling="cls",
        heads=3,
        classes=5,
        preprocess=pl.Preprocess((64, 64)),
    )


class _Frames:
    def __init__(self, embed: Any) -> None:
        self.embed = embed

    def __call__(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.embed(images[:, None])
        return tokens


@pytest.mark.parametrize("name", ["genatt", "ixg", "gradcam", "occlusion", "kernel-shap", "lime", "posterior", "ig"])
def test_one_frame_equals_the_image_to_the_bit(name: str) -> None:
    video, batch = tiny_video(1, 1), clips(2, 1)
    options = {"precision": "full"} if "precision" in resolve(name).settings else {}
    one, other = quick_map(video, batch, name, **options), quick_map(as_image(video), batch[:, 0], name, **options)
    assert torch.equal(one[:, 0], other)


@pytest.mark.parametrize("name", ["deletion", "insertion", "srg", "saco", "faithfulness-correlation", "sparseness"])
def test_one_frame_is_measured_as_the_image(name: str) -> None:
    video, batch = tiny_video(1, 1), clips(2, 1)
    maps = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(3))
    quick = {name: METRICS[name].quick}
    one = pl.evaluate(video, batch, maps, quick)[name].values
    other = pl.evaluate(as_image(video), batch[:, 0], maps[:, 0], quick)[name].values
    assert torch.equal(one, other)


def test_order_and_suffix_change_nothing() -> None:
    order = tuple((r * 4 + c) * 2 + t for t in range(2) for r in range(4) for c in range(4))
    plain, moved = tiny_video(suffix=2), tiny_video(suffix=2, order=order)
    model: Any = moved.model
    cells = slice(1, 33)  # positions move with their cells
    model.positions.data[:, cells] = plain.model.positions.data[:, cells][:, torch.tensor(order).argsort()]
    batch = clips()
    for name in ("genatt", "ixg", "atman", "gradcam", "tis", "kernel-shap", "occlusion", "fullgrad-plus"):
        torch.testing.assert_close(quick_map(moved, batch, name), quick_map(plain, batch, name), atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("fill", ["zero", "none"])
@pytest.mark.parametrize("unit", ["frame", "tube"])
def test_occlusion_of_a_unit_is_that_of_all_its_cells(unit: str, fill: str) -> None:
    vit, batch = tiny_video(), clips(1)
    att = pl.explain(vit, batch, "occlusion", unit=unit, fill=fill, level="token", score="logit", target=1)
    members = vit.layout.members(unit)
    for cells in members:
        if fill == "none":
            keep = torch.tensor([[c for c in range(vit.cells) if c not in cells]])
            logits = vit.readout(vit.run(vit.embed(batch), keep=keep))
        else:
            shown = torch.ones(vit.cells)
            shown[cells] = 0
            pixels = shown.view(2, 4, 4).repeat_interleave(2, 0).repeat_interleave(16, 1).repeat_interleave(16, 2)
            logits = vit.logits(batch * pixels[None, :, None])
        lost = float(vit.logits(batch)[0, 1] - logits[0, 1])
        values = att.scores[0].flatten()[cells]
        assert float(values.sum()) == pytest.approx(lost, abs=1e-4)
        assert float(values.std()) < 1e-6


def test_units_are_partitions() -> None:
    video = Layout((2, 3, 4), axes=("time", "row", "column"))
    assert video.members("frame").tolist() == [list(range(12)), list(range(12, 24))]
    assert video.members("tube").shape == (12, 2)
    assert video.members("tube")[5].tolist() == [5, 17]
    sound = Layout((2, 5), axes=("frequency", "time"))
    assert sound.members("band").tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert sound.members("frame")[2].tolist() == [2, 7]
    assert Layout((2, 2, 2), axes=("depth", "row", "column")).members("slice")[1].tolist() == [4, 5, 6, 7]
    refuses(("needs an axis of frequency", "'frame'"), video.members, "band")
    refuses("needs an axis of time", Layout((2, 2)).members, "frame")


@pytest.mark.parametrize("name", ["rise", "lime", "kernel-shap"])
def test_sampled_units_share_one_value(name: str) -> None:
    vit, batch = tiny_video(), clips(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for fill in ("zero", "none"):
            level = {} if name == "kernel-shap" else {"level": "token"}
            att = pl.explain(vit, batch, name, unit="tube", fill=fill, samples=64, **level)
            values = att.scores[0].flatten()[vit.layout.members("tube")]
            assert float(values.std(1).max()) < 1e-6
            assert float(values[:, 0].std()) > 0


def test_kernel_shap_of_two_frames_is_the_shapley_value() -> None:
    vit, batch = tiny_video(), clips(1)
    att = pl.explain(vit, batch, "kernel-shap", unit="frame", fill="zero", samples=64, score="logit", target=0)

    def value(*frames: int) -> float:
        shown = torch.zeros(1, 4, 1, 1, 1)
        for frame in frames:
            shown[:, 2 * frame : 2 * frame + 2] = 1
        return float(vit.logits(batch * shown)[0, 0])

    first = (value(0) - value() + value(0, 1) - value(1)) / 2
    assert float(att.over("row", "column")[0, 0]) == pytest.approx(first, abs=1e-4)


@pytest.mark.parametrize("fill", ["zero", "freeze", "floor", "blur-tis", "none"])
def test_deletion_by_frames(fill: str) -> None:
    vit, batch = tiny_video(), clips(2)
    maps = torch.rand(2, *vit.grid)
    found = pl.evaluate(vit, batch, maps, {"deletion": {"unit": "frame", "fill": fill, "steps": None}})["deletion"]
    assert found.curve is not None
    assert found.curve.shape == (2, 3)
    assert found.x is not None
    assert found.x.tolist() == [0, 0.5, 1]


def test_freeze_repeats_the_last_visible_frame() -> None:
    video = torch.arange(5.0).view(1, 5, 1, 1, 1)
    shown = torch.tensor([0, 1, 0, 0, 1], dtype=torch.bool).view(1, 5, 1, 1, 1)
    assert Freeze(1).over(video, shown).flatten().tolist() == [1, 1, 1, 1, 4]
    assert Freeze(1).over(video, torch.zeros_like(shown)).flatten().tolist() == [0] * 5
    vit = tiny_video()
    floor = fill_images("floor", clips(2), vit)
    assert torch.equal(floor[:, 0, 0, 0, 0], clips(2).flatten(1).amin(1))
    mean = fill_images("channel-mean", clips(2), vit)
    torch.testing.assert_close(mean[1, 2, 0, 0, 0], clips(2)[1, 2, 0].mean())
    refuses("fill='road' is for images", fill_images, "road", clips(1), vit)
    refuses("repeats frames", fill_images, "freeze", torch.randn(1, 3, 64, 64), as_image(tiny_video(1, 1)))


def test_refusals_name_what_works() -> None:
    vit = tiny_video()
    for name, words in (("rise", "unit='patch' works"), ("hsic", "takes videos"), ("vit-cx", "takes videos")):
        refuses(words, pl.explain, vit, clips(1), name)
    refuses("boxes are drawn on pictures", pl.evaluate, vit, clips(1), torch.rand(1, 2, 4, 4), "gt-known-loc")
    refuses("needs an axis of frequency", pl.explain, vit, clips(1), "occlusion", unit="band")
    refuses("give them on the grid [2, 4, 4]", pl.evaluate, vit, clips(1), torch.rand(1, 2, 4, 5), "deletion")


def test_voxel_masks_locate() -> None:
    vit, masks = tiny_video(), torch.zeros(1, 4, 64, 64, dtype=torch.long)
    masks[:, :2] = 1
    maps = torch.zeros(1, 2, 4, 4)
    maps[:, 0] = 1
    found = pl.evaluate(
        vit, clips(1), maps, {"energy-pointing": {"upsampling": "nearest", "max_area": None}}, masks=masks
    )
    assert float(found["energy-pointing"].mean) == pytest.approx(1.0)


def test_geometry_of_a_channels_first_volume() -> None:
    geometry = Geometry.even((2, 2, 3), (32, 32, 48))
    assert geometry.channels_first(torch.zeros(1, 1, 32, 32, 48)).shape == (1, 1, 32, 32, 48)
