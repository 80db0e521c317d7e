"""Images: from paths, pictures, arrays and tensors to the tensor that a model takes, and back to pictures."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from patchlight.core.errors import PatchlightError

Picture = str | Path | Image.Image | NDArray[Any]
PICTURES = (str, Path, Image.Image, np.ndarray)
"""The types of `Picture`, for isinstance."""
PIXELS = "uint8 values from 0 to 255, or floats from 0 to 1"
GIVE_IMAGES = "give paths, PIL images, numpy arrays or a tensor"

MAX_PIXELS = 100_000_000
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""The only decoders that read files, whatever their names; others are unsafe: the EPS decoder runs a program."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_RESAMPLING = {method.name.lower(): method for method in Image.Resampling}


@dataclass(frozen=True)
class Preprocess:
    """How images are prepared for a model: resize, crop the centre, scale colours to [0, 1] and normalise.

    Sizes are rounded as in timm and torchvision: down for square models, else to the nearest. A crop larger than the
    image is filled with black.

    Args:
        size: Height and width of the model's input.
        mean: Mean of each channel, subtracted.
        std: Standard deviation of each channel, divided by.
        crop_pct: The share of the resized image that the crop keeps.
        interpolation: "bicubic", "bilinear", "nearest", "lanczos", "box" or "hamming".
        fit: Resize the shorter side to `size / crop_pct` ("crop"), both sides ("squash"), or the longer side, with
            black ("pad") or the mean colour ("pad-mean") below or on the right.
        corner: How the corner of the crop is rounded if half a pixel is left: "nearest" as in timm and torchvision,
            "down" or "inward" (towards zero) as in transformers.

    Example:
        >>> Preprocess((224, 224), crop_pct=0.9).framing(640, 480)[1:]
        ((330, 248), (53, 12))
    """

    size: tuple[int, int]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    crop_pct: float = 1.0
    interpolation: str = "bicubic"
    fit: Literal["crop", "squash", "pad", "pad-mean"] = "crop"
    corner: Literal["nearest", "down", "inward"] = "nearest"

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "strict": True}

    def __post_init__(self) -> None:
        sane = all(1 <= side <= MAX_PIXELS for side in self.size) and 0 < self.crop_pct <= min(self.size)
        if not sane or math.prod(side / self.crop_pct for side in self.size) > MAX_PIXELS:
            raise PatchlightError(f"size {list(self.size)} with crop_pct {self.crop_pct} is not a possible image size")
        colours = (*self.mean, *self.std)
        if not 0 < len(self.mean) == len(self.std) or not all(map(math.isfinite, colours)) or 0 in self.std:
            raise PatchlightError(f"mean {self.mean} and std {self.std} need one finite mean and std per channel")

    def crop(self, image: Image.Image) -> Image.Image:
        """The part of `image` that the model sees, at the model's input size."""
        if self.fit == "pad-mean":
            colour = tuple(round(255 * mean) for mean in self.mean)
            square = Image.new(image.mode, self.framing(*image.size)[0][2:], colour if len(colour) > 1 else colour[0])
            square.paste(image)
            image = square
        return self._cut(image, _RESAMPLING.get(self.interpolation, Image.Resampling.BICUBIC))

    def mask(self, mask: torch.Tensor) -> torch.Tensor:
        """Crop an integer mask [H,W] as `crop` crops its image, with nearest-neighbour resizing."""
        if mask.ndim != 2 or mask.is_floating_point():
            raise PatchlightError(f"a mask has shape {list(mask.shape)} and dtype {mask.dtype}; give integers [H,W]")
        cut = self._cut(Image.fromarray(mask.cpu().numpy().astype(np.int32)), Image.Resampling.NEAREST)
        return torch.from_numpy(np.array(cut)).to(mask.dtype)

    def boxes(self, boxes: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Move boxes to the model's input, clip them to it, and drop those that lie outside.

        Args:
            boxes: Boxes [n,4] on the image: xmin, ymin, xmax, ymax.
            size: Width and height of the image.
        """
        if boxes.ndim != 2 or boxes.shape[1] != 4:
            raise PatchlightError(f"boxes have shape {list(boxes.shape)}; give [n,4]: xmin, ymin, xmax, ymax")
        boxes = boxes if boxes.is_floating_point() else boxes.float()
        part, (width, height), (left, top) = self.framing(*size)
        scale = boxes.new_tensor([width / (part[2] - part[0]), height / (part[3] - part[1])]).repeat(2)
        moved = (boxes - boxes.new_tensor(part[:2]).repeat(2)) * scale - boxes.new_tensor([left, top]).repeat(2)
        limit = boxes.new_tensor([self.size[1], self.size[0]]).repeat(2)
        moved = torch.minimum(moved.clamp(min=0), limit)
        return moved[(moved[:, 2] > moved[:, 0]) & (moved[:, 3] > moved[:, 1])]

    def boxes_on_photograph(self, boxes: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Move boxes [n,4] from the model's input to the image, and clip them to it: the inverse of `boxes`.

        Args:
            boxes: Boxes in pixels of the model's input.
            size: Width and height of the image.
        """
        part, (width, height), (left, top) = self.framing(*size)
        scale = boxes.new_tensor([(part[2] - part[0]) / width, (part[3] - part[1]) / height]).repeat(2)
        moved = (boxes + boxes.new_tensor([left, top]).repeat(2)) * scale + boxes.new_tensor(part[:2]).repeat(2)
        return torch.minimum(moved.clamp(min=0), boxes.new_tensor(size).repeat(2))

    def _cut(self, image: Image.Image, resample: Image.Resampling) -> Image.Image:
        part, size, (left, top) = self.framing(*image.size)
        if part != (0, 0, *image.size):
            image = image.crop(part)
        return image.resize(size, resample).crop((left, top, left + self.size[1], top + self.size[0]))

    def framing(self, width: int, height: int) -> tuple[tuple[int, int, int, int], tuple[int, int], tuple[int, int]]:
        """For an image of this size: the part that is resized, its new size, and the corner of the crop.

        Images, masks and boxes all use these numbers.
        """
        short_h, short_w = (math.floor(side / self.crop_pct) for side in self.size)
        part = (0, 0, width, height)
        if self.fit == "squash":
            size = (short_w, short_h)
        elif self.fit in ("pad", "pad-mean"):
            longer = max(width * short_h, height * short_w)
            part, size = (0, 0, round(longer / short_h), round(longer / short_w)), (short_w, short_h)
        else:
            part = _within_aspect(width, height)
            width, height = part[2] - part[0], part[3] - part[1]
            rounded = int if short_h == short_w else round
            if short_h * width >= short_w * height:
                size = (rounded(short_h * width / height), short_h)
            else:
                size = (short_w, rounded(short_w * height / width))
        halves: dict[str, Callable[[float], int]] = {"nearest": round, "down": math.floor, "inward": math.trunc}
        half = halves[self.corner]
        return part, size, (half((size[0] - self.size[1]) / 2.0), half((size[1] - self.size[0]) / 2.0))

    def tensor(self, image: Image.Image) -> torch.Tensor:
        """Prepare one image: a normalised tensor [C,H,W]."""
        pixels = torch.from_numpy(np.array(self.crop(image), dtype=np.float32)).permute(2, 0, 1) / 255
        return (pixels - torch.tensor(self.mean)[:, None, None]) / torch.tensor(self.std)[:, None, None]

    def picture(self, tensor: torch.Tensor) -> Image.Image:
        """The picture that a normalised tensor [C,H,W] of one or three channels shows."""
        if tensor.ndim != 3 or tensor.shape[0] not in (1, 3):
            raise PatchlightError(f"a tensor of shape {list(tensor.shape)} is not a picture; give [1,H,W] or [3,H,W]")
        return Image.fromarray((self.pixels(tensor.cpu()) * 255).round().byte().permute(1, 2, 0).contiguous().numpy())

    def pixels(self, tensor: torch.Tensor) -> torch.Tensor:
        """Undo the normalisation of tensors [...,C,H,W], C being 1 or 3: colours [...,3,H,W] from 0 to 1."""
        mean, std = (torch.tensor(v, device=tensor.device)[:, None, None] for v in (self.mean, self.std))
        colours = (tensor.detach().float() * std + mean).clamp(0, 1)
        return colours if colours.shape[-3] == 3 else colours[..., :1, :, :].repeat_interleave(3, -3)


def open_image(source: Picture) -> Image.Image:
    """Open an image as upright RGB: first frame of an animation, alpha over white, 16 bits scaled to 8.

    Args:
        source: A path, a PIL image or an array [H,W] or [H,W,C].

    Raises:
        PatchlightError: If the image cannot be read, or has more than 100 million pixels.
    """
    if isinstance(source, np.ndarray):
        return _as_rgb(array_picture(source), "the array")
    if not isinstance(source, PICTURES):
        raise PatchlightError(f"an image was given as {type(source).__name__}; {GIVE_IMAGES}")
    return _as_rgb(source, "the PIL image") if isinstance(source, Image.Image) else _open(Path(source), _as_rgb)


def array_picture(pixels: NDArray[Any], subject: str = "an image array", layout: str = "[H,W,C]") -> Image.Image:
    """An array as a PIL image.

    Args:
        pixels: Grey (also [H,W]), RGB or RGBA, before any normalisation.
        subject: What an error calls the array.
        layout: "[H,W,C]" or "[C,H,W]".
    """
    shape = list(pixels.shape)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    elif pixels.ndim == 3 and layout == "[C,H,W]":
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or 0 in shape:
        raise PatchlightError(f"{subject} has shape {shape}; give {layout} or [H,W], C being 1, 3 or 4")
    pixels = pixels[..., 0] if pixels.shape[2] == 1 else pixels
    if np.issubdtype(pixels.dtype, np.floating):
        low, high = float(pixels.min()), float(pixels.max())
        if not (low >= 0 and high <= 1):
            raise PatchlightError(f"{subject} has values from {low:.3g} to {high:.3g}; give {PIXELS}")
        pixels = (pixels * 255).round().astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise PatchlightError(f"{subject} has values of type {pixels.dtype}; give {PIXELS}")
    return Image.fromarray(np.ascontiguousarray(pixels))


def open_mask(path: Path) -> Image.Image:
    """Open a picture whose pixels are class numbers, as it is stored: not rotated, not converted."""
    return _open(path, _copy)


def _open(path: Path, convert: Callable[[Image.Image, str], Image.Image]) -> Image.Image:
    if not os.path.exists(path):
        raise PatchlightError(f"no image at '{path}'")
    if path.is_dir():
        raise PatchlightError(f"'{path}' is a folder; give the image files in it")
    if not path.is_file():
        raise PatchlightError(f"'{path}' is not a file")
    try:
        with _silence_warnings(), Image.open(path, formats=FORMATS) as image:
            return convert(image, f"'{path}'")
    except PatchlightError:
        raise
    except Image.DecompressionBombError as error:
        raise PatchlightError(f"'{path}' is too large: at most {MAX_PIXELS // 10**6} million pixels") from error
    except UnidentifiedImageError as error:
        formats = ", ".join(FORMATS)
        size = path.stat().st_size
        raise PatchlightError(f"'{path}' is not a readable image ({size} bytes; formats: {formats})") from error
    except PermissionError as error:
        raise PatchlightError(f"'{path}' cannot be read: {error.strerror}") from error
    except Exception as error:  # decoders raise all kinds of exceptions for damaged files
        raise PatchlightError(f"'{path}' is damaged or truncated: {str(error) or type(error).__name__}") from error


@contextlib.contextmanager
def _silence_warnings() -> Iterator[None]:
    """Silence the warnings of decoders, in the main thread only: warning filters are shared by all threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def list_images(folder: Path) -> list[Path]:
    """All image files below a folder, sorted, without hidden files and folders; an error if there are none."""
    below = (p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    files = sorted(p for p in below if not any(part.startswith(".") for part in p.relative_to(folder).parts))
    if not files:
        raise PatchlightError(f"no images in '{folder}' (looked for {', '.join(sorted(SUFFIXES))})")
    return files


def _within_aspect(width: int, height: int) -> tuple[int, int, int, int]:
    """The central part of a very long image, at most 20 times as long as wide: resizing it all could exhaust memory."""
    w, h = min(width, 20 * height), min(height, 20 * width)
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _check_size(image: Image.Image, what: str) -> None:
    if image.width * image.height > MAX_PIXELS:
        limit = MAX_PIXELS // 10**6
        raise PatchlightError(f"{what} is too large: {image.width} x {image.height}; at most {limit} million pixels")


def _copy(image: Image.Image, what: str) -> Image.Image:
    _check_size(image, what)
    return image.copy()


def _as_rgb(image: Image.Image, what: str) -> Image.Image:
    _check_size(image, what)
    original = image
    image.load()
    with contextlib.suppress(Exception):  # without readable EXIF, the image is not rotated
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # otherwise it is copied for nothing
            image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _as_grey(image, what)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        return _over_white(image)
    return image.convert("RGB") if image is original or image.mode != "RGB" else image


def _over_white(image: Image.Image, rows: int = 256) -> Image.Image:
    """A transparent image over white, some rows at a time: a copy of the largest pictures takes 400 MB."""
    opaque = Image.new("RGB", image.size)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height))).convert("RGBA")
        opaque.paste(Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip).convert("RGB"), (0, top))
    return opaque


def _as_grey(image: Image.Image, what: str) -> Image.Image:
    """Scale a grey image of integers or floats to 8 bits, by the smallest usual range that holds its values."""
    array = np.array(image, dtype=np.float64)
    if not np.isfinite(array).all():
        raise PatchlightError(f"{what} contains NaN or infinity")
    highest = float(array.max(initial=0))
    ranges = (65535.0,) if image.mode.startswith("I;16") else (255.0, 65535.0) if image.mode == "I" else (1.0, 255.0)
    top = next((r for r in ranges if highest <= r), highest)
    array /= top  # in place: a copy of the largest pictures takes 800 MB
    np.clip(array, 0, 1, out=array)
    array *= 255
    return Image.fromarray(np.rint(array, out=array).astype(np.uint8))


Note = Callable[[Image.Image | None], None]
"""Called with each image that is read: the picture, or None for a tensor."""


def to_batch(images: Any, preprocess: Preprocess, channels: int = 3, note: Note | None = None) -> torch.Tensor:
    """Prepare images for a model: one float tensor [B,C,H,W].

    Args:
        images: A preprocessed tensor, a picture (path, PIL image, array [H,W,C]), an array [N,H,W,C], or a sequence of
            pictures or of tensors [C,H,W].
        preprocess: How pictures are prepared.
        channels: The number of channels that the model takes.
        note: Called with each picture, or None for each tensor.
    """
    from patchlight.core.inputs import ArrayPreprocess

    if isinstance(preprocess, ArrayPreprocess):
        return _note_tensors(preprocess.batch(images), note)
    if isinstance(images, torch.Tensor):
        return _note_tensors(_check_tensor(images, preprocess.size, channels), note)
    images = image_list(images)
    if not isinstance(images, Sequence):
        kind = "None" if images is None else f"a {type(images).__name__}"
        raise PatchlightError(f"images are {kind}; {GIVE_IMAGES}")
    if not images:
        raise PatchlightError(f"no images were given; {GIVE_IMAGES}")
    if all(isinstance(i, torch.Tensor) for i in images):
        shapes = list(dict.fromkeys(str(list(i.shape)) for i in images))
        if len(shapes) > 1:
            raise PatchlightError(f"images have the shapes {' and '.join(shapes[:3])}; give tensors of one shape")
        return _note_tensors(_check_tensor(torch.stack(list(images)), preprocess.size, channels), note)
    wrong = next((i for i in images if not isinstance(i, PICTURES)), None)
    if wrong is not None:
        raise PatchlightError(f"an image was given as {type(wrong).__name__}; {GIVE_IMAGES}")
    if channels not in (1, 3):
        shape = f"[B,{channels},{preprocess.size[0]},{preprocess.size[1]}]"
        raise PatchlightError(f"this model takes {channels} channels, not pictures; give a preprocessed {shape} tensor")

    def read(source: Picture) -> torch.Tensor:
        picture = open_image(source)
        if note is not None:
            note(picture)
        return preprocess.tensor(picture)

    batch = torch.stack([read(i) for i in images])
    return batch if channels == 3 else batch.mean(1, keepdim=True)


def image_list(images: Any) -> Any:
    """One picture or an array [N,H,W,C] as a list; other values unchanged."""
    if isinstance(images, np.ndarray) and images.ndim == 4:
        return list(images)
    return [images] if isinstance(images, PICTURES) else images


def _note_tensors(batch: torch.Tensor, note: Note | None) -> torch.Tensor:
    if note is not None:
        for _ in batch:
            note(None)
    return batch


def in_batches(
    images: Any,
    size: int,
    preprocess: Preprocess,
    channels: int = 3,
    note: Note | None = None,
    labels: list[Any] | None = None,
) -> tuple[int | None, Iterator[torch.Tensor]]:
    """The number of images (None for a stream), and an iterator over batches [b,C,H,W] of them.

    Args:
        images: As in `to_batch`, or a stream: a generator, DataLoader or Dataset, whose items may be tuples such as
            (images, labels).
        size: Images per batch.
        preprocess: As in `to_batch`.
        channels: As in `to_batch`.
        note: As in `to_batch`.
        labels: A list to which the labels of a stream are appended.
    """
    images = getattr(preprocess, "input_list", image_list)(images)
    if isinstance(images, Sequence) and images:
        parts = (images[begin : begin + size] for begin in range(0, len(images), size))
        _check_stream(labels, False)
        return len(images), (to_batch(part, preprocess, channels, note) for part in parts)
    in_memory = isinstance(images, torch.Tensor | Sequence | Mapping | Set)
    if not in_memory and hasattr(images, "__iter__"):
        items = iter(images)
    elif not in_memory and hasattr(images, "__getitem__") and hasattr(images, "__len__"):
        items = (images[i] for i in range(len(images)))
    else:
        _check_stream(labels, False)
        batch = to_batch(images, preprocess, channels, note)
        return len(batch), iter(batch.split(size))

    dims = 1 + len(getattr(preprocess, "shape", (channels, *preprocess.size)))

    def read(item: Any) -> torch.Tensor:
        parts = _parts(item, dims)
        batch = to_batch(parts[0], preprocess, channels, note)
        if labels is not None:
            labels.extend(_labels(parts, len(batch)))
        return batch

    return None, _rebatch(map(read, items), size)


def _parts(item: Any, dims: int) -> Sequence[Any]:
    """The parts of a loader's item: (images, labels, …), or images alone; a list of pictures is a batch itself.

    A batch has `dims` dimensions.
    """
    is_batch = isinstance(item, list) and bool(item) and isinstance(item[0], torch.Tensor) and item[0].ndim == dims
    return item if is_batch or (isinstance(item, tuple) and item) else (item,)


def _labels(parts: Sequence[Any], count: int) -> list[Any]:
    """The labels of `count` images in a loader's item."""
    _check_stream(parts, len(parts) > 1)
    values = parts[1].tolist() if isinstance(parts[1], torch.Tensor | np.ndarray) else parts[1]
    labels = list(values) if isinstance(values, list | tuple) else [values]
    if len(labels) != count:
        raise PatchlightError(f"{len(labels)} labels were given for {count} images; give one per image")
    return labels


def _check_stream(labels: Any, has_labels: bool) -> None:
    if labels is not None and not has_labels:
        raise PatchlightError(
            "labels=True needs a loader of (images, labels), but these images have no labels; give a list of labels"
        )


def _rebatch(batches: Iterator[torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    """Split batches into batches of `size` images, in the same order."""
    rest: list[torch.Tensor] = []
    for batch in batches:
        rest.append(batch)
        if sum(map(len, rest)) >= size:
            *full, last = torch.cat(rest).split(size)
            rest = [last.clone()] if len(last) < size else []
            yield from full if rest else [*full, last]
    if rest:
        yield torch.cat(rest)


def _check_tensor(images: torch.Tensor, size: tuple[int, int], channels: int) -> torch.Tensor:
    images = images[None] if images.ndim == 3 else images
    shape, expected = list(images.shape), f"this model takes [B,{channels},{size[0]},{size[1]}]"
    if images.ndim != 4 or tuple(shape[1:]) != (channels, *size):
        raise PatchlightError(f"images have shape {shape}; {expected}")
    if shape[0] == 0:
        raise PatchlightError(f"images are empty, shape {shape}; {expected} with B >= 1")
    if not images.is_floating_point():
        raise PatchlightError(
            f"images have dtype {images.dtype}; give a preprocessed floating-point tensor, or paths, PIL images or "
            "numpy arrays"
        )
    if not bool(torch.isfinite(torch.stack(images.aminmax())).all()):
        raise PatchlightError("images contain NaN or infinity; give finite values")
    return images
