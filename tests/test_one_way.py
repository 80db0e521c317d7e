"""One way to do each thing: what only one module does, no other does beside it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import patchlight

SOURCE = Path(patchlight.__file__).parent
ONLY = {
    "interpolate": {"core/resize.py", "methods/mda.py"},
    "log_softmax": {"core/targets.py"},
    "logsigmoid": {"core/targets.py", "trained/diffmask/hard_concrete.py"},
    "kl_div": set(),
    "index_select": {"anatomy/opened.py"},
}
"""By the name of a torch function, the files that call it: the upsampler (and MDA's squares, which its
authors average with soft borders), log-probabilities (and those of DiffMask's
gates, which are of no class), the gatherer of tokens. KL is `targets.kl_divergence`."""


@pytest.mark.parametrize("name", ONLY)
def test_one_place_calls(name: str) -> None:
    callers = {
        file.relative_to(SOURCE).as_posix()
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == name
    }
    assert callers == ONLY[name]


def test_types_of_settings_are_defined_once() -> None:
    """Two methods whose settings may have the same values share the type."""
    found: dict[str, list[str]] = {}
    for file in (SOURCE / "methods").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Annotated["):
                found.setdefault(ast.unparse(node), []).append(file.name)
    assert not {what: files for what, files in found.items() if len(files) > 1}
