"""Running a plan on this machine: shard after shard, what is done already left alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from patchlight.attribution import versions
from patchlight.bench.events import End, Listener, ShardEnd, ShardStart, Start
from patchlight.bench.manifest import Manifest, PlannedShard
from patchlight.bench.plan import Plan, Shard, plan
from patchlight.bench.recipe import Recipe
from patchlight.bench.shard import Resources, loaded, opened, run_shard
from patchlight.bench.store import Store
from patchlight.errors import PatchlightError
from patchlight.evidence.ablation import free_chunk

OTHER_VERSION = "the run was begun with another version of"


@dataclass(frozen=True)
class Summary:
    """What a run did: shards in all, done before and partly done before, values that failed, by reason."""

    shards: int
    before: int
    partly: int
    failures: dict[str, int]
    notes: tuple[str, ...]


def run(
    recipe: Recipe,
    out: str | Path,
    *,
    text: str = "",
    device: str = "cpu",
    quick: bool = False,
    retry: bool = False,
    listen: Listener = lambda event: None,
) -> Summary:
    """Run what is missing of a recipe into the store `out`; a run that was broken off goes on where it was.

    `retry` runs again what failed. The chunk size and number of threads of the first run are kept, so that a resumed
    run gives the same numbers to the bit on the same machine. `listen` is told of every step.
    """
    store = Store(out)
    with store.locked():
        earlier = store.read_manifest()
        _check_same_run(store, earlier, recipe, device)
        opened.cache_clear()  # the data may have changed since this process last looked
        whole = plan(recipe, listen=listen, device=device)
        resources, notes = _resources(earlier, device, whole)
        store.arrange(whole.shards)
        notes += [f"{told}: made again" for told in store.damaged(whole.shards)]
        todo = store.missing(whole.shards, failed_too=not retry)
        store.write_manifest(_manifest(whole, text, quick, resources, earlier, notes))
        total, done = len(whole.shards), len(whole.shards) - len(todo)
        listen(Start(total, done, notes, whole.images, list(recipe.models), str(store.folder)))
        partly = sum(_run_one(store, shard, resources, retry, listen) for shard in todo)
        end = Summary(total, done, partly, store.failures(), (*whole.notes, *notes))
        listen(End(end.failures, end.shards))
        return end


def _run_one(store: Store, shard: Shard, resources: Resources, retry: bool, listen: Listener) -> bool:
    """Run and keep a shard; whether part of it was done before."""
    begin = time.perf_counter()
    known = store.before(shard, failed_too=not retry)
    listen(ShardStart(shard.label, len(shard.names), shard.key))
    done = run_shard(shard, resources, known, listen)
    store.write(shard, done)
    listen(ShardEnd(shard.key, time.perf_counter() - begin, done.rows))
    return not known.rows.keys().isdisjoint(shard.cells.values())


def _check_same_run(store: Store, earlier: Manifest | None, recipe: Recipe, device: str) -> None:
    """Refuse a folder of another recipe's run, or of one on another kind of device."""
    if earlier is None:
        return
    if earlier.resolved.name != recipe.name:
        raise PatchlightError(
            f"'{store.folder}' holds a run of '{earlier.resolved.name}', not of '{recipe.name}'; give another --out"
        )
    if torch.device(earlier.device).type != torch.device(device).type:
        raise PatchlightError(
            f"this run was begun on {earlier.device}, and {device} rounds differently; give --device "
            f"{earlier.device} or another --out"
        )


def _resources(earlier: Manifest | None, device: str, whole: Plan) -> tuple[Resources, list[str]]:
    """Chunk and threads of the run as it was begun, else of this machine, and notes where they changed."""
    if earlier is None:
        return Resources(device, free_chunk(loaded(whole.shards[0], device))), []
    notes = []
    if earlier.threads != torch.get_num_threads():
        torch.set_num_threads(earlier.threads)
        notes.append(f"{earlier.threads} threads are used, as when the run was begun")
    changed = sorted(name for name, version in versions().items() if earlier.versions.get(name) != version)
    if changed:
        notes.append(f"{OTHER_VERSION} {', '.join(changed)}")
    return Resources(device, earlier.chunk), notes


def _manifest(
    whole: Plan, text: str, quick: bool, resources: Resources, earlier: Manifest | None, notes: Sequence[str]
) -> Manifest:
    """What the run is; versions are those it was begun with, and notes of a change of them stay."""
    changed = [*(earlier.notes if earlier else ()), *notes]
    return Manifest(
        resolved=whole.recipe,
        recipe=text,
        quick=quick,
        notes=(*whole.notes, *dict.fromkeys(note for note in changed if note.startswith(OTHER_VERSION))),
        device=resources.device,
        chunk=resources.chunk,
        threads=torch.get_num_threads(),
        versions=earlier.versions if earlier else versions(),
        shards=tuple(
            PlannedShard(place=s.place, key=s.key, model=s.label, images=s.names, indices=s.indices)
            for s in whole.shards
        ),
    )
