"""The files of a unit: a row for each image, method and metric, and the maps."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

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
class UnitResult:
    """The result of a unit: rows, maps, and facts by metric."""

    rows: Sequence[ResultRow]
    maps: Maps
    facts: Mapping[str, Facts] = field(default_factory=dict)


class ImageMap(NamedTuple):
    """The map [h,w] of one image, the name of the class that it explains, and the model's preprocessing."""

    scores: Tensor
    explained: str
    preprocess: Preprocess | None


@dataclass(frozen=True)
class CellValue:
    """A measured value: its row, the facts of its metric, and its map if there is one."""

    row: ResultRow
    facts: Facts | None = None
    map: ImageMap | None = None


CellValues = Mapping[str, CellValue]
"""Values by the hash of their cell."""


def stack_maps(model: str, names: Iterable[str], maps: Mapping[str, Mapping[str, ImageMap]]) -> Maps:
    """Stack maps, given by method and image, in the order of `names`; NaN for a missing map."""
    any_map = {name: each for by_image in maps.values() for name, each in by_image.items()}
    images = [name for name in names if name in any_map]
    if not images:
        return Maps(model=model)
    first = any_map[images[0]]
    blank = ImageMap(torch.full_like(first.scores, torch.nan), "", None)
    scores = {
        method: torch.stack([by_image.get(name, blank).scores for name in images])
        for method, by_image in maps.items()
        if by_image
    }
    return Maps(scores, images, [any_map[name].explained for name in images], first.preprocess, model)


def join_maps(parts: Iterable[Maps], model: str, names: Iterable[str], method: str | None = None) -> Maps:
    """Join the maps of a model, by one method or all, from several files; the first map of an image wins."""
    joined: dict[str, dict[str, ImageMap]] = {}
    for part in parts:
        for label, maps in part.scores.items() if part.model == model else ():
            if method in (None, label):
                by_image = joined.setdefault(label, {})
                for name, scores, explained in zip(part.images, maps, part.classes, strict=True):
                    if name not in by_image or bool(by_image[name].scores.isnan().all()):
                        by_image[name] = ImageMap(scores, explained, part.preprocess)
    return stack_maps(model, names, joined)


def table_bytes(result: UnitResult) -> bytes:
    """Rows and facts as Parquet."""
    facts = {metric: asdict(each) for metric, each in result.facts.items()}
    schema = SCHEMA.with_metadata({"facts": json.dumps(facts), "format": str(FORMAT)})
    return parquet(pa.Table.from_pylist([vars(row) for row in result.rows], schema))


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


def without_newer_columns(table: Any) -> Any:
    """A table without the columns that a newer version added."""
    return table.select([name for name in SCHEMA.names if name in table.column_names])


def rows_of(table: Any) -> list[ResultRow]:
    return [ResultRow(**{**row, "parts": dict(row["parts"] or ())}) for row in without_newer_columns(table).to_pylist()]


def facts_of(table: Any) -> dict[str, Facts]:
    """The facts of a table, by metric."""
    by_metric = json.loads((table.schema.metadata or {}).get(b"facts", b"{}"))
    return {metric: Facts(**_without_newer_fields(Facts, facts)) for metric, facts in by_metric.items() if facts}


def _without_newer_fields(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the fields of a dataclass, without fields that a newer version added."""
    return {f.name: values[f.name] for f in fields(kind) if f.name in values}


def map_bytes(maps: Maps) -> bytes:
    """Maps as safetensors."""
    from safetensors.torch import save

    preprocess = None if maps.preprocess is None else asdict(maps.preprocess)
    header = {"images": maps.images, "classes": maps.classes, "preprocess": preprocess, "model": maps.model}
    tensors = {name: scores.contiguous() for name, scores in maps.scores.items()}
    data: bytes = save(tensors, {key: json.dumps(value) for key, value in header.items()})
    return data


def maps_of(path: Path, images: Collection[str] | None = None) -> Maps:
    """The maps in a safetensors file, without what a newer version added; empty if it cannot be read.

    With `images`, empty also if it has none of these images, according to its header.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            texts = file.metadata() or {}
            keys = [key for key in ("images", "classes", "preprocess", "model") if key in texts]
            header = {key: json.loads(texts[key]) for key in keys}
            if images is not None and set(images).isdisjoint(header.get("images", ())):
                return Maps()
            scores = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError):
        return Maps()
    steps = {key: tuple(v) if isinstance(v, list) else v for key, v in (header.pop("preprocess", None) or {}).items()}
    return Maps(scores, **header, preprocess=Preprocess(**_without_newer_fields(Preprocess, steps)) if steps else None)
