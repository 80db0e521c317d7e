"""Bad and odd images: every one is either shown as defined or refused in one sentence, never a decoder's traceback."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from patchlight.core.errors import PatchlightError
from patchlight.core.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Preprocess,
    in_batches,
    list_images,
    open_image,
    to_batch,
)

SMALL = Preprocess((64, 64))


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    channels = {"RGB": 3, "RGBA": 4, "CMYK": 4, "L": 1, "LA": 2}[mode]
    array = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(array[..., 0] if channels == 1 else array, mode=None if mode != "CMYK" else "CMYK")


def png_header(width: int, height: int) -> bytes:
    """A 1-bit PNG that claims a size and holds no pixels: opening it must cost nothing."""

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
    """Tensors, arrays, lists, tuples; one label beside one image, which may be a word."""
    pair, one = torch.zeros(2, 3, 64, 64), torch.zeros(3, 64, 64)
    beside = [torch.tensor([3, 4]), np.array([3, 4]), [3, 4], (3, 4), ["a", "b"]]
    alone = [torch.tensor([5]), torch.tensor(5), np.array([5]), 5, [5], "cat"]
    labels: list[object] = []
    items = [*((pair, given) for given in beside), *((one, given) for given in alone), [pair, torch.tensor([3, 4])]]
    count, batches = in_batches(iter(items), 4, SMALL, labels=labels)
    assert (count, [len(batch) for batch in batches]) == (None, [4, 4, 4, 4, 2])
    assert labels == [3, 4] * 4 + ["a", "b"] + [5] * 5 + ["cat", 3, 4]
    assert {type(label) for label in labels} == {int, str}
