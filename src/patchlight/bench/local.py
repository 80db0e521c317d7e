"""Running a plan on this machine: shard after shard, what is done already left alone."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchlight.anatomy.base import Anatomy
from patchlight.attribution import Attribution, versions
from patchlight.bench.plan import (
    Listener,
    Plan,
    Shard,
    as_planned,
    load_model,
    model_digest,
    model_key,
    opened,
    plan,
)
from patchlight.bench.recipe import Method, Recipe, Source
from patchlight.bench.store import Before, Done, Maps, Row, Store, planned
from patchlight.data import Batch, Data, labelled, load_batch
from patchlight.engine import explain
from patchlight.errors import PatchlightError, spelled
from patchlight.evidence.ablation import free_chunk
from patchlight.methods.base import Ablates
from patchlight.methods.requests import refusal, resolve
from patchlight.metrics.base import Evaluation, on_grid, resolve_metric
from patchlight.metrics.evaluation import evaluate
from patchlight.statistics import constant
from patchlight.targets import predicted

OTHER_VERSION = "the run was begun with another version of"


@dataclass(frozen=True)
class How:
    """Where and how shards run, no part of their keys; `chunk` is how many variants are scored at once."""

    device: str = "cpu"
    chunk: int = 64


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
        if earlier is not None and earlier["resolved"]["name"] != recipe.name:
            raise PatchlightError(
                f"'{store.folder}' holds a run of '{earlier['resolved']['name']}', not of '{recipe.name}'; "
                f"give another --out"
            )
        _data.cache_clear()  # it may have changed since this process last looked
        _check_device(earlier, device)
        whole = plan(recipe, listen=listen, device=device)
        how, notes = _how(earlier, device, whole)
        store.arrange(whole.shards)
        notes += [f"{told}: made again" for told in store.damaged(whole.shards)]
        todo = store.missing(whole.shards, failed_too=not retry)
        store.write_manifest(_manifest(whole, text, quick, how, earlier, notes))
        listen(
            {
                "event": "start",
                "shards": len(whole.shards),
                "done": len(whole.shards) - len(todo),
                "notes": notes,
                "images": whole.images,
                "models": list(recipe.models),
                "folder": str(store.folder),
            }
        )
        partly = 0
        for shard in todo:
            begin = time.perf_counter()
            known = store.before(shard, failed_too=not retry)
            partly += bool(set(known.rows) & set(shard.cells.values()))
            listen({"event": "shard", "model": shard.label, "images": len(shard.names), "key": shard.key})
            done = run_shard(shard, how, known, lambda step: listen({"event": "step", **step}))
            store.write(shard, done)
            listen({"event": "done", "key": shard.key, "seconds": time.perf_counter() - begin, "rows": done.rows})
        total, done_before = len(whole.shards), len(whole.shards) - len(todo)
        end = Summary(total, done_before, partly, store.failures(), (*whole.notes, *notes))
        listen({"event": "end", "failures": end.failures, "shards": end.shards})
        return end


def _check_device(before: Mapping[str, Any] | None, device: str) -> None:
    if before is not None and torch.device(before["device"]).type != torch.device(device).type:
        raise PatchlightError(
            f"this run was begun on {before['device']}, and {device} rounds differently; give --device "
            f"{before['device']} or another --out"
        )


def _how(before: Mapping[str, Any] | None, device: str, whole: Plan) -> tuple[How, list[str]]:
    """Chunk and threads of the run as it was begun, else of this machine, and notes where they changed."""
    if before is None:
        vit = loaded(whole.shards[0], device)
        return How(device, free_chunk(vit)), []
    notes = []
    if before["threads"] != torch.get_num_threads():
        torch.set_num_threads(before["threads"])
        notes.append(f"{before['threads']} threads are used, as when the run was begun")
    if before["versions"] != versions():
        changed = sorted(k for k in versions() if before["versions"].get(k) != versions()[k])
        notes.append(f"{OTHER_VERSION} {', '.join(changed)}")
    return How(device, before["chunk"]), notes


def _manifest(
    whole: Plan, text: str, quick: bool, how: How, earlier: Mapping[str, Any] | None, notes: list[str]
) -> dict[str, Any]:
    """What the run is; versions are those it was begun with, and notes of a change of them stay."""
    changed = [*(earlier["notes"] if earlier else ()), *notes]
    return {
        "resolved": whole.recipe.model_dump(mode="json"),
        "recipe": text,
        "quick": quick,
        "notes": [*whole.notes, *dict.fromkeys(note for note in changed if note.startswith(OTHER_VERSION))],
        "device": how.device,
        "chunk": how.chunk,
        "threads": torch.get_num_threads(),
        "versions": earlier["versions"] if earlier else versions(),
        "shards": planned(whole.shards),
    }


def loaded(shard: Shard, device: str) -> Anatomy:
    """A shard's model; refused where it is not the one that was planned with."""
    vit = load_model(model_key(shard.model), device)
    if model_digest(vit) != shard.digest:
        raise PatchlightError(f"{vit.name} has changed since the run was planned; run the same command again")
    return vit


