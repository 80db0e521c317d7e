"""Describes methods and metrics as plain data, so that a change of a user's code changes their hash."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from modulefinder import ModuleFinder
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from patchlight.core.fingerprints import fingerprint

_LIBRARIES = tuple(str(Path(sysconfig.get_paths()[key]).resolve()) for key in ("stdlib", "purelib", "platlib"))


def describe_value(value: Any, seen: frozenset[int] = frozenset()) -> Any:
    """Describe a value as JSON, such that values that behave the same are equal.

    Functions and classes of Patchlight and of installed packages are described by their names. A user's own are
    described by the hashes of their file and of the files that it imports and that are not installed; without a file,
    as in a notebook, by their code and the functions, classes and values it names. Files and networks that a function
    reads are not included.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray | np.ndarray | Tensor):
        return _digest(value)
    if id(value) in seen:
        return "again"
    seen |= {id(value)}
    if isinstance(value, Mapping):
        return sorted(([repr(key), describe_value(one, seen)] for key, one in value.items()), key=lambda pair: pair[0])
    if isinstance(value, list | tuple):
        return [describe_value(one, seen) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(describe_value(one, seen)) for one in value)
    if isinstance(value, type | FunctionType | ModuleType):
        return _describe_definition(value, seen)
    if isinstance(value, nn.Module):
        return [_plain(value), fingerprint(value), describe_value(type(value), seen)]
    if isinstance(value, functools.partial):
        return describe_value([value.func, value.args, value.keywords], seen)
    for inner in ("__func__", "__wrapped__", "fget", "func"):  # methods, caches and properties
        if hasattr(value, inner):
            return [
                describe_value(getattr(value, inner), seen),
                describe_value(getattr(value, "__self__", None), seen),
            ]
    if is_dataclass(value):
        return [
            describe_value(type(value), seen),
            {f.name: describe_value(getattr(value, f.name), seen) for f in fields(value)},
        ]
    attributes = getattr(value, "__dict__", None) if not _is_installed(type(value).__module__) else None
    return [describe_value(type(value), seen), describe_value(attributes, seen) if attributes else _plain(value)]


def _describe_definition(value: Any, seen: frozenset[int]) -> Any:
    """A function, class or module: its name; if it is the user's, also its files or code."""
    home = value.__name__ if isinstance(value, ModuleType) else value.__module__ or ""
    name = f"{home}.{getattr(value, '__qualname__', '')}"
    if _is_installed(home):
        return name
    module = sys.modules.get(home)
    if getattr(module, "__file__", None):
        assert module is not None
        return [getattr(value, "__qualname__", ""), _sources(module)]
    if isinstance(value, type):
        members = {k: describe_value(v, seen) for k, v in vars(value).items() if callable(v) or k[:2] != "__"}
        return ["class", [describe_value(base, seen) for base in value.__bases__], members]
    if not isinstance(value, FunctionType):
        return name
    cells = [_content(cell) for cell in value.__closure__ or ()]
    named = [value.__globals__[word] for word in _names(value.__code__) if word in value.__globals__]
    outside = [value.__defaults__, value.__kwdefaults__, cells, named]
    return ["function", _code(value.__code__), describe_value(outside, seen)]


def _sources(module: ModuleType) -> dict[str, str]:
    """The hashes of a module's file and of all files that it imports and that are not installed."""
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    home = Path(str(top.__file__)).resolve().parents[1 if hasattr(top, "__path__") else 0]
    places = [str(home), *(place for place in sys.path if not _in_library(place))]
    finder = ModuleFinder(places, excludes=["patchlight"])
    if module.__spec__ is None:
        finder.run_script(str(module.__file__))
    else:
        finder.import_hook(module.__name__)
    files = {name: getattr(one, "__file__", None) for name, one in sorted(finder.modules.items())}
    return {name: _digest(Path(file).read_bytes()) for name, file in files.items() if file}


def _code(code: CodeType) -> list[Any]:
    """A code object, without file name and line numbers."""
    constants = [_code(one) if isinstance(one, CodeType) else describe_value(one) for one in code.co_consts]
    return [code.co_code.hex(), constants, list(code.co_names), list(code.co_varnames), list(code.co_freevars)]


def _names(code: CodeType) -> list[str]:
    """The global names and attributes that a code object and the code objects inside it read."""
    inner = [name for one in code.co_consts if isinstance(one, CodeType) for name in _names(one)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the name has no value yet
        return None


def _in_library(path: str) -> bool:
    return str(Path(path).resolve()).startswith(_LIBRARIES)


def _is_installed(module: str) -> bool:
    """Whether a module is installed or part of Patchlight, whose source is hashed as a whole."""
    root = module.partition(".")[0]
    if root == "patchlight" or root in sys.stdlib_module_names:
        return root != "__main__"
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and _in_library(file)


def _plain(value: Any) -> str:
    return re.sub(r"0x[0-9a-fA-F]+", "", repr(value))


def _digest(value: Any) -> str:
    """The hash of bytes, or of an array with its type and shape."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        header, value = [str(value.dtype), list(value.shape)], value.flatten().view(torch.uint8).numpy()
    else:
        header = [str(value.dtype), list(value.shape)] if isinstance(value, np.ndarray) else []
    data = np.ascontiguousarray(value).tobytes() if isinstance(value, np.ndarray) else bytes(value)
    return hashlib.sha256(repr(header).encode() + data).hexdigest()
