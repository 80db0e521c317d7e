"""What a function of a user's own is recognised by: its file and what that imports; its code, where it has no file."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from patchlight.bench.code import describe_value
from patchlight.core.plugins import load_plugin


def test_what_a_decorator_does_is_part_of_a_function() -> None:
    def smoothed(times: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any) -> Any:
                return [function(*args) for _ in range(times)]

            call.__module__ = "a notebook"
            return call

        return around

    def method(x: int) -> int:
        return x + 1

    assert describe_value(smoothed(2)(method)) != describe_value(smoothed(3)(method))
    assert describe_value(smoothed(2)(method)) == describe_value(smoothed(2)(method))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of a user's own, of which nothing is imported yet."""
    (tmp_path / "mylib" / "deep").mkdir(parents=True)
    texts = {"core": "def g(x):\n    from . import deep\n    return x + deep.A\n", "deep/__init__": "A = 1\n"}
    for name, text in {"__init__": "", "methods": "from .core import g\ndef f(x): return g(x)\n", **texts}.items():
        (tmp_path / "mylib" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path / "mylib"
    for plugin in tmp_path.glob("*.py"):
        plugin.write_text("")  # workers of later tests load it too, without the package
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mylib",)]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "text",
    [
        "import mylib.core\ndef f(x): return mylib.core.g(x)",
        "def f(x):\n    from mylib.core import g\n    return g(x)",
        "def f(x):\n    def inner():\n        import json, torch, no_such_package\n        import mylib.core as c\n",
        "",
    ],
)
@pytest.mark.parametrize("name", ["core.py", "deep/__init__.py"])
def test_every_file_that_is_imported_counts(library: Path, text: str, name: str) -> None:
    """Of a plugin, or (without text) of a package of the user's own."""

    def now() -> Any:
        if not text:
            return describe_value(importlib.import_module("mylib.methods").f)
        path = library.parent / f"mine_{len(list(library.parent.glob('mine_*.py')))}.py"
        path.write_text(text)
        before = set(sys.modules)
        load_plugin(path)
        (plugin,) = (sys.modules[name] for name in set(sys.modules) - before if name.startswith("patchlight_plugin"))
        return describe_value(plugin.f)

    before = now()
    assert now() == before
    with (library / name).open("a") as file:
        file.write("B = 2\n")
    assert now() != before
