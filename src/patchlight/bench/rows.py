"""The files of a unit: a row for each image, method and metric, and the maps."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchlight.core.extras import missing_extra
from patchlight.core.images import Preprocess
from patchlight.metrics.base import Evaluation
from patchlight.study.cell import Cell

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise missing_extra("the benchmark needs", "pyarrow and filelock", "bench") from error

FORMAT = 3
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
        ("shared_by", pa.int32()),
        *((name, pa.float64()) for name in TIMING),
    ]
)


@dataclass(frozen=True)
class ResultRow(Cell):
    """A cell of a run: one image under one method and metric, on one model.

    Attributes:
        model: The label of the model in the recipe.
        cell: The hash of everything the value depends on.
    """

    model: str = ""
    cell: str = ""


@dataclass(frozen=True)
class Facts:
    """Properties of a metric that all images share: `x` [P] of its curves, direction, bounds, and shapes of parts."""

    x: Sequence[float] | None = None
    higher_is_better: bool = True
    bounds: Sequence[float] = (0.0, 1.0)
    parts: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @staticmethod
    def of(evaluation: Evaluation) -> Facts:
        return Facts(
            x=None if evaluation.x is None else evaluation.x.tolist(),
            higher_is_better=evaluation.higher_is_better,
            bounds=list(evaluation.bounds),
            parts={name: list(part.shape[1:]) for name, part in evaluation.parts.items()},
        )


@dataclass(frozen=True)
class Maps:
    """Maps [n,h,w] by method (NaN for a missing map), with their images, explained classes and preprocessing.

    `model` is the label of the model in the recipe.
    """

    scores: Mapping[str, Tensor] = field(default_factory=dict)
    images: Sequence[str] = ()
    classes: Sequence[str] = ()
    preprocess: Preprocess | None = None
    model: str = ""


@dataclass(frozen=True)
class Done:
    """The result of a unit: rows, maps, and facts by metric."""

    rows: Sequence[ResultRow]
    maps: Maps
    facts: Mapping[str, Facts] = field(default_factory=dict)


@dataclass(frozen=True)
class KnownValue:
    """A value that was measured before: its row, the facts of its metric, and its map if there is one.

    `explained` is the class that the map explains.
    """

    row: ResultRow
    facts: Facts | None = None
    map: Tensor | None = None
    explained: str = ""
    preprocess: Preprocess | None = None


KnownValues = Mapping[str, KnownValue]
"""Known values by the hash of their cell."""


def maps_from(model: str, names: Iterable[str], drawn: Mapping[str, Mapping[str, KnownValue]]) -> Maps:
    """Stack known maps, given by method and image, in the order of `names`."""
    some = {name: known for maps in drawn.values() for name, known in maps.items()}
    if not some:
        return Maps(model=model)
    shown = [name for name in names if name in some]
    blank = torch.full_like(torch.as_tensor(some[shown[0]].map), torch.nan)
    scores = {
        method: torch.stack([blank if name not in maps else torch.as_tensor(maps[name].map) for name in shown])
        for method, maps in drawn.items()
        if maps
    }
    return Maps(scores, shown, [some[name].explained for name in shown], some[shown[0]].preprocess, model)


def joined_maps(parts: Iterable[Maps], model: str, method: str, names: Iterable[str]) -> Maps:
    """Join the maps of a method from several files, in the order of `names`; the first map of an image wins."""
    joined: dict[str, Any] = {}
    for part in parts:
        if part.model == model and method in part.scores:
            for name, scores, explained in zip(part.images, part.scores[method], part.classes, strict=True):
                if name not in joined or bool(joined[name][0].isnan().all()):
                    joined[name] = scores, explained, part.preprocess
    shown = [name for name in names if name in joined]
    if not shown:
        return Maps(model=model)
    scores = torch.stack([joined[name][0] for name in shown])
    return Maps({method: scores}, shown, [joined[name][1] for name in shown], joined[shown[0]][2], model)


def failed(rows: Iterable[ResultRow]) -> int:
    """The number of failed rows."""
    return sum(bool(row.error) for row in rows)


def table_bytes(done: Done) -> bytes:
    """Rows and facts as Parquet."""
    facts = {metric: asdict(own) for metric, own in done.facts.items()}
    schema = SCHEMA.with_metadata({"facts": json.dumps(facts), "format": str(FORMAT)})
    return parquet(pa.Table.from_pylist([vars(row) for row in done.rows], schema))


def parquet(table: Any) -> bytes:
    """A table as Parquet, including its metadata."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def table_of(data: bytes | None, columns: list[str] | None = None) -> Any:
    """The table in a Parquet file; None if it cannot be read."""
    try:
        if data is None:
            return None
        # Without threads: a pool that is busy when the interpreter exits would abort it
        return pq.ParquetFile(pa.BufferReader(data), pre_buffer=False).read(columns, use_threads=False)
    except (pa.ArrowException, OSError):
        return None


def known_columns(table: Any) -> Any:
    """A table without the columns that a newer version added."""
    return table.select([name for name in SCHEMA.names if name in table.column_names])


def rows_of(table: Any) -> list[ResultRow]:
    return [ResultRow(**{**row, "parts": dict(row["parts"] or ())}) for row in known_columns(table).to_pylist()]


def facts_of(table: Any) -> dict[str, Facts]:
    """The facts of a table, by metric."""
    by_metric = json.loads((table.schema.metadata or {}).get(b"facts", b"{}"))
    return {metric: Facts(**_known_fields(Facts, facts)) for metric, facts in by_metric.items() if facts}


def _known_fields(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass, without those that a newer version added."""
    return {f.name: values[f.name] for f in fields(kind) if f.name in values}


def map_bytes(maps: Maps) -> bytes:
    """Maps as safetensors."""
    from safetensors.torch import save

    preprocess = None if maps.preprocess is None else asdict(maps.preprocess)
    header = {"images": maps.images, "classes": maps.classes, "preprocess": preprocess, "model": maps.model}
    tensors = {name: scores.contiguous() for name, scores in maps.scores.items()}
    data: bytes = save(tensors, {key: json.dumps(value) for key, value in header.items()})
    return data


def maps_of(path: Path) -> Maps:
    """The maps in a safetensors file, without what a newer version added; empty if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            scores = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            texts = file.metadata() or {}
        header = {key: json.loads(texts[key]) for key in ("images", "classes", "preprocess", "model") if key in texts}
    except (OSError, ValueError, SafetensorError):
        return Maps()
    steps = {key: tuple(v) if isinstance(v, list) else v for key, v in (header.pop("preprocess", None) or {}).items()}
    return Maps(scores, **header, preprocess=Preprocess(**_known_fields(Preprocess, steps)) if steps else None)


def has_maps_of(path: Path, model: str, images: Collection[str]) -> bool:
    """Whether a file has maps of a model for any of these images, according to its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            texts = file.metadata() or {}
        return bool(json.loads(texts["model"]) == model and not set(images).isdisjoint(json.loads(texts["images"])))
    except (OSError, ValueError, KeyError, SafetensorError):
        return False
