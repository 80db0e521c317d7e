"""Every row of the strangers' table."""

import importlib
from pathlib import Path

import pytest

from tests.strangers.table import ROWS

for room in ("contexts", "files", "inputs", "models", "processors", "runs"):
    if (Path(__file__).parent / f"{room}.py").is_file():
        importlib.import_module(f"tests.strangers.{room}")


@pytest.mark.parametrize("name", sorted(ROWS))
def test_strangers(name: str, tmp_path: Path) -> None:
    ROWS[name](tmp_path)
