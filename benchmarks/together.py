"""Recipes on one accelerator, by several processes at once and within a time.

    python -m benchmarks.together run DATA OUT --seconds 400       # an accelerator without pyarrow is enough
    python -m benchmarks.together store DATA OUT RUNS              # run folders, as `patchlight bench run` makes them

Small models leave an accelerator idle while Python works, so several processes share it. Every task is a few images
under one method, or under some that share a pass. Tasks are ordered by images, so what is done when the time is up is
the same for all methods, and every result is written when it is there. Other benchmarks are run first and alone.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

COSTS = {"crossing": 30.0, "questions": 30.0, "answers": 60.0}
"""Benchmarks that are run alone before the recipes, and the most seconds of each."""
READY = 60.0
"""Seconds in which their processes must have imported what they need."""
FIRST = 0.38
"""The largest share of the time that they may take together."""
PHASES = {"all-methods": 0.62, "equal-budget": 0.16, "all-methods-sensitivity": 0.06, "ground-truth": 0.16}
"""Recipes in their order, and the share of the time that each gets."""
BATCH = {"all-methods": 16, "equal-budget": 8, "all-methods-sensitivity": 8, "ground-truth": 50}
SHARED = 8
"""Methods of one pass in a task, at most."""
MARGIN = 4.0
"""Seconds before the end in which no task begins."""
MODELS = ("vit_tiny_patch16_224", "deit_tiny_patch16_224")


@dataclass(frozen=True)
class Task:
    """Methods on consecutive images, `start` to `stop`, of a recipe."""

    recipe: str
    model: str
    methods: tuple[str, ...]
    start: int
    stop: int

    @property
    def kind(self) -> tuple[str, tuple[str, ...]]:
        return self.recipe, self.methods


def recipe_of(name: str, data: Path, device: str) -> dict[str, Any]:
    """A bundled recipe: its methods, metrics, models and data, with the files in `data`."""
    from patchlight.anatomy.spec import ModelSpec
    from patchlight.core.recipes import bundled_recipes
    from patchlight.data.spec import DataSpec
    from patchlight.study.spec import MethodSpec, MetricSpec

    raw = tomllib.loads(bundled_recipes("bench")[name].read_text(encoding="utf-8"))
    for what, spec in (("methods", MethodSpec), ("metrics", MetricSpec), ("models", ModelSpec)):
        raw[what] = {label: spec.model_validate(given) for label, given in raw[what].items()}
    for label, model in raw["models"].items():
        if model.name in MODELS and device == "cpu":
            raw["models"][label] = ModelSpec.model_validate("pocket")
        elif model.name in MODELS:
            weights = str(data / "weights" / f"{model.name}_imagenet1k.safetensors")
            raw["models"][label] = model.model_copy(update={"weights": weights})
    if raw["data"]["kind"] == "imagenet":
        raw["data"] = {"kind": "imagenet", "path": str(data), "list": str(data / "order.txt")}
    options = raw.pop("data_of", {})
    raw["data"] = {
        label: DataSpec.model_validate({**raw["data"], "options": options.get(label, {})}) for label in raw["models"]
    }
    if device == "cpu":  # a rehearsal: the bundled model and quick settings
        quick = raw.get("quick", {})
        for what in ("methods", "metrics"):
            specs = {k: v for k, v in raw[what].items() if k not in quick.get("leave_out", ())}
            settings = quick.get(what, {})
            raw[what] = {k: v.changed(**settings.get(v.registered, {})) for k, v in specs.items()}
    return raw


def tasks_of(name: str, recipe: dict[str, Any]) -> Iterator[Task]:
    """The tasks of a recipe: batch by batch, all models, slow methods first."""
    shared = [label for label, spec in recipe["methods"].items() if spec.request.in_pass]
    alone = [label for label in recipe["methods"] if label not in shared]
    slow = ("mda", "search", "rise", "kernel-shap", "posterior", "tis", "dave", "ig", "smoothgrad", "hsic")
    alone.sort(key=lambda label: next((i for i, word in enumerate(slow) if label.startswith(word)), len(slow)))
    groups = [(label,) for label in alone]
    groups += [tuple(shared[i : i + SHARED]) for i in range(0, len(shared), SHARED)]
    first = next(iter(recipe["data"].values()))
    count = len(first.chosen(first.open().names))
    size = BATCH[name] if torch.cuda.is_available() else 1
    for start in range(0, count, size):
        for methods in groups:
            for model in recipe["models"]:
                yield Task(name, model, methods, start, min(start + size, count))


class Study:
    """What a process needs for its tasks."""

    def __init__(self, data: Path, device: str) -> None:
        self.data, self.device = data, device
        self.recipe = lru_cache(maxsize=None)(lambda name: recipe_of(name, data, device))
        self.model = lru_cache(maxsize=None)(lambda name, label: self.recipe(name)["models"][label].load(device))
        self.batch = lru_cache(maxsize=64)(self._batch)

    def _batch(self, name: str, label: str, start: int, stop: int) -> Any:
        from patchlight.data import labelled, load_batch

        recipe = self.recipe(name)
        spec = recipe["data"][label]
        data = spec.open()
        batch = load_batch(data, spec.chosen(data.names)[start:stop], self.model(name, label), workers=2)
        return labelled(batch) if recipe["target"] == "label" else replace(batch, labels=None)

    def run(self, task: Task) -> dict[str, Any]:
        """The cells of a task, and its maps as half-precision numbers."""
        from patchlight.metrics.base import on_grid
        from patchlight.study.run import study_batch

        recipe, vit = self.recipe(task.recipe), self.model(task.recipe, task.model)
        batch = self.batch(task.recipe, task.model, task.start, task.stop)
        plan = []
        for label in task.methods:
            spec = recipe["methods"][label]
            metrics = [replace(spec.measured_by(metric), label=n) for n, metric in recipe["metrics"].items()]
            plan.append((replace(spec.request, label=label), metrics))
        target = batch.labels if recipe["target"] == "label" else None
        study = study_batch(vit, batch, plan, target=target, seed=recipe.get("seed", 0))
        cells: dict[str, dict[str, Any]] = {}
        for cell in study.cells():
            column = cells.setdefault(f"{cell.method}\t{cell.metric}", {"values": {}, "parts": {}, "why": {}})
            column["values"][cell.image] = None if cell.value is None else float(f"{cell.value:.7g}")
            column["time"] = [cell.explain_seconds, cell.measure_seconds, cell.shared_by]
            if cell.reason:
                column["why"][cell.image] = [cell.error, cell.note]
            for part, numbers in cell.parts.items():
                column["parts"].setdefault(part, {})[cell.image] = [float(f"{x:.6g}") for x in numbers]
        facts = {}
        for (_, metric), outcome in study.evaluations.items():
            if outcome.result is not None:
                e = outcome.result
                shapes = {part: list(value.shape[1:]) for part, value in e.parts.items()}
                facts[metric] = {"higher_is_better": e.higher_is_better, "bounds": list(e.bounds), "parts": shapes}
        maps = {
            label: base64.b64encode(on_grid(o.result.scores, vit).half().cpu().numpy().tobytes()).decode()
            for label, o in study.explained.items()
            if o.result is not None and task.recipe != "ground-truth"
        }
        return {
            "images": list(batch.names),
            "targets": study.target.tolist(),
            "grid": list(vit.grid),
            "cells": cells,
            "facts": facts,
            "maps": maps,
        }


def work(data: Path, device: str) -> None:
    """Answer tasks, one line of JSON each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(2 if device == "cuda" else 1)
    study = Study(data, device)
    import timm  # noqa: F401  imported before the first task

    import patchlight.study.run  # noqa: F401

    for line in sys.stdin:
        task = Task(**{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(line).items()})
        begin = time.perf_counter()
        try:
            found = study.run(task)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
            if device == "cuda":
                torch.cuda.empty_cache()
        found["seconds"] = time.perf_counter() - begin
        print(json.dumps({"task": vars(task), **found}), file=answers, flush=True)


