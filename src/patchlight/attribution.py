"""The result: raw signed scores with their provenance. Upsampling, masking and colouring are steps of the reader."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.errors import PatchlightError
from patchlight.images import Preprocess

_FORMAT = 1


@cache
def _installed() -> tuple[tuple[str, str], ...]:
    found = {"python": platform.python_version()}
    for package in ("patchlight", "torch", "timm", "transformers", "torchvision"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return tuple(found.items())


def versions() -> dict[str, str]:
    """The versions an attribution was made with."""
    return dict(_installed())


@dataclass(frozen=True, eq=False)
class Attribution:
    """Scores of image regions for a class: what a method said, untouched.

    `scores` is CPU float32 [B,h,w] at the method's own resolution (the patch grid, or pixels where `level` is
    "pixel"), raw and signed; [B,T,h,w] when several classes an image were asked for. `target` [B] or [B,T] holds the
    classes, `against` the classes they were contrasted with.
    """

    scores: Tensor
    target: Tensor
    method: str
    model: str
    image_size: tuple[int, int]
    level: Literal["token", "pixel"] = "token"
    score: str = "logit"
    settings: dict[str, Any] = field(default_factory=dict)
    against: Tensor | None = None
    labels: tuple[str, ...] = ()
    seed: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    preprocess: Preprocess | None = None
    """How the images were shown to the model, so that the heat can be laid where it belongs."""
    weights: str = ""
    """The hash of the model's weights, and `images` of each image as the model saw it; empty where not known."""
    images: tuple[str, ...] = ()

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of `scores`."""
        return self.scores.shape[-2], self.scores.shape[-1]

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, images: int | slice) -> Attribution:
        """The attribution of one image (still with a batch axis) or of a slice of them."""
        if isinstance(images, int):
            if not -len(self) <= images < len(self):
                raise IndexError(f"image {images} of {len(self)}")
            images = slice(images % len(self), images % len(self) + 1)
        per_image = max(len(self.labels) // max(len(self), 1), 1)
        rows = range(len(self))[images]
        labels = tuple(name for i in rows for name in self.labels[i * per_image : (i + 1) * per_image])
        changed = {"scores": self.scores[images], "target": self.target[images], "labels": labels}
        changed["images"] = self.images[images]
        if self.against is not None:
            changed["against"] = self.against[images]
        return Attribution(**{f.name: getattr(self, f.name) for f in fields(self)} | changed)  # type: ignore[arg-type]

    def upsample(
        self, size: int | tuple[int, int] | None = None, mode: Literal["nearest", "bilinear", "bicubic"] = "bilinear"
    ) -> Tensor:
        """Scores at another resolution, the model's input size by default: [..., H, W]."""
        size = self.image_size if size is None else (size, size) if isinstance(size, int) else size
        if mode not in ("nearest", "bilinear", "bicubic"):
            raise PatchlightError(f"no upsampling is called '{mode}'; give nearest, bilinear or bicubic")
        flat = self.scores.reshape(-1, 1, *self.grid)
        align = None if mode == "nearest" else False
        return F.interpolate(flat, size, mode=mode, align_corners=align).reshape(*self.scores.shape[:-2], *size)

    def top_patches(self, k: int = 10) -> Tensor:
        """The k highest-scoring cells as (row, column), best first: [..., k, 2]. Ties keep reading order."""
        cells = self.grid[0] * self.grid[1]
        if not 1 <= k <= cells:
            raise PatchlightError(f"there are {cells} cells; {k} cannot be picked")
        order = self.scores.flatten(-2).sort(stable=True, dim=-1, descending=True).indices[..., :k]
        return torch.stack([order // self.grid[1], order % self.grid[1]], -1)

    def mask(self, fraction: float = 0.2) -> Tensor:
        """True on the highest-scoring `fraction` of the cells (rounded, at least one)."""
        if not 0 < fraction <= 1:
            raise PatchlightError(f"fraction {fraction} is not in (0, 1]")
        best = self.top_patches(max(1, round(fraction * self.grid[0] * self.grid[1])))
        flat = torch.zeros(*self.scores.shape[:-2], self.grid[0] * self.grid[1], dtype=torch.bool)
        return flat.scatter(-1, best[..., 0] * self.grid[1] + best[..., 1], True).view(self.scores.shape)

    def overlay(self, image: Any, index: int = 0, **options: Any) -> Any:
        """A PIL picture of image `index`'s heat over `image` (a PIL image, a path or a [C,H,W] tensor).

        The image is cut as the model saw it. Of several classes the first is shown. Options as in viz.overlay.
        """
        from patchlight.viz import overlay

        if not -len(self) <= index < len(self):
            raise PatchlightError(f"there is no image {index}; this attribution has {len(self)}")
        if isinstance(image, Tensor):
            if self.preprocess is None or image.ndim != 3:
                raise PatchlightError("give the picture itself, or one preprocessed [C,H,W] tensor of this model")
            image = self.preprocess.picture(image)
        scores = self.scores[index]
        options = {"preprocess": self.preprocess, **options}
        return overlay(scores if scores.ndim == 2 else scores[0], image, self.image_size, **options)

    def save(self, folder: str | Path, force: bool = False) -> Path:
        """Write scores (safetensors) and provenance (JSON) as a new folder, whole or not at all.

        An existing folder is refused; `force=True` replaces one that holds an attribution.
        """
        from safetensors.torch import save_file

        folder = Path(folder)
        if folder.exists() and not (force and (folder / "attribution.json").is_file()):
            raise PatchlightError(f"'{folder}' exists already; choose another folder, or force=True to replace it")
        tensors = {"scores": self.scores.contiguous(), "target": self.target.contiguous()}
        if self.against is not None:
            tensors["against"] = self.against.contiguous()
        about = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("scores", "target", "against")}
        about["preprocess"] = None if self.preprocess is None else asdict(self.preprocess)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        except OSError as error:
            raise PatchlightError(f"'{folder}' cannot be written: {error.strerror}") from error
        try:
            save_file(tensors, part / "scores.safetensors")
            text = json.dumps({"format": _FORMAT, **about}, indent=1, default=repr)
            (part / "attribution.json").write_text(text + "\n", encoding="utf-8")
            part.chmod(0o755)
            if folder.exists():
                old = part.with_name(part.name + "-old")
                os.rename(folder, old)
                os.rename(part, folder)
                shutil.rmtree(old)
            else:
                os.rename(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return folder

    @staticmethod
    def load(folder: str | Path) -> Attribution:
        """Read back what `save` wrote."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(folder)
        try:
            about = json.loads((folder / "attribution.json").read_text(encoding="utf-8"))
            tensors = load_file(folder / "scores.safetensors")
            if about.pop("format") != _FORMAT:
                raise PatchlightError(f"'{folder}' was written by another version of the format")
            about["image_size"] = tuple(about["image_size"])
            about["labels"] = tuple(about["labels"])
            about["images"] = tuple(about.get("images", ()))
            if about.get("preprocess") is not None:
                known = {k: tuple(v) if isinstance(v, list) else v for k, v in about["preprocess"].items()}
                about["preprocess"] = Preprocess(**cast("dict[str, Any]", known))
            return Attribution(**tensors, **about)
        except FileNotFoundError as error:
            raise PatchlightError(
                f"'{folder}' holds no attribution ({Path(error.filename).name} is missing)"
            ) from error
        except (json.JSONDecodeError, SafetensorError, KeyError, TypeError) as error:
            raise PatchlightError(f"'{folder}' is damaged: {error}") from error

    def __repr__(self) -> str:
        grid = "x".join(map(str, self.grid))
        named = ", ".join(dict.fromkeys(self.labels[:3])) + ("…" if len(self.labels) > 3 else "")
        return f"<Attribution by {self.method} of {self.model} for {named}: {len(self)} image(s), {grid} {self.level}s>"

    def _repr_html_(self) -> str:
        from patchlight.viz import heat_html

        return heat_html(self)
