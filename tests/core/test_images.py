"""Unusual images are read as documented or refused with a PatchlightError, never with a decoder's traceback."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform

from patchlight.core.errors import PatchlightError
from patchlight.core.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    MAX_PIXELS,
    Preprocess,
    array_picture,
    in_batches,
    list_images,
    open_image,
    open_mask,
    to_batch,
)

SMALL = Preprocess((64, 64))


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    channels = {"RGB": 3, "RGBA": 4, "CMYK": 4, "L": 1, "LA": 2}[mode]
    array = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(array[..., 0] if channels == 1 else array, mode=None if mode != "CMYK" else "CMYK")


def png_header(width: int, height: int) -> bytes:
    """A 1-bit PNG that declares a size and has no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def refused(path: Path) -> str:
    with pytest.raises(PatchlightError) as error:
        open_image(path)
    sentence = str(error.value)
    assert str(path) in sentence
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"crop_pct": 0.9, "interpolation": "bicubic"}, (224, 224)),
        ({"crop_pct": 0.875, "interpolation": "bilinear"}, (224, 224)),
        ({"crop_pct": 1.0, "interpolation": "bicubic"}, (64, 64)),
        ({"crop_pct": 0.95, "interpolation": "bicubic", "crop_mode": "squash"}, (196, 196)),
        ({"crop_pct": 0.9, "interpolation": "bilinear"}, (48, 80)),
    ],
)
def test_preprocessing_is_timms(options: dict[str, object], size: tuple[int, int]) -> None:
    theirs = create_transform((3, *size), is_training=False, mean=IMAGENET_MEAN, std=IMAGENET_STD, **options)
    fit = "squash" if "crop_mode" in options else "crop"
    ours = Preprocess(size, crop_pct=options["crop_pct"], interpolation=options["interpolation"], fit=fit)
    for seed, (width, height) in enumerate([(31, 47), (333, 500), (501, 333), (64, 64), (225, 224), (1023, 77)]):
        image = noise(width, height, seed=seed)
        torch.testing.assert_close(ours.tensor(image), theirs(image), rtol=0, atol=1e-6)


def test_defaults_are_imagenets() -> None:
    assert (IMAGENET_MEAN, IMAGENET_STD) == (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    assert Preprocess((1, 1)).crop(noise(9, 9)).size == (1, 1)
    assert Preprocess((1, MAX_PIXELS)).size == (1, 100_000_000)


def test_picture_undoes_tensor() -> None:
    image = noise(90, 120)
    seen = np.asarray(SMALL.crop(image))
    np.testing.assert_array_equal(np.asarray(SMALL.picture(SMALL.tensor(image))), seen)


def test_unreadable(tmp_path: Path) -> None:
    for name, content in {"empty.jpg": b"", "text.png": b"not an image at all"}.items():
        (tmp_path / name).write_bytes(content)
        assert "not a readable image" in refused(tmp_path / name)
    assert "no image at" in refused(tmp_path / "absent.png")
    assert "is a folder" in refused(tmp_path)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "gif", "bmp", "tif"])
def test_truncated_and_scrambled(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"cut.{suffix}"
    noise(80, 80).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "damaged or truncated" in refused(path) or "not an image" in refused(path)
    generator = np.random.default_rng(0)
    for _ in range(20):
        damaged = np.frombuffer(whole, np.uint8).copy()
        damaged[generator.integers(4, len(damaged), 40)] ^= generator.integers(1, 256, 40).astype(np.uint8)
        path.write_bytes(damaged.tobytes())
        with contextlib.suppress(PatchlightError):  # any other exception is a failure
            assert open_image(path).mode == "RGB"


def test_animation_shows_its_first_frame(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "blue", "green")]
    for suffix in ("gif", "webp", "png"):
        path = tmp_path / f"moving.{suffix}"
        lossless = {"lossless": True} if suffix == "webp" else {}
        frames[0].save(path, save_all=True, append_images=frames[1:], **lossless)
        assert open_image(path).getpixel((5, 5)) == (255, 0, 0)


