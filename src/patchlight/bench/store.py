"""The folder of a run.

manifest.json describes the plan. units/KEY-SUM.parquet has a row for each image, method and metric of a unit, and
maps/KEY-SUM.safetensors its maps at patch resolution; SUM is the checksum of the file. Files are written under another
name and renamed, so a killed process loses only the unit in flight. The shards of a run are in shards/K-of-N/, and the
run is the union of its shards; the owner of a shard holds its lock. Units that a changed plan does not contain are in
earlier/.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import math
import os
import platform
import re
import time
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.compute as pc
import torch
from torch import Tensor

from patchlight.bench.manifest import Manifest, read_manifest
from patchlight.bench.plan import WHOLE, Plan, Shard, Unit
from patchlight.bench.results import Results, collect_results, sum_counts, word_counts
from patchlight.bench.rows import CellValue, CellValues, ImageMap, Maps, facts_of, join_maps, maps_of, rows_of, table_of
from patchlight.core.errors import PatchlightError
from patchlight.core.extras import missing_extra
from patchlight.core.files import check_writable, write_atomic
from patchlight.core.progress import Progress, show_progress

try:
    from filelock import FileLock, Timeout
except ImportError as error:
    raise missing_extra("the benchmark needs", "filelock", "bench") from error

PART = re.compile(r"\..+-[a-z0-9_]{8}")
"""Temporary names of files that are being written."""
NAMES = ("units", "maps", "shards", "earlier", "logs", "lock", "plan.lock", "owner.json")
"""Names in the folder of a run besides its manifest."""
MOMENT = 2.0
"""Seconds to wait for a lock: another process may hold it briefly to check whether it is free."""


class Files(NamedTuple):
    """The files of a unit, its rows and its maps, if they exist."""

    rows: Path | None = None
    maps: Path | None = None

    @property
    def there(self) -> bool:
        return self.rows is not None and self.maps is not None

    @property
    def damaged(self) -> list[Path]:
        return [path for path in self if path is not None and _read_verified(path) is None]

    def table(self, columns: list[str] | None = None) -> Any:
        """The rows as a table; None if they are missing or damaged."""
        return table_of(_read_verified(self.rows), columns)

    def read_maps(self, images: Collection[str] | None = None) -> Maps:
        """The maps; empty if they are missing or damaged, or if they are of none of `images`."""
        maps = Maps() if self.maps is None else maps_of(self.maps, images)
        return maps if maps.images and _read_verified(self.maps) is not None else Maps()


class Store:
    """A run's folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._read = lru_cache(maxsize=4)(lambda files: (files.table(), files.read_maps()))  # exports have large files

    @property
    def manifest_path(self) -> Path:
        return self.folder / "manifest.json"

    def folder_of(self, shard: Shard) -> Path:
        """The folder of a shard's units."""
        return self.folder if shard == WHOLE else self.folder / "shards" / f"{shard.number}-of-{shard.count}"

    def shards(self) -> list[Path]:
        """The folders with units: that of the run, and one for each shard that was started."""
        return [self.folder, *sorted((self.folder / "shards").glob("*-of-*"))]

    def make(self, shard: Shard = WHOLE) -> None:
        """Create the folder; a folder with other files is refused."""
        check_writable(self.folder)
        if self.folder.is_dir() and not self.manifest_path.exists():
            foreign = [p.name for p in self.folder.iterdir() if p.name not in NAMES and not PART.fullmatch(p.name)]
            if foreign:
                raise PatchlightError(f"'{self.folder}' is not a run: it contains '{foreign[0]}'; give an empty folder")
        try:
            for folder in ("units", "maps"):
                (self.folder_of(shard) / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PatchlightError(f"'{self.folder}' cannot be written: {error.strerror or error}") from error

    @contextlib.contextmanager
    def owned(self, shard: Shard) -> Iterator[None]:
        """Own a shard; an error if another process owns it, or works on the run with another number of shards."""
        folder = self.folder_of(shard)
        with _lock(folder / "lock") as lock:
            if not lock:
                raise PatchlightError(f"{_holder(folder)} is working on {self._name(folder)}; wait until it ends")
            for other in self.busy():
                same = other != self.folder and shard != WHOLE and other.name.endswith(f"-of-{shard.count}")
                if other != folder and not same:
                    raise PatchlightError(
                        f"{_holder(other)} is working on {self._name(other)}; wait until it ends, or use --shard with "
                        "the same number of shards"
                    )
            owner = {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            write_atomic(folder / "owner.json", json.dumps(owner).encode())
            try:
                yield
            finally:
                (folder / "owner.json").unlink(missing_ok=True)

    def busy(self) -> list[Path]:
        """The folders of shards that a process is working on."""
        folders = []
        for folder in self.shards():
            if (folder / "lock").exists():
                with _lock(folder / "lock", 0) as lock:
                    folders += [] if lock else [folder]
        return folders

    def workers(self) -> list[str]:
        """The processes that work on the run, with their shards."""
        return [self.worker(folder) for folder in self.busy()]

    def worker(self, folder: Path) -> str:
        """The process that works on the shard in this folder."""
        return f"{_holder(folder)}, on {self._name(folder)}"

    def _name(self, folder: Path) -> str:
        return f"'{self.folder}'" if folder == self.folder else f"shard {folder.name} of '{self.folder}'"

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Hold the lock for bringing the folder in line with a plan."""
        with _lock(self.folder / "plan.lock", -1):
            yield

    def sweep(self, folders: Iterable[Path]) -> None:
        """Remove partially written files of killed processes from these shards."""
        patterns = (f".{self.manifest_path.name}-*", "units/.*", "maps/.*")  # not owner.json: it may be in use
        for leftover in (path for folder in folders for pattern in patterns for path in folder.glob(pattern)):
            leftover.unlink(missing_ok=True)

    def read_manifest(self) -> Manifest | None:
        """The manifest; None if the folder does not hold a run."""
        return read_manifest(self.manifest_path)

    def manifest(self) -> Manifest:
        """The manifest; an error if the folder does not hold a run."""
        manifest = self.read_manifest()
        if manifest is None:
            raise PatchlightError(
                f"there is no run in '{self.folder}'; `patchlight bench run RECIPE --out DIR` starts one"
            )
        return manifest

    def files(self, folders: Iterable[Path] | None = None) -> dict[str, Files]:
        """The files of every unit by key, in these folders or in all shards."""
        by_key: dict[str, Files] = {}
        for root in self.shards() if folders is None else folders:
            for which, pattern in (("rows", "units/[!.]*.parquet"), ("maps", "maps/[!.]*.safetensors")):
                for path in sorted(root.glob(pattern)):
                    key = path.name.rpartition("-")[0]
                    files = by_key.setdefault(key, Files())
                    if getattr(files, which) is None:
                        by_key[key] = files._replace(**{which: path})
        return by_key

    def units(self, plan: Plan) -> list[Unit]:
        """The finished units of a plan, according to file names."""
        units = (plan.unit_of(key) for key, files in self.files().items() if files.there)
        return [unit for unit in units if unit is not None]

    def arrange(self, plan: Plan) -> list[str]:
        """Move units that are not of the plan to earlier/, and units of the plan back from there.

        As a result, units/*.parquet contains every row once. A file whose rows are not those of the unit in its name
        was renamed: it is removed, and reported in the notes that this returns.
        """
        notes = []
        for key, files in self.files().items():
            unit = plan.unit_of(key)
            if unit is not None and files.rows is not None and not _contains(files, unit):
                notes.append(f"'units/{files.rows.name}' does not contain the unit of its name; it is measured again")
                _remove(files)
            elif unit is None:
                self.set_aside(files)
        done = {(unit.group.key, i) for unit in self.units(plan) for i in range(unit.start, unit.stop)}
        for key, files in self.files([self.folder / "earlier"]).items():
            unit = plan.unit_of(key)
            if unit is None or not files.there:
                continue
            places = {(unit.group.key, i) for i in range(unit.start, unit.stop)}
            if not places & done:
                done |= places
                _move(files, self.folder)
        return notes

    def set_aside(self, files: Files) -> None:
        """Move the files of a unit to earlier/, so that it is run again; values that did not fail can be reused."""
        _move(files, self.folder / "earlier")

    def drop_damaged(self, folders: Iterable[Path]) -> list[str]:
        """Remove damaged and partially written units of these shards, and return a sentence for each damaged file."""
        notes = []
        for files in self.files(folders).values():
            damaged = files.damaged
            if damaged or not files.there:
                notes += [_damage(path) for path in damaged]
                _remove(files)
        return notes

    @cached_property
    def earlier(self) -> dict[str, Files]:
        """By cell, the files of earlier plans that contain it; preferably a file in which it did not fail."""
        by_cell: dict[str, Files] = {}
        good: set[str] = set()
        for files in self.files([self.folder / "earlier"]).values():
            table = files.table(["cell", "error"]) if files.there else None
            if table is None:
                continue
            for cell, error in zip(table["cell"].to_pylist(), table["error"].to_pylist(), strict=True):
                if cell not in by_cell or (cell not in good and not error):
                    by_cell[cell] = files
                if not error:
                    good.add(cell)
        return by_cell

    def before(self, unit: Unit, failed_too: bool = True) -> dict[str, CellValue]:
        """The values of a unit that earlier plans measured; failed ones only with `failed_too`."""
        cells = {cell for pair in unit.group.hashes for cell in unit.cells(pair)} if self.earlier else set()
        values: dict[str, CellValue] = {}
        for files in {self.earlier[cell] for cell in cells if cell in self.earlier}:
            for cell, value in cell_values(*self._read(files), cells).items():
                if self.earlier[cell] is files and (failed_too or not value.row.error):
                    values[cell] = value
        return values

    def keep(self, key: str, rows: bytes, maps: bytes, folder: Path | None = None) -> None:
        """Write the maps of a unit, and then its rows, which mark it as finished."""
        for name, data, suffix in (("maps", maps, "safetensors"), ("units", rows, "parquet")):
            place = (folder or self.folder) / name
            write_atomic(place / f"{key}-{checksum(data)}.{suffix}", data, durable=True)

    def maps(self, model: str, images: Collection[str]) -> Maps:
        """The maps of all methods for these images of a model."""
        parts = (files.read_maps(images) for files in self.files().values() if files.there)
        return join_maps(parts, model, images)

    def tables(self, columns: list[str] | None = None) -> Iterator[Any]:
        """The rows of every finished unit, as tables."""
        tables = (files.table(columns) for files in self.files().values())
        return (table for table in tables if table is not None)

    def failures(self, folders: Iterable[Path] | None = None) -> dict[str, int]:
        """The number of failed values by reason, most frequent first, in these shards or in all."""
        tables = (files.table(["error"]) for files in self.files(folders).values())
        return sum_counts(word_counts(table["error"]) for table in tables if table is not None)

    def failed(self, folders: Iterable[Path]) -> list[Files]:
        """The files of units with failed values in these shards."""
        return [
            files
            for files in self.files(folders).values()
            if (table := files.table(["error"])) is not None and any(table["error"].to_pylist())
        ]

    def results(self, progress: Progress | bool = False) -> Results:
        """All values of the run."""
        notes: set[str] = set()
        files = self.files()

        def tables() -> Iterator[Any]:
            with show_progress(progress, "reading units") as advance:
                for i, unit in enumerate(files.values()):
                    table = unit.table()
                    damaged = [unit.rows] if table is None else []
                    damaged += [unit.maps] if _read_verified(unit.maps) is None else []
                    notes.update(f"{_damage(p)} and left out; the same `bench run` repairs it" for p in damaged if p)
                    if table is not None:
                        yield table
                    advance(i + 1, len(files))

        return collect_results(tables(), self.manifest(), notes)

    def curves(self, model: str, method: str, metric: str) -> Tensor | None:
        """The curves [B,P] of all images, NaN for an image without a curve; None if the metric has no curves."""
        names = self.manifest().images.names
        column = (pc.field("model") == model) & (pc.field("method") == method) & (pc.field("metric") == metric)
        curves: dict[str, Any] = {}
        points = None
        for table in self.tables(["model", "image", "method", "metric", "curve"]):
            facts = facts_of(table).get(metric)
            points = points if facts is None or facts.x is None else len(facts.x)
            rows = table.filter(column).to_pydict()
            curves |= {image: curve for image, curve in zip(rows["image"], rows["curve"], strict=True) if curve}
        if points is None:
            return None
        return torch.tensor([curves.get(name, [math.nan] * points) for name in names], dtype=torch.float32)


def cell_values(table: Any, maps: Maps, cells: Collection[str] | None = None) -> CellValues:
    """The values in rows and maps by cell; with `cells`, only those."""
    if table is None:
        return {}
    if cells is not None:
        table = table.filter([cell in cells for cell in table["cell"].to_pylist()])
    facts, place = facts_of(table), {name: i for i, name in enumerate(maps.images)}
    by_cell: dict[str, CellValue] = {}
    for row in rows_of(table):
        image_map = None
        if row.method in maps.scores and row.image in place:
            i = place[row.image]
            scores = maps.scores[row.method][i]
            image_map = None if bool(scores.isnan().all()) else ImageMap(scores, maps.classes[i], maps.preprocess)
        by_cell[row.cell] = CellValue(row, facts.get(row.metric), image_map)
    return by_cell


def checksum(data: bytes) -> str:
    """The checksum at the end of a file's name."""
    return hashlib.sha256(data).hexdigest()[:16]


def _read_verified(path: Path | None) -> bytes | None:
    """The content of a file; None if it is missing or does not match the checksum in its name."""
    try:
        data = path.read_bytes() if path is not None else None
    except OSError:
        return None
    return data if data is not None and path is not None and checksum(data) == path.stem.rpartition("-")[2] else None


def _contains(files: Files, unit: Unit) -> bool:
    """Whether the rows of a file are those of a unit, by their number and the first and last of them."""
    table = files.table(["cell"])
    if table is None or len(table) != unit.values:
        return False
    pairs = list(unit.group.hashes)
    expected = [unit.cells(pairs[0])[0], unit.cells(pairs[-1])[-1]]
    return [table["cell"][0].as_py(), table["cell"][len(table) - 1].as_py()] == expected


def _damage(path: Path) -> str:
    return f"'{path.parent.name}/{path.name}' is damaged"


def _remove(files: Files) -> None:
    for path in filter(None, files):
        path.unlink(missing_ok=True)


def _move(files: Files, root: Path) -> None:
    """Move the files of a unit, its rows last, because they mark it as finished."""
    for path in filter(None, reversed(files)):
        target = root / path.parent.name / path.name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
            for other in target.parent.glob(f"{glob.escape(path.name.rpartition('-')[0])}-*{path.suffix}"):
                if other.name != path.name:  # the unit was run twice: the last result counts
                    other.unlink(missing_ok=True)
        except OSError as error:
            raise PatchlightError(f"'{path}' cannot be moved: {error.strerror or error}") from error


@contextlib.contextmanager
def _lock(path: Path, seconds: float = MOMENT) -> Iterator[FileLock | None]:
    """Hold a lock; yields None if another process holds it for longer than `seconds`. -1 waits forever."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        yield None
        return
    except OSError as error:
        raise PatchlightError(f"'{path}' cannot be locked: {error.strerror or error}") from error
    try:
        yield lock
    finally:
        lock.release()


def _holder(folder: Path) -> str:
    """The process that holds the lock of a shard, its machine, and since when."""
    try:
        owner = json.loads((folder / "owner.json").read_text(encoding="utf-8"))
        return f"process {owner['pid']} on {owner['host']} (since {owner['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
