"""Runs of any size without a model: folders as a benchmark leaves them, written as Parquet at once."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from patchlight.bench.manifest import Manifest, PlannedGroup, write_manifest
from patchlight.bench.plan import Images
from patchlight.bench.recipe import Recipe, parse
from patchlight.bench.rows import FORMAT, SCHEMA, Facts, Maps, map_bytes
from patchlight.core.images import Preprocess

Floats = npt.NDArray[np.float64]
METHODS = ["genatt", "rollout", "gradcam", "attcat", "ixg", "grad"]
METHODS += ["rawatt", "attcam", "hirescam", "gradsam", "layercam", "random"]
CURVES = ("insertion", "deletion", "auc", "aopc", "lodds", "srg")
PARTS = {"pixel-accuracy": {"correct": [], "labelled": []}, "max-box-acc": {"hits": [3, 101], "images": []}}
METRICS = (*CURVES, *PARTS, "pointing-game", "energy-pointing", "sparseness", "saco")
TOGETHER, GRID = 4, 4
UNREADABLE = "the picture cannot be read"
NO_OBJECT = "no object"


@dataclass(frozen=True)
class Synthetic:
    """What was written: `values` [method, metric, image], NaN where there is none; `curves` [method, metric, P] means
    over images with a value; `correct` and `labelled` [method, image] of pixel accuracy; `level` [method, image] the
    threshold up to which a box hits, for all three overlaps; `done` [method, image].
    """

    folder: Path
    recipe: Recipe
    names: list[str]
    values: Floats
    curves: Floats
    correct: Floats
    labelled: Floats
    level: Floats
    failed: npt.NDArray[np.bool_]
    done: npt.NDArray[np.bool_]


def recipe_of(methods: int, metrics: int) -> Recipe:
    lines = [
        'name = "synthetic"',
        'target = "prediction"',
        "[models]",
        'Pocket = "pocket"',
        "[data]",
        'kind = "folder"',
    ]
    lines += ['path = "/nowhere"', "[methods]", *(f'{name} = "{name}"' for name in METHODS[:methods])]
    lines += ["[metrics]", *(f'{name} = "{name}"' for name in METRICS[:metrics])]
    return parse("\n".join(lines))


def synthesise(
    folder: Path,
    images: int,
    methods: int = 12,
    metrics: int = 12,
    unit: int = 64,
    points: int = 20,
    undone: int = 0,
    seed: int = 0,
) -> Synthetic:
    """Write a run: groups of four methods, units of so many images; the last group lacks the last `undone` units.

    Of every metric some images have no value; of every method some of its own; some images failed.
    """
    rng = np.random.default_rng(seed)
    recipe = recipe_of(methods, metrics)
    names = [f"class{i % 1000:04d}/image-{i:06d}.jpeg" for i in range(images)]
    values = rng.random((methods, metrics, images)) + np.linspace(0, 0.05, methods)[:, None, None]
    values[:, rng.random((metrics, images)) < 0.02] = np.nan
    values[rng.random(values.shape) < 0.001] = np.nan
    failed = rng.random(images) < 0.005
    values[:, :, failed] = np.nan
    labelled = np.broadcast_to(rng.integers(20_000, 50_000, images).astype(np.float64), (methods, images)).copy()
    correct = np.floor(labelled * rng.random((methods, images)))
    level = rng.integers(0, 101, (methods, images)).astype(np.float64)
    done = np.ones((methods, images), dtype=bool)
    labels = list(recipe.methods)
    groups = [labels[i : i + TOGETHER] for i in range(0, methods, TOGETHER)]
    starts = list(range(0, images, unit))
    total, count = np.zeros((methods, metrics, points)), np.zeros((methods, metrics))
    writer = _Writer(folder, recipe, names, points, rng)
    for g, group in enumerate(groups):
        own = slice(g * TOGETHER, g * TOGETHER + len(group))
        for number, start in enumerate(starts):
            stretch = slice(start, min(start + unit, images))
            if g == len(groups) - 1 and number >= len(starts) - undone:
                done[own, stretch] = False
                values[own, :, stretch] = np.nan
                continue
            drawn = writer.write(group, stretch, values[own], (correct[own], labelled[own], level[own]), failed).astype(
                np.float64
            )
            there = np.isfinite(values[own, : drawn.shape[1], stretch])
            total[own, : drawn.shape[1]] += np.einsum("mnbp,mnb->mnp", drawn, there)
            count[own, : drawn.shape[1]] += there.sum(-1)
    write_manifest(
        folder / "manifest.json",
        Manifest(
            resolved=recipe,
            recipe="",
            quick=False,
            notes=(),
            device="cpu",
            chunk=64,
            threads=1,
            versions={},
            code="",
            plan="",
            groups=tuple(
                PlannedGroup(key=f"{g:016x}", model="Pocket", methods=tuple(own), batch_size=1)
                for g, own in enumerate(groups)
            ),
            images=Images(
                indices=tuple(range(images)), names=tuple(names), contents=tuple(f"{i:016x}" for i in range(images))
            ),
        ),
    )
    with np.errstate(invalid="ignore"):
        curves = total / count[..., None]
    return Synthetic(folder, recipe, names, values, curves, correct, labelled, level, failed, done)


class _Writer:
    """Writes units, table by table, without a Python object for each row."""

    def __init__(self, folder: Path, recipe: Recipe, names: list[str], points: int, rng: np.random.Generator) -> None:
        self.folder, self.names, self.points, self.rng = folder, names, points, rng
        self.metrics = list(recipe.metrics)
        x = np.linspace(0, 1, points).tolist()
        curves = {name: Facts(x) for name in self.metrics if name in CURVES}
        parts = {name: Facts(parts=own) for name, own in PARTS.items()}
        rest = {name: Facts() for name in self.metrics}
        self.facts = {name: asdict({**rest, **curves, **parts}[name]) for name in self.metrics}
        for which in ("units", "maps"):
            (folder / which).mkdir(parents=True, exist_ok=True)

    def write(
        self,
        group: list[str],
        stretch: slice,
        values: Floats,
        drawn: tuple[Floats, Floats, Floats],
        failed: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.float32]:
        """A unit; its curves [method, metric with curves, image, P]."""
        images, k, n = self.names[stretch], len(group), len(self.metrics)
        b = len(images)
        curved = sum(name in CURVES for name in self.metrics)
        curves = self.rng.random((b, k, curved, self.points), dtype=np.float32)
        shape = (b, k, n)
        image, method, metric = (grid.ravel() for grid in np.indices(shape))
        value = values[:, :, stretch].transpose(2, 0, 1).ravel()
        broken = failed[stretch][image]
        nothing = np.isnan(value) & ~broken
        has_curve = (metric < curved) & ~broken
        lengths = np.where(has_curve, self.points, 0)
        correct, labelled, level = (own[:, stretch].T[image, method] for own in drawn)
        whole = {"correct": correct[:, None], "labelled": labelled[:, None], "images": np.ones((len(image), 1))}
        hits = (np.arange(101) <= level[:, None]).astype(np.float64)
        entries, keys, items = np.zeros(len(image), dtype=np.int64), [], []
        for row in np.flatnonzero(
            ~broken & np.isin(metric, [self.metrics.index(n) for n in PARTS if n in self.metrics])
        ):
            for part in PARTS[self.metrics[metric[row]]]:
                entries[row] += 1
                keys.append(part)
                items.append(np.tile(hits[row], 3) if part == "hits" else whole[part][row])
        listed = pa.ListArray.from_arrays(
            pa.array(np.cumsum([0, *map(len, items)]), pa.int32()), pa.array(np.concatenate(items or [np.zeros(0)]))
        )
        columns: dict[str, Any] = {
            "model": pa.array(["Pocket"]).take(pa.array(np.zeros(len(image), dtype=np.int64))),
            "image": pa.array(images).take(pa.array(image)),
            "target": pa.array(image % 1000),
            "method": pa.array(group).take(pa.array(method)),
            "metric": pa.array(self.metrics).take(pa.array(metric)),
            "cell": _hexadecimal(self.rng, len(image)),
            "value": pa.array(value, mask=np.isnan(value)),
            "note": pa.array(["", NO_OBJECT]).take(pa.array(nothing.astype(np.int64))),
            "error": pa.array(["", UNREADABLE]).take(pa.array(broken.astype(np.int64))),
            "curve": pa.ListArray.from_arrays(
                pa.array(np.concatenate([[0], lengths.cumsum()]), pa.int32()),
                pa.array(curves[~failed[stretch]].ravel()),
                mask=pa.array(~has_curve),
            ),
            "parts": pa.MapArray.from_arrays(
                pa.array(np.concatenate([[0], entries.cumsum()]), pa.int32()), pa.array(keys, pa.string()), listed
            ),
            "shared_by": pa.array(np.full(len(image), k), pa.int32()),
            "explain_seconds": pa.array(np.full(len(image), 0.25), mask=broken),
            "measure_seconds": pa.array(0.01 * (1 + metric), mask=broken),
        }
        schema = SCHEMA.with_metadata({"facts": json.dumps(self.facts), "format": str(FORMAT)})
        sink = pa.BufferOutputStream()
        table = pa.Table.from_arrays(
            [columns[name].cast(schema.field(name).type) for name in schema.names], schema=schema
        )
        pq.write_table(table, sink, compression="zstd")
        key = f"{stretch.start:08x}{METHODS.index(group[0]):08x}"
        good = [name for name, bad in zip(images, failed[stretch], strict=True) if not bad]
        scores = {m: torch.from_numpy(self.rng.random((len(good), GRID, GRID), dtype=np.float32)) for m in group}
        maps = Maps(scores, good, ["a class"] * len(good), Preprocess((64, 64)), "Pocket")
        for folder, data, suffix in (
            ("maps", map_bytes(maps), "safetensors"),
            ("units", sink.getvalue().to_pybytes(), "parquet"),
        ):
            name = f"{key}-{hashlib.sha256(data).hexdigest()[:16]}.{suffix}"
            (self.folder / folder / name).write_bytes(data)
        return curves.transpose(1, 2, 0, 3)


def _hexadecimal(rng: np.random.Generator, rows: int) -> Any:
    """Random hashes of sixteen digits."""
    offsets = np.arange(0, 16 * rows + 1, 16, dtype=np.int32)
    return pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(rng.bytes(8 * rows).hex().encode()))