def test_cmyk_is_close_to_its_rgb(tmp_path: Path) -> None:
    path = tmp_path / "print.jpg"
    Image.new("RGB", (16, 16), (200, 40, 90)).convert("CMYK").save(path, quality=98)
    assert open_image(path).mode == "RGB"
    np.testing.assert_allclose(open_image(path).getpixel((8, 8)), (200, 40, 90), atol=6)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path, suffix: str) -> None:
    levels = np.array([[0, 257, 25700, 65535]], dtype=np.uint16)
    path = tmp_path / f"deep.{suffix}"
    Image.fromarray(levels).save(path)
    assert np.asarray(open_image(path))[0, :, 0].tolist() == [0, 1, 100, 255]
    Image.fromarray(levels // 257).save(path)
    assert np.asarray(open_image(path)).max() <= 1, "a nearly black 16-bit image stays nearly black"


def test_sixteen_bits_take_little_more_memory_than_eight() -> None:
    image = Image.fromarray(np.full((1000, 1000), 25700, dtype=np.uint16))
    tracemalloc.start()
    try:
        grey = open_image(image)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert grey.getpixel((0, 0)) == (100, 100, 100)
    assert peak < 14e6, f"{peak / 1e6:.0f} bytes a pixel, of which 8 are one array of float64"


def test_floats_and_wide_integers() -> None:
    for values, expected in {(0.0, 1.0): [0, 255], (0.0, 0.2): [0, 51], (0.0, 51.0): [0, 51]}.items():
        grey = open_image(Image.fromarray(np.array([values], dtype=np.float32)))
        assert np.asarray(grey)[0, :, 0].tolist() == expected
    wide = Image.fromarray(np.array([[0, 65535]], dtype=np.int32))
    assert np.asarray(open_image(wide))[0, :, 0].tolist() == [0, 255]
    with pytest.raises(PatchlightError, match="NaN"):
        open_image(Image.fromarray(np.array([[np.nan]], dtype=np.float32)))


def test_grey_and_bilevel(tmp_path: Path) -> None:
    grey = noise(9, 7, "L")
    grey.save(tmp_path / "grey.png")
    shown = np.asarray(open_image(tmp_path / "grey.png"))
    np.testing.assert_array_equal(shown, np.asarray(grey)[..., None].repeat(3, 2))
    Image.new("1", (8, 8), 1).save(tmp_path / "fax.png")
    assert open_image(tmp_path / "fax.png").getpixel((3, 3)) == (255, 255, 255)


def test_transparency_lies_on_white(tmp_path: Path) -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    clear.putpixel((0, 0), (255, 0, 0, 255))
    clear.save(tmp_path / "rgba.png")
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([255, 0, 0, 0, 0, 0])
    palette.putpixel((0, 0), 0)
    palette.save(tmp_path / "palette.png", transparency=1)
    palette.save(tmp_path / "palette.gif", transparency=1)
    for name in ("rgba.png", "palette.png", "palette.gif"):
        shown = open_image(tmp_path / name)
        assert (shown.getpixel((0, 0)), shown.getpixel((2, 2))) == ((255, 0, 0), (255, 255, 255)), name
    half = Image.new("LA", (2, 2), (0, 128))
    assert open_image(half).getpixel((0, 0)) == (127, 127, 127)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_undone(tmp_path: Path, orientation: int) -> None:
    upright = Image.new("RGB", (40, 24), "white")
    upright.paste("red", (0, 0, 16, 8))
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    stored = upright.transpose(Image.Transpose(undo[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "phone.jpg", exif=exif, quality=95, subsampling=0)
    shown = open_image(tmp_path / "phone.jpg")
    assert shown.size == (40, 24)
    np.testing.assert_allclose(np.asarray(shown), np.asarray(upright), atol=12)


def test_unreadable_exif_does_not_matter(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "blue").save(tmp_path / "odd.jpg", exif=b"Exif\0\0garbage")
    assert open_image(tmp_path / "odd.jpg").size == (8, 8)


def test_one_pixel() -> None:
    batch = to_batch(Image.new("RGB", (1, 1), (255, 0, 0)), SMALL)
    assert batch.shape == (1, 3, 64, 64)
    assert float(batch[0].flatten(1).std(1).max()) < 1e-5


@pytest.mark.parametrize("size", [(30_000, 30_000), (11_000, 11_000), (2_000_000_000, 1)])
def test_huge_images_are_refused_from_their_header(tmp_path: Path, size: tuple[int, int]) -> None:
    (tmp_path / "huge.png").write_bytes(png_header(*size))
    assert "too large" in refused(tmp_path / "huge.png")


@pytest.mark.parametrize("size", [(20_000, 1), (1, 20_000), (5000, 3), (60, 1200)])
def test_extreme_aspect_ratios_show_the_centre(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, "white")
    width, height = size
    middle = (
        (width // 2 - 200, 0, width // 2 + 200, height)
        if width > height
        else (0, height // 2 - 200, width, height // 2 + 200)
    )
    image.paste("red", middle)
    assert SMALL.crop(image).size == (64, 64)
    assert SMALL.crop(image).getpixel((32, 32)) == (255, 0, 0)


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(PatchlightError, match=r"no images in .*\.png"):
        list_images(tmp_path)
    for name in ("b/2.PNG", "a/1.jpg", "a/._1.jpg", ".cache/3.png", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert [str(p.relative_to(tmp_path)) for p in list_images(tmp_path)] == ["a/1.jpg", "b/2.PNG"]


def test_labels_of_a_loader_in_any_form() -> None:
    pair, one = torch.zeros(2, 3, 64, 64), torch.zeros(3, 64, 64)
    beside = [torch.tensor([3, 4]), np.array([3, 4]), [3, 4], (3, 4), ["a", "b"]]
    alone = [torch.tensor([5]), torch.tensor(5), np.array([5]), 5, [5], "cat"]
    labels: list[object] = []
    items = [*((pair, given) for given in beside), *((one, given) for given in alone), [pair, torch.tensor([3, 4])]]
    count, batches = in_batches(iter(items), 4, SMALL, labels=labels)
    assert (count, [len(batch) for batch in batches]) == (None, [4, 4, 4, 4, 2])
    assert labels == [3, 4] * 4 + ["a", "b"] + [5] * 5 + ["cat", 3, 4]
    assert {type(label) for label in labels} == {int, str}


@pytest.mark.parametrize(
    "options",
    [
        {"size": (0, 8)},
        {"size": (8, MAX_PIXELS + 1)},
        {"crop_pct": 0.0},
        {"crop_pct": 9.0},
        {"crop_pct": 1e-4},
        {"mean": ()},
        {"mean": (0.5,)},
        {"std": (0.5, 0.0, 0.5)},
        {"mean": (0.5, float("nan"), 0.5)},
        {"std": (0.5, float("inf"), 0.5)},
    ],
)
def test_impossible_preprocessing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PatchlightError, match=r"not a possible image size|need one finite mean and std per channel"):
        Preprocess(**{"size": (8, 8), **options})


@pytest.mark.parametrize(
    ("preprocess", "image", "expected"),
    [
        (Preprocess((64, 32)), (100, 100), ((0, 0, 100, 100), (64, 64), (16, 0))),
        (Preprocess((64, 64), crop_pct=0.5), (100, 50), ((0, 0, 100, 50), (256, 128), (96, 32))),
        (Preprocess((64, 64), fit="squash"), (100, 50), ((0, 0, 100, 50), (64, 64), (0, 0))),
        (Preprocess((64, 64), fit="pad"), (100, 50), ((0, 0, 100, 100), (64, 64), (0, 0))),
        (Preprocess((64, 32), fit="pad-mean"), (50, 50), ((0, 0, 50, 100), (32, 64), (0, 0))),
        (Preprocess((64, 64)), (101, 100), ((0, 0, 101, 100), (64, 64), (0, 0))),
        (Preprocess((64, 63)), (101, 100), ((0, 0, 101, 100), (65, 64), (1, 0))),
        (Preprocess((63, 64)), (100, 101), ((0, 0, 100, 101), (64, 65), (0, 1))),
        (Preprocess((8, 8), crop_pct=0.62), (10, 10), ((0, 0, 10, 10), (12, 12), (2, 2))),
        (Preprocess((8, 8), crop_pct=0.72), (10, 10), ((0, 0, 10, 10), (11, 11), (2, 2))),
        (Preprocess((8, 8), crop_pct=0.72, corner="down"), (10, 10), ((0, 0, 10, 10), (11, 11), (1, 1))),
        (Preprocess((8, 8), crop_pct=1.3, corner="down"), (10, 10), ((0, 0, 10, 10), (6, 6), (-1, -1))),
        (Preprocess((8, 8), crop_pct=1.1, corner="down"), (10, 10), ((0, 0, 10, 10), (7, 7), (-1, -1))),
        (Preprocess((8, 8), crop_pct=1.1, corner="inward"), (10, 10), ((0, 0, 10, 10), (7, 7), (0, 0))),
        (Preprocess((8, 8)), (2000, 10), ((900, 0, 1100, 10), (160, 8), (76, 0))),
        (Preprocess((8, 8)), (10, 2001), ((0, 900, 10, 1100), (8, 160), (0, 76))),
    ],
)
def test_framing(preprocess: Preprocess, image: tuple[int, int], expected: tuple[Any, ...]) -> None:
    assert preprocess.framing(*image) == expected


def test_padding_has_its_colour_and_its_side() -> None:
    red = Image.new("RGB", (8, 4), "red")
    for fit, colour in (("pad", (0, 0, 0)), ("pad-mean", (191, 51, 0))):
        cut = Preprocess((8, 8), mean=(0.75, 0.2, 0.0), interpolation="nearest", fit=fit).crop(red)  # type: ignore[arg-type]
        assert [cut.getpixel((3, y)) for y in (0, 3, 4, 7)] == [(255, 0, 0)] * 2 + [colour] * 2
    grey = Preprocess((8, 8), mean=(0.2,), std=(1.0,), interpolation="nearest", fit="pad-mean")
    assert grey.crop(Image.new("L", (4, 8), 255)).getpixel((7, 3)) == 51
    unknown = Preprocess((4, 4), interpolation="sinc").crop(noise(9, 9))
    assert np.array_equal(unknown, Preprocess((4, 4), interpolation="bicubic").crop(noise(9, 9)))


def test_boxes_move_with_their_image() -> None:
    preprocess = Preprocess(
        (64, 32), crop_pct=0.5
    )  # an image of 50 x 100 is resized to 64 x 128, and the centre is cut
    boxes = torch.tensor([[0.0, 0.0, 50.0, 100.0], [15.0, 30.0, 20.0, 60.0], [0.0, 0.0, 10.0, 90.0], [20, 0, 30, 20]])
    moved = preprocess.boxes(boxes, (50, 100))
    torch.testing.assert_close(moved, torch.tensor([[0, 0, 32, 64], [3.2, 6.4, 9.6, 44.8]]))
    assert torch.equal(preprocess.boxes(boxes.long(), (50, 100)), moved)
    back = preprocess.boxes_on_photograph(moved, (50, 100))
    torch.testing.assert_close(back, torch.tensor([[12.5, 25, 37.5, 75], [15, 30, 20, 60]]))
    outside = torch.tensor([[-500.0, -500.0, 500.0, 500.0]])
    assert preprocess.boxes_on_photograph(outside, (50, 100)).tolist() == [[0, 0, 50, 100]]
    for wrong in (torch.rand(4), torch.rand(2, 5)):
        with pytest.raises(PatchlightError, match=r"boxes have shape .*; give \[n,4\]"):
            preprocess.boxes(wrong, (50, 100))


def test_a_mask_is_cropped_without_new_values() -> None:
    mask = torch.zeros(100, 50, dtype=torch.int16)
    mask[30:60, 15:20] = 900
    cut = Preprocess((64, 32), crop_pct=0.5).mask(mask)
    assert (cut.dtype, cut.unique().tolist()) == (torch.int16, [0, 900])
    assert (cut == 900).nonzero().amin(0).tolist() == [6, 3]
    assert (cut == 900).nonzero().amax(0).tolist() == [44, 9]
    for wrong in (mask.float(), mask[None]):
        with pytest.raises(PatchlightError, match=r"give integers \[H,W\]"):
            SMALL.mask(wrong)


def test_pixels_of_grey_and_of_colours() -> None:
    grey = Preprocess((2, 2), mean=(0.5,), std=(0.25,))
    pixels = grey.pixels(torch.tensor([[[[-2.0, 0.0], [1.0, 9.0]]]]))
    assert pixels.shape == (1, 3, 2, 2)
    assert pixels[0, 2].tolist() == [[0, 0.5], [0.75, 1]]
    assert grey.picture(torch.zeros(1, 2, 2)).getpixel((1, 1)) == (128, 128, 128)
    for shape in ((2, 4, 4), (1, 3, 4, 4)):
        with pytest.raises(PatchlightError, match=r"is not a picture; give \[1,H,W\] or \[3,H,W\]"):
            SMALL.picture(torch.zeros(shape))


def test_arrays_as_pictures() -> None:
    levels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    assert np.array_equal(array_picture(levels), levels)
    assert np.array_equal(array_picture(levels.transpose(2, 0, 1), layout="[C,H,W]"), levels)
    assert array_picture(levels[..., 0]).mode == array_picture(levels[..., :1]).mode == "L"
    assert np.array_equal(array_picture(levels[..., 0], layout="[C,H,W]"), levels[..., 0])
    assert array_picture(levels.repeat(2, 2)[..., :4]).mode == "RGBA"
    assert np.asarray(array_picture(np.array([[0.0, 0.5, 1.0]]))).tolist() == [[0, 128, 255]]
    for wrong, sentence in (
        (levels[..., :2], r"shape \[2, 4, 2\]; give \[H,W,C\] or \[H,W\], C being 1, 3 or 4"),
        (levels[:0], "shape"),
        (levels[0, 0], "shape"),
        (levels[None], "shape"),
        (levels.astype(np.int64), "type int64; give uint8 values"),
        (levels - 0.5, "from -0.5 to 22.5; give uint8 values from 0 to 255, or floats from 0 to 1"),
        (levels / 23 * 1.01, "from 0 to 1.01"),
        (levels / 23 * np.nan, "from nan to nan"),
    ):
        with pytest.raises(PatchlightError, match=f"the photo has .*{sentence}"):
            array_picture(wrong, "the photo")


def test_a_mask_is_opened_as_it_is_stored(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    palette = Image.fromarray(np.array([[1, 7, 7], [7, 7, 7]], dtype=np.uint8))
    palette.putpalette([255 - i // 3 for i in range(768)])
    palette.save(tmp_path / "mask.png", exif=exif)
    assert np.asarray(open_mask(tmp_path / "mask.png")).tolist() == [[1, 7, 7], [7, 7, 7]]


def test_what_is_no_image_is_refused() -> None:
    for wrong, sentence in (
        (7, "images are a int; give paths"),
        (None, "images are None"),
        ([], "no images were given"),
        ([7], "an image was given as int"),
        ([torch.zeros(3, 64, 64), torch.zeros(3, 32, 32)], r"shapes \[3, 64, 64\] and \[3, 32, 32\]"),
        (torch.zeros(2, 3, 64, 32), r"this model takes \[B,3,64,64\]"),
        (torch.zeros(2, 1, 64, 64), r"this model takes \[B,3,64,64\]"),
        (torch.zeros(64, 64), "this model takes"),
        (torch.zeros(0, 3, 64, 64), "images are empty"),
        (torch.zeros(1, 3, 64, 64, dtype=torch.uint8), "images have dtype torch.uint8"),
        (torch.full((1, 3, 64, 64), float("inf")), "NaN or infinity"),
        (torch.zeros(1, 3, 64, 64).index_fill(3, torch.tensor([5]), float("inf")), "NaN or infinity"),
    ):
        with pytest.raises(PatchlightError, match=sentence):
            to_batch(wrong, SMALL)
    with pytest.raises(PatchlightError, match="an image was given as int"):
        open_image(7)  # type: ignore[arg-type]
    with pytest.raises(PatchlightError, match=r"takes 2 channels, not pictures; give a preprocessed \[B,2,64,64\]"):
        to_batch(noise(9, 9), SMALL, channels=2)


def test_all_forms_of_a_batch_are_the_same() -> None:
    pictures = [noise(70, 90, seed=seed) for seed in range(3)]
    arrays = np.stack([np.asarray(picture) for picture in pictures])
    batch = to_batch(pictures, SMALL)
    assert batch.shape == (3, 3, 64, 64)
    for images in (arrays, list(arrays), tuple(pictures), batch, list(batch)):
        assert torch.equal(to_batch(images, SMALL), batch)
    assert torch.equal(to_batch(pictures[0], SMALL), batch[:1])
    assert torch.equal(to_batch(batch[0], SMALL), batch[:1])
    assert torch.equal(to_batch(pictures, SMALL, channels=1), batch.mean(1, keepdim=True))


def test_every_image_is_noted() -> None:
    notes: list[Image.Image | None] = []
    for images in (noise(9, 9), [noise(9, 9)] * 2, torch.zeros(2, 3, 64, 64), [torch.zeros(3, 64, 64)] * 3):
        to_batch(images, SMALL, note=notes.append)
    assert [note is None for note in notes] == [False] * 3 + [True] * 5


def test_batches_of_any_source() -> None:
    class Indexed:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> torch.Tensor:
            return images[index]

    images = torch.rand(5, 3, 64, 64)
    pictures = [noise(70, 90, seed=seed) for seed in range(5)]
    prepared = to_batch(pictures, SMALL)
    sources: list[tuple[Any, torch.Tensor, int | None]] = [
        (images, images, 5),
        (list(images), images, 5),
        (pictures, prepared, 5),
        (np.stack([np.asarray(picture) for picture in pictures]), prepared, 5),
        (Indexed(), images, None),
        (iter(pictures), prepared, None),
        (iter([images[:3], images[3:]]), images, None),
        (iter([[images[:3], torch.arange(3)], (images[3:], torch.arange(2))]), images, None),
        (iter([list(images[:3]), list(images[3:])]), images, None),
    ]
    for source, expected, number in sources:
        count, batches = in_batches(source, 2, SMALL)
        parts = list(batches)
        assert (count, [len(part) for part in parts]) == (number, [2, 2, 1])
        assert torch.equal(torch.cat(parts), expected)
    assert [len(part) for part in in_batches(iter([images, images[:3]]), 4, SMALL)[1]] == [4, 4]
    count, batches = in_batches(pictures[0], 2, SMALL)
    assert (count, [len(part) for part in batches]) == (1, [1])


def test_a_full_batch_of_a_stream_does_not_wait_for_more() -> None:
    source = iter(torch.zeros(3, 2, 3, 64, 64))
    _, batches = in_batches(source, 2, SMALL)
    assert len(next(batches)) == 2
    assert len(list(source)) == 2


def test_labels_that_a_stream_lacks() -> None:
    images = torch.zeros(2, 3, 64, 64)
    for source in (images, list(images), iter([images]), iter([(images,)])):
        with pytest.raises(PatchlightError, match="these images have no labels"):
            list(in_batches(source, 2, SMALL, labels=[])[1])
    for given in ([1, 2, 3], [1]):
        with pytest.raises(PatchlightError, match=f"{len(given)} labels were given for 2 images"):
            list(in_batches(iter([(images, given)]), 2, SMALL, labels=[])[1])


def test_the_limit_of_pixels_is_the_last_size_that_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchlight.core.images.MAX_PIXELS", 100)
    assert open_image(Image.new("RGB", (10, 10))).size == (10, 10)
    with pytest.raises(PatchlightError, match="the PIL image is too large: 10 x 11; at most 0 million pixels"):
        open_image(Image.new("RGB", (10, 11)))
