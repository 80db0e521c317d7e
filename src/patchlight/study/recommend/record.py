"""The measurements of a race, in memory or in a JSON lines file that a later run resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from patchlight.core.errors import PatchlightError, first_line
from patchlight.study.cell import Cell

FILE = "cells.jsonl"
MODEL = ""
"""The method of cells that describe the model or an image, not a map."""
BLANKED = "blanked"
"""The metric of cells with the change of the class's score when a fill replaces the whole image."""
UNTRAINED = "untrained"
"""The metric of cells with a method's score on a copy of the model with random weights."""
IMAGE_HASH, UNREADABLE = "image hash", "unreadable"
"""The metrics of cells that hold an image's hash (as note), or the reason why it cannot be read (as error)."""
PARTICIPATION = "takes part"
"""The metric of cells that hold the reason why a method is left out (as error)."""
LACKS_TIME = "lacks time"
"""The note of such a cell if the method would take part with more time."""


class RaceRecord:
    """Cells of a race. Measured images are identified by their place in the seeded order.

    Attributes:
        about: What the cells are about; the first line of the file.
        failed: Why images cannot be read, by name.
        left_out: Why methods do not take part, by label.
        set_aside: The methods left out only for lack of time.
    """

    def __init__(self, about: Mapping[str, Any], path: Path | None = None, cells: Iterable[Cell] = ()) -> None:
        self.about: dict[str, Any] = dict(about)
        self.failed: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.set_aside: set[str] = set()
        self._path = path
        self._measured: dict[tuple[int, str, str], Cell] = {}
        for cell in cells:
            self._index(cell)

    @staticmethod
    def begin(about: Mapping[str, Any], folder: Path | None = None) -> RaceRecord:
        """Create an empty record, in a folder or in memory."""
        record = RaceRecord(about, None if folder is None else folder / FILE)
        record._append({"header": record.about})
        return record

    @staticmethod
    def resume(folder: Path) -> RaceRecord | None:
        """Read the record of an earlier run, or return None if there is none; an incomplete last line is dropped."""
        path = folder / FILE
        data = path.read_bytes() if path.exists() else b""
        complete = data[: data.rfind(b"\n") + 1]
        if not complete:
            return None
        try:
            header, *lines = map(json.loads, complete.splitlines())
            record = RaceRecord(header["header"], path, TypeAdapter(list[Cell]).validate_python(lines))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = first_line(error)
            raise PatchlightError(f"'{path}' does not contain cells ({reason}); choose another folder") from error
        if len(complete) < len(data):
            os.truncate(path, len(complete))
        return record

    def add(self, place: int, method: str, metric: str, value: float | None = None, **rest: Any) -> None:
        """Add a measurement; `rest` are further fields of the cell."""
        self._add(Cell(str(place), method, metric, value, **rest))

    def fail(self, name: str, reason: str) -> None:
        """Add an image that cannot be read."""
        if name not in self.failed:
            self._add(Cell(name, MODEL, UNREADABLE, error=reason))

    def leave_out(self, method: str, reason: str, for_time: bool = False) -> None:
        """Exclude a method; `for_time` if more time would admit it."""
        if method not in self.left_out:
            self._add(Cell("", method, PARTICIPATION, error=reason, note=LACKS_TIME if for_time else ""))

    def readmit(self, method: str) -> None:
        """Include a method again that was left out for lack of time."""
        self._add(Cell("", method, PARTICIPATION))

    def __contains__(self, key: tuple[int, str, str]) -> bool:
        return key in self._measured

    def __len__(self) -> int:
        return len(self._measured)

    def cells(self, metric: str | None = None, method: str | None = None) -> Iterator[tuple[int, Cell]]:
        """Places and cells, optionally of one metric or method, in an order that does not depend on the race."""
        for key in sorted(k for k in self._measured if method in (None, k[1]) and metric in (None, k[2])):
            yield key[0], self._measured[key]

    def values(self, metric: str) -> dict[str, dict[int, float]]:
        """By method, the existing values of a metric by place."""
        values: dict[str, dict[int, float]] = {}
        for place, cell in self.cells(metric):
            if cell.value is not None:
                values.setdefault(cell.method, {})[place] = cell.value
        return values

    def _add(self, cell: Cell) -> None:
        self._index(cell)
        required = ("image", "method", "metric")
        fields = asdict(cell).items()
        self._append({key: value for key, value in fields if key in required or value not in (None, "", {})})

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        if "header" not in line and not self._path.exists():
            raise PatchlightError(
                f"'{self._path}' is missing: the folder was moved or deleted during the run; give its place now "
                "as out=…, with resume=True"
            )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write((json.dumps(line, allow_nan=False) + "\n").encode())
        except OSError as error:
            raise PatchlightError(f"'{self._path}' cannot be written: {error.strerror or error}") from error

    def _index(self, cell: Cell) -> None:
        if cell.metric == PARTICIPATION:
            self.left_out.pop(cell.method, None)
            self.set_aside.discard(cell.method)
            if cell.error:
                self.left_out[cell.method] = cell.error
            if cell.note == LACKS_TIME:
                self.set_aside.add(cell.method)
        elif cell.metric == UNREADABLE:
            self.failed[cell.image] = cell.error
        else:
            self._measured[int(cell.image), cell.method, cell.metric] = cell
