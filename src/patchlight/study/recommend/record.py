"""What a race has finished: measurements by the places of images, images that cannot be read, methods left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from patchlight.study.cell import Cell
from patchlight.study.store import CellStore, JsonLinesStore, MemoryStore

FILE = "cells.jsonl"
MODEL = ""
"""The method of a cell about the model or the image alone."""
FALL = "fall"
"""The metric of the model itself: how far the class's score falls when a fill replaces the whole image."""
FALLS = 10
"""How many times `worth` it must fall, or there is nothing to explain."""
UNTRAINED = "untrained"
"""The metric of a method's score on a copy of the model with random weights."""
IMAGE_HASH, UNREADABLE = "image hash", "unreadable"
"""The metrics of a cell whose note is an image's hash, and of one whose error says why an image cannot be read."""
TAKES_PART = "takes part"
"""The metric of a cell whose error says why a method is left out; its note is LACKS_TIME if more time would help."""
LACKS_TIME = "lacks time"


def hardly_falls(fall: Mapping[str, float], worth: float) -> bool:
    """Whether the class's score hardly falls without the image, under any fill: then no map can be right about it."""
    falls = [value for name, value in fall.items() if name.startswith(FALL)]
    return bool(falls) and max(falls) < FALLS * worth


class RaceRecord:
    """The cells of a race in a store. A measured image is named by its place in the seeded order.

    `failed` says by name why an image cannot be read, `left_out` by method why it is not followed; `set_aside` are
    those left out only because time was short.
    """

    def __init__(self, store: CellStore) -> None:
        self.about: dict[str, Any] = dict(store.header)
        self.failed: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.set_aside: set[str] = set()
        self._store = store
        self._measured: dict[tuple[int, str, str], Cell] = {}
        for cell in store:
            self._index(cell)

    @staticmethod
    def begin(about: Mapping[str, Any], folder: Path | None = None) -> RaceRecord:
        """A new record, in a folder or in memory."""
        return RaceRecord(MemoryStore(about) if folder is None else JsonLinesStore.create(folder / FILE, about))

    @staticmethod
    def resume(folder: Path) -> RaceRecord | None:
        """What an earlier run left in a folder; None where there is nothing."""
        store = JsonLinesStore.resume(folder / FILE)
        return None if store is None else RaceRecord(store)

    def add(self, place: int, method: str, metric: str, value: float | None = None, **rest: Any) -> None:
        """Record what a metric says of a method's map; `rest` are further fields of the cell."""
        self._add(Cell(str(place), method, metric, value, **rest))

    def fail(self, name: str, reason: str) -> None:
        """Record an image that cannot be read."""
        if name not in self.failed:
            self._add(Cell(name, MODEL, UNREADABLE, error=reason))

    def leave_out(self, method: str, reason: str, for_time: bool = False) -> None:
        """Follow a method no more; `for_time`: only because time is short."""
        if method not in self.left_out:
            self._add(Cell("", method, TAKES_PART, error=reason, note=LACKS_TIME if for_time else ""))

    def take_in(self, method: str) -> None:
        """Follow a method again that was left out for time."""
        self._add(Cell("", method, TAKES_PART))

    def __contains__(self, key: tuple[int, str, str]) -> bool:
        return key in self._measured

    def __len__(self) -> int:
        return len(self._measured)

    def cells(self, metric: str | None = None, method: str | None = None) -> Iterator[tuple[int, Cell]]:
        """Places and cells, of one metric or method or of all, in an order that does not depend on the race."""
        for key in sorted(k for k in self._measured if method in (None, k[1]) and metric in (None, k[2])):
            yield key[0], self._measured[key]

    def values(self, metric: str) -> dict[str, dict[int, float]]:
        """By method, the values of a metric by place, where they exist."""
        values: dict[str, dict[int, float]] = {}
        for place, cell in self.cells(metric):
            if cell.value is not None:
                values.setdefault(cell.method, {})[place] = cell.value
        return values

    def _add(self, cell: Cell) -> None:
        self._store.add(cell)
        self._index(cell)

    def _index(self, cell: Cell) -> None:
        if cell.metric == TAKES_PART:
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
