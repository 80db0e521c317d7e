"""The store of a run: a folder of Parquet units and safetensors maps, each written whole and renamed.

manifest.json says what is planned; units/KEY-SUM.parquet has a row for each image, method and metric of a unit; maps/
its maps at patch resolution; sizes/ how many images the units of a group have. SUM is the checksum of the file, without
which nothing in it is believed. What a changed plan leaves behind lies under earlier/. Who is at work on what is in
owners/ and claims/. A process that is killed loses the unit in flight, nothing else.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from patchlight.bench.manifest import Manifest, read_manifest
from patchlight.bench.plan import Group, Plan, Unit
from patchlight.bench.results import Results, counted, curves_of, results_of, word_counts
from patchlight.bench.rows import (
    Before,
    Done,
    Known,
    Maps,
    facts_of,
    map_bytes,
    maps_from,
    maps_of,
    rows_of,
    shows,
    table_bytes,
    table_of,
)
from patchlight.core.errors import PatchlightError
from patchlight.core.files import check_writable, write_new, write_whole
from patchlight.core.progress import Progress, telling

PART = re.compile(r"\..+-[a-z0-9_]{8}")
"""Names under which files are written before they are renamed."""
FOLDERS = ("units", "maps", "sizes", "owners", "claims", "earlier", "logs")


class Files(NamedTuple):
    """The files of a unit, where they exist: its rows and its maps."""

    rows: Path | None = None
    maps: Path | None = None

    @property
    def there(self) -> bool:
        return self.rows is not None and self.maps is not None

    @property
    def damaged(self) -> list[Path]:
        return [path for path in self if path is not None and _sound(path) is None]

    def table(self, columns: list[str] | None = None) -> Any:
        """The rows as a table; None where they are missing or damaged."""
        return table_of(_sound(self.rows), columns)

    def read_maps(self) -> Maps:
        """The maps; none where they are missing or damaged."""
        return Maps() if self.maps is None or _sound(self.maps) is None else maps_of(self.maps)


class Store:
    """A run's folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def manifest_path(self) -> Path:
        return self.folder / "manifest.json"

    def make(self) -> None:
        """Make the folder; refused where it is something else's."""
        check_writable(self.folder)
        if self.folder.is_dir() and not self.manifest_path.exists():
            strange = [p.name for p in self.folder.iterdir() if p.name not in FOLDERS and not PART.fullmatch(p.name)]
            if strange:
                raise PatchlightError(f"'{self.folder}' is not a run: it holds '{strange[0]}'; give an empty folder")
        try:
            for folder in ("units", "maps", "sizes"):
                (self.folder / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PatchlightError(f"'{self.folder}' cannot be written: {error.strerror or error}") from error

    def sweep(self) -> None:
        """Take away what processes that were killed left half written; only while nobody else is at work."""
        for pattern in (f".{self.manifest_path.name}-*", "units/.*", "maps/.*", "sizes/.*"):
            for leftover in self.folder.glob(pattern):
                leftover.unlink(missing_ok=True)

    def read_manifest(self) -> Manifest | None:
        """What the run is; None where none was begun."""
        return read_manifest(self.manifest_path)

    def manifest(self) -> Manifest:
        """What the run is; refused where none was begun."""
        found = self.read_manifest()
        if found is None:
            raise PatchlightError(
                f"there is no run in '{self.folder}'; `patchlight bench run RECIPE --out DIR` begins one"
            )
        return found

    def size(self, group: Group) -> int | None:
        """How many images the units of a group have behind its first batch; None where that is not known yet."""
        try:
            size = int(json.loads((self.folder / "sizes" / f"{group.key}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return size if size > 0 else None

    def write_size(self, group: Group, size: int) -> None:
        """Say how many images the units of a group have; who says so first is believed."""
        path = self.folder / "sizes" / f"{group.key}.json"
        if not write_new(path, json.dumps(size).encode()) and self._damaged_size(path):
            write_whole(path, json.dumps(size).encode())

    @staticmethod
    def _damaged_size(path: Path) -> bool:
        try:
            return not path.read_text(encoding="utf-8").strip().isdecimal()
        except (OSError, ValueError):  # it may be sound, and cannot be read now
            return False

    def units(self, whole: Plan) -> Iterator[Unit]:
        """The units of a plan, as far as they are known."""
        for group in whole.groups:
            yield from whole.units(group, self.size(group))

    def files(self, earlier: bool = False) -> dict[str, Files]:
        """The files of every unit, by key: those of the plan, or those that earlier plans left."""
        root = self.folder / "earlier" if earlier else self.folder
        found: dict[str, Files] = {}
        for which, folder, suffix in (("rows", "units", ".parquet"), ("maps", "maps", ".safetensors")):
            with contextlib.suppress(FileNotFoundError), os.scandir(root / folder) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.name.endswith(suffix) and not entry.name.startswith("."):
                        key = entry.name.partition("-")[0]
                        own = found.setdefault(key, Files())
                        if getattr(own, which) is None:
                            found[key] = own._replace(**{which: Path(entry.path)})
        return found

    def done(self) -> set[str]:
        """The keys of the units that are done, by their files' names."""
        return {key for key, files in self.files().items() if files.there}

    def arrange(self, keys: Collection[str]) -> None:
        """Have units/ and maps/ hold nothing but these units; the rest goes to earlier/, and comes back.

        So that whoever reads units/*.parquet reads each row once.
        """
        self.set_aside(keys)
        missing = set(keys) - self.done()
        for key, files in self.files(earlier=True).items():
            if key in missing:
                for path in filter(None, reversed(files)):  # rows say that a unit is done: they come last
                    self._move(path, back=True)

    def set_aside(self, keys: Collection[str]) -> None:
        """Put all but these units into earlier/."""
        for key, files in self.files().items():
            if key not in keys:
                for path in filter(None, reversed(files)):
                    self._move(path, back=False)

    def _move(self, path: Path, back: bool) -> None:
        root = self.folder if back else self.folder / "earlier"
        try:
            (root / path.parent.name).mkdir(parents=True, exist_ok=True)
            os.replace(path, root / path.parent.name / path.name)
            for other in (root / path.parent.name).glob(f"{glob.escape(path.name.partition('-')[0])}-*{path.suffix}"):
                if other.name != path.name:  # of a unit that was run twice, the last is right
                    other.unlink(missing_ok=True)
        except FileNotFoundError:  # another process was first
            return
        except OSError as error:
            raise PatchlightError(f"'{path}' cannot be moved: {error.strerror or error}") from error

    def discard(self, unit: Unit) -> None:
        """Put what a unit has left aside, so that it is run again; what was right in it is still known."""
        for path in filter(None, reversed(self.files().get(unit.key, Files()))):
            self._move(path, back=False)

    def drop_damaged(self) -> list[str]:
        """Take damaged files away; a sentence for each."""
        told = []
        for files in self.files().values():
            for path in files.damaged:
                told.append(_told(path))
                path.unlink(missing_ok=True)
        return told

    @cached_property
    def earlier(self) -> dict[str, Files]:
        """By cell, the files earlier plans left that know it; one in which it did not fail, where several do."""
        found: dict[str, Files] = {}
        good: set[str] = set()
        for files in self.files(earlier=True).values():
            table = files.table(["cell", "error"])
            if table is None:
                continue
            for cell, error in zip(table["cell"].to_pylist(), table["error"].to_pylist(), strict=True):
                if cell not in found or (cell not in good and not error):
                    found[cell] = files
                if not error:
                    good.add(cell)
        return found

    def before(self, unit: Unit, failed_too: bool = True) -> dict[str, Known]:
        """What earlier plans left of a unit's values; without those that failed, unless these count."""
        wanted = {cell for pair in unit.group.made for cell in unit.cells(pair)} if self.earlier else set()
        known: dict[str, Known] = {}
        for files in {self.earlier[cell] for cell in wanted if cell in self.earlier}:
            own = known_in(files, wanted)
            known |= {
                cell: one
                for cell, one in own.items()
                if self.earlier[cell] is files and (failed_too or not one.row.error)
            }
        return known

    def write(self, unit: Unit, done: Done) -> None:
        """Keep a unit."""
        self.keep(unit.key, table_bytes(done), map_bytes(done.maps))

    def keep(self, key: str, rows: bytes, maps: bytes) -> None:
        """Keep what belongs to a key: first its maps, then its rows, whose file says that it is done."""
        for folder, data, suffix in (("maps", maps, "safetensors"), ("units", rows, "parquet")):
            write_whole(self.folder / folder / f"{key}-{checksum(data)}.{suffix}", data, durable=True)
            for other in sorted((self.folder / folder).glob(f"{glob.escape(key)}-*.{suffix}"))[1:]:
                other.unlink(missing_ok=True)  # one thought dead has written it as well: whoever looks keeps the same

    def maps(self, model: str, images: Collection[str]) -> Maps:
        """What every method made of these images for a model."""
        drawn: dict[str, dict[str, Known]] = {}
        for files in self.files().values():
            if files.maps is None or not shows(files.maps, model, images):
                continue
            for known in known_in(files).values():
                if known.map is not None and known.row.image in images:
                    drawn.setdefault(known.row.method, {})[known.row.image] = known
        return maps_from(model, images, drawn)

    def tables(self, columns: list[str] | None = None) -> Iterator[Any]:
        """The rows of every unit that is done, as tables."""
        tables = (files.table(columns) for files in self.files().values())
        return (table for table in tables if table is not None)

    def failures(self) -> dict[str, int]:
        """How many values failed, by reason, the commonest first."""
        return counted(word_counts(table["error"]) for table in self.tables(["error"]))

    def results(self, progress: Progress | bool = False) -> Results:
        """All that is done of the plan."""
        notes: set[str] = set()
        files = self.files()

        def tables() -> Iterator[Any]:
            with telling(progress, "reading units") as tell:
                for i, own in enumerate(files.values()):
                    table = own.table()
                    damaged = [own.rows] if table is None else []
                    damaged += [own.maps] if _sound(own.maps) is None else []
                    notes.update(f"{_told(p)} and left out; run the benchmark again to mend it" for p in damaged if p)
                    if table is not None:
                        yield table
                    tell(i + 1, len(files))

        return results_of(tables(), self.manifest(), notes)

    def curves(self, model: str, method: str, metric: str) -> Tensor | None:
        """The curves [B,P] of every image, NaN of one without; None where the metric has none."""
        tables = self.tables(["model", "image", "method", "metric", "curve"])
        return curves_of(tables, self.manifest(), model, method, metric)


def known_in(files: Files, wanted: Collection[str] | None = None) -> Before:
    """What the files of a unit know, by cell; of the `wanted` cells alone, where some are."""
    table, maps = files.table(), files.read_maps()
    if table is None:
        return {}
    if wanted is not None:
        table = table.filter([cell in wanted for cell in table["cell"].to_pylist()])
    facts, place = facts_of(table), {name: i for i, name in enumerate(maps.images)}
    found: dict[str, Known] = {}
    for row in rows_of(table):
        i = place.get(row.image)
        drawn = maps.scores[row.method][i] if i is not None and row.method in maps.scores else None
        drawn = None if drawn is None or bool(drawn.isnan().all()) else drawn
        explained = "" if i is None else maps.classes[i]
        found[row.cell] = Known(row, facts.get(row.metric), drawn, explained, maps.preprocess)
    return found


def checksum(data: bytes) -> str:
    """What a file's name ends with, without which nothing in it is believed."""
    return hashlib.sha256(data).hexdigest()[:16]


def _sound(path: Path | None) -> bytes | None:
    """What is in a file; None where it is missing, or not what was written: its name ends with its checksum."""
    try:
        data = path.read_bytes() if path is not None else None
    except OSError:
        return None
    return data if data is not None and path is not None and checksum(data) == path.stem.rpartition("-")[2] else None


def _told(path: Path) -> str:
    return f"'{path.parent.name}/{path.name}' is damaged"
