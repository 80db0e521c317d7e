"""Reads and writes attributions: scores as safetensors, everything else as JSON, both checked when they are read."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints
from urllib.parse import quote, unquote

from pydantic import BaseModel, ConfigDict, Field, create_model

from patchlight.core.attribution import Attribution
from patchlight.core.errors import PatchlightError, first_line
from patchlight.core.files import write_atomic
from patchlight.core.images import MAX_PIXELS
from patchlight.core.layout import IMAGE_AXES

_IN_MEMORY = ("photos", "question", "words")
"""Fields that are not saved."""
_METADATA, _SCORES = "attribution.json", "scores.safetensors"
_TYPES = {"scores": ("F32", "F64"), "error": ("F32", "F64"), "target": ("I64", "I32"), "against": ("I64", "I32")}
"""The tensors of an attribution, and the types that they may have in a file."""
_BEYOND_IMAGES = ("axes", "geometry")
"""Fields of format 2, which is written for maps of videos, volumes and sounds; maps of images have format 1."""
_LONGEST_HEADER = 2**16
"""Bytes; the header of these four tensors is far shorter."""


def write_attribution(att: Attribution, folder: Path, force: bool = False) -> Path:
    """Write an attribution to a folder: see `Attribution.save`.

    The JSON names the file of the scores, so the old attribution can be read until the new one is complete.
    """
    _check_finite(att)
    if folder.exists() and not (force and (folder / _METADATA).is_file()):
        raise PatchlightError(f"'{folder}' already exists; choose another folder, or replace it with force=True")
    try:
        if folder.exists():
            old = _scores_file(folder)
            _write_files(att, folder, f"scores-{secrets.token_hex(4)}.safetensors")
            old.unlink(missing_ok=True)
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _write_files(att, part, _SCORES)
            part.chmod(0o755)
            os.rename(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise PatchlightError(f"'{folder}' cannot be written: {error.strerror or error}") from error
    return folder


def write_attributions(maps: Mapping[str, Attribution], folder: Path, force: bool = False) -> Path:
    """Write several attributions below a folder: see `Attributions.save`."""
    for att in maps.values():
        _check_finite(att)
    if not force and folder.exists():
        raise PatchlightError(f"'{folder}' already exists; choose another folder, or replace it with force=True")
    earlier = {path.parent for path in folder.glob(f"*/{_METADATA}")}
    for label, att in maps.items():
        name = quote(label, safe=" +=,()")  # reversible, and without slashes
        earlier.discard(write_attribution(att, folder / (f"%2E{name[1:]}" if name.startswith(".") else name), force))
    for unused in earlier:
        _remove_attribution(unused)
    return folder


def _remove_attribution(folder: Path) -> None:
    """Remove the two files of an attribution, and the folder if nothing else is in it."""
    try:
        scores = _scores_file(folder)
        (folder / _METADATA).unlink(missing_ok=True)
        scores.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        raise PatchlightError(f"'{folder}' cannot be removed: {error.strerror or error}") from error


def read_attributions(folder: Path) -> dict[str, Attribution]:
    """The attributions below a folder, by method."""
    folders = {unquote(path.parent.name): path.parent for path in sorted(folder.glob(f"*/{_METADATA}"))}
    if not folders:
        raise PatchlightError(f"'{folder}' holds no attributions; give the folder that `Attributions.save` wrote")
    return {label: read_attribution(path) for label, path in folders.items()}


def attribution_bytes(att: Attribution, scores: str = _SCORES) -> dict[str, bytes]:
    """The content of the files of an attribution, by name: the scores, then the JSON that names them."""
    from safetensors.torch import save

    _check_finite(att)
    tensors = {name: getattr(att, name) for name in _TYPES if getattr(att, name) is not None}
    excluded = (*_TYPES, *_IN_MEMORY, *(_BEYOND_IMAGES if att.pictures else ()))
    metadata = {f.name: getattr(att, f.name) for f in fields(att) if f.name not in excluded}
    for name in {"preprocess", "geometry"} & set(metadata):
        metadata[name] = None if metadata[name] is None else asdict(metadata[name])
    text = json.dumps({"format": 1 if att.pictures else 2, "tensors": scores, **metadata}, indent=1, default=repr)
    return {
        scores: save({name: tensor.contiguous() for name, tensor in tensors.items()}),
        _METADATA: (text + "\n").encode(),
    }


def read_attribution(folder: Path) -> Attribution:
    """Read an attribution: see `Attribution.load`."""
    from safetensors import SafetensorError

    try:
        metadata = _read_metadata(folder)
        axes = metadata.get("axes", IMAGE_AXES)
        att = Attribution(**_read_tensors(folder / metadata.pop("tensors"), len(axes)), **metadata)
        _check_consistent(att)
        return att
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise PatchlightError(f"'{folder}' holds no attribution ({name} is missing)") from error
    except OSError as error:
        raise PatchlightError(f"'{folder}' cannot be read: {error.strerror or error}") from error
    except (ValueError, SafetensorError) as error:
        raise PatchlightError(f"'{folder}' is damaged: {first_line(error)}") from error


def _check_finite(att: Attribution) -> None:
    if not bool(att.scores.isfinite().all()) or (att.error is not None and bool(att.error.isinf().any())):
        raise PatchlightError(f"the scores of {att.method} contain NaN or infinity; such a map cannot be saved")


def _write_files(att: Attribution, folder: Path, scores: str) -> None:
    """Write the scores under this name, then the JSON that names them."""
    try:
        for name, data in attribution_bytes(att, scores).items():
            write_atomic(folder / name, data)
    finally:
        if _scores_file(folder) != folder / scores:
            (folder / scores).unlink(missing_ok=True)


def _scores_file(folder: Path) -> Path:
    """The file of the scores that the JSON of a folder names."""
    try:
        return folder / str(_read_metadata(folder)["tensors"])
    except (OSError, ValueError):
        return folder / _SCORES


@cache
def _schema() -> type[BaseModel]:
    """The schema of attribution.json: every field of `Attribution` except its tensors."""
    hints = get_type_hints(Attribution)
    keys: dict[str, Any] = {
        f.name: (hints[f.name], ... if f.default is MISSING and f.default_factory is MISSING else None)
        for f in fields(Attribution)
        if f.name not in (*_TYPES, *_IN_MEMORY)
    }
    scores = Annotated[str, Field(pattern=r"^scores(-[0-9a-f]+)?\.safetensors$")]
    config = ConfigDict(extra="forbid", strict=True)
    return create_model("Metadata", __config__=config, format=(Literal[1, 2], ...), tensors=(scores, _SCORES), **keys)


def _read_metadata(folder: Path) -> dict[str, Any]:
    """The keys of a checked attribution.json; missing ones have the default of the dataclass."""
    path = folder / _METADATA
    _check_fits_memory(path)
    try:
        read = _schema().model_validate_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{_METADATA}: {first_line(error)}") from error
    unexpected = sorted(read.model_fields_set & set(_BEYOND_IMAGES))
    if (read.format == 2) != (unexpected == sorted(_BEYOND_IMAGES)):  # type: ignore[attr-defined]
        raise ValueError(f"{_METADATA}: axes and geometry belong to format 2, and to no other")
    return {"tensors": _SCORES} | {name: getattr(read, name) for name in read.model_fields_set if name != "format"}


def _read_tensors(path: Path, axes: int) -> dict[str, Any]:
    """The tensors of maps with this many axes; the header is checked before the file is read."""
    from safetensors.torch import load

    _check_fits_memory(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(min(length, _LONGEST_HEADER))
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        shape = [int(side) for side in header["scores"]["shape"]]
        types = {name: str(tensor["dtype"]) for name, tensor in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path.name} has no header that declares scores") from error
    if not {"scores", "target"} <= set(types) <= set(_TYPES):
        raise ValueError(f"{path.name} holds {', '.join(sorted(types))}; it must hold scores and target")
    for name, kind in types.items():
        if kind not in _TYPES[name]:
            raise ValueError(f"{name} has the type {kind}, not {' or '.join(_TYPES[name])}")
    if len(shape) - axes not in (1, 2) or min(shape) < 1 or math.prod(shape[-axes:]) > MAX_PIXELS:
        kind = "a map of an image" if axes == 2 else f"a map with {axes} axes"
        raise ValueError(f"scores have the shape {shape}, which is not {kind}")
    tensors: dict[str, Any] = load(path.read_bytes())  # from bytes: safetensors cannot open paths that are not UTF-8
    return {name: tensor if tensor.is_floating_point() else tensor.long() for name, tensor in tensors.items()}


def _check_fits_memory(path: Path) -> None:
    size = path.stat().st_size
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else size
    if size > memory:
        raise ValueError(f"{path.name} has {size >> 30} GiB; this machine has {memory >> 30} GiB of memory")


def _check_consistent(att: Attribution) -> None:
    """Raise a ValueError if values do not belong together."""
    shape = att.scores.shape[: -len(att.axes)]
    for name, index in (("target", att.target), ("against", att.target if att.against is None else att.against)):
        if index.shape != shape or bool((index < 0).any()):
            raise ValueError(f"{name} is not one class index for each map of {list(att.scores.shape)}")
    if not bool(att.scores.isfinite().all()):
        raise ValueError("scores are not finite numbers")
    if att.error is not None and (att.error.shape != att.scores.shape or bool(att.error.isinf().any())):
        raise ValueError("error is not one finite number or NaN for each score")
    maps, images = math.prod(shape), len(att)
    for name, count in (("labels", maps), ("against_labels", maps), ("samples", images), ("images", images)):
        if len(getattr(att, name)) not in (0, count):
            raise ValueError(f"{name} has {len(getattr(att, name))} values, not {count}")
    for name, numbers in att.facts.items():
        if len(numbers) != len(att) or not all(map(math.isfinite, numbers)):
            raise ValueError(f"facts.{name} is not one finite number for each of {len(att)} images")
    for name, size in (("image_size", att.image_size), ("extent", att.extent or att.image_size)):
        if len(size) != len(att.axes) or min(size) < 1 or math.prod(size) > MAX_PIXELS:
            raise ValueError(f"{name} is {list(size)[:3]}")
    if att.geometry is not None and len(att.geometry.size) != len(att.axes):
        raise ValueError(f"geometry has {len(att.geometry.size)} axes, but a map has {len(att.axes)}")
    if att.preprocess is not None and att.preprocess.size != att.image_size:
        raise ValueError(f"image_size is {list(att.image_size)}, but preprocess.size is {list(att.preprocess.size)}")
