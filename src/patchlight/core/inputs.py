"""Videos, volumes and sounds: from folders of frames, files and arrays to the tensor that a model takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from patchlight.core.errors import PatchlightError, first_line
from patchlight.core.extras import import_extra
from patchlight.core.images import Preprocess, array_picture, list_images, open_image
from patchlight.core.layout import Geometry, Layout

VIDEOS = frozenset({".mp4", ".mkv", ".mov", ".avi", ".webm"})
VOLUMES = (".nii", ".nii.gz")


@dataclass(frozen=True)
class ArrayPreprocess(Preprocess):
    """How inputs that are not images are prepared: frames like images, other inputs unchanged.

    Args:
        shape: The shape of one input, without the batch.
        axes: The name of each axis of the model's grid.
        geometry: Which dimension of an input each axis is, and its length.
        inputs: What the inputs are called: "videos", "volumes" or "sounds".
    """

    shape: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    geometry: Geometry = field(default_factory=lambda: Geometry.even((1, 1), (1, 1)))
    inputs: str = "arrays"

    @staticmethod
    def of(preprocess: Preprocess, shape: tuple[int, ...], layout: Layout, geometry: Geometry) -> ArrayPreprocess:
        """The preprocessing of inputs whose frames are prepared like these images."""
        options: dict[str, Any] = {key.name: getattr(preprocess, key.name) for key in fields(Preprocess)}
        return ArrayPreprocess(**options, shape=shape, axes=layout.axes, geometry=geometry, inputs=layout.inputs)

    def input_list(self, inputs: Any) -> Any:
        """One input as a list; other values unchanged."""
        single = isinstance(inputs, str | Path) or (
            isinstance(inputs, Tensor | np.ndarray) and inputs.ndim in (0, self._dims(inputs))
        )
        return [inputs] if single else inputs

    def batch(self, inputs: Any) -> Tensor:
        """Inputs as one float tensor [B,*shape]: tensors, arrays, `.npy` files, folders of frames, videos, volumes."""
        inputs = self.input_list(inputs)
        if isinstance(inputs, Tensor) or not hasattr(inputs, "__iter__"):
            return self._check(inputs)
        items = list(inputs)
        if not items:
            raise PatchlightError(f"no {self.inputs} were given; {self._give}")
        read = [self._check(self._read(item)) for item in items]
        several = next((tensor for tensor in read if len(tensor) > 1), None)
        if several is not None:
            raise PatchlightError(f"one of the {self.inputs} has the shape {list(several.shape)}; {self._give}")
        return torch.cat(read)

    def views(self, batch: Tensor) -> Tensor:
        """Inputs [B,*shape] for display, as uint8 [B,1 or 3,*size]; grey values are scaled from lowest to highest."""
        planes = self.geometry.channels_first(batch.detach().float().cpu())
        ones = [1] * len(self.axes)
        if planes.shape[1] == 3 == len(self.mean) and "time" in self.axes:
            mean, std = (torch.tensor(v).view(1, -1, *ones) for v in (self.mean, self.std))
            colours = planes * std + mean
        else:
            planes = planes.mean(1, keepdim=True)
            low, high = (ends.view(-1, 1, *ones) for ends in (planes.flatten(1).amin(1), planes.flatten(1).amax(1)))
            colours = (planes - low) / (high - low).clamp_min(1e-12)
        return (colours.clamp(0, 1) * 255).round().byte()

    @property
    def _give(self) -> str:
        frames = "a folder of frames, " if self._frames else ""
        return f"give {frames}a .npy file, or a tensor [B,{','.join(map(str, self.shape))}]"

    @property
    def _frames(self) -> int:
        """The number of frames of a video; 0 if inputs are not videos."""
        return self.geometry.size[0] if self.axes == ("time", "row", "column") else 0

    def _dims(self, array: Tensor | NDArray[Any]) -> int:
        """The dimensions of one input: pictures of bytes have their channels at the end."""
        return 4 if self._frames and isinstance(array, np.ndarray) and array.dtype == np.uint8 else len(self.shape)

    def _check(self, batch: Any) -> Tensor:
        if not isinstance(batch, Tensor):
            raise PatchlightError(f"{self.inputs} were given as {type(batch).__name__}; {self._give}")
        batch = batch[None] if batch.ndim == len(self.shape) else batch
        if tuple(batch.shape[1:]) != self.shape or not len(batch):
            taken = ",".join(map(str, self.shape))
            raise PatchlightError(f"{self.inputs} have the shape {list(batch.shape)}; this model takes [B,{taken}]")
        if not batch.is_floating_point() or not bool(batch.isfinite().all()):
            raise PatchlightError(f"{self.inputs} are of type {batch.dtype} or not finite; give finite floats")
        checked: Tensor = batch
        return checked

    def _read(self, item: Any) -> Tensor:
        if isinstance(item, Tensor):
            return item
        if isinstance(item, np.ndarray):
            return self._array(item)
        if not isinstance(item, str | Path):
            raise PatchlightError(f"one of the {self.inputs} was given as {type(item).__name__}; {self._give}")
        path = Path(item)
        name = path.name.lower()
        try:
            if not path.exists():
                raise PatchlightError(f"there is no file or folder at '{path}'; {self._give}")
            if path.is_dir() and self._frames:
                return self._clip((open_image(frame) for frame in list_images(path)), f"'{path}'")
            if name.endswith(".npy"):
                return self._array(np.load(path, allow_pickle=False))
            if path.suffix.lower() in VIDEOS and self._frames:
                return self._clip(_decode(path, self._frames), f"'{path}'")
            if name.endswith(VOLUMES):
                return self._array(_volume(path))
        except PatchlightError:
            raise
        except Exception as error:  # readers raise all kinds of exceptions for damaged files
            raise PatchlightError(f"'{path}' cannot be read: {first_line(error)}") from error
        raise PatchlightError(f"'{path}' is not one of the {self.inputs} that this model takes; {self._give}")

    def _array(self, array: NDArray[Any]) -> Tensor:
        if self._frames and array.dtype == np.uint8 and array.ndim == 4:
            return self._clip((array_picture(frame) for frame in array), "the array")
        if array.dtype.kind not in "biuf":
            raise PatchlightError(f"one of the {self.inputs} has values of type {array.dtype}; {self._give}")
        values = torch.from_numpy(np.ascontiguousarray(array, np.float32))
        lacks_channel = values.ndim == len(self.shape) - 1 and tuple(values.shape) == self.geometry.size
        return self.geometry.as_input(values[None, None])[0] if lacks_channel else values

    def _clip(self, frames: Iterator[Image.Image], what: str) -> Tensor:
        """Frames, each prepared like an image, as one input."""
        pictures = [frame.convert("RGB") for frame in frames]
        sizes = list(dict.fromkeys(f"{picture.width} x {picture.height}" for picture in pictures))
        if len(sizes) > 1:
            raise PatchlightError(f"the frames of {what} are {sizes[0]} and {sizes[1]} pixels; give frames of one size")
        if len(pictures) != self._frames:
            raise PatchlightError(
                f"{what} has {len(pictures)} frames, and this model takes {self._frames}; give {self._frames} of them"
            )
        clip = torch.stack([self.tensor(picture) for picture in pictures], 1)[None]
        return self.geometry.as_input(clip)[0]


def _decode(path: Path, count: int) -> Iterator[Image.Image]:
    """`count` frames at equal distances, each in the middle of its part; all frames of a shorter video."""
    av = import_extra("av", f"'{path}' needs", "video", "give a folder of its frames")
    with av.open(str(path)) as container:
        if not container.streams.video:
            raise PatchlightError(f"'{path}' has no video that can be read; give a folder of its frames")
        total = sum(1 for _ in container.decode(video=0))  # all frames at once may not fit into memory
    chosen = range(total) if total < count else {int((i + 0.5) * total / count) for i in range(count)}
    with av.open(str(path)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number in chosen:
                yield frame.to_image()


def _volume(path: Path) -> NDArray[Any]:
    nibabel = import_extra("nibabel", f"'{path}' needs", "medical", "save its array as .npy")
    values: NDArray[Any] = np.asarray(nibabel.load(path).dataobj, dtype=np.float32)
    return values
