"""An explainer: a trained network, the model it was made for, and the folder it is kept in."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, first_line
from patchlight.core.files import write_atomic
from patchlight.core.fingerprints import fingerprint, stamp
from patchlight.core.registry import Settings

Network = TypeVar("Network", bound=nn.Module)


class _Model(BaseModel, extra="forbid"):
    """What must agree between the model an explainer was made for and the one it explains."""

    name: str
    blocks: int
    patch_grid: tuple[int, int]
    prefix_tokens: int
    classes: int
    image_size: tuple[int, int]


class _Header(BaseModel, extra="allow"):
    """The JSON file of an explainer; the keys that are not listed here are the options of its network."""

    kind: str
    format: int
    model: _Model
    about: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Explainer(ABC, Generic[Network]):
    """A trained network, what model it was made for, and how it was trained."""

    kind: ClassVar[str]
    """What its JSON file is called; `weights`: its safetensors file."""
    weights: ClassVar[str]
    title: ClassVar[str]
    format: ClassVar[int]
    command: ClassVar[str]
    """`patchlight COMMAND train` and `pl.COMMAND.train` make one."""
    need: ClassVar[tuple[str, str]]
    """What a model needs, and its pronoun: ("gates", "them")."""
    shipped: ClassVar[Path]
    """The folder of the bundled model's explainer."""
    stored: ClassVar[torch.dtype] = torch.float32
    """The type its weights are saved in."""

    network: Network
    model: dict[str, Any]
    signature: Tensor
    about: dict[str, Any] = field(default_factory=dict)
    _ready: dict[Any, Network] = field(default_factory=dict, repr=False)

    @staticmethod
    @abstractmethod
    def why_not(vit: Anatomy) -> str | None:
        """Why a model cannot have such an explainer; None when it can."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """What `build` needs besides the weights."""

    @staticmethod
    @abstractmethod
    def build(weights: dict[str, Tensor], options: dict[str, Any]) -> Network:
        """The network again."""

    @classmethod
    def of(cls, network: Network, vit: Anatomy, **about: Any) -> Self:
        rounded = network.to(cls.stored).float()  # what is used is what is read again
        return cls(rounded.requires_grad_(False).eval(), described(vit), signature(vit), about)

    def mismatch(self, vit: Anatomy) -> str | None:
        """Why this explainer does not belong to a model; None when it does."""
        mine, other = self.model, described(vit)
        wrong = [key for key in mine if key != "name" and mine[key] != other[key]]
        if wrong:
            differences = " and ".join(f"{mine[key]} {key.replace('_', ' ')}, not {other[key]}" for key in wrong)
            return f"the explainer was made for {mine['name']} with {differences}"
        now = stamp(vit.model)
        seen = _SEEN.setdefault(self, WeakKeyDictionary())
        known, fits = seen.get(vit, (None, False))
        if known != now:  # reading weights takes many small copies from a device, so only when they changed
            fits = self._signed(vit)
            seen[vit] = (now, fits)
        return None if fits else f"the explainer was made for other weights of {mine['name']}"

    def _signed(self, vit: Anatomy) -> bool:
        here, mine = signature(vit), self.signature
        if here.shape != mine.shape:
            return False
        return float(((here - mine).abs() / (here.abs() + mine.abs() + 1e-6)).mean()) <= 5e-3

    def on(self, like: Tensor) -> Network:
        """The network in a tensor's type and on its device."""
        key = (like.device, like.dtype)
        if key not in self._ready:
            self._ready[key] = copy.deepcopy(self.network).to(like)
        return self._ready[key]

    def save(self, folder: str | Path) -> Path:
        """Write the weights and a JSON file into a folder; an explainer of this kind that lies there is replaced."""
        from safetensors.torch import save

        folder = Path(folder)
        state = self.network.state_dict()
        tensors = {name: value.detach().to("cpu", self.stored).contiguous() for name, value in state.items()}
        write_atomic(folder / f"{self.weights}.safetensors", save({**tensors, "signature": self.signature}))
        known = {"format": self.format, "kind": self.kind, "model": self.model, **self.options()}
        text = json.dumps({**known, "about": self.about}, indent=1)
        write_atomic(folder / f"{self.kind}.json", text.encode() + b"\n")
        return folder

    @classmethod
    def read(cls, folder: str | Path, vit: Anatomy | None = None) -> Self:
        """The explainer in a folder; with a model, one that was made for another is refused."""
        from safetensors.torch import load_file

        folder = Path(folder)
        try:
            header = _Header.model_validate_json((folder / f"{cls.kind}.json").read_bytes())
            if header.kind != cls.kind:
                raise PatchlightError(f"'{folder}' holds an explainer of another kind, '{header.kind}'")
            if header.format != cls.format:
                age = "an earlier" if header.format < cls.format else "a later"
                raise PatchlightError(
                    f"'{folder}' was made by {age} Patchlight (format {header.format}, this one reads {cls.format}); "
                    "train it again, or explain with that version"
                )
            tensors = load_file(folder / f"{cls.weights}.safetensors")
            signed = tensors.pop("signature").float()
            network = cls.build({k: v.float() for k, v in tensors.items()}, header.model_extra or {})
        except FileNotFoundError as error:
            name = Path(error.filename).name
            raise PatchlightError(f"'{folder}' holds no {cls.title} explainer ({name} is missing)") from error
        except PatchlightError:
            raise
        except Exception as error:  # torch meets damaged weights with every kind of exception
            raise PatchlightError(f"the explainer in '{folder}' is damaged: {first_line(error)}") from error
        explainer = cls(network.requires_grad_(False).eval(), header.model.model_dump(), signed, header.about)
        if vit is not None and (reason := explainer.mismatch(vit)) is not None:
            raise PatchlightError(f"'{folder}' does not fit {vit.name}: {reason}")
        return explainer

    @classmethod
    def resolve(cls, given: Any) -> Self:
        """An explainer as a setting gives it: itself, a folder, or None for the one that comes with `pocket`."""
        if isinstance(given, cls):
            return given
        given = cls.shipped if given is None else given
        if not isinstance(given, str | Path):
            advice = f"give a {cls.__name__} or the folder it was saved in"
            raise PatchlightError(f"explainer is a {type(given).__name__}; {advice}")
        folder = Path(given).resolve()
        files = [folder / f"{cls.kind}.json", folder / f"{cls.weights}.safetensors"]
        states = [file.stat() for file in files if file.is_file()]
        explainer: Self = _read_once(cls, folder, tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in states))
        return explainer

    @classmethod
    def identity(cls, settings: Settings) -> str:
        """What a map depends on besides the method's settings: the trained weights."""
        explainer = cls.resolve(settings["explainer"])
        return f"{fingerprint(explainer.network)} {explainer.options()}"

    @classmethod
    def refusal(cls, settings: Settings, vit: Anatomy) -> str | None:
        """Why a method with these settings cannot explain a model; None when it can."""
        reason = cls.why_not(vit)
        if reason is not None:
            return reason
        if settings["explainer"] is None and vit.name != "pocket":
            noun, them = cls.need
            how = f"`patchlight {cls.command} train` or pl.{cls.command}.train"
            return f"it needs {noun} trained for {vit.name}: make {them} with {how}, and give {them} as explainer"
        return cls.resolve(settings["explainer"]).mismatch(vit)


_SEEN: WeakKeyDictionary[Explainer[Any], WeakKeyDictionary[Anatomy, Any]] = WeakKeyDictionary()
"""By explainer and model: where its weights were when they were last compared, and whether they fitted."""


@cache
def _read_once(kind: type[Explainer[Any]], folder: Path, files: tuple[tuple[int, ...], ...]) -> Any:
    return kind.read(folder)


def described(vit: Anatomy) -> dict[str, Any]:
    """What must agree between the model an explainer was made for and the one it explains."""
    return {
        "name": vit.name,
        "blocks": vit.depth,
        "patch_grid": vit.grid,
        "prefix_tokens": vit.prefix,
        "classes": vit.classes,
        "image_size": vit.preprocess.size,
    }


def signature(vit: Anatomy) -> Tensor:
    """Four numbers of every weight: enough to tell one training from another, in any precision."""
    some = [p.detach().flatten()[:4].float() for p in vit.model.parameters()]
    return torch.cat(some).cpu()
