"""Trained explainers: a network, the model it was trained for, and the folder that stores both."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
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
from patchlight.core.fingerprints import fingerprint, hash_tensor, json_digest, stamp
from patchlight.core.registry import Settings

Network = TypeVar("Network", bound=nn.Module)
Value = TypeVar("Value")
HASHED_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class _Model(BaseModel, extra="forbid"):
    """The properties of the trained model, which the explained model must share."""

    name: str
    blocks: int
    patch_grid: tuple[int, int]
    prefix_tokens: int
    classes: int
    image_size: tuple[int, int]


class _Header(BaseModel, extra="allow"):
    """The JSON file of an explainer; extra keys are options of its network. Older files have no `hashes`."""

    kind: str
    format: int
    model: _Model
    about: dict[str, Any]
    hashes: dict[str, str] = {}


@dataclass(frozen=True, eq=False)
class Explainer(ABC, Generic[Network]):
    """A trained network, the model it was trained for (`model`, `hashes`), and its training (`about`).

    `signature` has four numbers of every weight of the model, for files without `hashes`.
    """

    kind: ClassVar[str]
    """Name of its JSON file; `weights` is that of its safetensors file, both without suffix."""
    weights: ClassVar[str]
    title: ClassVar[str]
    format: ClassVar[int]
    command: ClassVar[str]
    """`patchlight COMMAND train` and `pl.COMMAND.train` train one."""
    need: ClassVar[tuple[str, str]]
    """What is trained, and its pronoun, for errors: ("gates", "them")."""
    shipped: ClassVar[Path]
    """The folder of the bundled model's explainer."""
    stored: ClassVar[torch.dtype] = torch.float32
    """The type its weights are saved in."""

    network: Network
    model: dict[str, Any]
    signature: Tensor
    about: dict[str, Any] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    _ready: dict[Any, Network] = field(default_factory=dict, repr=False)

    @staticmethod
    @abstractmethod
    def why_not(vit: Anatomy) -> str | None:
        """Why a model cannot have such an explainer; None if it can."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The options that `build` needs besides the weights."""

    @staticmethod
    @abstractmethod
    def build(weights: dict[str, Tensor], options: dict[str, Any]) -> Network:
        """Build the network from its weights and options."""

    @classmethod
    def of(cls, network: Network, vit: Anatomy, **about: Any) -> Self:
        """The explainer of a network that was trained for a model."""
        network = network.to(cls.stored).float().requires_grad_(False).eval()  # the same numbers as after a reload
        return cls(network, describe_model(vit), weight_signature(vit), about, weight_hashes(vit, HASHED_TYPES))

    def mismatch(self, vit: Anatomy) -> str | None:
        """Why this explainer does not fit a model; None if it fits."""
        expected, actual = self.model, describe_model(vit)
        wrong = [key for key in expected if key != "name" and expected[key] != actual[key]]
        if wrong:
            differences = " and ".join(f"{expected[key]} {key.replace('_', ' ')}, not {actual[key]}" for key in wrong)
            return f"the explainer was trained for {expected['name']} with {differences}"
        fits = self.cached("fits", vit, self._fits_weights)
        return None if fits else f"the explainer was trained for other weights of {expected['name']}"

    def cached(self, key: str, vit: Anatomy, compute: Callable[[Anatomy], Value]) -> Value:
        """A value that depends on this explainer and a model; computed again when the model's weights have changed."""
        values = _CACHE.setdefault(self, WeakKeyDictionary()).setdefault(vit, {})
        current = stamp(vit.model)
        if key not in values or values[key][0] != current:
            values[key] = current, compute(vit)
        value: Value = values[key][1]
        return value

    def _fits_weights(self, vit: Anatomy) -> bool:
        """Whether all weights are the same, rounded to the type of the model; older files compare four numbers each."""
        dtype = min((p.dtype for p in vit.model.parameters()), key=lambda dtype: dtype.itemsize, default=torch.float32)
        dtype = torch.float32 if dtype == torch.float64 else dtype
        if str(dtype) in self.hashes:
            return weight_hashes(vit, [dtype])[str(dtype)] == self.hashes[str(dtype)]
        actual, expected = weight_signature(vit), self.signature
        if actual.shape != expected.shape:
            return False
        return float(((actual - expected).abs() / (actual.abs() + expected.abs() + 1e-6)).mean()) <= 5e-3

    def network_like(self, like: Tensor) -> Network:
        """The network with the type and on the device of a tensor."""
        key = (like.device, like.dtype)
        if key not in self._ready:
            self._ready[key] = copy.deepcopy(self.network).to(like)
        return self._ready[key]

    def save(self, folder: str | Path) -> Path:
        """Write the weights and a JSON file into a folder; an explainer of this kind in the folder is replaced."""
        from safetensors.torch import save

        folder = Path(folder)
        state = self.network.state_dict()
        tensors = {name: value.detach().to("cpu", self.stored).contiguous() for name, value in state.items()}
        write_atomic(folder / f"{self.weights}.safetensors", save({**tensors, "signature": self.signature}))
        header = {"format": self.format, "kind": self.kind, "model": self.model, **self.options()}
        header |= {"hashes": self.hashes, "about": self.about}
        write_atomic(folder / f"{self.kind}.json", json.dumps(header, indent=1).encode() + b"\n")
        return folder

    @classmethod
    def read(cls, folder: str | Path, vit: Anatomy | None = None) -> Self:
        """Read the explainer in a folder.

        Args:
            folder: The folder that `save` wrote.
            vit: The model to explain; an explainer that was trained for another model is refused.

        Raises:
            PatchlightError: If the folder holds no such explainer, or a damaged one, or one that does not fit `vit`.
        """
        from safetensors.torch import load_file

        folder = Path(folder)
        try:
            header = _Header.model_validate_json((folder / f"{cls.kind}.json").read_bytes())
            if header.kind != cls.kind:
                raise PatchlightError(f"'{folder}' holds an explainer of another kind: '{header.kind}'")
            if header.format != cls.format:
                age = "an earlier" if header.format < cls.format else "a later"
                raise PatchlightError(
                    f"'{folder}' was written by {age} version of Patchlight (format {header.format}; this version "
                    f"reads {cls.format}); train it again, or use that version"
                )
            tensors = load_file(folder / f"{cls.weights}.safetensors")
            signature = tensors.pop("signature").float()
            network = cls.build({k: v.float() for k, v in tensors.items()}, header.model_extra or {})
        except FileNotFoundError as error:
            name = Path(error.filename).name
            raise PatchlightError(f"'{folder}' does not hold a {cls.title} explainer: {name} is missing") from error
        except PatchlightError:
            raise
        except Exception as error:  # torch raises many kinds of exceptions for damaged weights
            raise PatchlightError(f"the explainer in '{folder}' is damaged: {first_line(error)}") from error
        network.requires_grad_(False).eval()
        explainer = cls(network, header.model.model_dump(), signature, header.about, header.hashes)
        if vit is not None and (reason := explainer.mismatch(vit)) is not None:
            raise PatchlightError(f"'{folder}' does not fit {vit.name}: {reason}")
        return explainer

    @classmethod
    def resolve(cls, explainer: Any) -> Self:
        """The explainer of a setting: an explainer, its folder, or None for that of `pocket`."""
        if isinstance(explainer, cls):
            return explainer
        source = cls.shipped if explainer is None else explainer
        if not isinstance(source, str | Path):
            advice = f"give a {cls.__name__} or the folder it was saved in"
            raise PatchlightError(f"explainer is a {type(source).__name__}; {advice}")
        folder = Path(source).resolve()
        files = [folder / f"{cls.kind}.json", folder / f"{cls.weights}.safetensors"]
        states = [file.stat() for file in files if file.is_file()]
        resolved: Self = _read_once(cls, folder, tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in states))
        return resolved

    @classmethod
    def identity(cls, settings: Settings) -> str:
        """A text that identifies the trained weights, on which maps depend."""
        explainer = cls.resolve(settings["explainer"])
        return f"{fingerprint(explainer.network)} {explainer.options()}"

    @classmethod
    def refusal(cls, settings: Settings, vit: Anatomy) -> str | None:
        """Why a method with these settings cannot explain a model; None if it can."""
        reason = cls.why_not(vit)
        if reason is not None:
            return reason
        if settings["explainer"] is None and vit.name != "pocket":
            noun, them = cls.need
            how = f"`patchlight {cls.command} train` or pl.{cls.command}.train"
            return f"it needs {noun} trained for {vit.name}: train {them} with {how}, and pass {them} as explainer"
        return cls.resolve(settings["explainer"]).mismatch(vit)


