"""Maps and inputs with other axes than rows and columns: files, sums over axes, resizing, reading, drawing."""

from __future__ import annotations

import contextlib
import json
import sys
import types
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import patchlight as pl
from patchlight.core.attribution_files import attribution_bytes
from patchlight.core.layout import Geometry
from patchlight.core.resize import to_cells, to_pixels
from tests.helpers import refuses
from tests.videos import AXES, clips, tiny_video


def video_map(grid: tuple[int, ...] = (2, 4, 3), several: int = 0, **options: Any) -> pl.Attribution:
    size = (grid[0] * 2, grid[1] * 8, grid[2] * 8)
    shape = (2, several, *grid) if several else (2, *grid)
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    target = torch.zeros(shape[: -len(grid)], dtype=torch.long)
    geometry = Geometry.even(grid, size, unit=("frame", "px", "px"))
    return pl.Attribution(scores, target, "grad", "tiny", size, axes=AXES, geometry=geometry, **options)


@pytest.mark.parametrize("several", [0, 3])
def test_format_2_round_trip(tmp_path: Path, several: int) -> None:
    att = video_map(several=several)
    back = pl.Attribution.load(att.save(tmp_path / "map"))
    assert json.loads((tmp_path / "map" / "attribution.json").read_text())["format"] == 2
    assert torch.equal(back.scores, att.scores)
    assert (back.axes, back.geometry, back.grid, back.several) == (att.axes, att.geometry, att.grid, bool(several))


def test_images_are_written_in_format_1() -> None:
    att = pl.Attribution(torch.rand(1, 2, 2), torch.tensor([0]), "grad", "tiny", (32, 32))
    written = json.loads(attribution_bytes(att)["attribution.json"])
    assert written["format"] == 1
    assert not {"axes", "geometry"} & set(written)


@pytest.mark.parametrize(
    "damage",
    [{"format": 1}, {"axes": ["time", "row"]}, {"geometry": {"size": [4]}}, {"image_size": [4, 32]}, {"axes": None}],
)
def test_damaged_files_of_format_2_are_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    file = video_map().save(tmp_path / "map") / "attribution.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    refuses("is damaged", pl.Attribution.load, tmp_path / "map")


def test_sums_over_axes_and_top_cells() -> None:
    att = video_map()
    assert att.over("row", "column").shape == (2, 2)
    torch.testing.assert_close(att.over("row", "column").sum(1), att.over(*AXES))
    torch.testing.assert_close(att.over("time").sum((1, 2)), att.scores.sum((1, 2, 3)))
    best = att.top_patches(3)
    assert best.shape == (2, 3, 3)
    assert att.scores[0][tuple(best[0, 0])] == att.scores[0].max()
    assert int(att.mask(0.25).sum()) == 2 * 6
    assert att.upsample().shape == (2, 4, 32, 24)
    assert torch.equal(att.upsample(upsampling="nearest")[:, ::2, ::8, ::8], att.scores)
    refuses("the axes of this map are time, row, column", att.over, "depth")


def test_table_has_a_column_per_axis() -> None:
    pytest.importorskip("pandas")
    att = video_map()
    frame = att.to_frame()
    row = frame[(frame.image == 1) & (frame.time == 1) & (frame.row == 2) & (frame.column == 0)]
    assert row.score.item() == att.scores[1, 1, 2, 0].item()


@pytest.mark.parametrize("upsampling", ["nearest", "bilinear", "bicubic"])
def test_one_frame_is_resized_as_an_image(upsampling: Any) -> None:
    maps, extent = torch.randn(2, 1, 4, 3), (30, 26)
    plane = to_pixels(maps[:, 0], (32, 32), extent, upsampling)
    assert torch.equal(to_pixels(maps, (1, 32, 32), (1, *extent), upsampling)[:, 0], plane)
    pixels = torch.randn(2, 1, 32, 32)
    assert torch.equal(to_cells(pixels, (1, 4, 3), (1, *extent))[:, 0], to_cells(pixels[:, 0], (4, 3), extent))


