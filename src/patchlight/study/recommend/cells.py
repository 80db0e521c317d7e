"""What is finished: a cell for each image, method and metric, appended whole to a file as soon as it is known."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchlight.core.errors import PatchlightError

FILE = "cells.jsonl"
EXPLANATION = "explanation"
"""The metric of a cell that tells how long a map took; it has no value."""
MODEL = ""
"""The method of a cell that is about the model alone."""

FALL = "fall"
"""The metric of the model itself: how far the class's score falls when the whole image gives way to a fill."""

UNTRAINED = "untrained"
"""The metric of a method on a copy of the model whose weights are drawn anew: its score there."""


@dataclass(frozen=True)
class Cell:
    """What one metric said of one method's map of one image, and the seconds that took.

    `place` is the image's in the seeded order, `image` its hash; `value` is None where there is none, for a `reason`.
    """

    place: int
    image: str
    method: str
    metric: str
    value: float | None
    seconds: float
    reason: str = ""

    @property
    def key(self) -> tuple[int, str, str]:
        return self.place, self.method, self.metric


class Cells:
    """Finished cells with what they are about, and what could not be done; in a folder, or in memory alone.

    Each line of the file is one JSON value. The last one may be torn by a kill; it is forgotten, and its cell done
    again.
    """

    def __init__(self, about: Mapping[str, Any], folder: Path | None = None) -> None:
        self.about = dict(about)
        self.failed: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.set_aside: set[str] = set()
        self._cells: dict[tuple[int, str, str], Cell] = {}
        self._path = None if folder is None else folder / FILE

    @staticmethod
    def opened(folder: Path) -> Cells | None:
        """What an earlier run left in a folder; None where there is nothing."""
        path = folder / FILE
        if not path.exists():
            return None
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            if not lines:
                return None
            found = Cells(lines[0]["about"], folder)
            for line in lines[1:]:
                found._take(line)
        except (ValueError, KeyError, TypeError) as error:
            raise PatchlightError(f"'{path}' holds no cells of `recommend` ({error}); choose another folder") from error
        if len(whole) < len(data):
            os.truncate(path, len(whole))
        return found

    def begin(self) -> None:
        """Write what the cells are about, as the first line."""
        self._append({"about": self.about})

    def add(self, cell: Cell) -> None:
        self._cells[cell.key] = cell
        self._append({"cell": asdict(cell)})

    def fail(self, image: str, reason: str) -> None:
        """An image that could not be read."""
        if image not in self.failed:
            self.failed[image] = reason
            self._append({"failed": [image, reason]})

    def leave_out(self, method: str, reason: str, for_time: bool = False) -> None:
        """A method that is not followed; `for_time`: more of it would take it in."""
        if method not in self.left_out:
            line = {"left_out": [method, reason, for_time]}
            self._take(line)
            self._append(line)

    def take_in(self, method: str) -> None:
        """Follow a method again that was left out for time."""
        line = {"taken_in": method}
        self._take(line)
        self._append(line)

    def __iter__(self) -> Iterator[Cell]:
        """In an order that does not depend on when they were finished."""
        return iter(sorted(self._cells.values(), key=lambda cell: cell.key))

    def __len__(self) -> int:
        return len(self._cells)

    def __contains__(self, key: tuple[int, str, str]) -> bool:
        return key in self._cells

    def images(self) -> dict[int, str]:
        """The hash of the image at each place that has a cell."""
        return {cell.place: cell.image for cell in self._cells.values()}

    def values(self, metric: str) -> dict[str, dict[int, float]]:
        """By method, the values of a metric by place, where they exist."""
        found: dict[str, dict[int, float]] = {}
        for cell in self:
            if cell.metric == metric and cell.value is not None:
                found.setdefault(cell.method, {})[cell.place] = cell.value
        return found

    def undefined(self, metric: str) -> dict[str, list[int]]:
        """By method, the places where a metric has no value."""
        found: dict[str, list[int]] = {}
        for cell in self:
            if cell.metric == metric and cell.value is None:
                found.setdefault(cell.method, []).append(cell.place)
        return found

    def seconds(self, metric: str) -> dict[str, list[float]]:
        """By method, the seconds of a metric's cells."""
        found: dict[str, list[float]] = {}
        for cell in self:
            if cell.metric == metric:
                found.setdefault(cell.method, []).append(cell.seconds)
        return found

    def _take(self, line: Mapping[str, Any]) -> None:
        if "cell" in line:
            cell = Cell(**line["cell"])
            self._cells[cell.key] = cell
        elif "failed" in line:
            self.failed[line["failed"][0]] = line["failed"][1]
        elif "left_out" in line:
            method, reason, for_time = line["left_out"]
            self.left_out[method] = reason
            self.set_aside |= {method} if for_time else set()
        elif "taken_in" in line:
            del self.left_out[line["taken_in"]]
            self.set_aside.discard(line["taken_in"])
        else:
            raise KeyError(f"a line is about {', '.join(line) or 'nothing'}")

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write((json.dumps(line, allow_nan=False) + "\n").encode())
        except OSError as error:
            raise PatchlightError(f"'{self._path}' cannot be written: {error.strerror or error}") from error
