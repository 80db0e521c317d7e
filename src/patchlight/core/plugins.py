"""Plugins: files and installed packages that register methods, metrics, rules and so on."""

from __future__ import annotations

import sys
import threading
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from patchlight.core.errors import PatchlightError, warn

GROUP = "patchlight.plugins"
"""The group of entry points of installed plugins."""
_LOCK = threading.RLock()
_INSTALLED: list[str] = []
_FILES: set[Path] = set()


def load_plugin(path: str | Path) -> None:
    """Run a Python file that registers methods, metrics or other entries. A file is loaded only once.

    Args:
        path: The Python file.

    Example:
        >>> pl.load_plugin("my_method.py")                                                      # doctest: +SKIP
    """
    file = Path(path).resolve()
    if not file.is_file() or file.suffix != ".py":
        raise PatchlightError(f"plugin '{path}' is not a Python file; give one that registers a method or metric")
    with _LOCK:
        if file in _FILES:
            return
        name = f"patchlight_plugin_{file.stem}_{len(_FILES)}"
        module = ModuleType(name)
        module.__file__ = str(file)
        sys.modules[name] = module
        try:
            SourceFileLoader(name, str(file)).exec_module(module)
        except Exception as error:
            del sys.modules[name]
            reason = str(error) if isinstance(error, PatchlightError) else f"{type(error).__name__}: {error}"
            raise PatchlightError(f"plugin '{path}' could not be loaded: {reason}") from error
        _FILES.add(file)


def loaded_files() -> list[str]:
    """The loaded files, which other processes load too."""
    return sorted(map(str, _FILES))


def load_installed() -> list[str]:
    """Load the plugins of installed packages once and return their names; broken plugins are skipped with a warning."""
    with _LOCK:
        if not _INSTALLED:
            _INSTALLED.append("")  # a plugin that looks up methods must not start this again
            for point in entry_points(group=GROUP):
                try:
                    point.load()
                    _INSTALLED.append(point.name)
                except Exception as error:
                    warn(f"plugin '{point.name}' could not be loaded: {type(error).__name__}: {error}", RuntimeWarning)
        return _INSTALLED[1:]
