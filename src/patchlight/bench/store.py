"""The store of a run: a folder of Parquet shards and safetensors maps, each written whole and renamed.

manifest.json says what is planned; shards/PLACE-KEY-SUM.parquet has a row for each image, method and metric; maps/ the
maps at patch resolution. SUM is the checksum of the file, without which nothing in it is believed. What a changed plan
leaves behind lies under earlier/. A run that is killed loses the shard in flight, nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from patchlight.bench.plan import Shard, digest_of
from patchlight.bench.recipe import Recipe
from patchlight.errors import PatchlightError
from patchlight.files import check_writable, write_whole

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
except ImportError as error:
    raise PatchlightError("the benchmark needs pyarrow, jinja2 and plotly: pip install 'patchlight[bench]'") from error

FORMAT = 2
PART = re.compile(r"\..+-[a-z0-9_]{8}")
"""Names under which files are written before they are renamed."""
TIMING = ("explain_seconds", "measure_seconds")
SCHEMA = pa.schema(
    [
        ("model", pa.string()),
        ("image", pa.string()),
        ("target", pa.int64()),
        ("method", pa.string()),
        ("metric", pa.string()),
        ("cell", pa.string()),
        ("value", pa.float64()),
        ("note", pa.string()),
        ("error", pa.string()),
        ("curve", pa.list_(pa.float32())),
        ("parts", pa.map_(pa.string(), pa.list_(pa.float64()))),
        *((name, pa.float64()) for name in TIMING),
    ]
)
Row = dict[str, Any]


class _Shard(BaseModel):
    """A shard as the manifest lists it."""

    place: str
    key: str
    model: str
    images: list[str]
    indices: list[int]


class _Manifest(BaseModel):
    """What must be in a manifest for a run to go on and a report to be made."""

    resolved: dict[str, Any]
    recipe: str
    quick: bool
    notes: list[str]
    device: str
    chunk: int
    threads: int
    versions: dict[str, str]
    shards: list[_Shard]


class Files(NamedTuple):
    """The files of a shard, where they exist: its rows and its maps."""

    rows: Path | None = None
    maps: Path | None = None


@dataclass(frozen=True)
class Maps:
    """Maps [n,h,w] by method, the images they are of, the classes they explain, and how the model saw the images."""

    scores: Mapping[str, Tensor] = field(default_factory=dict)
    images: Sequence[str] = ()
    classes: Sequence[str] = ()
    preprocess: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """What running a shard gave: rows, maps, and facts by metric (`x` [P], `higher_is_better`, `bounds`, `parts`)."""

    rows: list[Row]
    maps: Maps
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Before:
    """What is known already, by cell: rows, facts about the metric, and maps."""

    rows: Mapping[str, list[Row]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    maps: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Column:
    """One method under one metric on one model, image by image: values [B], curve [B,P] float32 and parts [B,...].

    `errors` say why an image failed; `notes` why a value does not exist, or is worth little.
    """

    values: Tensor
    errors: list[str]
    notes: list[str]
    curve: Tensor | None
    x: Tensor | None
    parts: dict[str, Tensor]
    higher_is_better: bool
    bounds: tuple[float, float]
    explain_seconds: Tensor
    measure_seconds: Tensor


@dataclass(frozen=True, eq=False)
class Results:
    """All that a store holds of its plan: the images of each model that are done, and a column for each cell."""

    images: dict[str, list[str]]
    columns: dict[tuple[str, str, str], Column]
    notes: tuple[str, ...] = ()

    @property
    def failures(self) -> dict[str, int]:
        """How many values failed, by reason, the commonest first."""
        return _ordered(Counter(error for column in self.columns.values() for error in column.errors if error))


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

    def read_manifest(self) -> dict[str, Any] | None:
        """What the run was begun with; None where none was."""
        try:
            manifest = json.loads(self.manifest_path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise PatchlightError(f"'{self.manifest_path}' cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError):
            manifest = None
        made = manifest.get("format") if isinstance(manifest, dict) else None
        if isinstance(made, int) and not isinstance(made, bool) and made != FORMAT:
            newer = made > FORMAT
            raise PatchlightError(
                f"'{self.folder}' was made by {'a newer' if newer else 'an earlier'} Patchlight (format {made}, here "
                f"{FORMAT}); {'update Patchlight to read it' if newer else 'give another --out, and run it again'}"
            )
        damaged = PatchlightError(
            f"'{self.manifest_path}' is damaged; delete it, and the same `bench run` goes on with what is done"
        )
        if not isinstance(manifest, dict) or manifest.pop("sum", None) != digest_of(manifest):
            raise damaged
        try:
            _Manifest.model_validate(manifest)
            Recipe.model_validate(manifest["resolved"])
        except ValidationError as error:
            raise damaged from error
        return manifest

    def manifest(self) -> dict[str, Any]:
        """What the run was begun with; refused where there is none."""
        found = self.read_manifest()
        if found is None:
            raise PatchlightError(
                f"there is no run in '{self.folder}'; `patchlight bench run RECIPE --out DIR` begins one"
            )
        return found

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        whole = json.loads(json.dumps({"format": FORMAT, **manifest}))
        text = json.dumps({**whole, "sum": digest_of(whole)}, indent=1)
        write_whole(self.manifest_path, text.encode(), durable=True)

    def recipe(self) -> Recipe:
        """The recipe as it was run, overrides and all."""
        return Recipe.model_validate(self.manifest()["resolved"])

    def files(self, earlier: bool = False) -> dict[tuple[str, str], Files]:
        """The files of every shard, by place and key: those of the plan, or those that earlier plans left."""
        root = self.folder / "earlier" if earlier else self.folder
        found: dict[tuple[str, str], Files] = {}
        for which, folder, suffix in (("rows", "shards", "parquet"), ("maps", "maps", "safetensors")):
            for path in sorted((root / folder).glob(f"*.{suffix}")):
                place, _, key = path.stem.rpartition("-")[0].partition("-")
                found[place, key] = found.get((place, key), Files())._replace(**{which: path})
        return found

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
        there = self.files()

        def done(shard: Shard) -> bool:
            files = there.get((shard.place, shard.key), Files())
            table = _table(files.rows)
            sound = table is not None and _sound(files.maps) is not None
            return sound and (failed_too or not any(table["error"].to_pylist()))

        return [shard for shard in shards if not done(shard)]

    def finished(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The manifest's shards that are done, and those whose files are there but damaged."""
        done: list[dict[str, Any]] = []
        damaged: list[dict[str, Any]] = []
        there = self.files()
        for planned in self.manifest()["shards"]:
            files = there.get((planned["place"], planned["key"]), Files())
            if files.rows is not None:
                sound = _table(files.rows) is not None and _sound(files.maps) is not None
                (done if sound else damaged).append(planned)
        return done, damaged

    def damaged(self, shards: Sequence[Shard]) -> list[str]:
        """A sentence for each damaged file of these shards."""
        there = self.files()
        found = [there.get((s.place, s.key), Files()) for s in shards]
        return [_told(path) for files in found for path in files if path is not None and _sound(path) is None]

    def before(self, shard: Shard, failed_too: bool = True) -> Before:
        """What earlier shards of the same place know; without cells that have failures, unless those count.

        Where several know a cell, the one with the fewest failures is believed.
        """
        rows: dict[str, list[Row]] = {}
        facts: dict[str, Any] = {}
        maps: dict[str, Tensor] = {}
        there = [*self.files().items(), *self.files(earlier=True).items()]
        for files in (files for (place, _), files in there if place == shard.place):
            table = _table(files.rows)
            if table is None or _sound(files.maps) is None:
                continue
            own, drawn = _facts(table), _read_maps(files.maps).scores
            here: dict[str, list[Row]] = {}
            for row in table.select([n for n in SCHEMA.names if n in table.column_names]).to_pylist():
                here.setdefault(row["cell"], []).append({**row, "parts": dict(row["parts"] or ())})
            for cell, found in here.items():
                failed = _failed(found)
                if (failed and not failed_too) or (cell in rows and _failed(rows[cell]) <= failed):
                    continue
                rows[cell], facts[cell] = found, own.get(found[0]["metric"])
                maps.pop(cell, None)
                if found[0]["method"] in drawn:
                    maps[cell] = drawn[found[0]["method"]]
        return Before(rows, facts, maps)

    def write(self, shard: Shard, done: Done) -> None:
        """Keep a shard: first its maps, then its rows, whose file says that it is done."""
        from safetensors.torch import save

        maps = done.maps
        about = {"images": maps.images, "classes": maps.classes, "preprocess": maps.preprocess}
        tensors = {name: scores.contiguous() for name, scores in maps.scores.items()}
        data = save(tensors, {key: json.dumps(value) for key, value in about.items()})
        schema = SCHEMA.with_metadata({"facts": json.dumps(done.facts), "format": str(FORMAT)})
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(done.rows, schema), sink, compression="zstd")
        old = self.files().get((shard.place, shard.key), Files())
        for path in filter(None, old):
            path.unlink(missing_ok=True)
        self._write("maps", shard, data, "safetensors")
        self._write("shards", shard, sink.getvalue().to_pybytes(), "parquet")

    def _write(self, folder: str, shard: Shard, data: bytes, suffix: str) -> None:
        name = f"{shard.place}-{shard.key}-{_sum(data)}.{suffix}"
        write_whole(self.folder / folder / name, data, durable=True)

    def read_maps(self, place: str, key: str) -> Maps:
        """The maps of a shard; none where they are missing or damaged. What a newer version adds is left out."""
        return _read_maps(self.files().get((place, key), Files()).maps)

    def failures(self) -> dict[str, int]:
        """How many values of the plan failed, by reason, the commonest first."""
        found: Counter[str] = Counter()
        there = self.files()
        for planned in self.manifest()["shards"]:
            table = _table(there.get((planned["place"], planned["key"]), Files()).rows, ["error"])
            if table is not None:
                found.update(error for error in table["error"].to_pylist() if error)
        return _ordered(found)

    def results(self) -> Results:
        """Every shard of the plan that is done, put together in the plan's order."""
        manifest = self.manifest()
        images: dict[str, list[str]] = {}
        tables: dict[str, list[Any]] = {}
        notes: set[str] = set()
        there = self.files()
        for planned in manifest["shards"]:
            files = there.get((planned["place"], planned["key"]), Files())
            table = _table(files.rows)
            if files.rows is not None:
                broken = [path for path in files if path is not None and _sound(path) is None]
                notes |= {f"{_told(path)} and left out; run the benchmark again to mend it" for path in broken}
            if table is None:
                continue
            unknown = sorted(set(table.column_names) - set(SCHEMA.names))
            if unknown:
                notes.add(f"column '{unknown[0]}' was written by a newer Patchlight and is left out")
            images.setdefault(planned["model"], []).extend(planned["images"])
            tables.setdefault(planned["model"], []).append(table)
        columns = {}
        resolved = manifest["resolved"]
        for model, found in tables.items():
            facts: dict[str, Any] = {}
            for table in found:
                facts |= {k: v for k, v in _facts(table).items() if v}
            kept = [t.select([n for n in SCHEMA.names if n in t.column_names]).replace_schema_metadata() for t in found]
            whole = pa.concat_tables(kept)
            names = {key: list(resolved[key]) for key in ("methods", "metrics")}
            method = pc.index_in(whole["method"], pa.array(names["methods"])).to_numpy()
            metric = pc.index_in(whole["metric"], pa.array(names["metrics"])).to_numpy()
            for i, m in enumerate(names["methods"]):
                for j, n in enumerate(names["metrics"]):
                    rows = np.flatnonzero((method == i) & (metric == j))
                    columns[model, m, n] = _column(whole.take(rows), facts.get(n) or {})
        return Results(images, columns, tuple(sorted(notes)))


