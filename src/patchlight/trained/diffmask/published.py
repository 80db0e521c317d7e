"""Reads the gate checkpoints that the authors of VISION DIFFMASK published, without running code from the file.

The files are PyTorch Lightning checkpoints: zip files with a pickle that also names classes of other packages, such as
the configuration of the ViT. Such a name becomes an empty object and is not imported; names of unexpected packages are
refused.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.trained.diffmask.gates import DiffMask, new_gates

LONGEST_PICKLE = 16 * 2**20
"""Maximum size of the pickle in bytes; tensors are stored separately."""
HARMLESS = {"torch", "collections", "transformers", "pytorch_lightning", "lightning", "numpy", "pathlib", "argparse"}
"""Packages whose classes a checkpoint may name; they are not imported."""
CONTAINERS = {"dict", "list", "set", "frozenset", "object"}
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
}


def import_gates(file: str | Path, vit: Anatomy, alpha: float | None = None) -> DiffMask:
    """Read the gates in a checkpoint of the authors' code.

    Their code shows the map `map="keep"`. A checkpoint does not identify the weights of its model, so only
    shapes are checked.

    Args:
        file: A checkpoint (`.ckpt`, a zip file of `torch.save`), or its tensors under the same names (`.safetensors`).
        vit: The model that the gates were trained for.
        alpha: Scale of the gates' stretch, `mul_activation` in the checkpoint; required if the file does not have it.
    """
    path = Path(file)
    reason = DiffMask.why_not(vit)
    if reason is not None:
        raise Unsupported(f"{vit.name} cannot have gates: {reason}")
    if not path.is_file():
        raise PatchlightError(f"'{path}' does not exist")
    checkpoint = (_read_safetensors if path.suffix == ".safetensors" else _read_zip)(path)
    alpha = checkpoint.alpha if alpha is None else alpha
    if alpha is None or not (math.isfinite(alpha) and alpha > 0):
        raise PatchlightError(f"'{path}' does not contain the scale of its gates (mul_activation); give it as alpha")
    gates = new_gates(vit, alpha=alpha)
    gates.load_state_dict(_gates(checkpoint, vit, path))
    return DiffMask.of(gates, vit, imported={"file": path.name, "alpha": alpha, "multipliers": checkpoint.multipliers})


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a file (shapes, and a function that reads one) and two of its hyper-parameters."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    alpha: float | None
    multipliers: list[float]


def layout(gates: int, width: int) -> dict[str, tuple[str, int | None, tuple[int, ...]]]:
    """By name in the checkpoint: the tensor of `Gates` that it is part of, its gate (None: all), and its shape."""
    hidden = max(width // 4, 1)
    parts: dict[str, tuple[str, tuple[int, ...]]] = {
        "f.0.weight_v": ("v1", (hidden, 2 * width)),
        "f.0.weight_g": ("g1", (hidden, 1)),
        "f.0.bias": ("c1", (hidden,)),
        "f.2.weight_v": ("v2", (1, hidden)),
        "f.2.weight_g": ("g2", (1, 1)),
        "f.2.bias": ("c2", (1,)),
        "add_activation": ("beta", ()),
    }
    each = {
        f"gate.g_hat.{i}.{theirs}": (ours, i, shape) for i in range(gates) for theirs, (ours, shape) in parts.items()
    }
    return {**each, "gate.placeholder": ("baseline", None, (1, 1, width))}


def _gates(checkpoint: Checkpoint, vit: Anatomy, path: Path) -> dict[str, Tensor]:
    """The state of `Gates` from a checkpoint, after a check of all names and shapes."""
    count = vit.depth + 2
    shapes = layout(count, vit.width)
    here = sum(name.startswith("gate.g_hat.") and name.endswith(".add_activation") for name in checkpoint.shapes)
    missing = [name for name in shapes if name not in checkpoint.shapes]
    if missing or here != count:
        have = f"it has {here} gates" if here else "it has no gates"
        raise PatchlightError(
            f"'{path}' does not fit {vit.name}, which needs {count} gates of width {vit.width}: {have}"
            + (f", and '{missing[0]}' is missing" if missing and here else "")
        )
    for name, (_, _, shape) in shapes.items():
        stored = list(checkpoint.shapes[name])
        if stored != list(shape):
            raise PatchlightError(f"'{path}' does not fit {vit.name}: '{name}' has shape {stored}, not {list(shape)}")
    ours = {name: value.clone() for name, value in new_gates(vit).cpu().state_dict().items()}
    for name, (mine, gate, _) in shapes.items():
        value = checkpoint.read(name).float()
        if not bool(value.isfinite().all()):
            raise PatchlightError(f"'{path}' is damaged: '{name}' has values that are not finite")
        place = ours[mine] if gate is None else ours[mine][gate]
        place.copy_(value.reshape(place.shape))
    return ours


def _read_safetensors(path: Path) -> Checkpoint:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            said = (file.metadata() or {}).get("mul_activation")
    except SafetensorError as error:
        raise PatchlightError(f"'{path}' is damaged: {str(error).splitlines()[0]}") from error

    def read(name: str) -> Tensor:
        with safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    return Checkpoint(shapes, read, _number(said), _multipliers(shapes, read))


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _multipliers(shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> list[float]:
    """The Lagrange multipliers at the end of the training, which the authors' code calls alpha."""
    names = (f"alpha.{i}" for i in range(len(shapes)))
    return [value for name in names if shapes.get(name) == () and math.isfinite(value := float(read(name)))]


class _Storage(NamedTuple):
    dtype: torch.dtype
    key: str
    length: int


