"""Extensions: somebody's own file or package that registers methods, metrics, rules, … as the bundled rooms do."""

from __future__ import annotations

import sys
import threading
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from patchlight.core.errors import PatchlightError, warn

GROUP = "patchlight.plugins"
"""The group of entry points a package names its modules in; they are loaded with the bundled ones."""
_LOCK = threading.RLock()
_INSTALLED: list[str] = []
_FILES: set[Path] = set()


def load_plugin(path: str | Path) -> None:
    """Run a Python file that registers something; a file that was loaded already is left alone.

    >>> load_plugin("my_method.py")                              # doctest: +SKIP
    """
    file = Path(path).resolve()
    if not file.is_file() or file.suffix != ".py":
        raise PatchlightError(f"plugin '{path}' is no Python file; give one that registers a method, metric, …")
    with _LOCK:
        if file in _FILES:
            return
        name = f"patchlight_plugin_{file.stem}_{len(_FILES)}"
        loader = SourceFileLoader(name, str(file))
        module = ModuleType(name)
        module.__file__ = str(file)
        sys.modules[name] = module
        try:
            loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            told = str(error) if isinstance(error, PatchlightError) else f"{type(error).__name__}: {error}"
            raise PatchlightError(f"plugin '{path}' could not be loaded: {told}") from error
        _FILES.add(file)


def loaded_files() -> list[str]:
    """The files that were loaded, for processes that have to load them too."""
    return sorted(map(str, _FILES))


def load_installed() -> list[str]:
    """Load what installed packages offer, once; one that breaks is told and left out. Returns their names."""
    with _LOCK:
        if not _INSTALLED:
            _INSTALLED.append("")  # a plugin may itself ask for methods
            for point in entry_points(group=GROUP):
                try:
                    point.load()
                    _INSTALLED.append(point.name)
                except Exception as error:
                    warn(f"plugin '{point.name}' could not be loaded: {type(error).__name__}: {error}", RuntimeWarning)
        return _INSTALLED[1:]
