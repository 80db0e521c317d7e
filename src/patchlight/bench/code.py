"""What a method or metric is, as plain data: where it is not Patchlight's own, with all the code it reaches."""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from patchlight.core.fingerprints import fingerprint

_LIBRARIES = tuple(str(Path(sysconfig.get_paths()[key]).resolve()) for key in ("stdlib", "purelib", "platlib"))
_SUFFIXES = (*SOURCE_SUFFIXES, *EXTENSION_SUFFIXES)


def described(value: Any, seen: set[int] | None = None) -> Any:
    """A value as JSON takes it, equal where it does the same: a function is its code and what the code names.

    Functions, classes and modules of Patchlight and of libraries go by their names; a user's own go by their code, with
    the functions, classes and values that they use, in turn, and modules by all files of their package. What a function
    reads from outside (a file, a network), and other packages that a module imports, are not in it.
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
        return [name, _package(home)]
    if isinstance(value, type):
        own = {k: described(v, seen) for k, v in vars(value).items() if not k.startswith("__") or callable(v)}
        return ["class", [described(base, seen) for base in value.__bases__], own]
    function = value.__wrapped__ if isinstance(value, functools._lru_cache_wrapper) else value
    if not isinstance(function, FunctionType):
        return name
    cells = [_content(cell) for cell in function.__closure__ or ()]
    named = [function.__globals__[word] for word in _names(function.__code__) if word in function.__globals__]
    rest = [function.__defaults__, function.__kwdefaults__, cells, named]
    imported = {word: _package(word) for word in _imported(function.__code__, home) if not _is_library(word)}
    return ["function", _code(function.__code__), *(described(one, seen) for one in rest), imported]


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


def _imported(code: CodeType, home: str) -> list[str]:
    """The packages from which code of the module `home`, and the code inside it, imports as it runs."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    found = [
        (home if level.argval else step.argval).partition(".")[0]
        for level, step in zip(steps, steps[2:], strict=False)
        if step.opname == "IMPORT_NAME"
    ]
    inner = [name for c in code.co_consts if isinstance(c, CodeType) for name in _imported(c, home)]
    return sorted({*found, *inner})


def _package(module: str) -> dict[str, str]:
    """The hashes of all source files of the package that a module is in, imported yet or not."""
    found: dict[str, str] = {}
    for place in _places(module.partition(".")[0]):
        files = _sources(place) if place.is_dir() else [place] if place.is_file() else []
        found |= {file.relative_to(place.parent).as_posix(): _bytes_of(file) for file in files}
    return found


def _sources(folder: Path) -> Iterator[Path]:
    """What can be imported from a folder, and from those below it, as far as there is something in each."""
    held = sorted(folder.iterdir())
    files = [path for path in held if path.name.endswith(_SUFFIXES)]
    yield from files
    if files:
        for path in held:
            if path.name.isidentifier() and path.is_dir() and not path.is_symlink():
                yield from _sources(path)


def _places(module: str) -> list[Path]:
    """The folders of a package, or the file of a module; nothing where it has none."""
    loaded = sys.modules.get(module)
    with contextlib.suppress(ImportError, ValueError):
        spec = getattr(loaded, "__spec__", None) or (find_spec(module) if loaded is None else None)
        folders = getattr(spec, "submodule_search_locations", None)
        if folders:
            return [Path(folder).resolve() for folder in folders]
        file = getattr(loaded, "__file__", None) or (spec.origin if spec is not None and spec.has_location else None)
        return [Path(file).resolve()] if file else []
    return []


@functools.cache
def _is_library(module: str) -> bool:
    """Whether a module is Patchlight's own (its source is hashed as a whole) or an installed one."""
    root = module.partition(".")[0]
    if root == "patchlight" or root in sys.builtin_module_names or root in sys.stdlib_module_names:
        return root != "__main__"
    file = getattr(sys.modules.get(module), "__file__", None)
    places = [Path(file).resolve()] if file is not None else _places(root)
    return bool(places) and all(str(place).startswith(_LIBRARIES) for place in places)


def _plain(value: Any) -> str:
    return re.sub(r"0x[0-9a-fA-F]+", "", repr(value))


def _bytes_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _bytes(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
