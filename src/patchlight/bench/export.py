"""A run as others can use it: per-image Parquet and maps by model and method, a data card, and no path of this machine.

The folder is a run like any other: `bench report`, `compare` and `merge` read it, and `bench run --from` takes every
value from it that would be measured again.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from patchlight.bench.card import card
from patchlight.bench.cleaner import Cleaner
from patchlight.bench.manifest import Manifest, write_manifest
from patchlight.bench.merge import part_of
from patchlight.bench.recipe import Recipe
from patchlight.bench.rows import FORMAT, SCHEMA, Maps, known_columns, map_bytes, parquet
from patchlight.bench.store import Files, Store
from patchlight.core.errors import PatchlightError
from patchlight.core.files import cell, check_writable, write_whole
from patchlight.core.progress import Progress, telling


@dataclass(frozen=True)
class Exported:
    """What was written: files, values, and what a reader should know."""

    files: int
    values: int
    notes: tuple[str, ...]


def export(
    run: str | Path,
    out: str | Path,
    licence: str | None = None,
    data_licence: str | None = None,
    progress: Progress | bool = False,
) -> Exported:
    """Write a run for others into the empty folder `out`; an incomplete one is told to be so.

    `licence` is that of the values and maps, `data_licence` that of the images they were made from, in words; the card
    says that they are unknown where they are not given.
    """
    store, target = Store(run), _empty(out)
    manifest = store.manifest()
    cleaner = Cleaner(manifest)
    told = cleaner.cleaned()
    listed = _by_method(store)
    if not listed:
        raise PatchlightError(f"no unit of the run in '{run}' is done yet; there is nothing to export")
    notes = [f"'{path.parent.name}/{path.name}' is damaged and left out" for path in _damaged(store)]
    values, names = 0, _file_names(manifest.resolved, cleaner.models)
    with telling(progress, "exporting") as tell:
        for i, ((model, method), files) in enumerate(listed.items()):
            rows, maps = _of_method(files, model, method, manifest.images.names)
            values += len(rows)
            shown = [cleaner.images[name] for name in maps.images]
            own = replace(maps, images=shown, model=cleaner.models[model])
            target.keep(names[model, method], parquet(cleaner.table(rows)), map_bytes(own))
            tell(i + 1, len(listed))
    if values < manifest.values:
        notes.append(f"the run is not complete: {manifest.values - values} of {manifest.values} values are missing")
    told = told.model_copy(update={"notes": (*told.notes, *(note for note in notes if note not in told.notes))})
    write_whole(target.folder / "images.csv", _images(told))
    write_whole(target.folder / "recipe.toml", as_toml(told.resolved).encode())
    listing = [(cleaner.models[model], method, names[model, method]) for model, method in listed]
    write_whole(target.folder / "README.md", card(told, values, listing, licence, data_licence).encode())
    write_manifest(target.manifest_path, told)
    return Exported(2 * len(listed) + 4, values, tuple(notes))


def _empty(out: str | Path) -> Store:
    check_writable(out)
    if Path(out).is_dir() and any(Path(out).iterdir()):
        raise PatchlightError(f"'{out}' is not empty; give an empty folder")
    return Store(out)


def _damaged(store: Store) -> Iterator[Path]:
    return (path for files in store.files().values() for path in files.damaged)


def _by_method(store: Store) -> dict[tuple[str, str], list[Files]]:
    """By model and method, in the recipe's order, the files that have rows of them."""
    recipe = store.manifest().resolved
    found: dict[tuple[str, str], list[Files]] = {(x, y): [] for x in recipe.models for y in recipe.methods}
    for files in store.files().values():
        table = files.table(["model", "method"])
        pairs = set() if table is None else set(zip(*(table[n].to_pylist() for n in table.column_names), strict=True))
        for pair in pairs & found.keys():
            found[pair].append(files)
    return {pair: own for pair, own in found.items() if own}


def _of_method(files: Sequence[Files], model: str, method: str, names: Sequence[str]) -> tuple[Any, Maps]:
    """The rows and maps of one method on one model, in the order of the images."""
    tables, drawn = [], []
    facts: dict[str, Any] = {}
    for own in files:
        table = own.table()
        if table is None:
            continue
        facts |= json.loads((table.schema.metadata or {}).get(b"facts", b"{}"))
        mine = pc.and_(pc.equal(table["model"], model), pc.equal(table["method"], method))
        table = known_columns(table).filter(mine).replace_schema_metadata()
        tables.append(table)
        drawn.append(part_of(own.read_maps(), table))
    whole = pa.concat_tables(tables).combine_chunks()
    place = pc.index_in(whole["image"], pa.array(list(names)))
    whole = whole.take(pc.array_sort_indices(place.combine_chunks()))
    about = {"facts": json.dumps(facts), "format": str(FORMAT)}
    return whole.cast(SCHEMA).replace_schema_metadata(about), _joined(drawn, model, method, names)


def _joined(parts: Sequence[Maps], model: str, method: str, names: Sequence[str]) -> Maps:
    """The maps of a method in several files as one, in the order of the images."""
    found = {
        name: (scores, explained, part.preprocess)
        for part in parts
        for name, scores, explained in zip(part.images, part.scores.get(method, ()), part.classes, strict=False)
    }
    shown = [name for name in names if name in found]
    if not shown:
        return Maps(model=model)
    scores = torch.stack([found[name][0] for name in shown])
    return Maps({method: scores}, shown, [found[name][1] for name in shown], found[shown[0]][2], model)


def _file_names(recipe: Recipe, models: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """By model and method, what its files are called: the letters and digits of their labels."""
    found: dict[tuple[str, str], str] = {}
    for model in recipe.models:
        for method in recipe.methods:
            name = ".".join(
                re.sub(r"[^A-Za-z0-9_]+", "_", label).strip("_") or "_" for label in (models[model], method)
            )
            taken = {own.casefold() for own in found.values()}
            same = (f"{name}_{number}" for number in itertools.count(2))
            found[model, method] = next(own for own in itertools.chain([name], same) if own.casefold() not in taken)
    return found


def _images(manifest: Manifest) -> bytes:
    """The images as CSV: their names, and the hashes of what is in them."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["image", "content"])
    for name, content in zip(manifest.images.names, manifest.images.contents, strict=True):
        writer.writerow([cell(name), content])
    return out.getvalue().encode()


def as_toml(recipe: Recipe) -> str:
    """A recipe as a file that `bench run` takes."""
    told = recipe.model_dump(mode="json", exclude_defaults=True)
    plain = [f"{_key(key)} = {_toml(value)}" for key, value in told.items() if not isinstance(value, dict)]
    for key, table in told.items():
        if isinstance(table, dict):
            plain += ["", f"[{_key(key)}]"]
            plain += [f"{_key(name)} = {_toml(value)}" for name, value in table.items() if value is not None]
    return "\n".join(plain) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(own)}" for key, own in value.items() if own is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join("nan" if own is None else _toml(own) for own in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)
