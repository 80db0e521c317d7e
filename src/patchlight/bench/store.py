"""The store of a run: a folder of Parquet shards and safetensors maps, each written whole and renamed.

manifest.json says what is planned; shards/PLACE-KEY-SUM.parquet has a row for each image, method and metric; maps/ the
maps at patch resolution. SUM is the checksum of the file, without which nothing in it is believed. What a changed plan
leaves behind lies under earlier/. A run that is killed loses the shard in flight, nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from patchlight.bench.manifest import Manifest, PlannedShard, read_manifest, write_manifest
from patchlight.bench.plan import Shard
from patchlight.bench.results import Column, Results, columns_of, counted
from patchlight.bench.rows import (
    SCHEMA,
    Before,
    Done,
    Facts,
    Maps,
    Row,
    facts_of,
    failed,
    map_bytes,
    maps_of,
    rows_of,
    table_bytes,
    table_of,
)
from patchlight.errors import PatchlightError
from patchlight.files import check_writable, write_whole

PART = re.compile(r"\..+-[a-z0-9_]{8}")
"""Names under which files are written before they are renamed."""


class Files(NamedTuple):
    """The files of a shard, where they exist: its rows and its maps."""

    rows: Path | None = None
    maps: Path | None = None

    @property
    def damaged(self) -> list[Path]:
        return [path for path in self if path is not None and _sound(path) is None]

    def table(self, columns: list[str] | None = None) -> Any:
        """The rows as a table; None where they are missing or damaged."""
        return table_of(_sound(self.rows), columns)

    def read_maps(self) -> Maps:
        """The maps; none where they are missing or damaged."""
        return Maps() if self.maps is None or _sound(self.maps) is None else maps_of(self.maps)

    def whole(self) -> Any:
        """The rows as a table, where rows and maps are both there and sound; else None."""
        return None if _sound(self.maps) is None else self.table()


class Store:
    """A run's folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def manifest_path(self) -> Path:
        return self.folder / "manifest.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and hold it alone; the lock is the system's, so it ends with the process in any case."""
        from filelock import FileLock, Timeout

        check_writable(self.folder)
        if self.folder.is_dir() and any(self.folder.iterdir()) and not self.manifest_path.exists():
            own = (".lock", "shards", "maps", "earlier")
            strange = [p.name for p in self.folder.iterdir() if p.name not in own and not PART.fullmatch(p.name)]
            if strange:
                raise PatchlightError(f"'{self.folder}' is not a run: it holds '{strange[0]}'; give an empty folder")
        try:
            for folder in ("shards", "maps"):
                (self.folder / folder).mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.folder / ".lock")
            lock.acquire(timeout=0)
        except Timeout as error:
            raise PatchlightError(
                f"another process is at work in '{self.folder}'; wait for it, or give another --out"
            ) from error
        except OSError as error:
            raise PatchlightError(f"'{self.folder}' cannot be written: {error.strerror or error}") from error
        try:
            for pattern in (f".{self.manifest_path.name}-*", "shards/.*", "maps/.*"):
                for leftover in self.folder.glob(pattern):
                    leftover.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

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

    def write_manifest(self, manifest: Manifest) -> None:
        write_manifest(self.manifest_path, manifest)

    def files(self, earlier: bool = False) -> dict[tuple[str, str], Files]:
        """The files of every shard, by place and key: those of the plan, or those that earlier plans left."""
        root = self.folder / "earlier" if earlier else self.folder
        found: dict[tuple[str, str], Files] = {}
        for which, folder, suffix in (("rows", "shards", "parquet"), ("maps", "maps", "safetensors")):
            for path in sorted((root / folder).glob(f"*.{suffix}")):
                place, _, key = path.stem.rpartition("-")[0].partition("-")
                found[place, key] = found.get((place, key), Files())._replace(**{which: path})
        return found

    def files_of(self, shards: Sequence[Shard | PlannedShard]) -> list[Files]:
        """The files of these shards."""
        there = self.files()
        return [there.get((shard.place, shard.key), Files()) for shard in shards]

    def arrange(self, shards: Sequence[Shard]) -> None:
        """Have shards/ and maps/ hold nothing but what belongs to the plan; the rest goes to earlier/, and comes back.

        So that whoever reads shards/*.parquet reads each row once.
        """
        wanted = {(s.place, s.key) for s in shards}
        for earlier in (False, True):
            for name, files in self.files(earlier).items():
                if (name in wanted) == earlier:
                    for path in filter(None, reversed(files)):  # rows say that a shard is done: they come last
                        self._move(path, earlier)

    def _move(self, path: Path, back: bool) -> None:
        root = self.folder if back else self.folder / "earlier"
        try:
            (root / path.parent.name).mkdir(parents=True, exist_ok=True)
            os.replace(path, root / path.parent.name / path.name)
        except OSError as error:
            raise PatchlightError(f"'{path}' cannot be moved: {error.strerror or error}") from error

    def missing(self, shards: Sequence[Shard], failed_too: bool = True) -> list[Shard]:
        """The shards that are not done: without sound files, or with failures unless those count as done."""

        def done(files: Files) -> bool:
            table = files.whole()
            return table is not None and (failed_too or not any(table["error"].to_pylist()))

        return [shard for shard, files in zip(shards, self.files_of(shards), strict=True) if not done(files)]

    def finished(self) -> tuple[list[PlannedShard], list[PlannedShard]]:
        """The manifest's shards that are done, and those whose files are there but damaged."""
        done: list[PlannedShard] = []
        damaged: list[PlannedShard] = []
        shards = self.manifest().shards
        for shard, files in zip(shards, self.files_of(shards), strict=True):
            if files.rows is not None:
                (damaged if files.whole() is None else done).append(shard)
        return done, damaged

    def damaged(self, shards: Sequence[Shard]) -> list[str]:
        """A sentence for each damaged file of these shards."""
        return [_told(path) for files in self.files_of(shards) for path in files.damaged]

    def before(self, shard: Shard, failed_too: bool = True) -> Before:
        """What earlier shards of the same place know; without cells that have failures, unless those count.

        Where several know a cell, the one with the fewest failures is believed.
        """
        rows: dict[str, list[Row]] = {}
        facts: dict[str, Facts] = {}
        maps: dict[str, Tensor] = {}
        there = [*self.files().items(), *self.files(earlier=True).items()]
        for files in (files for (place, _), files in there if place == shard.place):
            table = files.whole()
            if table is None:
                continue
            own, drawn = facts_of(table), files.read_maps().scores
            here: dict[str, list[Row]] = {}
            for row in rows_of(table):
                here.setdefault(row.cell, []).append(row)
            for cell, found in here.items():
                count = failed(found)
                if (count and not failed_too) or (cell in rows and failed(rows[cell]) <= count):
                    continue
                method, metric = found[0].method, found[0].metric
                rows[cell] = found
                facts |= {cell: own[metric]} if metric in own else {}
                maps.pop(cell, None)
                maps |= {cell: drawn[method]} if method in drawn else {}
        return Before(rows, facts, maps)

    def write(self, shard: Shard, done: Done) -> None:
        """Keep a shard: first its maps, then its rows, whose file says that it is done."""
        data, maps = table_bytes(done), map_bytes(done.maps)
        for path in filter(None, self.files_of([shard])[0]):
            path.unlink(missing_ok=True)
        self._write("maps", shard, maps, "safetensors")
        self._write("shards", shard, data, "parquet")

    def _write(self, folder: str, shard: Shard, data: bytes, suffix: str) -> None:
        name = f"{shard.place}-{shard.key}-{_sum(data)}.{suffix}"
        write_whole(self.folder / folder / name, data, durable=True)

    def read_maps(self, shard: Shard | PlannedShard) -> Maps:
        """The maps of a shard; none where they are missing or damaged."""
        return self.files_of([shard])[0].read_maps()

    def failures(self) -> dict[str, int]:
        """How many values of the plan failed, by reason, the commonest first."""
        tables = [files.table(["error"]) for files in self.files_of(self.manifest().shards)]
        return counted(error for table in tables if table is not None for error in table["error"].to_pylist())

    def results(self) -> Results:
        """Every shard of the plan that is done, put together in the plan's order."""
        manifest = self.manifest()
        images: dict[str, list[str]] = {}
        tables: dict[str, list[Any]] = {}
        notes: set[str] = set()
        for shard, files in zip(manifest.shards, self.files_of(manifest.shards), strict=True):
            table = files.table()
            if files.rows is not None:
                notes |= {f"{_told(p)} and left out; run the benchmark again to mend it" for p in files.damaged}
            if table is None:
                continue
            unknown = sorted(set(table.column_names) - set(SCHEMA.names))
            if unknown:
                notes.add(f"column '{unknown[0]}' was written by a newer Patchlight and is left out")
            images.setdefault(shard.model, []).extend(shard.images)
            tables.setdefault(shard.model, []).append(table)
        columns: dict[tuple[str, str, str], Column] = {}
        for model, found in tables.items():
            columns |= {(model, *pair): column for pair, column in columns_of(found, manifest.resolved)}
        return Results(images, columns, tuple(sorted(notes)))


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _sound(path: Path | None) -> bytes | None:
    """What is in a file; None where it is missing, or not what was written: its name ends with its checksum."""
    try:
        data = path.read_bytes() if path is not None else None
    except OSError:
        return None
    return data if data is not None and path is not None and _sum(data) == path.stem.rpartition("-")[2] else None


def _told(path: Path) -> str:
    return f"'{path.parent.name}/{path.name}' is damaged"
