"""The speed-up of several processes, and the overhead of a unit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bench_overhead import IMAGES, NAME, prepared
from patchlight.bench import local
from patchlight.bench.local import run
from patchlight.bench.recipe import Recipe, parse
from tests.bench.small import pictures

SMALL = """
name = "units"
models.Pocket = "pocket"
data = {{kind = "files", path = "{path}"}}
methods.Random = "random"
metrics.Sparseness = "sparseness"
"""
UNITS = 400


def workers() -> list[list[str]]:
    """The same run by one process with one thread, by two such processes, and by one process with all threads."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = prepared(folder)
        (folder / "recipe.json").write_text(recipe.model_dump_json())
        one, started = timed(folder, "one", 1, 1)
        two, _ = timed(folder, "two", 2, 1)
        both, _ = timed(folder, "both", 1, os.cpu_count() or 1)
    what = f"{IMAGES} images, {NAME}, 2 methods, 2 metrics"
    return [
        [f"1 process of 1 thread ({what})", f"{one:.1f}", "", ""],
        [f"2 processes of 1 thread each: {100 * one / two / 2:.0f} % efficient", f"{two:.1f}", "", ""],
        [f"1 process of {os.cpu_count()} threads: {100 * one / both / 2:.0f} % efficient", f"{both:.1f}", "", ""],
        ["start of a run: imports, plan, model", f"{started:.1f}", "", ""],
    ]


BEGIN = """
import sys, json, time, torch
from patchlight.bench.recipe import Recipe
from patchlight.bench.local import RunOptions, run
recipe = Recipe.model_validate_json(open(sys.argv[1]).read())
times = {}
def listen(event):
    times.setdefault(event.event, time.time())
    times["last"] = time.time()
out, count, threads = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if __name__ == "__main__":
    run(recipe, out, RunOptions(threads=threads, workers=count), listen=listen)
    print(json.dumps(times))
"""


def timed(folder: Path, out: str, count: int, threads: int) -> tuple[float, float]:
    """Seconds from the start of the first unit to the end, and from the start of the process to the first unit."""
    command = [sys.executable, "-c", BEGIN, str(folder / "recipe.json"), str(folder / out), str(count), str(threads)]
    begin = time.time()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    times = json.loads(done.stdout.splitlines()[-1])
    return times["last"] - times["unit"], times["unit"] - begin


def overhead() -> list[list[str]]:
    """The overhead of a unit: many units of one image each, minus the same images in one unit."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = parse(SMALL.format(path=pictures(folder / "images", UNITS).as_posix()))
        seconds = []
        for size in (UNITS, 1):
            seconds.append(_sized(recipe, folder / f"run{size}", size))
    whole, single = seconds
    each = 1000 * (single - whole) / (UNITS - 2)
    return [[f"overhead of a unit ({UNITS} units of one image minus 2 of all)", f"{each / 1000:.4f}", "", ""]]


def _sized(recipe: Recipe, out: Path, size: int) -> float:
    original, local.unit_size = local.unit_size, lambda group, images: size
    try:
        begin = time.perf_counter()
        run(recipe, out)
        return time.perf_counter() - begin
    finally:
        local.unit_size = original


def rows() -> Sequence[list[str]]:
    return [*workers(), *overhead()]


if __name__ == "__main__":
    for row in rows():
        print(" | ".join(row))
