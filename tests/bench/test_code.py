"""What a function's code is recognised by."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from patchlight.bench.code import described


def test_what_a_decorator_does_is_part_of_a_function() -> None:
    def smoothed(times: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any) -> Any:
                return [function(*args) for _ in range(times)]

            return call

        return around

    def method(x: int) -> int:
        return x + 1

    assert described(smoothed(2)(method)) != described(smoothed(3)(method))
    assert described(smoothed(2)(method)) == described(smoothed(2)(method))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of a user's own, of which nothing is imported yet."""
    (tmp_path / "mylib" / "deep").mkdir(parents=True)
    for name, text in {"__init__": "", "core": "def g(x):\n    return x + 1\n", "deep/part": "A = 1\n"}.items():
        (tmp_path / "mylib" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path / "mylib"
    for name in [name for name in sys.modules if name.partition(".")[0] == "mylib"]:
        del sys.modules[name]


def function(text: str, module: str = "my_plugin") -> Any:
    """The function f of a module."""
    space: dict[str, Any] = {"__name__": module, "__package__": module.rpartition(".")[0]}
    exec(text, space)
    return space["f"]


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("import mylib\nimport mylib.core\ndef f(x):\n    return mylib.core.g(x)", "my_plugin"),
        ("from mylib import core\ndef f(x):\n    return core.g(x)", "my_plugin"),
        ("def f(x):\n    from mylib.core import g\n    return g(x)", "my_plugin"),
        ("def f(x):\n    import mylib.core as c\n    return [c.g(y) for y in x]", "my_plugin"),
        ("def f(x):\n    def inner():\n        import mylib.core\n        return mylib.core.g(x)", "my_plugin"),
        ("def f(x):\n    from .core import g\n    return g(x)", "mylib.methods"),
    ],
)
@pytest.mark.parametrize("name", ["core.py", "deep/part.py"])
def test_every_file_of_a_package_that_is_used_counts(library: Path, text: str, module: str, name: str) -> None:
    before = described(function(text, module))
    importlib.import_module("mylib.deep.part")
    assert described(function(text, module)) == before, "whatever is imported by now"
    with (library / name).open("a") as file:
        file.write("B = 2\n")
    assert described(function(text, module)) != before


def test_what_libraries_hold_does_not_count(library: Path) -> None:
    told = described(function("def f(x):\n    import json, torch.nn, pyarrow, no_such_package\n    return json"))
    assert told[-1] == {"no_such_package": {}}
