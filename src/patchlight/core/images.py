"""From what a user hands over (a path, a picture, a tensor) to the tensor a model takes, and back to what it saw."""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from patchlight.core.errors import PatchlightError

Picture = str | Path | Image.Image
Images = Picture | torch.Tensor | Sequence[Picture] | Iterable[Any]

MAX_PIXELS = 100_000_000
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""The only decoders that see a file, whatever its name says: that of EPS, for one, runs a program."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}


@dataclass(frozen=True)
class Preprocess:
    """How a model's training pipeline shows it an image at evaluation time.

    `fit="crop"` resizes the shorter side to `size / crop_pct`, `fit="squash"` both sides; the centre is then cut out.
    Colours are scaled to [0, 1], less `mean`, over `std`. Sizes are rounded as timm and torchvision round them: down
    for square models, to the nearest otherwise. Where half a pixel is left over, `corner` says where the cut begins:
    `nearest` as timm and torchvision round, `down` and `inward` (towards zero) as transformers does; what a cut larger
    than the picture leaves empty is black.
    """

    size: tuple[int, int]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    crop_pct: float = 1.0
    interpolation: str = "bicubic"
    fit: Literal["crop", "squash"] = "crop"
    corner: Literal["nearest", "down", "inward"] = "nearest"

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "strict": True}

    def __post_init__(self) -> None:
        sane = all(1 <= side <= MAX_PIXELS for side in self.size) and 0 < self.crop_pct <= min(self.size)
        if not sane or math.prod(side / self.crop_pct for side in self.size) > MAX_PIXELS:
            raise PatchlightError(f"images of size {list(self.size)}, cut out at {self.crop_pct}, cannot be made")
        colours = (*self.mean, *self.std)
        if not 0 < len(self.mean) == len(self.std) or not all(map(math.isfinite, colours)) or 0 in self.std:
            raise PatchlightError(f"mean {self.mean} and std {self.std} are not a finite pair of each channel's")

    def crop(self, image: Image.Image) -> Image.Image:
        """The part of `image` that the model sees, at the model's size: what a heat map lies on."""
        return self._cut(image, _RESAMPLING.get(self.interpolation, Image.Resampling.BICUBIC))

    def mask(self, mask: torch.Tensor) -> torch.Tensor:
        """A mask [H,W] of integers drawn on an image, cut as `crop` cuts the image; nearest pixel, so values stay."""
        if mask.ndim != 2 or mask.is_floating_point():
            raise PatchlightError(f"a mask has shape {list(mask.shape)} and dtype {mask.dtype}; give integers [H,W]")
        cut = self._cut(Image.fromarray(mask.cpu().numpy().astype(np.int32)), Image.Resampling.NEAREST)
        return torch.from_numpy(np.array(cut)).to(mask.dtype)

    def boxes(self, boxes: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Boxes [n,4] (xmin, ymin, xmax, ymax) on an image of `size` (width, height), cut as `crop` cuts the image.

        Clipped to the model's input; a box of which nothing is left is dropped, so the result is [m,4] with m <= n.
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

    def _cut(self, image: Image.Image, resample: Image.Resampling) -> Image.Image:
        part, size, (left, top) = self.framing(*image.size)
        if part != (0, 0, *image.size):
            image = image.crop(part)
        return image.resize(size, resample).crop((left, top, left + self.size[1], top + self.size[0]))

    def framing(self, width: int, height: int) -> tuple[tuple[int, int, int, int], tuple[int, int], tuple[int, int]]:
        """For a picture of this size: the part of it that is resized, to what size, and where the cut then begins.

        Images, masks and boxes all go by these numbers.
        """
        short_h, short_w = (math.floor(side / self.crop_pct) for side in self.size)
        part = (0, 0, width, height)
        if self.fit == "squash":
            size = (short_w, short_h)
        else:
            part = _within_aspect(width, height)
            width, height = part[2] - part[0], part[3] - part[1]
            whole = int if short_h == short_w else round
            if short_h * width >= short_w * height:
                size = (whole(short_h * width / height), short_h)
            else:
                size = (short_w, whole(short_w * height / width))
        halves: dict[str, Callable[[float], int]] = {"nearest": round, "down": math.floor, "inward": math.trunc}
        half = halves[self.corner]
        return part, size, (half((size[0] - self.size[1]) / 2.0), half((size[1] - self.size[0]) / 2.0))

    def tensor(self, image: Image.Image) -> torch.Tensor:
        """The normalised [C,H,W] tensor of one image."""
        pixels = torch.from_numpy(np.array(self.crop(image), dtype=np.float32)).permute(2, 0, 1) / 255
        return (pixels - torch.tensor(self.mean)[:, None, None]) / torch.tensor(self.std)[:, None, None]

    def picture(self, tensor: torch.Tensor) -> Image.Image:
        """The picture a normalised [C,H,W] tensor of one or three channels shows."""
        if tensor.ndim != 3 or tensor.shape[0] not in (1, 3):
            raise PatchlightError(
                f"a tensor {list(tensor.shape)} is no picture, which is [1,H,W] or [3,H,W]; give the picture to show"
            )
        return Image.fromarray((self.pixels(tensor.cpu()) * 255).round().byte().permute(1, 2, 0).contiguous().numpy())

    def pixels(self, tensor: torch.Tensor) -> torch.Tensor:
        """The colours [...,3,H,W], from 0 to 1, of normalised tensors [...,C,H,W] of one or three channels."""
        mean, std = (torch.tensor(v, device=tensor.device)[:, None, None] for v in (self.mean, self.std))
        colours = (tensor.detach().float() * std + mean).clamp(0, 1)
        return colours if colours.shape[-3] == 3 else colours[..., :1, :, :].repeat_interleave(3, -3)


def open_image(source: Picture) -> Image.Image:
    """Open an image as upright RGB: first frame of an animation, alpha over white, 16 bits scaled to 8.

    Refuses, in one sentence, what cannot be read and what has more than 100 million pixels.
    """
    if not isinstance(source, Picture):
        raise PatchlightError(f"an image was given as {type(source).__name__}; give a path or a PIL image")
    return _as_rgb(source, "the PIL image") if isinstance(source, Image.Image) else _open(Path(source), _as_rgb)


def open_mask(path: Path) -> Image.Image:
    """Open a picture whose pixels are class numbers: in the mode it was stored in, nothing turned or scaled."""
    return _open(path, _as_stored)


def _open(path: Path, convert: Callable[[Image.Image, str], Image.Image]) -> Image.Image:
    if not path.exists():
        raise PatchlightError(f"no image at '{path}'")
    if path.is_dir():
        raise PatchlightError(f"'{path}' is a folder; give the image files in it")
    if not path.is_file():
        raise PatchlightError(f"'{path}' is not a file")
    try:
        with _quietly(), Image.open(path, formats=FORMATS) as image:
            return convert(image, f"'{path}'")
    except PatchlightError:
        raise
    except Image.DecompressionBombError as error:
        raise PatchlightError(f"'{path}' is too large: at most {MAX_PIXELS // 10**6} million pixels") from error
    except UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        size = path.stat().st_size
        raise PatchlightError(f"'{path}' is not an image that can be read ({size} bytes, none of {known})") from error
    except PermissionError as error:
        raise PatchlightError(f"'{path}' may not be read: {error.strerror}") from error
    except Exception as error:  # decoders meet damaged bytes with every kind of exception
        raise PatchlightError(f"'{path}' is damaged or truncated: {str(error) or type(error).__name__}") from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """No warnings of decoders; filters belong to the whole process, so that threads must leave them alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def list_images(folder: Path) -> list[Path]:
    """Every image file below `folder`, sorted, hidden files and folders left out; an error if there is none."""
    below = (p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    found = sorted(p for p in below if not any(part.startswith(".") for part in p.relative_to(folder).parts))
    if not found:
        raise PatchlightError(f"no images in '{folder}' (looked for {', '.join(sorted(SUFFIXES))})")
    return found


def _within_aspect(width: int, height: int, limit: int = 20) -> tuple[int, int, int, int]:
    """The centre of a very long image: the model's crop lies inside it, and resizing the rest could exhaust memory."""
    w, h = min(width, limit * height), min(height, limit * width)
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _check_size(image: Image.Image, what: str) -> None:
    if image.width * image.height > MAX_PIXELS:
        limit = MAX_PIXELS // 10**6
        raise PatchlightError(f"{what} is too large: {image.width} x {image.height}; at most {limit} million pixels")


def _as_stored(image: Image.Image, what: str) -> Image.Image:
    _check_size(image, what)
    return image.copy()


def _as_rgb(image: Image.Image, what: str) -> Image.Image:
    _check_size(image, what)
    image.load()
    with contextlib.suppress(Exception):  # a picture with unreadable EXIF is shown as it lies
        image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _as_grey(image, what)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _as_grey(image: Image.Image, what: str) -> Image.Image:
    """Grey of more than 8 bits, scaled by the range its numbers can have: 16 bits, else 8, else (floats) one."""
    array = np.array(image, dtype=np.float64)
    if not np.isfinite(array).all():
        raise PatchlightError(f"{what} contains NaN or infinity")
    highest = float(array.max(initial=0))
    ranges = (65535.0,) if image.mode.startswith("I;16") else (255.0, 65535.0) if image.mode == "I" else (1.0, 255.0)
    top = next((r for r in ranges if highest <= r), highest)
    array /= top  # in place: of the largest pictures each copy is 300 MB
    np.clip(array, 0, 1, out=array)
    array *= 255
    return Image.fromarray(np.rint(array, out=array).astype(np.uint8))


Note = Callable[[Image.Image | None], None]
"""Called for every image as it is read, with the opened picture, or None for a tensor."""


def to_batch(images: Any, preprocess: Preprocess, channels: int = 3, note: Note | None = None) -> torch.Tensor:
    """One [B,C,H,W] float tensor from a tensor, a picture or a sequence of pictures or [C,H,W] tensors."""
    if isinstance(images, np.ndarray):
        raise PatchlightError("images were given as a numpy array; give PIL images, paths, or a preprocessed tensor")
    if isinstance(images, torch.Tensor):
        return _noted(_check_tensor(images, preprocess.size, channels), note)
    if isinstance(images, str | Path | Image.Image):
        images = [images]
    if not isinstance(images, Sequence):
        what = "None" if images is None else f"a {type(images).__name__}"
        raise PatchlightError(f"images are {what}; give a tensor, PIL image(s) or path(s)")
    if not images:
        raise PatchlightError(f"no images in {images!r}; give a tensor, PIL image(s) or path(s)")
    if all(isinstance(i, torch.Tensor) for i in images):
        shapes = list(dict.fromkeys(str(list(i.shape)) for i in images))
        if len(shapes) > 1:
            raise PatchlightError(f"images have the shapes {' and '.join(shapes[:3])}; give tensors of one shape")
        return _noted(_check_tensor(torch.stack(list(images)), preprocess.size, channels), note)
    wrong = next((i for i in images if not isinstance(i, Picture)), None)
    if wrong is not None:
        raise PatchlightError(f"an image was given as {type(wrong).__name__}; give a path or a PIL image")
    if channels not in (1, 3):
        want = f"[B,{channels},{preprocess.size[0]},{preprocess.size[1]}]"
        raise PatchlightError(
            f"this model takes {channels} channels, which a picture does not have; give a preprocessed {want} tensor"
        )

    def read(source: Picture) -> torch.Tensor:
        picture = open_image(source)
        if note is not None:
            note(picture)
        return preprocess.tensor(picture)

    batch = torch.stack([read(i) for i in images])
    return batch if channels == 3 else batch.mean(1, keepdim=True)


def _noted(batch: torch.Tensor, note: Note | None) -> torch.Tensor:
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
    """How many images there are (None: only the end tells), and all of them in batches of `size` [b,C,H,W].

    A tensor, a picture or a sequence has a length. Whatever else can be gone through (a generator, a DataLoader, a
    Dataset) is read as it comes, and no more than a batch is held: its items are what `to_batch` takes, or a tuple or
    collated list that begins with it, as (images, labels) does. Where a list of `labels` is given, what stands second
    in each item is added to it as it is read.
    """
    if isinstance(images, Sequence) and images and not isinstance(images, str):
        parts = (images[begin : begin + size] for begin in range(0, len(images), size))
        _check_stream(labels, False)
        return len(images), (to_batch(part, preprocess, channels, note) for part in parts)
    at_once = isinstance(images, str | Path | Image.Image | torch.Tensor | np.ndarray | Sequence | Mapping | Set)
    if not at_once and hasattr(images, "__iter__"):
        items = iter(images)
    elif not at_once and hasattr(images, "__getitem__") and hasattr(images, "__len__"):
        items = (images[i] for i in range(len(images)))
    else:
        _check_stream(labels, False)
        batch = to_batch(images, preprocess, channels, note)
        return len(batch), iter(batch.split(size))

    def read(item: Any) -> torch.Tensor:
        parts = _parts(item)
        batch = to_batch(parts[0], preprocess, channels, note)
        if labels is not None:
            labels.extend(_labels(parts, len(batch)))
        return batch

    return None, _regrouped(map(read, items), size)


def _parts(item: Any) -> Sequence[Any]:
    """What a loader gives in one item: (images, labels, …), or images alone; a list of pictures is a batch itself."""
    collated = isinstance(item, list) and bool(item) and isinstance(item[0], torch.Tensor) and item[0].ndim == 4
    return item if collated or (isinstance(item, tuple) and item) else (item,)


def _labels(parts: Sequence[Any], count: int) -> list[Any]:
    """The labels that stand beside `count` images."""
    _check_stream(parts, len(parts) > 1)
    given = parts[1].tolist() if isinstance(parts[1], torch.Tensor | np.ndarray) else parts[1]
    found = list(given) if isinstance(given, list | tuple) else [given]
    if len(found) != count:
        raise PatchlightError(f"{len(found)} labels stand beside {count} images; give one per image")
    return found


def _check_stream(labels: Any, beside: bool) -> None:
    if labels is not None and not beside:
        raise PatchlightError(
            "labels=True takes the labels that come with the images of a loader, as (images, labels); these come "
            "without: give a list of them"
        )


def _regrouped(batches: Iterator[torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    """The same images in the same order, `size` at a time."""
    held: list[torch.Tensor] = []
    for batch in batches:
        held.append(batch)
        if sum(map(len, held)) >= size:
            *full, last = torch.cat(held).split(size)
            held = [last.clone()] if len(last) < size else []
            yield from full if held else [*full, last]
    if held:
        yield torch.cat(held)


def _check_tensor(images: torch.Tensor, size: tuple[int, int], channels: int) -> torch.Tensor:
    want = f"[B,{channels},{size[0]},{size[1]}]"
    if images.ndim == 3:
        images = images[None]
    if images.ndim != 4 or tuple(images.shape[1:]) != (channels, *size):
        raise PatchlightError(f"images have shape {list(images.shape)}; this model takes {want}")
    if images.shape[0] == 0:
        raise PatchlightError(f"images are empty, shape {list(images.shape)}; this model takes {want} with B >= 1")
    if not images.is_floating_point():
        raise PatchlightError(
            f"images have dtype {images.dtype}; give a preprocessed floating-point tensor, or PIL images or paths"
        )
    if not bool(torch.isfinite(torch.stack(images.aminmax())).all()):
        raise PatchlightError("images contain NaN or infinity; give finite values")
    return images
