"""What a method or metric is, as plain data: where it is not Patchlight's own, with all the code it reaches."""

from __future__ import annotations

import functools
import hashlib
import re
import sysconfig
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from patchlight.fingerprints import fingerprint

_LIBRARIES = tuple(str(Path(sysconfig.get_paths()[key]).resolve()) for key in ("stdlib", "purelib", "platlib"))


def described(value: Any, seen: set[int] | None = None) -> Any:
    """A value as JSON takes it, equal where it does the same: a function is its code and what the code names.

    Functions, classes and modules of Patchlight and of libraries go by their names; a user's own go by their code, with
    the functions, classes and values that they use, in turn. What a function reads from outside (a file, a network) is
    not in it.
    """
    seen = set() if seen is None else seen
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray):
        return ["bytes", hashlib.sha256(value).hexdigest()]
    if isinstance(value, Tensor):
        array = value.detach().cpu().contiguous()
        return ["tensor", str(array.dtype), list(array.shape), _bytes(array.flatten().view(torch.uint8).numpy())]
    if isinstance(value, np.ndarray):
        return ["array", str(value.dtype), list(value.shape), _bytes(value)]
    if isinstance(value, staticmethod | classmethod):
        return described(value.__func__, seen)
    if id(value) in seen:
        return ["again", getattr(value, "__qualname__", type(value).__qualname__)]
    seen.add(id(value))
    if isinstance(value, type | FunctionType | ModuleType | functools._lru_cache_wrapper):
        return _named(value, seen)  # once in all: however many use it
    try:
        return _held(value, seen)
    finally:
        seen.discard(id(value))


def _held(value: Any, seen: set[int]) -> Any:
    """A container or an object, by what it holds."""
    if isinstance(value, Mapping):
        return ["mapping", sorted(([repr(k), described(v, seen)] for k, v in value.items()), key=lambda pair: pair[0])]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(described(one, seen) for one in value)]
    if isinstance(value, set | frozenset):
        return ["set", *sorted(repr(described(one, seen)) for one in value)]
    if isinstance(value, functools.partial):
        return ["partial", *(described(one, seen) for one in (value.func, value.args, value.keywords))]
    if isinstance(value, MethodType):
        return ["method", described(value.__func__, seen), described(value.__self__, seen)]
    if isinstance(value, nn.Module):
        return ["module", _plain(value), fingerprint(value), described(type(value), seen)]
    if isinstance(value, property):
        return ["property", described(value.fget, seen), described(value.fset, seen)]
    if isinstance(value, functools.cached_property):
        return ["property", described(value.func, seen)]
    if is_dataclass(value):
        own = {f.name: described(getattr(value, f.name), seen) for f in fields(value)}
        return [described(type(value), seen), own]
    held = getattr(value, "__dict__", {}) if not _is_library(type(value).__module__) else {}
    return [described(type(value), seen), described(held, seen) if held else _plain(value)]


def _named(value: Any, seen: set[int]) -> Any:
    """A function, class or module: its name, and its code where that is a user's own."""
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    name = f"{home}.{getattr(value, '__qualname__', '')}"
    if _is_library(home):
        return name
    if isinstance(value, ModuleType):
        file = getattr(value, "__file__", None)
        return [name, hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and Path(file).is_file() else ""]
    if isinstance(value, type):
        own = {k: described(v, seen) for k, v in vars(value).items() if not k.startswith("__") or callable(v)}
        return ["class", [described(base, seen) for base in value.__bases__], own]
    function = value.__wrapped__ if isinstance(value, functools._lru_cache_wrapper) else value
    if not isinstance(function, FunctionType):
        return name
    cells = [_content(cell) for cell in function.__closure__ or ()]
    named = [function.__globals__[word] for word in _names(function.__code__) if word in function.__globals__]
    rest = [function.__defaults__, function.__kwdefaults__, cells, named]
    return ["function", _code(function.__code__), *(described(one, seen) for one in rest)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None


def _code(code: CodeType) -> list[Any]:
    """A code object without its file and line numbers."""
    constants = [_code(c) if isinstance(c, CodeType) else described(c) for c in code.co_consts]
    return [code.co_code.hex(), constants, list(code.co_names), list(code.co_varnames), list(code.co_freevars)]


def _names(code: CodeType) -> list[str]:
    """The global names and attributes that code and the code inside it read."""
    inner = [name for c in code.co_consts if isinstance(c, CodeType) for name in _names(c)]
    return list(dict.fromkeys([*code.co_names, *inner]))


@functools.cache
def _is_library(module: str) -> bool:
    """Whether a module is Patchlight's own (its source is hashed as a whole) or an installed one."""
    import sys

    root = module.partition(".")[0]
    if root == "patchlight" or root in sys.builtin_module_names or root in sys.stdlib_module_names:
        return root != "__main__"
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and str(Path(file).resolve()).startswith(_LIBRARIES)


def _plain(value: Any) -> str:
    return re.sub(r"0x[0-9a-fA-F]+", "", repr(value))


def _bytes(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
