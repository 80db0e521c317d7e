"""A recipe that runs in a second or two: the bundled model on six small pictures; and what a run of it leaves."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from PIL import Image

from patchlight.bench.plan import Plan, Unit
from patchlight.bench.recipe import Recipe, parse
from patchlight.bench.rows import TIMING
from patchlight.zoo import pocket

TEXT = """\
name = "small"
target = "prediction"
batch_size = 2

[models]
Pocket = "pocket"

[data]
kind = "folder"
path = "{path}"

[methods]
GenAtt = "genatt"
"Rollout (max)" = {{method = "rollout", fusion = "max"}}
Rollout = "rollout"
Random = "random"

[metrics]
Ins = {{metric = "insertion", steps = 3}}
Del = {{metric = "deletion", steps = 3, scale = 100, digits = 1}}

[published.Pocket]
metrics = ["Ins", "Del"]
GenAtt = [0.5, nan]

[quick.metrics]
insertion = {{steps = 2}}
"""


def pictures(folder: Path, count: int = 6) -> Path:
    """Small pictures cut from the bundled photographs."""
    folder.mkdir(parents=True, exist_ok=True)
    photos = sorted(pocket.PHOTOS.glob("*.jpg"))
    for i in range(count):
        with Image.open(photos[i % len(photos)]) as photo:
            photo.convert("RGB").resize((72, 64)).rotate(7 * i).save(folder / f"{i}.png")
    return folder


def replaced(path: Path, data: bytes) -> Path:
    """A file of a store with other content and the checksum of it, as another version would have written it."""
    path.unlink()
    name = f"{path.stem.rpartition('-')[0]}-{hashlib.sha256(data).hexdigest()[:16]}{path.suffix}"
    (path.parent / name).write_bytes(data)
    return path.parent / name


def text(folder: Path) -> str:
    return TEXT.format(path=folder.as_posix())


def recipe(folder: Path) -> Recipe:
    return parse(text(folder))


def units(whole: Plan, size: int = 4096) -> list[Unit]:
    """The units of a plan, had they this size."""
    total = len(whole.images)
    return [
        whole.unit(group, start, min(start + size, total)) for group in whole.groups for start in range(0, total, size)
    ]


def rows(out: Path) -> list[dict[str, Any]]:
    """All rows of a run, sorted, without their timing."""
    found = [
        row
        for path in out.rglob("units/*.parquet")
        if "earlier" not in path.parts
        for row in pq.read_table(path).drop_columns([*TIMING]).to_pylist()
    ]
    return sorted(found, key=lambda row: tuple(row[name] for name in ("model", "method", "metric", "image")))


def cells(whole: Plan) -> dict[tuple[str, str, str, str], str]:
    """By model, image, method and metric, what a value depends on."""
    return {
        (unit.group.label, name, *pair): cell
        for unit in units(whole)
        for pair in unit.group.hashes
        for name, cell in zip(unit.images.names, unit.cells(pair), strict=True)
    }
