"""Where finished cells are kept: in memory, or as JSON lines that a later run resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from patchlight.core.errors import PatchlightError
from patchlight.study.cell import Cell

CellKey = tuple[str, str, str]
"""The image, method and metric of a cell."""


class CellStore(Protocol):
    """Finished cells, one for each image, method and metric; a later one replaces an earlier one."""

    @property
    def header(self) -> Mapping[str, Any]:
        """What the cells are about, as JSON takes it."""

    def add(self, cell: Cell) -> None:
        """Keep a finished cell."""

    def __iter__(self) -> Iterator[Cell]: ...

    def __len__(self) -> int: ...

    def __contains__(self, key: CellKey) -> bool: ...


class MemoryStore:
    """Cells in memory."""

    def __init__(self, header: Mapping[str, Any], cells: Iterable[Cell] = ()) -> None:
        self.header = dict(header)
        self._cells = {_key(cell): cell for cell in cells}

    def add(self, cell: Cell) -> None:
        """Keep a finished cell."""
        self._cells[_key(cell)] = cell

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells.values())

    def __len__(self) -> int:
        return len(self._cells)

    def __contains__(self, key: CellKey) -> bool:
        return key in self._cells


class JsonLinesStore(MemoryStore):
    """Cells in a file: its first line is the header, and every cell is appended as one more line."""

    def __init__(self, path: Path, header: Mapping[str, Any], cells: Iterable[Cell] = ()) -> None:
        super().__init__(header, cells)
        self._path = path

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any]) -> JsonLinesStore:
        """A new file."""
        store = cls(path, header)
        store._append({"header": store.header})
        return store

    @classmethod
    def resume(cls, path: Path) -> JsonLinesStore | None:
        """What an earlier run left in a file, None where that is nothing; a line that a kill cut short is dropped."""
        data = path.read_bytes() if path.exists() else b""
        complete = data[: data.rfind(b"\n") + 1]
        if not complete:
            return None
        try:
            header, *lines = map(json.loads, complete.splitlines())
            store = cls(path, header["header"], [Cell(**line) for line in lines])
        except (ValueError, KeyError, TypeError) as error:
            raise PatchlightError(f"'{path}' holds no cells ({error}); choose another folder") from error
        if len(complete) < len(data):
            os.truncate(path, len(complete))
        return store

    def add(self, cell: Cell) -> None:
        """Keep a finished cell, and append it to the file."""
        super().add(cell)
        values = asdict(cell).items()
        self._append({key: value for key, value in values if key in _NEEDED or value not in (None, "", {})})

    def _append(self, line: Mapping[str, Any]) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write((json.dumps(line, allow_nan=False) + "\n").encode())
        except OSError as error:
            raise PatchlightError(f"'{self._path}' cannot be written: {error.strerror or error}") from error


_NEEDED = ("image", "method", "metric")


def _key(cell: Cell) -> CellKey:
    return cell.image, cell.method, cell.metric