_CACHE: WeakKeyDictionary[Explainer[Any], WeakKeyDictionary[Anatomy, dict[str, Any]]] = WeakKeyDictionary()
"""By explainer and model: the values of `Explainer.cached`, each with the stamp of the model."""


@cache
def _read_once(kind: type[Explainer[Any]], folder: Path, files: tuple[tuple[int, ...], ...]) -> Any:
    return kind.read(folder)


def describe_model(vit: Anatomy) -> dict[str, Any]:
    """The properties of a model that must be the same in training and explaining."""
    return {
        "name": vit.name,
        "blocks": vit.depth,
        "patch_grid": vit.grid,
        "prefix_tokens": vit.prefix,
        "classes": vit.classes,
        "image_size": vit.preprocess.size,
    }


def weight_hashes(vit: Anatomy, dtypes: Iterable[torch.dtype]) -> dict[str, str]:
    """A hash of all weights of a model, rounded to each of these types."""
    weights = [p.detach().flatten() for p in vit.model.parameters()]
    return {str(dtype): json_digest([hash_tensor(w.to(dtype)) for w in weights]) for dtype in dtypes}


def weight_signature(vit: Anatomy) -> Tensor:
    """The first four numbers of every weight."""
    return torch.cat([p.detach().flatten()[:4].float() for p in vit.model.parameters()]).cpu()
