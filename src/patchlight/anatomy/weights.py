"""Weights and class names, read from files; nothing is unpickled."""

from __future__ import annotations

import csv
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from patchlight.core.errors import PatchlightError


def read_labels(labels: str | Path | Sequence[str] | Mapping[int, str]) -> list[str]:
    """Class names from a list, a dictionary by index, a text file (one per line), or a CSV file.

    A CSV file has a column `names`, `name` or `label`; a column `class_index`, `index` or `id` gives the order.
    """
    if isinstance(labels, Mapping):
        return _by_index(list(labels.items()), "the dictionary of labels")
    if (
        isinstance(labels, bytes)
        or not isinstance(labels, str | Path | Iterable)
        or isinstance(labels, set | frozenset)
    ):
        raise PatchlightError(f"labels have type {type(labels).__name__}; give a list of names, or a file of them")
    if not isinstance(labels, str | Path):
        return [str(label) for label in labels]
    path = Path(labels)
    if not os.path.isfile(path):
        raise PatchlightError(f"no label file at '{path}'")
    try:
        text = path.read_text(encoding="utf-8-sig")
        if "\0" in text:
            raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "it contains zero bytes")
        names = _read_table(text, path) if path.suffix.lower() == ".csv" else text.split("\n")
    except UnicodeDecodeError as error:
        raise PatchlightError(f"'{path}' is not a text file in UTF-8, so no labels can be read from it") from error
    except (csv.Error, OSError) as error:
        raise PatchlightError(f"'{path}' cannot be read as labels: {error}") from error
    while names and not names[-1].strip():
        names.pop()
    if not names:
        raise PatchlightError(f"'{path}' contains no labels")
    blank = next((i for i, name in enumerate(names) if not name.strip()), None)
    if blank is not None:
        raise PatchlightError(f"class {blank} has no name in '{path}', though later ones do")
    return names


def _read_table(text: str, path: Path) -> list[str]:
    rows = list(csv.DictReader(text.splitlines(keepends=True)))
    column = next((c for c in ("names", "name", "label", "labels") if rows and c in rows[0]), None)
    if column is None:
        raise PatchlightError(f"'{path}' has no column called names, name or label, or no line below it")
    names = [row[column] or "" for row in rows]
    order = next((c for c in ("class_index", "index", "id") if c in rows[0]), None)
    return names if order is None else _by_index([(row[order], n) for row, n in zip(rows, names, strict=True)], path)


def _by_index(pairs: Sequence[tuple[Any, str]], source: Path | str) -> list[str]:
    """Names in the order of their indices, which must be 0 to n-1, each once."""
    where = f"'{source}'" if isinstance(source, Path) else source
    wrong = next((i for i, _ in pairs if not re.fullmatch(r"\s*[0-9]{1,9}\s*", str(i))), None)
    if wrong is not None:
        raise PatchlightError(f"{where} has the class index {str(wrong)[:40]!r}; indices are integers from 0")
    names = {int(index): str(name) for index, name in pairs}
    twice = next((i for i, count in Counter(int(i) for i, _ in pairs).items() if count > 1), None)
    if twice is not None:
        raise PatchlightError(f"{where} names class {twice} more than once; give each index from 0 once")
    missing = next((i for i in range(len(names)) if i not in names), None)
    if missing is not None:
        raise PatchlightError(f"{where} has {len(names)} names up to class {max(names)}, but none for class {missing}")
    return [names[i] for i in range(len(names))]


