"""The images of a site: those that are bundled, and uploads, which live in memory alone and go when others come."""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import re
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from PIL import Image, UnidentifiedImageError
from torch import Tensor

from patchlight.anatomy.base import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.images import FORMATS, open_image
from patchlight.core.resize import to_pixels
from patchlight.evidence.fills import Painted, fill_images
from patchlight.web.schemas import Photo
from patchlight.zoo.pocket import PHOTOS

MOST_BYTES, MOST_PIXELS = 20 * 2**20, 40_000_000
ROOM = 64 * 2**20
"""Bytes of uploads that are kept, packed: some hundreds."""
MOST_SCANS = 100
"""Times that a JPEG may go over its pixels, which takes 14 bytes each time; cameras and programs stay at a dozen."""
SHARP, LONGEST = 448, 768
"""The longer side, about, of the pictures that are kept to be shown: of the cut that the model sees, and uncut."""


TOLD = ("label", "subject", "credit", "licence")


class Gone(PatchlightError):
    """An image that is not there, or no longer."""


@dataclass(frozen=True, eq=False)
class Held:
    """An image as the model is given it [1,C,H,W], and pictures of it to be shown, packed."""

    id: str
    tensor: Tensor
    size: tuple[int, int]
    packed_whole: bytes
    packed_seen: bytes

    @property
    def whole(self) -> Image.Image:
        """The image uncut."""
        return Image.open(io.BytesIO(self.packed_whole))

    @property
    def seen(self) -> Image.Image:
        """The cut that the model sees."""
        return Image.open(io.BytesIO(self.packed_seen)).convert("RGB")

    @property
    def bytes(self) -> int:
        return len(self.packed_whole) + len(self.packed_seen) + self.tensor.nbytes


class Album:
    """Images by their ids. An upload's id is a hash of its bytes under a key that nobody else has."""

    def __init__(self, vit: Anatomy) -> None:
        self._vit = vit
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._uploads: OrderedDict[str, Held] = OrderedDict()
        self._kept: dict[str, Held] = {}
        self.photos = bundled_photos() if vit.channels in (1, 3) else []

    def add(self, data: bytes) -> Held:
        """Keep an upload; what is no image, or has too many pixels, is refused before it is decoded."""
        name = "u-" + hmac.new(self._key, data, hashlib.sha256).hexdigest()[:40]
        with self._lock:
            if name in self._uploads:
                self._uploads.move_to_end(name)
                return self._uploads[name]
        held = self._held(name, decoded(data))
        with self._lock:
            self._uploads[name] = held
            while sum(one.bytes for one in self._uploads.values()) > ROOM and len(self._uploads) > 1:
                self._uploads.popitem(last=False)
        return held

    def keep(self, name: str, picture: Image.Image) -> Held:
        """Keep a picture under a name for good: its owner cannot send it again."""
        self._kept[name] = self._held(name, picture)
        return self._kept[name]

    def find(self, name: str) -> Held:
        with self._lock:
            if name in self._uploads:
                self._uploads.move_to_end(name)
                return self._uploads[name]
        if name in self._kept:
            return self._kept[name]
        if name not in {photo.id for photo in self.photos}:
            raise Gone(f"no image '{name}' is here; upload it, again if it has been here before")
        return self.keep(name, open_image(PHOTOS / f"{name}.jpg"))

    def _held(self, name: str, picture: Image.Image) -> Held:
        vit = self._vit
        pixels = vit.preprocess.tensor(picture)[None]
        tensor = vit.place(pixels if vit.channels == 3 else pixels.mean(1, keepdim=True))
        scale = max(1, round(SHARP / max(vit.preprocess.size)))
        height, width = vit.preprocess.size
        sharp = replace(vit.preprocess, size=(scale * height, scale * width))
        whole = picture.copy()
        whole.thumbnail((LONGEST, LONGEST))
        return Held(name, tensor, picture.size, _packed(whole), _packed(sharp.crop(picture)))

    def picture(self, name: str, side: int, fill: Painted | None = None, whole: bool = False) -> bytes:
        """A PNG: what the model sees of an image, the image uncut, or a fill of it."""
        held = self.find(name)
        if whole:
            picture = held.whole
        elif fill is None:
            picture = held.seen
        else:
            filled = fill_images(fill, held.tensor, self._vit)
            large = max(1, side // max(self._vit.preprocess.size))
            size = tuple(large * s for s in self._vit.preprocess.size)
            picture = self._vit.preprocess.picture(to_pixels(filled.float(), size, upsampling="nearest")[0])
        if max(picture.size) > side:
            picture = picture.copy()
            picture.thumbnail((side, side))
        out = io.BytesIO()
        picture.save(out, "PNG", compress_level=1)
        return out.getvalue()


def decoded(data: bytes) -> Image.Image:
    """The picture in some bytes, upright, without anything else that the file says of itself."""
    if sum(1 for _ in _SCANS.finditer(data)) > MOST_SCANS:
        raise PatchlightError(f"the image is a JPEG of more than {MOST_SCANS} scans; save it anew")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                limit = MOST_PIXELS // 10**6
                raise PatchlightError(
                    f"the image has {image.width} x {image.height} pixels; at most {limit} million are taken"
                )
            upright = open_image(image)
    except PatchlightError:
        raise
    except (UnidentifiedImageError, Image.DecompressionBombError) as error:
        known = ", ".join(FORMATS)
        raise PatchlightError(f"these {len(data)} bytes are no image that can be read: give one of {known}") from error
    except Exception as error:  # decoders meet damaged bytes with every kind of exception
        raise PatchlightError("the image is damaged or cut short") from error
    bare = Image.new("RGB", upright.size)
    bare.paste(upright)
    return bare


_SCANS = re.compile(rb"\xff\xda\x00[\x08\x0a\x0c\x0e]")
"""How every scan of a JPEG begins."""


def _packed(picture: Image.Image) -> bytes:
    """A picture in few bytes, fit to be shown; a small one, which is shown magnified, to the bit."""
    out = io.BytesIO()
    if picture.width * picture.height < 2**16:
        picture.save(out, "PNG")
    else:
        picture.save(out, "JPEG", quality=92, subsampling=0)
    return out.getvalue()


def bundled_photos() -> list[Photo]:
    """What is told of each bundled photograph."""
    told = json.loads((PHOTOS / "photos.json").read_text(encoding="utf-8"))
    return [Photo(id=about["file"].removesuffix(".jpg"), **{key: about[key] for key in TOLD}) for about in told]
