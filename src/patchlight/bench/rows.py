"""What a unit leaves: a row for each image, method and metric, and maps; and how they are written and read."""

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
    """What is true of a metric for all images: `x` [P] of its curves, direction, bounds, and the shapes of parts."""

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
    """Maps [n,h,w] by method, the images they are of, the classes they explain, and how the model saw the images.

    A map that does not exist is NaN. `model` is the label of the model in the recipe.
    """

    scores: Mapping[str, Tensor] = field(default_factory=dict)
    images: Sequence[str] = ()
    classes: Sequence[str] = ()
    preprocess: Preprocess | None = None
    model: str = ""


@dataclass(frozen=True)
class Done:
    """What running a unit gave: rows, maps, and facts by metric."""

    rows: Sequence[ResultRow]
    maps: Maps
    facts: Mapping[str, Facts] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """What was found of one value: its row, the facts of its metric, and the map it was measured on, if it is kept.

    `explained` is the class that the map explains.
    """

    row: ResultRow
    facts: Facts | None = None
    map: Tensor | None = None
    explained: str = ""
    preprocess: Preprocess | None = None


Before = Mapping[str, Known]
"""What is known already, by cell."""


def maps_from(model: str, names: Iterable[str], drawn: Mapping[str, Mapping[str, Known]]) -> Maps:
    """The maps of every method that has some, by method and image, on the images of which there are any."""
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
    """The maps of a method in several files as one, in the order of the images; the first of each image counts."""
    found: dict[str, Any] = {}
    for part in parts:
        if part.model == model and method in part.scores:
            for name, scores, explained in zip(part.images, part.scores[method], part.classes, strict=True):
                if name not in found or bool(found[name][0].isnan().all()):
                    found[name] = scores, explained, part.preprocess
    shown = [name for name in names if name in found]
    if not shown:
        return Maps(model=model)
    scores = torch.stack([found[name][0] for name in shown])
    return Maps({method: scores}, shown, [found[name][1] for name in shown], found[shown[0]][2], model)


def failed(rows: Iterable[ResultRow]) -> int:
    """How many of these failed."""
    return sum(bool(row.error) for row in rows)


def table_bytes(done: Done) -> bytes:
    """Rows and facts as Parquet."""
    facts = {metric: asdict(own) for metric, own in done.facts.items()}
    schema = SCHEMA.with_metadata({"facts": json.dumps(facts), "format": str(FORMAT)})
    return parquet(pa.Table.from_pylist([vars(row) for row in done.rows], schema))


def parquet(table: Any) -> bytes:
    """A table as Parquet, with what its metadata says."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def table_of(data: bytes | None, columns: list[str] | None = None) -> Any:
    """The table in a Parquet file, with these columns of it; None where it is none."""
    try:
        if data is None:
            return None
        # without threads: a pool that still works when the interpreter ends aborts it
        return pq.ParquetFile(pa.BufferReader(data), pre_buffer=False).read(columns, use_threads=False)
    except (pa.ArrowException, OSError):
        return None


def known_columns(table: Any) -> Any:
    """A table without what a newer version added."""
    return table.select([name for name in SCHEMA.names if name in table.column_names])


def rows_of(table: Any) -> list[ResultRow]:
    return [ResultRow(**{**row, "parts": dict(row["parts"] or ())}) for row in known_columns(table).to_pylist()]


def facts_of(table: Any) -> dict[str, Facts]:
    """By metric, what the table says of it."""
    found = json.loads((table.schema.metadata or {}).get(b"facts", b"{}"))
    return {metric: Facts(**_known(Facts, own)) for metric, own in found.items() if own}


def _known(kind: Any, about: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of a dataclass, without what a newer version added."""
    return {f.name: about[f.name] for f in fields(kind) if f.name in about}


def map_bytes(maps: Maps) -> bytes:
    """Maps as safetensors."""
    from safetensors.torch import save

    cut = None if maps.preprocess is None else asdict(maps.preprocess)
    about = {"images": maps.images, "classes": maps.classes, "preprocess": cut, "model": maps.model}
    tensors = {name: scores.contiguous() for name, scores in maps.scores.items()}
    data: bytes = save(tensors, {key: json.dumps(value) for key, value in about.items()})
    return data


def maps_of(path: Path) -> Maps:
    """The maps in a safetensors file, without what a newer version added; none where it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            scores = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            told = file.metadata() or {}
        about = {name: json.loads(told[name]) for name in ("images", "classes", "preprocess", "model") if name in told}
    except (OSError, ValueError, SafetensorError):
        return Maps()
    cut = {key: tuple(v) if isinstance(v, list) else v for key, v in (about.pop("preprocess", None) or {}).items()}
    return Maps(scores, **about, preprocess=Preprocess(**_known(Preprocess, cut)) if cut else None)


def shows(path: Path, model: str, images: Collection[str]) -> bool:
    """Whether a file has maps of a model on any of these images, by its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            told = file.metadata() or {}
        return bool(json.loads(told["model"]) == model and not set(images).isdisjoint(json.loads(told["images"])))
    except (OSError, ValueError, KeyError, SafetensorError):
        return False