def _failed(rows: Sequence[Row]) -> int:
    return sum(bool(row["error"]) for row in rows)


def _ordered(found: Counter[str]) -> dict[str, int]:
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


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


def _table(path: Path | None, columns: list[str] | None = None) -> Any:
    """A shard's table; None where it is missing or damaged."""
    data = _sound(path)
    try:
        if data is None:
            return None
        # without threads: a pool that still works when the interpreter ends aborts it
        return pq.ParquetFile(pa.BufferReader(data), pre_buffer=False).read(columns, use_threads=False)
    except (pa.ArrowException, OSError):
        return None


def _read_maps(path: Path | None) -> Maps:
    from safetensors import SafetensorError, safe_open

    if _sound(path) is None:
        return Maps()
    known = ("images", "classes", "preprocess")
    try:
        with safe_open(path, "pt") as file:
            scores = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = file.metadata() or {}
            return Maps(scores, **{name: json.loads(about[name]) for name in known if name in about})
    except (OSError, ValueError, SafetensorError):
        return Maps()


def _facts(table: Any) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((table.schema.metadata or {}).get(b"facts", b"{}"))
    return facts


def _column(table: Any, facts: Mapping[str, Any]) -> Column:
    def numbers(name: str) -> Tensor:
        return torch.from_numpy(table[name].to_numpy().astype(np.float64))

    values = numbers("value")
    x = torch.tensor(facts["x"], dtype=torch.float64) if facts.get("x") else None
    curve = None
    if x is not None:
        lists = table["curve"].combine_chunks()
        drawn = (pc.list_value_length(lists).fill_null(0).to_numpy() == len(x)).nonzero()[0]
        curve = torch.full((len(table), len(x)), torch.nan)
        curve[torch.from_numpy(drawn)] = torch.from_numpy(
            lists.take(drawn).flatten().to_numpy().reshape(-1, len(x)).copy()
        )
    rows = [dict(parts or ()) for parts in table["parts"].to_pylist()]
    parts = {
        name: torch.tensor([r.get(name) or [0.0] * int(np.prod(shape)) for r in rows], dtype=torch.float64).view(
            -1, *shape
        )
        for name, shape in facts.get("parts", {}).items()
    }
    return Column(
        values,
        [e or "" for e in table["error"].to_pylist()],
        [n or "" for n in table["note"].to_pylist()],
        curve,
        x,
        parts,
        bool(facts.get("higher_is_better", True)),
        tuple(facts.get("bounds", (0.0, 1.0))),
        numbers("explain_seconds"),
        numbers("measure_seconds"),
    )


def planned(shards: Sequence[Shard]) -> list[dict[str, Any]]:
    """The shards, as a manifest lists them."""
    return [
        {"place": s.place, "key": s.key, "model": s.label, "images": list(s.names), "indices": list(s.indices)}
        for s in shards
    ]
