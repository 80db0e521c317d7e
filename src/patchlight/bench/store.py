"""The store of a run: a folder of Parquet shards and safetensors maps, each written whole and renamed.

manifest.json says what is planned; shards/PLACE-KEY.parquet has a row for each image, method and metric; maps/ the maps
at patch resolution. A run that is killed loses the shard in flight, nothing else.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchlight.bench.plan import Shard
from patchlight.bench.recipe import Recipe
from patchlight.errors import PatchlightError
from patchlight.files import check_writable, write_whole

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
except ImportError as error:
    raise PatchlightError("the benchmark needs pyarrow, jinja2 and plotly: pip install 'patchlight[bench]'") from error

FORMAT = 1
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
            own = (".lock", "shards", "maps")
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
            manifest: dict[str, Any] = json.loads(self.manifest_path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise PatchlightError(f"'{self.manifest_path}' is damaged: {error}") from error
        if manifest.get("format", 0) > FORMAT:
            raise PatchlightError(
                f"'{self.folder}' was made by a newer Patchlight (format {manifest['format']}, here {FORMAT}); "
                f"update Patchlight to read it"
            )
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
        text = json.dumps({"format": FORMAT, **manifest}, indent=1, ensure_ascii=False)
        write_whole(self.manifest_path, text.encode(), durable=True)

    def recipe(self) -> Recipe:
        """The recipe as it was run, overrides and all."""
        return Recipe.model_validate(self.manifest()["resolved"])

    def path(self, place: str, key: str) -> Path:
        return self.folder / "shards" / f"{place}-{key}.parquet"

    def has(self, shard: Shard, failed_too: bool = True) -> bool:
        """Whether a shard is done: its file can be read, and has no failures unless those count as done."""
        table = _table(self.path(shard.place, shard.key))
        return table is not None and (failed_too or not any(table["error"].to_pylist()))

    def finished(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The manifest's shards that are done, and those whose files are there but damaged."""
        done: list[dict[str, Any]] = []
        damaged: list[dict[str, Any]] = []
        for planned in self.manifest()["shards"]:
            path = self.path(planned["place"], planned["key"])
            if path.exists():
                (damaged if _table(path) is None else done).append(planned)
        return done, damaged

    def before(self, shard: Shard, failed_too: bool = True) -> Before:
        """What earlier shards of the same place know; without cells that have failures, unless those count.

        Where several know a cell, the one with the fewest failures is believed.
        """
        rows: dict[str, list[Row]] = {}
        facts: dict[str, Any] = {}
        maps: dict[str, Tensor] = {}
        for path in sorted((self.folder / "shards").glob(f"{shard.place}-*.parquet")):
            table = _table(path)
            if table is None:
                continue
            own, drawn = _facts(table), self.read_maps(path.stem.partition("-")[2]).scores
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
        write_whole(self.maps_path(shard.key), data, durable=True)
        schema = SCHEMA.with_metadata({"facts": json.dumps(done.facts), "format": str(FORMAT)})
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(done.rows, schema), sink, compression="zstd")
        write_whole(self.path(shard.place, shard.key), sink.getvalue().to_pybytes(), durable=True)

    def maps_path(self, key: str) -> Path:
        return self.folder / "maps" / f"{key}.safetensors"

    def read_maps(self, key: str) -> Maps:
        """The maps of a shard; none where they are missing or damaged. What a newer version adds is left out."""
        from safetensors import SafetensorError, safe_open

        known = ("images", "classes", "preprocess")
        try:
            with safe_open(self.maps_path(key), "pt") as file:
                scores = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                about = file.metadata() or {}
                return Maps(scores, **{name: json.loads(about[name]) for name in known if name in about})
        except (OSError, ValueError, SafetensorError):
            return Maps()

    def failures(self) -> dict[str, int]:
        """How many values of the plan failed, by reason, the commonest first."""
        found: Counter[str] = Counter()
        for planned in self.manifest()["shards"]:
            table = _table(self.path(planned["place"], planned["key"]), ["error"])
            if table is not None:
                found.update(error for error in table["error"].to_pylist() if error)
        return _ordered(found)

    def results(self) -> Results:
        """Every shard of the plan that is done, put together in the plan's order."""
        manifest = self.manifest()
        images: dict[str, list[str]] = {}
        tables: dict[str, list[Any]] = {}
        notes: set[str] = set()
        for planned in manifest["shards"]:
            path = self.path(planned["place"], planned["key"])
            table = _table(path)
            if table is None:
                if path.exists():
                    notes.add(f"'{path.name}' is damaged and left out; run the benchmark again to mend it")
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


def _table(path: Path, columns: list[str] | None = None) -> Any:
    """A shard's table; None where it is missing or damaged."""
    try:
        return pq.read_table(path, columns=columns)
    except (pa.ArrowException, OSError):
        return None


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