@lru_cache(maxsize=2)
def _data(key: str, classes: int, labels: tuple[str, ...]) -> tuple[Data, str]:
    """The data, and why its labels are not the model's classes; nothing where they are.

    A folder's class names are looked up among the model's, where it has names; else the number of classes must agree.
    """
    source = Source.model_validate_json(key)
    if source.kind == "folder" and labels and "classes" not in source.options:
        try:
            return opened(source.model_copy(update={"options": {**source.options, "classes": labels}})), ""
        except PatchlightError as error:
            return opened(source), str(error)
    data = opened(source)
    if data.labels is None or len(data.labels) == max(classes, 2):
        return data, ""
    return data, f"there are {len(data.labels)} of them, and {classes} classes"


def run_shard(shard: Shard, how: How, before: Before | None = None, step: Listener = lambda event: None) -> Done:
    """The rows and maps of a shard: a function of its spec alone, less what is known `before`.

    White-box methods are explained in one call, the others one by one; each method's maps serve all metrics. What
    fails becomes rows with the reason.
    """
    before = before or Before()
    vit = loaded(shard, how.device)
    data, foreign = _data(shard.data.model_dump_json(), vit.classes, tuple(vit.labels or ()))
    if foreign and shard.target == "label":
        raise PatchlightError(
            f"the labels are not classes of {vit.name}, so give a model of these classes or --target prediction: "
            f"{foreign}"
        )
    batch = load_batch(as_planned(data, shard), range(len(shard.names)), vit, workers=4)
    if foreign:
        batch = replace(batch, labels=None)
    elif shard.target == "label":
        batch = labelled(batch)
    target = _targets(shard, vit, batch)
    known = {pair: cell for pair, cell in shard.cells.items() if len(before.rows.get(cell, ())) == len(shard.names)}
    missing = {m: [n for n in shard.metrics if (m, n) not in known] for m in shard.methods}
    wanted = {m: shard.methods[m] for m, metrics in missing.items() if metrics}
    rows: list[Row] = []
    facts: dict[str, Any] = {}
    maps: dict[str, Tensor] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = _explained(vit, batch, target, wanted, shard.seed, how.chunk, step) if batch.names else {}
        for method in wanted:
            one = made.get(method, ("", 0.0))
            if isinstance(one[0], Attribution):
                maps[method] = on_grid(one[0].scores, vit)
            rows += _measured(shard, vit, batch, target, method, missing[method], one, how.chunk, facts)
            step({"stage": "measure", "method": method})
    for (method, metric), cell in known.items():
        rows += [{**row, "model": shard.label, "method": method, "metric": metric} for row in before.rows[cell]]
        facts.setdefault(metric, before.facts.get(cell))
        if method not in maps and len(before.maps.get(cell, ())) == len(batch.names):
            maps[method] = before.maps[cell]
    order = {name: i for i, name in enumerate(shard.names)}
    place = {pair: i for i, pair in enumerate(shard.cells)}
    rows.sort(key=lambda row: (order[row["image"]], place[row["method"], row["metric"]]))
    classes = [vit.label(int(t)) for t in target]
    return Done(rows, Maps(maps, batch.names, classes, asdict(vit.preprocess)), facts)


def _targets(shard: Shard, vit: Anatomy, batch: Batch) -> Tensor:
    """The class [B] each image is explained and measured for."""
    if not len(batch.names):
        return torch.empty(0, dtype=torch.long)
    if shard.target == "prediction":
        return predicted(vit.logits(batch.images)).index[:, 0]
    assert batch.labels is not None, "images without a label are failures by now"
    return batch.labels


def _explained(
    vit: Anatomy, batch: Batch, target: Tensor, methods: Mapping[str, Method], seed: int, chunk: int, step: Listener
) -> dict[str, tuple[Attribution | str, float]]:
    """By label, the attribution or the reason why there is none, and seconds per image.

    White-box methods share a call (those of the same name take turns) and its time in equal parts.
    """
    made: dict[str, tuple[Attribution | str, float]] = {}
    rounds: list[dict[str, str]] = []
    settings: dict[str, dict[str, Any]] = {}
    for label, method in methods.items():
        request = resolve(method.method, method.settings)
        reason = refusal(request, vit)
        if reason is not None:
            made[label] = f"'{request.name}' does not work on {vit.name}: {reason}", 0.0
            continue
        how = {"chunk": chunk} if isinstance(request.method, Ablates) else {}
        settings[label] = {**how, **method.settings}
        shares = request.in_pass
        free = [r for r in rounds if "" in r and method.method not in r] if shares else []
        if free:
            free[0][method.method] = label
        else:
            rounds.append({method.method: label} | ({"": ""} if shares else {}))
    for names in rounds:
        names.pop("", None)
        made |= _one_call(vit, batch, target, names, settings, seed)
        step({"stage": "explain", "method": ", ".join(names.values())})
    return made