@dataclass
class Queue:
    """The tasks that remain, by recipe; a recipe's turn ends at its time."""

    phases: dict[str, list[Task]]
    ends: dict[str, float]
    last: float
    seconds: dict[Any, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self) -> Task | None:
        """The next task of the recipe whose turn it is; None if none can be done in time."""
        with self.lock:
            now = time.monotonic()
            for late in (False, True):  # a recipe whose turn is over resumes when all others are done
                for name, tasks in list(self.phases.items()):
                    if now > self.ends[name] and not late:
                        continue
                    while tasks:
                        task = tasks.pop(0)
                        if now + self.seconds.get(task.kind, MARGIN) < self.last:
                            return task
            return None


class Lines:
    """Files of JSON lines, one for each recipe."""

    def __init__(self, out: Path) -> None:
        self.out, self.lock, self.files = out, threading.Lock(), dict[str, Any]()

    def write(self, name: str, line: str) -> None:
        with self.lock:
            if name not in self.files:
                self.files[name] = (self.out / f"{name}.jsonl").open("a", encoding="utf-8")
            self.files[name].write(line)
            self.files[name].flush()


def serve(command: Sequence[str], process: subprocess.Popen[str], queue: Queue, lines: Lines, log: Any) -> None:
    """Hand tasks to a process, which is started again if it dies, until none is left."""
    while (task := queue.next()) is not None:
        begin = time.monotonic()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(vars(task)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            print(f"a process died in {task}", file=log, flush=True)
            process = start(command, log)
            continue
        lines.write(task.recipe, line)
        took = time.monotonic() - begin
        queue.seconds[task.kind] = min(took, queue.seconds.get(task.kind, took))
        print(f"{time.strftime('%H:%M:%S')} {took:6.2f} s {task}", file=log, flush=True)
        if '"error"' in line[:400]:
            print(line[:600], file=log, flush=True)


def start(command: Sequence[str], log: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)


COST = """
import sys, timm, torch, transformers, patchlight as pl
from transformers import LlavaForConditionalGeneration, YolosForObjectDetection, DPTForSemanticSegmentation
from pathlib import Path
import benchmarks.common
benchmarks.common.RESULTS = Path(sys.argv.pop(1))
from benchmarks import bench_crossing, bench_questions, answers
name = sys.argv.pop(1)
Path(sys.argv.pop(1)).touch()
sys.stdin.readline()
torch.cuda.is_available() and torch.cuda.init()
{"crossing": bench_crossing, "questions": bench_questions, "answers": answers}[name].main()
"""


def measure_costs(out: Path, names: Sequence[str], device: str, seconds: float) -> None:
    """Run the benchmarks of costs one after the other, within a time; all are imported at once."""
    arguments = {"crossing": [], "questions": ["--device", device], "answers": ["--out", os.devnull]}
    if device == "cpu":
        arguments["answers"] += ["--small"]
        arguments["questions"] += ["--rounds", "1"]
    begun = time.monotonic()
    with (out / "costs.txt").open("a") as text:
        processes = {
            name: subprocess.Popen(
                [sys.executable, "-c", COST, tempfile.mkdtemp(), name, str(out / f"{name}.ready"), *arguments[name]],
                stdin=subprocess.PIPE, stdout=text, stderr=text, text=True,
            )
            for name in names
        }  # fmt: skip
        for name, process in processes.items():
            begin, ready = time.monotonic(), out / f"{name}.ready"
            while not ready.exists() and process.poll() is None and time.monotonic() < begun + READY:
                time.sleep(0.1)
            print(f"== {name}, imported after {time.monotonic() - begun:.1f} s", file=text, flush=True)
            ready.unlink(missing_ok=True)
            try:
                left = begun + seconds - time.monotonic()
                process.communicate("go\n", timeout=max(0.1, min(COSTS[name], left)))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            print(f"== {name}: {time.monotonic() - begin:.1f} s, exit {process.returncode}", file=text, flush=True)


def run(options: argparse.Namespace) -> None:
    """Costs, then all recipes, within the time."""
    begin = time.monotonic()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    log = (out / "log.txt").open("a")
    command = [sys.executable, "-m", "benchmarks.together", "work", str(options.data), device]
    processes = [start(command, log) for _ in range(options.workers)]
    phases = {name: share for name, share in PHASES.items() if name in options.recipes}
    queue = Queue({}, {}, begin + options.seconds - MARGIN)

    def fill() -> None:
        for name in phases:
            try:
                queue.phases[name] = list(tasks_of(name, recipe_of(name, options.data, device)))
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", file=log, flush=True)

    plan = threading.Thread(target=fill)
    plan.start()
    if options.costs:
        measure_costs(out, options.costs, device, FIRST * options.seconds)
    while plan.is_alive() and not queue.phases:  # the first recipe begins while others are planned
        time.sleep(0.1)
    now, total = time.monotonic(), sum(phases.values())
    for name, share in zip(phases, itertools.accumulate(phases.values()), strict=True):
        queue.ends[name] = now + (queue.last - now) * share / total
    print(
        f"costs took {now - begin:.1f} s; tasks: { {n: len(t) for n, t in queue.phases.items()} }", file=log, flush=True
    )
    lines = Lines(out)
    threads = [
        threading.Thread(target=serve, args=(command, process, queue, lines, log), daemon=True) for process in processes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, begin + options.seconds - time.monotonic()))
    print(f"ended after {time.monotonic() - begin:.1f} s", file=log, flush=True)
    for process in processes:
        process.kill()
    os._exit(0)  # threads may wait for answers