def test_three_axes_are_resized_one_after_the_other() -> None:
    maps = torch.randn(2, 2, 3, 4, dtype=torch.float64)
    found = to_pixels(maps, (6, 12, 8))
    planes = to_pixels(maps, (12, 8))
    expected = to_pixels(planes.movedim(1, -1)[..., None, :], (1, 6))[..., 0, :].movedim(-1, 1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(to_cells(to_pixels(maps, (6, 12, 8), upsampling="nearest"), (2, 3, 4)), maps)
    refuses("'bilinear' or 'nearest'", to_pixels, maps, (6, 12, 8), None, "bicubic")


def test_overlapping_cells_are_averaged() -> None:
    geometry = Geometry((7,), (2,), (4,), (0,), ("s",))
    found = geometry.overlapping(torch.tensor([[1.0, 3.0]]), (7,))
    assert found.tolist() == [[1, 1, 2, 2, 3, 3, 3]]  # cells 0-3 and 2-5; nothing covers place 6


def write_frames(folder: Path, count: int, size: tuple[int, int] = (80, 64)) -> Path:
    folder.mkdir()
    values = np.random.default_rng(0)
    for i in range(count):
        pixels = values.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03}.png")
    return folder


def test_clips_are_read_from_folders_arrays_and_files(tmp_path: Path) -> None:
    vit = tiny_video()
    folder = write_frames(tmp_path / "clip", 4)
    frames = np.stack([np.asarray(Image.open(file)) for file in sorted(folder.iterdir())])
    batch = vit.batch(folder)
    assert batch.shape == (1, 4, 3, 64, 64)
    assert torch.equal(batch[0, 2], vit.preprocess.tensor(Image.fromarray(frames[2])))
    assert torch.equal(vit.batch(frames), batch)
    np.save(tmp_path / "clip.npy", batch[0].numpy())
    assert torch.equal(vit.batch([tmp_path / "clip.npy", folder]), batch.repeat(2, 1, 1, 1, 1))
    assert torch.equal(pl.explain(vit, str(folder), "grad").scores, pl.explain(vit, batch, "grad").scores)


def test_wrong_clips_are_refused_in_one_sentence(tmp_path: Path) -> None:
    vit = tiny_video()
    refuses("has 3 frames, and this model takes 4", vit.batch, write_frames(tmp_path / "short", 3))
    mixed = write_frames(tmp_path / "mixed", 3)
    Image.new("RGB", (30, 30)).save(mixed / "999.png")
    refuses("80 x 64 and 30 x 30", vit.batch, mixed)
    refuses("this model takes [B,4,3,64,64]", vit.batch, torch.randn(1, 3, 3, 64, 64))
    refuses("no file or folder at", vit.batch, tmp_path / "absent.npy")
    refuses("give a folder of frames", vit.batch, [3])
    (tmp_path / "bad.npy").write_bytes(b"x")
    refuses("cannot be read", vit.batch, tmp_path / "bad.npy")


def test_no_clip_is_dropped_without_a_word() -> None:
    """A loader of clips without labels returns lists with one batch; a list has one clip per item."""
    vit, batch = tiny_video(), clips(4)
    expected = pl.explain(vit, batch, "grad").scores
    for loader in (DataLoader(TensorDataset(batch), 2), DataLoader(TensorDataset(batch, torch.arange(4)), 3)):
        torch.testing.assert_close(pl.explain(vit, loader, "grad").scores, expected)
    refuses("has the shape [2, 4, 3, 64, 64]", vit.batch, [batch[:2], batch[2:]])
    refuses("has the shape [4, 4, 3, 64, 64]", vit.batch, [batch.numpy()])


@pytest.mark.parametrize("values", [np.array(["a"]), np.array([None]), np.ones((4, 3, 64, 64), complex), np.array(b"")])
def test_arrays_that_are_not_of_numbers_are_refused(values: Any, tmp_path: Path) -> None:
    vit = tiny_video()
    refuses("has values of type", vit.batch, [values] if values.ndim else values)
    if values.dtype != object:
        np.save(tmp_path / "a.npy", values)
        refuses("has values of type", vit.batch, tmp_path / "a.npy")