class _Stored(NamedTuple):
    """The place of a tensor: its storage, and which part of it."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Archive:
    """The records of a zip file of torch.save; errors are PatchlightErrors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as archive:
            found = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(found) != 1:
            raise PatchlightError(f"'{path}' is not a checkpoint of torch.save: it has no data.pkl")
        self.root = found[0].removesuffix("data.pkl")
        if self.has("byteorder") and self.read("byteorder", 6) != b"little":
            raise PatchlightError(f"'{path}' was written on a big-endian machine, which is not supported")

    @contextlib.contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                yield archive
        except PatchlightError:
            raise
        except (zipfile.BadZipFile, EOFError, LookupError, OSError, RuntimeError, ValueError) as error:
            raise PatchlightError(
                f"'{self.path}' is damaged or not a checkpoint ({str(error).strip()}); give a zip file of torch.save "
                "(PyTorch 1.6 or later) or safetensors"
            ) from error

    def has(self, name: str) -> bool:
        with self._open() as archive:
            return f"{self.root}{name}" in archive.namelist()

    def read(self, name: str, limit: int) -> bytes:
        """Read a record of at most `limit` bytes; compressed records, and records longer than the file, are refused."""
        with self._open() as archive:
            info = archive.getinfo(f"{self.root}{name}")
            size, most = info.file_size, min(limit, self.path.stat().st_size)
            if info.compress_type != zipfile.ZIP_STORED or size > most:
                raise PatchlightError(
                    f"'{self.path}' is refused: its record '{name}' is compressed or declares {size} bytes, over {most}"
                )
            return archive.read(info)


def _read_zip(path: Path) -> Checkpoint:
    archive = _Archive(path)
    content = _unpickle(archive.read("data.pkl", LONGEST_PICKLE), path)
    if not isinstance(content, dict):
        raise PatchlightError(f"'{path}' does not contain a state_dict")
    state, said = content.get("state_dict", content), content.get("hyper_parameters")
    items = state.items() if isinstance(state, dict) else ()
    stored = {name: value for name, value in items if isinstance(name, str) and isinstance(value, _Stored)}
    shapes = {name: value.shape for name, value in stored.items()}

    def read(name: str) -> Tensor:
        return _tensor(archive, name, stored[name])

    alpha = _number(said.get("mul_activation")) if isinstance(said, dict) else None
    return Checkpoint(shapes, read, alpha, _multipliers(shapes, read))


def _unpickle(data: bytes, path: Path) -> Any:
    """The content of a pickle of torch.save, with tensors as `_Stored`."""
    try:
        _check_opcodes(data)
        return _Tensors(io.BytesIO(data)).load()
    except _Refused as error:
        raise PatchlightError(f"'{path}' is refused: {error}") from error
    except Exception as error:  # a pickle that was tampered with can fail in any way
        raise PatchlightError(f"'{path}' is damaged: its data.pkl cannot be read") from error


class _Refused(Exception):
    """A pickle contains something that is not allowed."""


def _check_opcodes(data: bytes) -> None:
    """Refuse opcodes that torch.save does not write or that could allocate more memory than the file has bytes."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.proto > 2 or opcode.name.startswith(("EXT", "INST", "OBJ")):
            raise _Refused(f"its pickle uses {opcode.name}, which torch.save does not write")
        if opcode.name.endswith("PUT") and isinstance(argument, int) and argument > len(data):
            raise _Refused("its pickle declares a size that it does not have")


class _Tensors(pickle.Unpickler):
    """An unpickler that calls only the functions below: tensors become `_Stored`, other objects `_Inert`."""

    def find_class(self, module: str, name: str) -> Any:
        functions: dict[tuple[str, str], Any] = {  # new ones for each name: a pickle may set their attributes
            ("collections", "OrderedDict"): lambda: {},
            ("torch._utils", "_rebuild_tensor_v2"): lambda *args: _stored(*args),
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
        }
        if (module, name) in functions:
            return functions[module, name]
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if module.partition(".")[0] in HARMLESS or (module in ("builtins", "__builtin__") and name in CONTAINERS):
            return type("Inert", (_Inert,), {})
        raise _Refused(f"it names {module}.{name}, which a checkpoint of gates does not need")

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(key, str):
            raise _Refused("its tensors are not stored as torch.save stores them")
        return _Storage(dtype, key, count) if isinstance(dtype, torch.dtype) and isinstance(count, int) else None


class _Inert(dict[Any, Any]):
    """Replaces an object of another package: a dictionary without behaviour."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...


def _stored(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Stored | None:
    """The place of a tensor; None for a number type that gates do not have."""
    if not isinstance(storage, _Storage):
        return None
    if not all(isinstance(n, int) and n >= 0 for n in (offset, *shape, *strides)):
        raise _Refused("it has a tensor of impossible size")
    return _Stored(storage, offset, tuple(shape), tuple(strides))


def _tensor(archive: _Archive, name: str, where: _Stored) -> Tensor:
    """Read a tensor of the zip file after a check of its size."""
    count, storage = math.prod(where.shape), where.storage
    if where.strides != _contiguous(where.shape) or where.offset + count > storage.length:
        raise PatchlightError(f"'{archive.path}' is damaged: '{name}' does not lie within its storage")
    size = storage.length * storage.dtype.itemsize
    data = bytearray(archive.read(f"data/{storage.key}", size))
    if len(data) != size:
        raise PatchlightError(f"'{archive.path}' is damaged: '{name}' declares {size} bytes and has {len(data)}")
    flat = torch.frombuffer(data, dtype=storage.dtype)
    return flat[where.offset : where.offset + count].view(where.shape).clone()


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
