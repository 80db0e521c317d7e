"""Reads the gate checkpoints that the authors of VISION DIFFMASK published, without running code from the file.

The files are PyTorch Lightning checkpoints: zip files with a pickle that also contains names of classes of other
packages, such as the configuration of the ViT. torch reads them with `weights_only`: these names become empty objects
and are not imported. Names from unexpected packages are refused.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, Unsupported, first_line
from patchlight.trained.diffmask.gates import DiffMask, new_gates

HARMLESS = {"torch", "collections", "transformers", "pytorch_lightning", "lightning", "numpy", "pathlib", "argparse"}
"""Packages whose classes a checkpoint may name; they are not imported."""
CONTAINERS = {"dict", "list", "set", "frozenset", "object"}


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
    tensors, scale = (_read_safetensors if path.suffix == ".safetensors" else _read_zip)(path)
    alpha = _number(scale) if alpha is None else alpha
    if alpha is None or not (math.isfinite(alpha) and alpha > 0):
        raise PatchlightError(f"'{path}' does not contain the scale of its gates (mul_activation); give it as alpha")
    gates = new_gates(vit, alpha=alpha)
    gates.load_state_dict(_gates(tensors, vit, path))
    imported = {"file": path.name, "alpha": alpha, "multipliers": _multipliers(tensors)}
    return DiffMask.of(gates, vit, imported=imported)


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
    each = {f"gate.g_hat.{i}.{name}": (key, i, shape) for i in range(gates) for name, (key, shape) in parts.items()}
    return {**each, "gate.placeholder": ("baseline", None, (1, 1, width))}


def _gates(tensors: Mapping[str, Tensor], vit: Anatomy, path: Path) -> dict[str, Tensor]:
    """The state of `Gates` from a checkpoint, after a check of all names and shapes."""
    count = vit.depth + 2
    shapes = layout(count, vit.width)
    gates = sum(name.startswith("gate.g_hat.") and name.endswith(".add_activation") for name in tensors)
    missing = [name for name in shapes if name not in tensors]
    if missing or gates != count:
        have = f"it has {gates} gates" if gates else "it has no gates"
        raise PatchlightError(
            f"'{path}' does not fit {vit.name}, which needs {count} gates of width {vit.width}: {have}"
            + (f", and '{missing[0]}' is missing" if missing and gates else "")
        )
    for name, (_, _, shape) in shapes.items():
        stored = list(tensors[name].shape)
        if stored != list(shape):
            raise PatchlightError(f"'{path}' does not fit {vit.name}: '{name}' has shape {stored}, not {list(shape)}")
    state = {name: value.clone() for name, value in new_gates(vit).cpu().state_dict().items()}
    for name, (key, gate, _) in shapes.items():
        value = tensors[name].float()
        if not bool(value.isfinite().all()):
            raise PatchlightError(f"'{path}' is damaged: '{name}' has values that are not finite")
        target = state[key] if gate is None else state[key][gate]
        target.copy_(value.reshape(target.shape))
    return state


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a file, and the scale of its gates if it has one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            scale = (file.metadata() or {}).get("mul_activation")
            return {name: file.get_tensor(name) for name in file.keys()}, scale  # noqa: SIM118
    except SafetensorError as error:
        raise PatchlightError(f"'{path}' is damaged: {str(error).splitlines()[0]}") from error


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _multipliers(tensors: Mapping[str, Tensor]) -> list[float]:
    """The Lagrange multipliers at the end of the training, which the authors' code calls alpha."""
    values = (tensors.get(f"alpha.{i}") for i in range(len(tensors)))
    return [float(value) for value in values if value is not None and value.ndim == 0 and value.isfinite()]


class _Inert:
    """Replaces an object of another package: it has no behaviour."""

    def __init__(self, *args: Any) -> None:
        """Ignore everything."""

    def __setstate__(self, state: Any) -> None:
        """Ignore everything."""


def _read_zip(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a zip file of torch.save, and the scale of its gates if it has one."""
    try:
        _check_records(path)
        names = get_unsafe_globals_in_checkpoint(path)
        for name in names:
            package, _, rest = name.partition(".")
            if package not in HARMLESS and not (package in ("builtins", "__builtin__") and rest in CONTAINERS):
                raise PatchlightError(
                    f"'{path}' is refused: it names {name}, which a checkpoint of gates does not need"
                )
        with safe_globals([(type("Inert", (_Inert,), {}), name) for name in names]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except PatchlightError:
        raise
    except Exception as error:  # a file that was tampered with can fail in any way
        raise PatchlightError(
            f"'{path}' is damaged or not a checkpoint ({first_line(error)}); give a zip file of torch.save (PyTorch "
            "1.6 or later) or safetensors"
        ) from error
    if not isinstance(content, dict):
        raise PatchlightError(f"'{path}' does not contain a state_dict")
    state, settings = content.get("state_dict", content), content.get("hyper_parameters")
    items = state.items() if isinstance(state, dict) else ()
    named = {name: value for name, value in items if isinstance(name, str) and isinstance(value, Tensor)}
    tensors = {k: v for k, v in named.items() if v.is_floating_point() and v.layout == torch.strided}
    return tensors, settings.get("mul_activation") if isinstance(settings, dict) else None


def _check_records(path: Path) -> None:
    """Refuse records that are compressed or that declare more bytes than the file has."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > size:
                record = f"its record '{info.filename.partition('/')[2]}'"
                raise PatchlightError(
                    f"'{path}' is refused: {record} is compressed or declares {info.file_size} bytes, over {size}"
                )
