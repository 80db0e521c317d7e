"""Opens a run or an export for reading: its values as a pyarrow or pandas table, and its maps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from patchlight.bench.manifest import Manifest
from patchlight.bench.recipe import Recipe
from patchlight.bench.rows import SCHEMA, TIMING, join_maps, without_newer_columns
from patchlight.bench.store import Files, Store
from patchlight.core.errors import PatchlightError, nearest
from patchlight.core.files import FORMULA
from patchlight.core.frames import from_arrow
from patchlight.core.text import plural

if TYPE_CHECKING:
    from pandas import DataFrame

PER_IMAGE = ("model", "image", "target", "method", "metric", "value", *TIMING, "shared_by", "note", "error")
"""The columns that fit into a spreadsheet."""


@dataclass(frozen=True, eq=False)
class MethodMaps:
    """The maps [n,h,w] of one method on one model, at patch resolution; NaN for an image without a map.

    `classes` are the names of the explained classes.
    """

    scores: Tensor
    images: tuple[str, ...]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        return f"<maps {list(self.scores.shape)} of {len(self)} images>"


class Opened:
    """A run that is open for reading; values and maps are read on access."""

    def __init__(self, folder: str | Path) -> None:
        self.store = Store(folder)
        self.manifest: Manifest = self.store.manifest()

    @property
    def recipe(self) -> Recipe:
        return self.manifest.resolved

    @property
    def images(self) -> tuple[str, ...]:
        return self.manifest.images.names

    @property
    def versions(self) -> dict[str, str]:
        return dict(self.manifest.versions)

    @property
    def notes(self) -> tuple[str, ...]:
        """What changed during the run, which files are damaged, and how many values are missing."""
        paths = [path for files in self.store.files().values() for path in files.damaged]
        damaged = [f"'{path.parent.name}/{path.name}' is damaged and left out" for path in paths]
        done = sum(len(table) for table in self.store.tables(["cell"]))
        return tuple(filter(None, (self.manifest.incomplete(done), *self.manifest.notes, *damaged)))

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """The rows of one unit at a time, ordered by model, method and image."""
        names = _column_names(columns)
        for files in self._in_order():
            table = files.table(None if columns is None else names)
            if table is not None:
                yield without_newer_columns(table).select(names).replace_schema_metadata()

    def _in_order(self) -> list[Files]:
        names: dict[str, Iterable[str]]
        names = {"model": self.recipe.models, "method": self.recipe.methods, "image": self.images}
        places = {column: {name: i for i, name in enumerate(each)} for column, each in names.items()}
        indices = []
        for files in self.store.files().values():
            table = files.table(list(places))
            for first in () if table is None else table.slice(0, 1).to_pylist():
                indices.append(([place.get(first[column], -1) for column, place in places.items()], files))
        return [files for _, files in sorted(indices, key=lambda pair: pair[0])]

    def table(self, columns: Sequence[str] | None = None) -> Any:
        """All values as a pyarrow table, with one row for each image, method and metric.

        Args:
            columns: The columns to read; all by default.
        """
        names, tables = _column_names(columns), list(self.tables(columns))
        return pa.concat_tables(tables) if tables else pa.schema(map(SCHEMA.field, names)).empty_table()

    def frame(self, columns: Sequence[str] | None = None) -> DataFrame:
        """The same table as a pandas data frame."""
        return from_arrow(self.table(columns))

    def maps(self, model: str, method: str) -> MethodMaps:
        """The maps of a method on a model, for all measured images in the run's order."""
        for what, label, names in (("model", model, self.recipe.models), ("method", method, self.recipe.methods)):
            if label not in names:
                raise PatchlightError(f"the run has no {what} '{label}'; {nearest(label, names)}")
        parts = (files.read_maps() for files in self.store.files().values())
        maps = join_maps(parts, model, self.images, method)
        scores = maps.scores.get(method, torch.empty(0, 0, 0))
        return MethodMaps(scores, tuple(maps.images), tuple(maps.classes))

    def __repr__(self) -> str:
        recipe = self.recipe
        sizes = {"model": len(recipe.models), "method": len(recipe.methods), "metric": len(recipe.metrics)}
        counts = ", ".join(plural(size, noun) for noun, size in sizes.items())
        return f"<run of '{recipe.name}': {counts} on {plural(len(self.images), 'image')}, in '{self.store.folder}'>"


def open(path: str | Path) -> Opened:
    """Open a run or an export for reading.

    Args:
        path: The folder of the run or export.

    Raises:
        PatchlightError: If the folder does not hold a run.
    """
    return Opened(path)


def write_csv(run: Opened, file: IO[bytes]) -> None:
    """Write one line of CSV for each image, method and metric."""
    from pyarrow.csv import WriteOptions
    from pyarrow.csv import write_csv as write

    header = pa.schema([SCHEMA.field(name) for name in PER_IMAGE]).empty_table()
    for i, table in enumerate(itertools.chain([header], run.tables(PER_IMAGE))):
        sink = pa.BufferOutputStream()
        write(_spreadsheet(table), sink, WriteOptions(include_header=i == 0))
        file.write(sink.getvalue().to_pybytes())


def _spreadsheet(table: Any) -> Any:
    """Put a ' before text that a spreadsheet would run as a formula."""
    for i, entry in enumerate(table.schema):
        if entry.type == pa.string():
            column = table.column(i)
            risky = pc.fill_null(pc.match_substring_regex(column, FORMULA), False)
            if pc.any(risky).as_py():
                escaped = pc.binary_join_element_wise("'", column, "")
                table = table.set_column(i, entry, pc.if_else(risky, escaped, column))
    return table


def _column_names(columns: Sequence[str] | None) -> list[str]:
    """The columns to read, all by default; an unknown column is an error."""
    unknown = next((name for name in columns or () if name not in SCHEMA.names), None)
    if unknown is not None:
        raise PatchlightError(f"rows have no column '{unknown}'; {nearest(unknown, SCHEMA.names)}")
    return list(SCHEMA.names if columns is None else columns)