def store(data: Path, lines: Path, folder: Path) -> None:
    """Make a run folder of the lines of a recipe, as `patchlight bench run` would have written it."""
    from patchlight.bench.local import RunOptions, _manifest
    from patchlight.bench.manifest import write_manifest
    from patchlight.bench.plan import load_model, plan
    from patchlight.bench.recipe import Overrides, override, read_recipe
    from patchlight.bench.rows import Facts, ImageMap, ResultRow, UnitResult, map_bytes, stack_maps, table_bytes
    from patchlight.bench.store import Store
    from patchlight.bench.unit import Resources

    answers = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    answers = [answer for answer in answers if "cells" in answer]
    recipe, text = read_recipe(lines.stem)
    measured: dict[tuple[str, str, str, str], tuple[ResultRow, Any]] = {}
    seen: dict[str, dict[str, None]] = {}
    facts: dict[str, Facts] = {}
    for answer in answers:
        model, images, (h, w) = answer["task"]["model"], answer["images"], answer["grid"]
        seen.setdefault(model, {}).update(dict.fromkeys(images))
        facts |= {metric: Facts(**given) for metric, given in answer["facts"].items()}
        maps = {
            label: torch.frombuffer(bytearray(base64.b64decode(given)), dtype=torch.half).view(-1, h, w).float()
            for label, given in answer["maps"].items()
        }
        for key, cell in answer["cells"].items():
            method, metric = key.split("\t")
            explain, measure, shared = cell["time"]
            for i, name in enumerate(images):
                error, note = cell["why"].get(name, ("", ""))
                parts = {part: numbers[name] for part, numbers in cell["parts"].items() if name in numbers}
                row = ResultRow(
                    name, method, metric, cell["values"][name], note, error, answer["targets"][i], None, parts,
                    measure, explain, shared, model,
                )  # fmt: skip
                measured[model, method, metric, name] = row, maps[method][i] if method in maps else None
    changes: dict[str, Any] = {}
    if recipe.data.kind == "imagenet":
        weights = [str(data / "weights" / f"{name}_imagenet1k.safetensors") for name in MODELS]
        done = data / f"done-{lines.stem}.txt"
        done.write_text("\n".join(next(iter(seen.values()))) + "\n", encoding="utf-8")
        changes = {"weights": weights, "data": f"imagenet:{data}", "listed": str(done)}
    else:
        changes = {"images": len(next(iter(seen.values())))}
    recipe = override(recipe, Overrides(**changes))
    planned, runs = plan(recipe), Store(folder)
    runs.make()
    manifest = _manifest(planned, RunOptions(text=text), Resources("cuda", 1024), None, [])
    write_manifest(runs.manifest_path, manifest)
    for group in planned.groups:
        vit, rows, drawn = load_model(group.model, "cpu"), [], dict[str, dict[str, ImageMap]]()
        unit = planned.unit(group, 0, len(planned.images))
        for pair in group.hashes:
            for cell, name in zip(unit.cells(pair), unit.images.names, strict=True):
                row, scores = measured.get((group.label, *pair, name), (None, None))
                if row is not None:
                    rows.append(replace(row, cell=cell))
                    if scores is not None:
                        image_map = ImageMap(scores, vit.label(row.target or 0), vit.preprocess)
                        drawn.setdefault(pair[0], {}).setdefault(name, image_map)
        result = UnitResult(rows, stack_maps(group.label, unit.images.names, drawn), facts)
        runs.keep(unit.key, table_bytes(result), map_bytes(result.maps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "work", "store"))
    parser.add_argument("data", type=Path)
    parser.add_argument("out")
    parser.add_argument("runs", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--costs", nargs="*", default=list(COSTS), choices=list(COSTS))
    parser.add_argument("--recipes", nargs="*", default=list(PHASES), choices=list(PHASES))
    options = parser.parse_args()
    if options.what == "work":
        work(options.data, options.out)
        return
    options.out = Path(options.out)
    if options.what == "run":
        run(options)
        return
    for lines in options.out.glob("*.jsonl"):
        store(options.data, lines, options.runs / lines.stem)


if __name__ == "__main__":
    main()
