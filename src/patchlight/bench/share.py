"""Merges runs, exports them with a data card, and reuses the values of other runs.

No model is loaded and nothing is computed. A merged run and an export have one file of rows and one of maps for each
model and method. Both are ordinary runs for `bench report`, `compare`, `merge` and `run`. An export does not contain
paths of this machine.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from patchlight import __version__
from patchlight.bench.compare import differences
from patchlight.bench.local import check_same_run
from patchlight.bench.manifest import MERGED, Manifest, PlannedGroup, write_manifest
from patchlight.bench.paths import PathRemover
from patchlight.bench.plan import source_digest
from patchlight.bench.recipe import Recipe
from patchlight.bench.rows import FORMAT, SCHEMA, Maps, join_maps, map_bytes, parquet, without_newer_columns
from patchlight.bench.slurm import render_text
from patchlight.bench.store import Files, Store
from patchlight.bench.tables import markdown_table
from patchlight.core.errors import PatchlightError
from patchlight.core.files import check_writable, csv_text, write_atomic
from patchlight.core.fingerprints import json_digest
from patchlight.core.progress import Progress, show_progress

Array = npt.NDArray[Any]
Pair = tuple[str, str]
"""The labels of a model and of a method."""
Sources = list[tuple[int, Files]]
"""Files with rows of a model and method, each with the index of its run."""
ROUNDING, NEAR_ZERO = 1e-3, 1e-6
"""Relative and absolute difference that two measurements of the same value may have."""


@dataclass(frozen=True)
class Merged:
    """The outcome of a merge: the number of values of the complete run, of values that exist, and notes."""

    values: int
    done: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Exported:
    """The outcome of an export: the number of files and values, and notes."""

    files: int
    values: int
    notes: tuple[str, ...]


def merge(runs: Sequence[str | Path], out: str | Path, progress: Progress | bool = False) -> Merged:
    """Merge runs into one that can be resumed and may be incomplete.

    The merged run has the models, methods and metrics of all runs, in the order of the first. If several runs contain
    the same value, the first that did not fail wins.

    Args:
        runs: The folders of the runs.
        out: An empty folder.
        progress: Whether to show a progress bar.

    Raises:
        PatchlightError: If the runs differ in images, models, code, seed, target or kind of device, or in the settings
            under the same label.
    """
    stores = [Store(run) for run in runs]
    manifests = [store.manifest() for store in stores]
    _check_compatible(runs, manifests)
    target = Store(out)
    if target.manifest_path.exists() or target.files():
        raise PatchlightError(f"'{out}' already holds a run; give an empty folder")
    target.make()
    manifest = _join_manifests(manifests)
    collection = Collection(stores, manifest, [f" of '{run}'" for run in runs])
    names = file_names(manifest.resolved, {label: label for label in manifest.resolved.models})
    done = 0
    with show_progress(progress, "merging") as advance:
        for i, pair in enumerate(collection.sources):
            table, maps = collection.take(pair)
            if len(table):
                target.keep(names[pair], parquet(table), map_bytes(maps))
            done += len(table)
            advance(i + 1, len(collection.sources))
    notes = [*collection.damaged, *collection.unequal(runs)]
    lasting = [f"{MERGED} {len(runs)} runs: {note}" for note in notes]
    write_manifest(target.manifest_path, manifest.model_copy(update={"notes": (*manifest.notes, *lasting)}))
    return Merged(manifest.values, done, tuple(notes))


def export(
    run: str | Path,
    out: str | Path,
    licence: str | None = None,
    data_licence: str | None = None,
    progress: Progress | bool = False,
) -> Exported:
    """Export a run, with a data card, for other people.

    Args:
        run: The folder of the run; the card of an incomplete run says so.
        out: An empty folder.
        licence: The licence of the values and maps; "unknown" in the card by default.
        data_licence: The licence of the images, which are not exported; "unknown" in the card by default.
        progress: Whether to show a progress bar.
    """
    store, target = Store(run), Store(out)
    check_writable(out)
    if Path(out).is_dir() and any(Path(out).iterdir()):
        raise PatchlightError(f"'{out}' is not empty; give an empty folder")
    manifest = store.manifest()
    paths = PathRemover(manifest)
    collection = Collection([store], manifest, [""])
    if not collection.sources:
        raise PatchlightError(f"the run in '{run}' has no finished unit yet; there is nothing to export")
    values, names = 0, file_names(manifest.resolved, paths.models)
    with show_progress(progress, "exporting") as advance:
        for i, pair in enumerate(collection.sources):
            table, maps = collection.take(pair)
            values += len(table)
            target.keep(names[pair], parquet(paths.clean_table(table)), map_bytes(paths.clean_maps(maps)))
            advance(i + 1, len(collection.sources))
    cleaned = paths.clean_manifest()
    notes = [*filter(None, [manifest.incomplete(values)]), *collection.damaged]
    cleaned = cleaned.model_copy(update={"notes": tuple(dict.fromkeys([*cleaned.notes, *notes]))})
    listing = [(paths.models[model], method, names[model, method]) for model, method in collection.sources]
    images = zip(cleaned.images.names, cleaned.images.contents, strict=True)
    write_atomic(target.folder / "images.csv", csv_text(["image", "content"], images).encode())
    write_atomic(target.folder / "recipe.toml", as_toml(cleaned.resolved).encode())
    write_atomic(target.folder / "README.md", _card(cleaned, values, listing, licence, data_licence).encode())
    write_manifest(target.manifest_path, cleaned)
    return Exported(2 * len(listing) + 4, values, tuple(notes))


def bring(
    source: str | Path, out: str | Path, recipe: Recipe, device: str = "cpu", progress: Progress | bool = False
) -> None:
    """Copy the units of another run or export to `out`, where a run of `recipe` reuses matching values.

    Raises:
        PatchlightError: If no value can match, because of other code of Patchlight or another kind of device, or if
            `out` holds another run.
    """
    store, target = Store(source), Store(out)
    check_same_run(target, target.read_manifest(), recipe, device)
    manifest = store.manifest()
    version = manifest.versions.get("patchlight", "?")
    if manifest.code != source_digest():
        here = f"this is {__version__}" if version != __version__ else "this is other code of that version"
        raise PatchlightError(
            f"'{source}' was measured with Patchlight {version} (code {manifest.code}), but {here} (code "
            f"{source_digest()}), so values may differ; install that version, or leave out --from"
        )
    if manifest.device.partition(":")[0] != device.partition(":")[0]:
        raise PatchlightError(f"'{source}' was measured on {manifest.device}, but {device} rounds differently")
    target.make()
    earlier = target.folder / "earlier"
    existing = {**target.files([earlier]), **target.files()}
    names = {files.rows.name for files in existing.values() if files.rows is not None}
    sources = store.files()
    with show_progress(progress, f"reading {store.folder.name}") as advance:
        for i, (key, files) in enumerate(sources.items()):
            if files.rows is not None and files.maps is not None and files.rows.name not in names and not files.damaged:
                name = json_digest([key, files.rows.name]) if key in existing else key
                target.keep(name, files.rows.read_bytes(), files.maps.read_bytes(), earlier)
            advance(i + 1, len(sources))


@dataclass
class Collection:
    """The rows and maps of several runs by model and method, each value once.

    `sources` has the files of each model and method, `damaged` a sentence for each damaged file, which is left out
    (`whose` is what follows its name), and `differing` the number of different values of two runs, and an example.
    """

    stores: Sequence[Store]
    manifest: Manifest
    whose: Sequence[str]
    sources: dict[Pair, Sources] = field(init=False)
    damaged: list[str] = field(default_factory=list)
    differing: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        recipe = self.manifest.resolved
        sources: dict[Pair, Sources] = {(x, y): [] for x in recipe.models for y in recipe.methods}
        for k, store in enumerate(self.stores):
            for files in store.files().values():
                damaged = [f"'{path.parent.name}/{path.name}'{self.whose[k]}" for path in files.damaged]
                self.damaged += [f"{name} is damaged and left out" for name in damaged]
                table = files.table(["model", "method"]) if files.there and not damaged else None
                columns = [] if table is None else [table[name].to_pylist() for name in table.column_names]
                for pair in set(zip(*columns, strict=True)) & sources.keys():
                    sources[pair].append((k, files))
        self.sources = {pair: files for pair, files in sources.items() if files}

    def take(self, pair: Pair) -> tuple[Any, Maps]:
        """The rows and maps of a model and method, ordered by image and metric."""
        tables, parts, runs = [], [], []
        facts: dict[str, Any] = {}
        for k, files in self.sources[pair]:
            table = files.table()
            facts = {**json.loads((table.schema.metadata or {}).get(b"facts", b"{}")), **facts}
            mine = pc.and_(pc.equal(table["model"], pair[0]), pc.equal(table["method"], pair[1]))
            tables.append(without_newer_columns(table).filter(mine).replace_schema_metadata())
            runs.append(np.full(len(tables[-1]), k))
            parts.append(files.read_maps())
        rows = pa.concat_tables(tables).combine_chunks()
        rows = rows.take(pa.array(self._choose(rows, np.concatenate(runs))))
        metadata = {"facts": json.dumps(facts), "format": str(FORMAT)}
        maps = join_maps(parts, pair[0], self.manifest.images.names, pair[1])
        return rows.cast(SCHEMA).replace_schema_metadata(metadata), maps

    def _choose(self, rows: Any, run: Array) -> Array:
        """The indices of the rows to use, by image and metric: of the first run in which the value did not fail."""
        names, metrics = self.manifest.images.names, list(self.manifest.resolved.metrics)
        image, metric = _index(rows["image"], names), _index(rows["metric"], metrics)
        place = np.where((image < 0) | (metric < 0), -1, image * len(metrics) + metric)
        values = pc.fill_null(rows["value"], np.nan).to_numpy()
        good = pc.equal(pc.fill_null(rows["error"], ""), "").to_numpy()
        order = np.lexsort((run, ~good, place))
        order = order[place[order] >= 0]
        new = np.diff(place[order], prepend=-1) != 0
        chosen: Array = order[new]
        chosen_of = chosen[np.cumsum(new) - 1] if len(chosen) else chosen
        close = np.isclose(values[order], values[chosen_of], rtol=ROUNDING, atol=NEAR_ZERO, equal_nan=True)
        differ = good[order] & ~close
        for key in sorted(set(zip(run[chosen_of[differ]].tolist(), run[order[differ]].tolist(), strict=True))):
            of_pair = order[differ][(run[chosen_of[differ]] == key[0]) & (run[order[differ]] == key[1])]
            row = rows.slice(int(of_pair[0]), 1).to_pylist()[0]
            example = f"{row['method']} under {row['metric']} on {row['model']}, image '{row['image']}'"
            count, example = self.differing.get(key, (0, example))
            self.differing[key] = count + len(of_pair), example
        return chosen

    def unequal(self, runs: Sequence[str | Path]) -> Iterator[str]:
        """A sentence for each pair of runs that have different values, with an example."""
        for (first, second), (count, example) in self.differing.items():
            yield (
                f"'{runs[second]}' has {count} values that differ from those of '{runs[first]}' by more than rounding; "
                f"the latter are used (for example {example})"
            )


def _index(column: Any, names: Sequence[str]) -> Array:
    """The index of each word among these; -1 for another word."""
    places = pc.fill_null(pc.index_in(column, pa.array(list(names), pa.string())), -1)
    return np.asarray(places.to_numpy(), dtype=np.int64)


def _check_compatible(runs: Sequence[str | Path], manifests: Sequence[Manifest]) -> None:
    """Refuse runs whose values cannot be in one table."""
    for (j, first), (k, second) in itertools.combinations(enumerate(manifests), 2):
        reasons = [d.text for d in differences(first, second, f"'{runs[j]}'", f"'{runs[k]}'") if d.incompatible]
        if reasons:
            raise PatchlightError(
                f"'{runs[j]}' and '{runs[k]}' cannot be merged: {'; '.join(reasons)} (`patchlight bench compare` shows "
                "them side by side)"
            )


def _join_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """The manifest of the merged run: all models, methods and metrics, and everything else from the first run."""
    first = manifests[0]
    tables: dict[str, dict[str, Any]] = {"models": {}, "methods": {}, "metrics": {}, "published": {}}
    hashes: dict[str, dict[str, str]] = {}
    for manifest in manifests:
        for table, specs in tables.items():
            tables[table] = {**getattr(manifest.resolved, table), **specs}
        for method, metrics in manifest.made.items():
            hashes[method] = {**metrics, **hashes.get(method, {})}
    ordered = {
        table: {label: specs[label] for manifest in manifests for label in getattr(manifest.resolved, table)}
        for table, specs in tables.items()
    }
    recipe = first.resolved.model_copy(update=ordered)
    same = bool(first.plan) and all(manifest.plan == first.plan for manifest in manifests)
    groups = (
        PlannedGroup(key="", model=model, methods=tuple(recipe.methods), batch_size=recipe.batch_size)
        for model in recipe.models
    )
    return first.model_copy(
        update={
            "resolved": recipe,
            "quick": any(manifest.quick for manifest in manifests),
            "notes": tuple(dict.fromkeys(note for manifest in manifests for note in manifest.notes)),
            "plan": first.plan if same else "",
            "groups": first.groups if same else tuple(groups),
            "models": {label: digest for m in reversed(manifests) for label, digest in m.models.items()},
            "made": hashes,
        }
    )


def file_names(recipe: Recipe, models: Mapping[str, str]) -> dict[Pair, str]:
    """The file names of each model and method: the letters and digits of their labels."""
    names: dict[Pair, str] = {}
    for pair in itertools.product(recipe.models, recipe.methods):
        labels = (models[pair[0]], pair[1])
        name = ".".join(re.sub(r"[^A-Za-z0-9_]+", "_", label).strip("_") or "_" for label in labels)
        taken = {other.casefold() for other in names.values()}
        candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        names[pair] = next(candidate for candidate in candidates if candidate.casefold() not in taken)
    return names


def _card(
    manifest: Manifest,
    values: int,
    listing: Sequence[tuple[str, str, str]],
    licence: str | None,
    data_licence: str | None,
) -> str:
    """The data card as Markdown; `listing` has the model, method and name of each pair of files."""
    device = f"{manifest.device}, {manifest.threads} threads, {manifest.chunk} variants at once"
    made_with = [
        *([name, version] for name, version in sorted(manifest.versions.items())),
        ["code of Patchlight", manifest.code],
        ["device", device],
        *([f"model {label}, as it was loaded", digest] for label, digest in manifest.models.items()),
        ["class names of the data", manifest.classes],
    ]
    return render_text(
        "card.md",
        manifest=manifest,
        recipe=manifest.resolved,
        values=values,
        listing=listing,
        licence=licence,
        data_licence=data_licence,
        files="\n".join(markdown_table(["model", "method", "files"], [[a, b, f"`{c}`"] for a, b, c in listing])),
        made_with="\n".join(markdown_table(["what", "version or hash"], made_with)),
        resolved=json.dumps(
            manifest.resolved.model_dump(mode="json", exclude_defaults=True), indent=1, ensure_ascii=False
        ),
        quoted=json.dumps,
    )


def as_toml(recipe: Recipe) -> str:
    """A recipe as TOML for `bench run`."""
    content = recipe.model_dump(mode="json", exclude_defaults=True)
    lines = [f"{_key(key)} = {_toml(value)}" for key, value in content.items() if not isinstance(value, dict)]
    for key, table in content.items():
        if isinstance(table, dict):
            lines += ["", f"[{_key(key)}]"]
            lines += [f"{_key(name)} = {_toml(value)}" for name, value in table.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items() if item is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join("nan" if item is None else _toml(item) for item in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)
