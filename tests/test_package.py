"""Importing is cheap and without side effects; the README's and documentation's examples are not stale."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import patchlight as pl


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, patchlight; heavy = {'torch', 'timm', 'transformers', 'matplotlib', 'scipy', 'PIL', 'numpy'};"
        "found = heavy & set(sys.modules); print(sorted(found)); sys.exit(bool(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"import patchlight loads {done.stdout}"


def test_public_names_are_there() -> None:
    for name in pl.__all__:
        assert getattr(pl, name) is not None
        assert name in dir(pl)
    with pytest.raises(AttributeError, match="No patchlight attribute explian"):
        pl.explian  # type: ignore[attr-defined]  # noqa: B018


def test_functions_stay_functions_after_their_rooms_are_imported() -> None:
    importlib.import_module("patchlight.methods.attention")
    importlib.import_module("patchlight.evidence.passes")
    assert callable(pl.trace)
    assert [m.name for m in pl.list_methods()]


@pytest.mark.parametrize("first", ["", "import patchlight as pl; pl.list_metrics(); pl.list_methods(); "])
def test_rooms_behind_functions_can_be_imported_by_name(first: str) -> None:
    code = (
        "import patchlight.metrics.base as base, patchlight.methods.tis as tis, patchlight.evidence.passes as trace; "
        "import patchlight as pl; assert base.Measure and tis.tis and trace.run_pass; "
        "assert pl.list_metrics() and pl.list_methods() and pl.metrics.base is base"
    )
    done = subprocess.run([sys.executable, "-c", first + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
