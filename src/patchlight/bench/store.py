"""The folder of a run: Parquet units and safetensors maps, each written whole and renamed, in one shard or several.

manifest.json says what is planned. units/KEY-SUM.parquet has a row for each image, method and metric of a unit, maps/
its maps at patch resolution; SUM is the checksum of the file, without which nothing in it is used. A run in shards has
them under shards/K-of-N/, and the run is the union of its shards. A shard has one owner at a time, who holds its lock.
Units that a changed plan no longer has are kept under earlier/. A killed process loses the unit in flight.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from patchlight.bench.manifest import Manifest, read_manifest
from patchlight.bench.plan import WHOLE, Plan, Shard, Unit
from patchlight.bench.results import Results, counted, curves_of, results_of, word_counts
from patchlight.bench.rows import (
    Before,
    Known,
    Maps,
    facts_of,
    maps_from,
    maps_of,
    rows_of,
    shows,
    table_of,
)
from patchlight.core.errors import PatchlightError
from patchlight.core.extras import missing_extra
from patchlight.core.files import check_writable, write_atomic
from patchlight.core.progress import Progress, show_progress

try:
    from filelock import FileLock, Timeout
except ImportError as error:
    raise missing_extra("the benchmark needs", "filelock", "bench") from error

PART = re.compile(r"\..+-[a-z0-9_]{8}")
"""Names under which files are written before they are renamed."""
NAMES = ("units", "maps", "shards", "earlier", "logs", "lock", "plan.lock", "owner.json")
"""What a run's folder may hold besides its manifest."""
MOMENT = 2.0
"""Seconds to wait for a lock: somebody may only be looking whether it is held."""


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

    def content(self) -> tuple[Any, Maps]:
        """Rows and maps."""
        return self.table(), self.read_maps()

    def read_maps(self) -> Maps:
        """The maps; none where they are missing or damaged."""
        return Maps() if self.maps is None or _sound(self.maps) is None else maps_of(self.maps)