def _one_call(
    vit: Anatomy, batch: Batch, target: Tensor, names: Mapping[str, str], settings: Mapping[str, Any], seed: int
) -> dict[str, tuple[Attribution | str, float]]:
    """Explain with all of these methods at once; where that fails, with each alone."""
    begin = time.perf_counter()
    try:
        asked = {name: settings[label] for name, label in names.items()}
        found = explain(vit, batch.images, asked, target, seed=seed, finite=False)
    except Exception as error:
        if len(names) == 1:
            return {label: (_reason(error), 0.0) for label in names.values()}
        alone: dict[str, tuple[Attribution | str, float]] = {}
        for name, label in names.items():
            alone |= _one_call(vit, batch, target, {name: label}, settings, seed)
        return alone
    seconds = (time.perf_counter() - begin) / len(names) / len(batch.names)
    return {label: (found[name], seconds) for name, label in names.items()}


def _measured(
    shard: Shard,
    vit: Anatomy,
    batch: Batch,
    target: Tensor,
    method: str,
    metrics: Sequence[str],
    made: tuple[Attribution | str, float],
    chunk: int,
    learned: dict[str, Any],
) -> list[Row]:
    """The rows of one method under these metrics; facts about the metrics go into `learned`."""
    rows = [_row(shard, name, method, metric, error=reason) for name, reason in batch.failures for metric in metrics]
    attribution, seconds = made
    if isinstance(attribution, str):
        failed = [(name, int(t)) for name, t in zip(batch.names, target, strict=True)]
        return rows + [
            _row(shard, name, method, metric, target=t, error=attribution) for name, t in failed for metric in metrics
        ]
    flat = attribution.scores.flatten(1)
    broken = (~flat.isfinite()).any(1).tolist()
    same = constant(flat).tolist()
    found = _evaluated(shard, vit, batch, target, attribution, method, metrics, chunk)
    for metric, (evaluation, spent) in found.items():
        if not isinstance(evaluation, str):
            learned[metric] = _facts(evaluation)
        for i, name in enumerate(batch.names):
            row = _row(shard, name, method, metric, target=int(target[i]))
            row |= {"explain_seconds": seconds, "measure_seconds": spent}
            if broken[i]:
                row["error"] = "the map holds NaN or infinite values"
            elif isinstance(evaluation, str):
                row["error"] = evaluation
            else:
                row |= _value(evaluation, i)
                row["note"] = row["note"] or ("the map is constant" if same[i] else "")
            rows.append(row)
    return rows


def _evaluated(
    shard: Shard,
    vit: Anatomy,
    batch: Batch,
    target: Tensor,
    maps: Attribution,
    method: str,
    metrics: Sequence[str],
    chunk: int,
) -> dict[str, tuple[Evaluation | str, float]]:
    """By metric, its evaluation or the reason why there is none, and seconds per image (shared equally)."""
    asked = {}
    for metric in metrics:
        own, settings = shard.metrics[metric], shard.methods[method].measured_by(shard.metrics[metric])
        how = {"chunk": chunk} if resolve_metric(own.metric, settings).metric.ablates else {}
        asked[metric] = {"metric": own.metric, **how, **settings}
    given = {"labels": batch.labels, "boxes": batch.boxes, "masks": batch.masks}
    begin = time.perf_counter()
    try:
        found = evaluate(vit, batch.images, maps, asked, target, seed=shard.seed, current=True, **given)
    except Exception as error:
        if len(metrics) == 1:
            return {metrics[0]: (_reason(error), 0.0)}
        alone: dict[str, tuple[Evaluation | str, float]] = {}
        for metric in metrics:
            alone |= _evaluated(shard, vit, batch, target, maps, method, [metric], chunk)
        return alone
    seconds = (time.perf_counter() - begin) / len(metrics) / len(batch.names)
    return {metric: (evaluation, seconds) for metric, evaluation in found.items()}


def _reason(error: Exception) -> str:
    told = spelled(" ".join(str(error).split())) or type(error).__name__
    return told if isinstance(error, PatchlightError) else f"{type(error).__name__}: {told}"


def _row(shard: Shard, image: str, method: str, metric: str, target: int | None = None, error: str = "") -> Row:
    return {
        "model": shard.label,
        "image": image,
        "target": target,
        "method": method,
        "metric": metric,
        "cell": shard.cells[method, metric],
        "value": None,
        "note": "",
        "error": error,
        "curve": None,
        "parts": {},
        "explain_seconds": None,
        "measure_seconds": None,
    }


def _value(evaluation: Evaluation, i: int) -> Row:
    value = float(evaluation.values[i])
    return {
        "value": value if value == value else None,
        "note": evaluation.reasons[i] if evaluation.reasons else "",
        "curve": None if evaluation.curve is None else evaluation.curve[i].numpy(),
        "parts": {name: part[i].flatten().numpy() for name, part in evaluation.parts.items()},
    }


def _facts(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "x": None if evaluation.x is None else evaluation.x.tolist(),
        "higher_is_better": evaluation.higher_is_better,
        "bounds": list(evaluation.bounds),
        "parts": {name: list(part.shape[1:]) for name, part in evaluation.parts.items()},
    }