def test_arrays_of_any_number_are_read() -> None:
    vit, clip = tiny_video(), clips(1)[0].numpy()
    for kind in (">f4", np.longdouble, np.float64):
        torch.testing.assert_close(vit.batch(clip.astype(kind))[0], torch.from_numpy(clip))


def movie(frames: int, streams: int = 1) -> types.SimpleNamespace:
    """A stand-in for PyAV with one movie. The grey value of a frame is its number; converted frames are counted."""
    module = types.SimpleNamespace(pictures=0)

    def picture(number: int) -> Image.Image:
        module.pictures += 1
        return Image.new("RGB", (80, 64), (number,) * 3)

    def decode(video: int) -> Any:
        return (types.SimpleNamespace(to_image=partial(picture, n)) for n in range(frames)) if streams else ()[video]

    found = types.SimpleNamespace(streams=types.SimpleNamespace(video=[0] * streams), decode=decode)
    module.open = lambda path: contextlib.nullcontext(found)
    return module


def test_a_movie_is_read_at_equal_distances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the chosen frames are converted: all frames of a minute take 10 GB."""
    vit, path = tiny_video(), tmp_path / "a.mp4"
    path.touch()
    monkeypatch.setitem(sys.modules, "av", movie(40))
    shown = vit.preprocess.views(vit.batch(path))[0, 0, :, 0, 0]
    assert shown.tolist() == [5, 15, 25, 35]
    assert sys.modules["av"].pictures == 4
    monkeypatch.setitem(sys.modules, "av", movie(3))
    refuses("has 3 frames, and this model takes 4", vit.batch, path)
    monkeypatch.setitem(sys.modules, "av", movie(0, streams=0))
    refuses("has no video that can be read", vit.batch, path)


@pytest.mark.parametrize("error", [EOFError("ended"), zlib.error("damaged"), IndexError("index"), KeyError("data")])
def test_a_damaged_movie_or_volume_is_refused(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Any) -> None:
        raise error

    vit, path = tiny_video(), tmp_path / "a.nii.gz"
    path.touch()
    monkeypatch.setitem(sys.modules, "nibabel", types.SimpleNamespace(load=fail))
    refuses("cannot be read", vit.batch, path)
    monkeypatch.setitem(sys.modules, "av", types.SimpleNamespace(open=fail))
    refuses("cannot be read", vit.batch, path.rename(tmp_path / "a.mp4"))


def test_figures_by_axes(tmp_path: Path) -> None:
    att = pl.explain(tiny_video(), clips(1), "grad")
    for name, given in (
        ("video", att),
        (
            "volume",
            video_map((2, 2, 2)).__class__(**{**vars(video_map((2, 2, 2))), "axes": ("depth", "row", "column")}),
        ),
    ):
        given.figure(tmp_path / f"{name}.png")
        assert Image.open(tmp_path / f"{name}.png").width > 300
    assert "<img" in att._repr_html_()
    refuses("use figure()", att.overlay)
    refuses("this figure draws pictures, and tiny-video takes videos", pl.figure, clips(1), att)


def test_sound_is_drawn_with_its_axes(tmp_path: Path) -> None:
    geometry = Geometry((32, 64), (10, 10), (16, 16), (0, 0), ("Hz", "s"), (1, 0))
    about = {"axes": ("frequency", "time"), "extent": (26, 56), "geometry": geometry}
    att = pl.Attribution(torch.rand(1, 2, 5), torch.tensor([0]), "grad", "tiny", (32, 64), **about)  # type: ignore[arg-type]
    fig = att.figure(tmp_path / "sound.png")
    assert fig.axes[0].get_xlabel() == "time (s)"
    assert att.upsample().shape == (1, 32, 64)
    assert att.several is False