class Store:
    """A run's folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._recent = lru_cache(maxsize=4)(Files.content)  # those of an export are asked for many times

    @property
    def manifest_path(self) -> Path:
        return self.folder / "manifest.json"

    def folder_of(self, shard: Shard) -> Path:
        """Where the units of a shard are."""
        return self.folder if shard == WHOLE else self.folder / "shards" / f"{shard.number}-of-{shard.count}"

    def shards(self) -> list[Path]:
        """The folders that hold units: the run's own, and one for each shard that was begun."""
        return [self.folder, *sorted((self.folder / "shards").glob("*-of-*"))]

    def make(self, shard: Shard = WHOLE) -> None:
        """Make the folder; refused where it is something else's."""
        check_writable(self.folder)
        if self.folder.is_dir() and not self.manifest_path.exists():
            strange = [p.name for p in self.folder.iterdir() if p.name not in NAMES and not PART.fullmatch(p.name)]
            if strange:
                raise PatchlightError(f"'{self.folder}' is not a run: it holds '{strange[0]}'; give an empty folder")
        try:
            for folder in ("units", "maps"):
                (self.folder_of(shard) / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PatchlightError(f"'{self.folder}' cannot be written: {error.strerror or error}") from error

    @contextlib.contextmanager
    def owned(self, shard: Shard) -> Iterator[None]:
        """Own a shard; refused where another process does, or where one is at work on another division of the run."""
        folder = self.folder_of(shard)
        with _locked(folder / "lock") as lock:
            if not lock:
                raise PatchlightError(f"{_holder(folder)} is at work on {self._shown(folder)}; wait until it has ended")
            for other in self.held():
                same = other != self.folder and shard != WHOLE and other.name.endswith(f"-of-{shard.count}")
                if other != folder and not same:
                    raise PatchlightError(
                        f"{_holder(other)} is at work on {self._shown(other)}; wait until it has ended, or give "
                        "--shard of as many"
                    )
            about = {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            write_atomic(folder / "owner.json", json.dumps(about).encode())
            try:
                yield
            finally:
                (folder / "owner.json").unlink(missing_ok=True)

    def held(self) -> list[Path]:
        """The folders of shards that some process is at work on."""
        found = []
        for folder in self.shards():
            if (folder / "lock").exists():
                with _locked(folder / "lock", 0) as lock:
                    found += [] if lock else [folder]
        return found

    def workers(self) -> list[str]:
        """Who is at work on the run, and on which shard."""
        return [self.worker(folder) for folder in self.held()]

    def worker(self, folder: Path) -> str:
        """Who is at work on the shard of this folder."""
        return f"{_holder(folder)}, on {self._shown(folder)}"

    def _shown(self, folder: Path) -> str:
        return f"'{self.folder}'" if folder == self.folder else f"shard {folder.name} of '{self.folder}'"

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Nobody else brings the folder in line with a plan meanwhile."""
        with _locked(self.folder / "plan.lock", -1):
            yield

    def sweep(self, folders: Iterable[Path]) -> None:
        """Remove what killed processes left half written in these shards."""
        patterns = (f".{self.manifest_path.name}-*", "units/.*", "maps/.*")  # an owner.json may be written right now
        for leftover in (path for folder in folders for pattern in patterns for path in folder.glob(pattern)):
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

    def files(self, folders: Iterable[Path] | None = None) -> dict[str, Files]:
        """The files of every unit, by key, in these folders; by default those of all shards."""
        found: dict[str, Files] = {}
        for root in self.shards() if folders is None else folders:
            for which, folder, suffix in (("rows", "units", ".parquet"), ("maps", "maps", ".safetensors")):
                with contextlib.suppress(FileNotFoundError), os.scandir(root / folder) as entries:
                    for entry in sorted(entries, key=lambda entry: entry.name):
                        if entry.name.endswith(suffix) and not entry.name.startswith("."):
                            key = entry.name.rpartition("-")[0]
                            own = found.setdefault(key, Files())
                            if getattr(own, which) is None:
                                found[key] = own._replace(**{which: Path(entry.path)})
        return found

    def units(self, plan: Plan) -> list[Unit]:
        """The units of a plan that are done, by their files' names."""
        units = (plan.unit_of(key) for key, files in self.files().items() if files.there)
        return [unit for unit in units if unit is not None]

    def arrange(self, plan: Plan) -> list[str]:
        """Move units that are not of the plan to earlier/, and units of the plan back from there.

        So units/*.parquet contains every row once. A file whose rows are not those of the unit in its name was renamed:
        it is removed, and reported in the notes that this returns.
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
        """Put the files of a unit into earlier/, so that it is run again; what is right in it can be reused."""
        _move(files, self.folder / "earlier")

    def drop_damaged(self, folders: Iterable[Path]) -> list[str]:
        """Remove units of these shards that are damaged, or of which a killed process wrote half; name the damaged."""
        notes = []
        for files in self.files(folders).values():
            damaged = files.damaged
            if damaged or not files.there:
                notes += [_damage(path) for path in damaged]
                _remove(files)
        return notes

    @cached_property
    def earlier(self) -> dict[str, Files]:
        """By cell, the files earlier plans left that know it; one in which it did not fail, where several do."""
        found: dict[str, Files] = {}
        good: set[str] = set()
        for files in self.files([self.folder / "earlier"]).values():
            table = files.table(["cell", "error"]) if files.there else None
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
            own = known_in(*self._recent(files), wanted)
            known |= {
                cell: one
                for cell, one in own.items()
                if self.earlier[cell] is files and (failed_too or not one.row.error)
            }
        return known

    def keep(self, key: str, rows: bytes, maps: bytes, folder: Path | None = None) -> None:
        """Write the files of a key: first its maps, then its rows, whose file says that it is done."""
        for name, data, suffix in (("maps", maps, "safetensors"), ("units", rows, "parquet")):
            place = (folder or self.folder) / name
            write_atomic(place / f"{key}-{checksum(data)}.{suffix}", data, durable=True)

    def maps(self, model: str, images: Collection[str]) -> Maps:
        """What every method made of these images for a model."""
        drawn: dict[str, dict[str, Known]] = {}
        for files in self.files().values():
            if files.maps is None or not shows(files.maps, model, images):
                continue
            for known in known_in(*files.content()).values():
                if known.map is not None and known.row.image in images:
                    drawn.setdefault(known.row.method, {})[known.row.image] = known
        return maps_from(model, images, drawn)

    def tables(self, columns: list[str] | None = None) -> Iterator[Any]:
        """The rows of every unit that is done, as tables."""
        tables = (files.table(columns) for files in self.files().values())
        return (table for table in tables if table is not None)

    def failures(self, folders: Iterable[Path] | None = None) -> dict[str, int]:
        """How many values failed, by reason, the commonest first; in these shards, by default in all."""
        tables = (files.table(["error"]) for files in self.files(folders).values())
        return counted(word_counts(table["error"]) for table in tables if table is not None)

    def failed(self, folders: Iterable[Path]) -> list[Files]:
        """The files of the units of these shards in which something failed."""
        return [
            files
            for files in self.files(folders).values()
            if (table := files.table(["error"])) is not None and any(table["error"].to_pylist())
        ]

    def results(self, progress: Progress | bool = False) -> Results:
        """All that is done of the plan."""
        notes: set[str] = set()
        files = self.files()

        def tables() -> Iterator[Any]:
            with show_progress(progress, "reading units") as tell:
                for i, own in enumerate(files.values()):
                    table = own.table()
                    damaged = [own.rows] if table is None else []
                    damaged += [own.maps] if _sound(own.maps) is None else []
                    notes.update(f"{_damage(p)} and left out; run the benchmark again to mend it" for p in damaged if p)
                    if table is not None:
                        yield table
                    tell(i + 1, len(files))

        return results_of(tables(), self.manifest(), notes)

    def curves(self, model: str, method: str, metric: str) -> Tensor | None:
        """The curves [B,P] of every image, NaN of one without; None where the metric has none."""
        tables = self.tables(["model", "image", "method", "metric", "curve"])
        return curves_of(tables, self.manifest(), model, method, metric)


def known_in(table: Any, maps: Maps, wanted: Collection[str] | None = None) -> Before:
    """What rows and maps know, by cell; of the `wanted` cells alone, where some are."""
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


def _contains(files: Files, unit: Unit) -> bool:
    """Whether the rows of a file are those of a unit, by their number and the first and last of them."""
    table = files.table(["cell"])
    if table is None or len(table) != unit.values:
        return False
    pairs = list(unit.group.made)
    expected = [unit.cells(pairs[0])[0], unit.cells(pairs[-1])[-1]]
    return [table["cell"][0].as_py(), table["cell"][len(table) - 1].as_py()] == expected


def _damage(path: Path) -> str:
    return f"'{path.parent.name}/{path.name}' is damaged"


def _remove(files: Files) -> None:
    for path in filter(None, files):
        path.unlink(missing_ok=True)


def _move(files: Files, root: Path) -> None:
    """Move the files of a unit, its rows last: they say that it is done."""
    for path in filter(None, reversed(files)):
        target = root / path.parent.name / path.name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
            for other in target.parent.glob(f"{glob.escape(path.name.rpartition('-')[0])}-*{path.suffix}"):
                if other.name != path.name:  # of a unit that was run twice, the last is right
                    other.unlink(missing_ok=True)
        except OSError as error:
            raise PatchlightError(f"'{path}' cannot be moved: {error.strerror or error}") from error


@contextlib.contextmanager
def _locked(path: Path, seconds: float = MOMENT) -> Iterator[FileLock | None]:
    """Hold a lock; None where another process holds it for longer than that. -1 waits for ever."""
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
    """Who holds the lock of a shard: its process, its machine, and since when."""
    try:
        about = json.loads((folder / "owner.json").read_text(encoding="utf-8"))
        return f"process {about['pid']} on {about['host']} (since {about['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
