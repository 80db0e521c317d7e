"""The images of a server: bundled photographs, and uploads, which stay in memory until newer ones need the room."""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import re
import secrets
import threading
from dataclasses import dataclass, replace

from cachetools import LRUCache, cachedmethod
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.images import FORMATS, open_image
from patchlight.core.resize import to_pixels
from patchlight.evidence.fills import Painted, fill_images
from patchlight.web import Refused
from patchlight.web.schemas import MOST_PIXELS, Photo
from patchlight.zoo.pocket import PHOTOS

MOST_BYTES = 20 * 2**20
ROOM = 64 * 2**20
"""Bytes of uploads that are kept, compressed: a few hundred images."""
MOST_SCANS = 100
"""Largest number of scans of a JPEG. A scan of 14 bytes decodes every pixel again; real files have about a dozen."""
SHARP, LONGEST = 448, 768
"""The approximate longer side of the pictures kept for display: as the model sees the image, and uncropped."""

_SCANS = re.compile(rb"\xff\xda\x00[\x08\x0a\x0c\x0e]")
"""The first bytes of a JPEG scan."""


@dataclass(frozen=True, eq=False)
class StoredImage:
    """An image as the model gets it [1,C,H,W], and compressed pictures of it for display."""

    id: str
    tensor: Tensor
    size: tuple[int, int]
    packed_whole: bytes
    packed_seen: bytes

    @property
    def whole(self) -> Image.Image:
        """The uncropped image."""
        return Image.open(io.BytesIO(self.packed_whole))

    @property
    def seen(self) -> Image.Image:
        """The part that the model sees."""
        return Image.open(io.BytesIO(self.packed_seen)).convert("RGB")

    @property
    def bytes(self) -> int:
        return len(self.packed_whole) + len(self.packed_seen) + self.tensor.nbytes


class ImageStore:
    """Images by id. The id of an upload is a keyed hash of its bytes, so it cannot be guessed."""

    def __init__(self, vit: Anatomy) -> None:
        self._vit = vit
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        room = max(ROOM, 8 * vit.channels * vit.preprocess.size[0] * vit.preprocess.size[1])  # room for at least one
        self._uploads: LRUCache[str, StoredImage] = LRUCache(room, lambda image: image.bytes)
        self._lasting: dict[str, StoredImage] = {}
        self.photos = bundled_photos() if vit.channels in (1, 3) else []

    def add(self, data: bytes) -> StoredImage:
        """Keep an upload. Anything but an image, and images with too many pixels, is refused before decoding."""
        return self._decoded("u-" + hmac.new(self._key, data, hashlib.sha256).hexdigest()[:40], data)

    @cachedmethod(lambda self: self._uploads, key=lambda self, name, data: name, lock=lambda self: self._lock)
    def _decoded(self, name: str, data: bytes) -> StoredImage:
        return self._prepare(name, decode(data))

    def keep(self, name: str, picture: Image.Image) -> StoredImage:
        """Keep a picture under a name until the server ends, for `pl.show`, whose page cannot upload it again.

        The picture is scaled down in place: a copy of the largest ones takes 160 MB.
        """
        self._lasting[name] = self._prepare(name, picture)
        return self._lasting[name]

    def find(self, name: str) -> StoredImage:
        with self._lock:
            image = self._uploads.get(name) or self._lasting.get(name)
        if image is not None:
            return image
        if name not in {photo.id for photo in self.photos}:
            raise Refused(404, f"Image '{name}' does not exist, or has expired; upload it again.")
        return self.keep(name, open_image(PHOTOS / f"{name}.jpg"))

    def _prepare(self, name: str, picture: Image.Image) -> StoredImage:
        vit = self._vit
        pixels = vit.preprocess.tensor(picture)[None]
        tensor = vit.place(pixels if vit.channels == 3 else pixels.mean(1, keepdim=True))
        scale = max(1, round(SHARP / max(vit.preprocess.size)))
        height, width = vit.preprocess.size
        sharp = replace(vit.preprocess, size=(scale * height, scale * width))
        size, seen = picture.size, _pack(sharp.crop(picture))
        picture.thumbnail((LONGEST, LONGEST))
        return StoredImage(name, tensor, size, _pack(picture), seen)

    def picture(self, name: str, side: int, fill: Painted | None = None, whole: bool = False) -> bytes:
        """A PNG of the image as the model sees it, of the uncropped image, or of a fill."""
        image = self.find(name)
        if whole:
            picture = image.whole
        elif fill is None:
            picture = image.seen
        else:
            filled = fill_images(fill, image.tensor, self._vit)
            large = max(1, side // max(self._vit.preprocess.size))
            size = tuple(large * s for s in self._vit.preprocess.size)
            picture = self._vit.preprocess.picture(to_pixels(filled.float(), size, upsampling="nearest")[0])
        if max(picture.size) > side:
            picture = picture.copy()
            picture.thumbnail((side, side))
        out = io.BytesIO()
        picture.save(out, "PNG", compress_level=1)
        return out.getvalue()


def decode(data: bytes) -> Image.Image:
    """Decode an image, upright and without metadata."""
    if sum(1 for _ in _SCANS.finditer(data)) > MOST_SCANS:
        raise PatchlightError(f"The image is a JPEG with more than {MOST_SCANS} scans; save it again.")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                size = f"{image.width} x {image.height} pixels"
                raise PatchlightError(f"The image has {size}; the limit is {MOST_PIXELS // 10**6} million.")
            upright = open_image(image)
    except PatchlightError:
        raise
    except (UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise PatchlightError(f"This file is not a readable image. Supported: {', '.join(FORMATS)}.") from error
    except Exception as error:  # decoders raise every kind of exception on damaged bytes
        raise PatchlightError("The image is damaged or incomplete.") from error
    upright.info.clear()
    return upright


def _pack(picture: Image.Image) -> bytes:
    """Compress a picture for display; a small one, which is shown magnified, without loss."""
    out = io.BytesIO()
    small = picture.width * picture.height < 2**16
    picture.save(out, "PNG") if small else picture.save(out, "JPEG", quality=92, subsampling=0)
    return out.getvalue()


def bundled_photos() -> list[Photo]:
    """The bundled photographs, with their credits."""
    photos = json.loads((PHOTOS / "photos.json").read_text(encoding="utf-8"))
    return [Photo(id=photo["file"].removesuffix(".jpg"), **photo) for photo in photos]
