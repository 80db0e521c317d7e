"""Runs of one recipe as one: shards from machines that share no disk, or other methods on the same images.

No model is loaded and nothing is computed. Units are copied as they were cut; of two runs that have the same value, the
first one's is kept. `bench run` cuts the merged run as it would have been cut, and finds every value by its cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from patchlight import __version__
from patchlight.bench.differences import differences
from patchlight.bench.local import check_same_run
from patchlight.bench.manifest import MERGED, Manifest, PlannedGroup, write_manifest
from patchlight.bench.plan import source_digest
from patchlight.bench.recipe import Recipe
from patchlight.bench.rows import Maps, map_bytes, parquet
from patchlight.bench.store import Files, Store
from patchlight.core.errors import PatchlightError
from patchlight.core.fingerprints import digest_of
from patchlight.core.progress import Progress, telling

Array = npt.NDArray[Any]
ROUNDING = 1e-3
"""What two measurements of the same value may differ by, relatively."""
NEAR_ZERO = 1e-6
STRETCH = 1024
"""Images whose rows are copied as one file."""


@dataclass(frozen=True)
class Merged:
    """What a merge made: how many values there are, how many are done, and what a reader should know."""

    values: int
    done: int
    notes: tuple[str, ...]


def merge(runs: Sequence[str | Path], out: str | Path, progress: Progress | bool = False) -> Merged:
    """Put runs together in the folder `out`, an ordinary run that can be gone on with; it may be incomplete.

    Refused where they do not belong together: other images, models, code, seed, target, kind of device, or other
    settings under one label. Models, methods and metrics are those of all runs, in the order of the first.
    """
    stores = [Store(run) for run in runs]
    manifests = [store.manifest() for store in stores]
    _check_belonging(runs, manifests)
    target = _new_store(out)
    listed = [(k, key, files) for k, store in enumerate(stores) for key, files in store.files().items()]
    whole = _joined(manifests)
    choice = Choice(whole.values)
    notes: list[str] = []
    unequal: dict[tuple[int, int], list[int]] = {}
    with telling(progress, "merging units") as tell:
        for i, (k, _, files) in enumerate(listed):
            if files.damaged:
                damaged = ", ".join(f"'{path.parent.name}/{path.name}'" for path in files.damaged)
                notes.append(f"{damaged} of '{runs[k]}' is damaged and left out")
                continue
            for place, kept in choice.look(i, whole, files):
                unequal.setdefault((listed[kept][0], k), []).append(place)
            tell(i + 1, 2 * len(listed))
        taken: set[str] = set()
        for i, (_, key, files) in enumerate(listed):
            own = digest_of([key, i]) if key in taken else key
            taken.add(own)
            _keep(target, own, files, choice.rows(i, whole, files))
            tell(len(listed) + i + 1, 2 * len(listed))
    notes += [_unequal(whole, runs[j], runs[k], places) for (j, k), places in unequal.items()]
    lasting = [f"{MERGED} {len(runs)} runs: {note}" for note in notes]
    write_manifest(target.manifest_path, whole.model_copy(update={"notes": (*whole.notes, *lasting)}))
    return Merged(whole.values, choice.done, tuple(notes))


def _check_belonging(runs: Sequence[str | Path], manifests: Sequence[Manifest]) -> None:
    """Refuse runs whose values are not of one table; every one is compared with all before it."""
    for k, second in enumerate(manifests):
        for j, first in enumerate(manifests[:k]):
            apart = [one.told for one in differences(first, second, f"'{runs[j]}'", f"'{runs[k]}'") if one.apart]
            if apart:
                raise PatchlightError(
                    f"'{runs[j]}' and '{runs[k]}' do not belong together: {'; '.join(apart)} (`patchlight bench "
                    "compare` shows them side by side)"
                )


def _new_store(out: str | Path) -> Store:
    """An empty store; refused where something is there already."""
    store = Store(out)
    if store.manifest_path.exists() or store.files():
        raise PatchlightError(f"'{out}' holds a run already; give an empty folder")
    store.make()
    return store


def _joined(manifests: Sequence[Manifest]) -> Manifest:
    """What the runs are together: all models, methods and metrics, and for the rest the first."""
    first = manifests[0]
    recipe = _recipe([own.resolved for own in manifests])
    same = bool(first.plan) and all(own.plan == first.plan for own in manifests)
    made: dict[str, dict[str, str]] = {}
    for own in manifests:
        for method, metrics in own.made.items():
            made[method] = {**metrics, **made.get(method, {})}
    return first.model_copy(
        update={
            "resolved": recipe,
            "quick": any(own.quick for own in manifests),
            "notes": tuple(dict.fromkeys(note for own in manifests for note in own.notes)),
            "plan": first.plan if same else "",
            "groups": first.groups if same else tuple(_groups(recipe, manifests)),
            "models": {label: digest for own in reversed(manifests) for label, digest in own.models.items()},
            "made": made,
        }
    )


def _recipe(recipes: Sequence[Recipe]) -> Recipe:
    tables: dict[str, dict[str, Any]] = {"models": {}, "methods": {}, "metrics": {}, "published": {}}
    for recipe in recipes:
        for table, found in tables.items():
            for label, spec in getattr(recipe, table).items():
                found.setdefault(label, spec)
    return recipes[0].model_copy(update=tables)


def _groups(recipe: Recipe, manifests: Sequence[Manifest]) -> Iterator[PlannedGroup]:
    """Every method of every model once: as a run has them, the rest by themselves; the next plan gives them keys."""
    for model in recipe.models:
        left = dict.fromkeys(recipe.methods)
        for group in (group for own in manifests for group in own.groups if group.model == model):
            methods = tuple(method for method in group.methods if method in left)
            left = {method: None for method in left if method not in methods}
            if methods:
                key = group.key if methods == group.methods else ""
                yield group.model_copy(update={"methods": methods, "key": key})
        if left:
            yield PlannedGroup(key="", model=model, methods=tuple(left), batch_size=recipe.batch_size)


def places_of(table: Any, manifest: Manifest) -> Array:
    """The place of each row among all values of a run; -1 where it is none of them."""
    recipe = manifest.resolved
    place: Array = np.zeros(len(table), dtype=np.int64)
    strange = np.zeros(len(table), dtype=bool)
    for column, names in (
        ("model", recipe.models),
        ("method", recipe.methods),
        ("metric", recipe.metrics),
        ("image", manifest.images.names),
    ):
        own = pc.fill_null(pc.index_in(table[column], pa.array(list(names), pa.string())), -1).to_numpy()
        place, strange = place * len(names) + own, strange | (own < 0)
    return np.where(strange, -1, place)


class Choice:
    """Which file each value is taken from: the first that has it, or the first in which it did not fail."""

    def __init__(self, values: int) -> None:
        self.owner: Array = np.full(values, -1, dtype=np.int32)
        self.value: Array = np.full(values, np.nan)
        self.good: Array = np.zeros(values, dtype=bool)

    @property
    def done(self) -> int:
        return int((self.owner >= 0).sum())

    def look(self, index: int, whole: Manifest, files: Files) -> Iterator[tuple[int, int]]:
        """Take in a file; where it says something else than an earlier one, the place of the value and that file."""
        table = files.table(["model", "method", "metric", "image", "value", "error"]) if files.there else None
        if table is None:
            return
        places = places_of(table, whole)
        values = pc.fill_null(table["value"], np.nan).to_numpy()
        good = pc.equal(pc.fill_null(table["error"], ""), "").to_numpy()
        here = places >= 0
        places, values, good = places[here], values[here], good[here]
        known = self.owner[places] >= 0
        close = np.isclose(values, self.value[places], rtol=ROUNDING, atol=NEAR_ZERO, equal_nan=True)
        told = [(int(p), int(self.owner[p])) for p in places[known & good & self.good[places] & ~close]]
        taken = ~known | (good & ~self.good[places])
        own = places[taken]
        self.owner[own], self.value[own], self.good[own] = index, values[taken], good[taken]
        yield from told

    def rows(self, index: int, whole: Manifest, files: Files) -> Array:
        """Which rows of a file were chosen."""
        table = files.table(["model", "method", "metric", "image"])
        if table is None:
            return np.zeros(0, dtype=bool)
        places = places_of(table, whole)
        chosen: Array = (places >= 0) & (self.owner[places] == index)
        return chosen


def _keep(target: Store, key: str, files: Files, chosen: Array | None = None) -> None:
    """Copy rows and their maps: a file as it is, or in pieces under keys of their own.

    These are where only some rows were chosen, or where there are many images (as in an export): who looks for the
    values of a unit then reads little else.
    """
    if files.rows is None or files.maps is None or (chosen is not None and not chosen.any()):
        return
    table = files.table()
    images = pc.unique(table["image"])
    if len(images) <= STRETCH and (chosen is None or chosen.all()):
        target.keep(key, files.rows.read_bytes(), files.maps.read_bytes())
        return
    table = table if chosen is None else table.filter(pa.array(chosen))
    maps = files.read_maps()
    for begin in range(0, len(images), STRETCH):
        part = table.filter(pc.is_in(table["image"], images.slice(begin, STRETCH)))
        if len(part):
            name = digest_of([key, part["cell"].to_pylist()])
            target.keep(name, parquet(part), map_bytes(part_of(maps, part)))


def part_of(maps: Maps, table: Any) -> Maps:
    """The maps of the methods and images that a table has rows of."""
    methods, images = (set(pc.unique(table[name]).to_pylist()) for name in ("method", "image"))
    places = [i for i, name in enumerate(maps.images) if name in images]
    return Maps(
        {method: scores[places] for method, scores in maps.scores.items() if method in methods},
        [maps.images[i] for i in places],
        [maps.classes[i] for i in places],
        maps.preprocess,
        maps.model,
    )


def _unequal(whole: Manifest, first: str | Path, second: str | Path, places: Sequence[int]) -> str:
    """That two runs measured some values otherwise, and one of them."""
    recipe = whole.resolved
    rest, image = divmod(places[0], len(whole.images.names))
    rest, metric = divmod(rest, len(recipe.metrics))
    model, method = divmod(rest, len(recipe.methods))
    found = ((recipe.methods, method), (recipe.metrics, metric), (recipe.models, model))
    words = [list(names)[i] for names, i in found]
    return (
        f"'{second}' has {len(places)} values that differ from those of '{first}' by more than rounding, which are "
        f"kept: {words[0]} under {words[1]} on {words[2]}, image '{whole.images.names[image]}', for one"
    )


def bring(
    source: str | Path, out: str | Path, recipe: Recipe, device: str = "cpu", progress: Progress | bool = False
) -> None:
    """Lay what another run or an export knows beside a run of `recipe` in `out`, where values come back by cell.

    Refused where no value could be the same: other code of Patchlight, or another kind of device; and where `out` holds
    another run.
    """
    store, target = Store(source), Store(out)
    check_same_run(target, target.read_manifest(), recipe, device)
    told = store.manifest()
    version = told.versions.get("patchlight", "?")
    if told.code != source_digest():
        here = f"this is {__version__}" if version != __version__ else "this is other code of that version"
        raise PatchlightError(
            f"'{source}' was measured with Patchlight {version} (code {told.code}), and {here} (code "
            f"{source_digest()}), whose values need not be the same; install that version, or leave out --from"
        )
    if told.device.partition(":")[0] != device.partition(":")[0]:
        raise PatchlightError(f"'{source}' was measured on {told.device}, and {device} rounds differently")
    target.make()
    known = {**target.files([target.folder / "earlier"]), **target.files()}
    names = {files.rows.name for files in known.values() if files.rows is not None}
    earlier = Store(target.folder / "earlier")
    found = store.files()
    with telling(progress, f"reading {store.folder.name}") as tell:
        for i, (key, files) in enumerate(found.items()):
            if files.rows is not None and files.maps is not None and files.rows.name not in names and not files.damaged:
                _keep(earlier, digest_of([key, files.rows.name]) if key in known else key, files)
            tell(i + 1, len(found))