_HOLDERS = ("state_dict", "model", "model_state_dict", "module", "net", "network", "weights", "params")
"""Keys under which checkpoints store the model beside other things."""
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema", "ema_model")
_WRAPPERS = ("module.", "model.", "backbone.")
"""Prefixes that training scripts add to the name of every weight."""
_POSITIONS = re.compile(r"(.*\.)?(pos_embed|pos_embedding|position_embeddings|position_embedding\.weight)")
_BIASES = re.compile(r"(.*)\.relative_position_bias_table")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name from a safetensors file, or a torch file read without unpickling code.

    Prefixes that wrappers add to all names are removed.
    """
    if not os.path.isfile(path):
        raise PatchlightError(f"no weights at '{path}'")
    if path.suffix not in (".safetensors", ".pth", ".pt", ".bin"):
        raise PatchlightError(f"'{path}' cannot be read as weights; give a .safetensors, .pth, .pt or .bin file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return _strip_prefix(load_file(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise PatchlightError(
            f"'{path}' cannot be read as weights: it is damaged, or contains more than plain tensors"
        ) from error
    return _strip_prefix(_find_tensors(state, path))


def _find_tensors(state: Any, path: Path) -> dict[str, Tensor]:
    """The dictionary of plain tensors in a checkpoint: itself, under a known key, or the only one."""
    if isinstance(state, dict) and state and all(isinstance(v, Tensor) for v in state.values()):
        return state
    inside = {key: v for key, v in state.items() if isinstance(v, dict) and v} if isinstance(state, dict) else {}
    known = next((key for key in (*_HOLDERS, *_AVERAGED) if key in inside), None)
    others = [key for key, v in inside.items() if all(isinstance(each, Tensor) for each in v.values())]
    if known is not None or len(others) == 1:
        return _find_tensors(inside[known if known is not None else others[0]], path)
    if others:
        named = ", ".join(f"'{key}'" for key in others)
        raise PatchlightError(f"'{path}' contains tensors under {named}; save those of one model only")
    raise PatchlightError(f"'{path}' does not contain plain tensors by name")


def _strip_prefix(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names without the prefix that `torch.compile`, data parallelism or a training script added to all of them."""
    state = {key.replace("_orig_mod.", ""): value for key, value in state.items() if key != "n_averaged"}
    while state:
        prefix = next((p for p in _WRAPPERS if all(key.startswith(p) for key in state)), None)
        if prefix is None:
            break
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def resampled(state: dict[str, Tensor], model: nn.Module, grid: tuple[int, ...], source: str) -> dict[str, Tensor]:
    """Weights with position tables, made for another image size, resampled to a model's grid as timm does."""
    from timm.layers.pos_embed import resample_abs_pos_embed
    from timm.layers.pos_embed_rel import resize_rel_pos_bias_table

    out, expected = dict(state), model.state_dict()
    for key in (k for k in expected if k in state and expected[k].shape != state[k].shape):
        table, bias = state[key], _BIASES.fullmatch(key)
        if bias is not None:
            window, shape = cast(Any, model.get_submodule(bias[1])).window_size, expected[key].shape
            out[key] = resize_rel_pos_bias_table(table, new_window_size=window, new_bias_shape=tuple(shape))
        elif (
            _POSITIONS.fullmatch(key)
            and table.ndim == expected[key].ndim
            and table.shape[-1] == expected[key].shape[-1]
        ):
            prefix = expected[key].shape[-2] - grid[0] * grid[1]
            side = math.isqrt(max(table.shape[-2] - prefix, 0))
            if prefix < 0 or side * side + prefix != table.shape[-2] or side == 0:
                raise PatchlightError(
                    f"'{key}' in {source} is {list(table.shape)}, which is not a square grid of positions after "
                    f"{prefix} prefix positions; it cannot be resampled to {grid[0]} x {grid[1]}"
                )
            flat = table if table.ndim == 3 else table[None]
            new = resample_abs_pos_embed(flat.float(), list(grid), (side, side), prefix).to(table.dtype)
            out[key] = new if table.ndim == 3 else new[0]
    return out


def fill(model: nn.Module, state: dict[str, Tensor], source: str, name: str) -> None:
    expected = model.state_dict()
    missing = [k for k in expected if k not in state]
    extra = [k for k in state if k not in expected]
    shapes = [k for k in expected if k in state and expected[k].shape != state[k].shape]
    if missing or extra or shapes:
        parts = [f"{len(keys)} {word} ({keys[0]})" for word, keys in (("missing", missing), ("extra", extra)) if keys]
        parts += [f"'{k}' is {list(state[k].shape)} but must be {list(expected[k].shape)}" for k in shapes[:1]]
        if shapes and _POSITIONS.fullmatch(shapes[0]):
            parts.append("give img_size= to have its positions resampled")
        raise PatchlightError(f"weights in {source} do not fit {name}: {'; '.join(parts)}")
    other = next((k for k in expected if not _same_kind(state[k], expected[k])), None)
    if other is not None:
        given = "a tensor without values" if state[other].is_meta else str(state[other].dtype).removeprefix("torch.")
        kind = expected[other].dtype
        needed = "floating point" if kind.is_floating_point else str(kind).removeprefix("torch.")
        raise PatchlightError(f"weights in {source} do not fit {name}: '{other}' is {given} but must be {needed}")
    model.load_state_dict(state)


def _same_kind(given: Tensor, expected: Tensor) -> bool:
    """Whether values can be copied unchanged: floats of any precision into floats, otherwise the same type."""
    plain = given.layout is torch.strided and not given.is_quantized and not given.is_meta
    return plain and (given.is_floating_point() if expected.is_floating_point() else given.dtype == expected.dtype)
