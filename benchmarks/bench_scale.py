"""Fifty thousand images: how long a plan takes, first and once files are known, and the report of 7.2 million rows.

Images are 64 files of noise under 50,000 names, read from the system's cache; rows are synthesised. Everything is
measured in a process of its own, whose memory is that of the whole process, 0.6 GB of it libraries.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.common import record
from tests.bench.synthetic import synthesise

IMAGES, FILES, SIDE = 50_000, 64, 224
RECIPE = """
name = "scale"
target = "prediction"
[models]
Pocket = "pocket"
[data]
kind = "files"
path = "{path}"
[methods]
GenAtt = "genatt"
[metrics]
Deletion = "deletion"
"""


def main() -> None:
    rows = [*planning(), *reporting()]
    header = ["what", "seconds", "most memory"]
    record("scale", "Fifty thousand images", header, rows, cpu=True)


def planning() -> list[list[str]]:
    """A plan of so many images: the folder listed, files hashed, the model loaded; and again."""
    found = []
    for images in (IMAGES // 10, IMAGES):
        with tempfile.TemporaryDirectory() as folder:
            size = make_images(Path(folder) / "images", images)
            time.sleep(3)  # a file that changed just now is not kept
            for words in (f"plan {images:,} images of {size / 1000:.0f} KB each, for the first time", "the same again"):
                told = measured("plan", folder)
                found.append([words, f"{told['seconds']:.1f}", f"{told['memory'] / 1000:.2f} GB"])
    return found


def reporting() -> list[list[str]]:
    """Rows of 50,000 images, 12 methods and 12 metrics: read, means, intervals, ties and ranks, tables, the page."""
    with tempfile.TemporaryDirectory() as folder:
        rows = synthesise(Path(folder), IMAGES).values.size
        units = len(list((Path(folder) / "units").iterdir()))
        told = measured("report", folder)
    memory = f"{told['memory'] / 1000:.2f} GB"
    return [
        [f"report of {rows / 1e6:.1f} million rows in {units:,} units", f"{told['seconds']:.1f}", memory],
        *([f"– {name}", f"{seconds:.1f}", ""] for name, seconds in told["parts"].items()),
    ]


def make_images(folder: Path, count: int) -> float:
    """Files of noise under many names, in folders by class; their mean size in bytes."""
    rng = np.random.default_rng(0)
    first: list[Path] = []
    for i in range(count):
        path = folder / f"class{i % 1000:04d}" / f"{i:06d}.jpeg"
        path.parent.mkdir(parents=True, exist_ok=True)
        if i < FILES:
            pixels = rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path, quality=95)
            first.append(path)
        else:
            os.link(first[i % FILES], path)
    return sum(path.stat().st_size for path in first) / FILES


def measured(what: str, folder: str) -> dict[str, Any]:
    """Seconds and MB of a process that does this."""
    own = {**os.environ, "PATCHLIGHT_CACHE": str(Path(folder) / "cache")}
    command = [sys.executable, "-m", "benchmarks.bench_scale", what, folder]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=own)
    told: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return told


def plan_once(folder: Path) -> dict[str, Any]:
    from patchlight.bench.plan import plan
    from patchlight.bench.recipe import parse

    recipe = parse(RECIPE.format(path=(folder / "images").as_posix()))
    begin = time.perf_counter()
    plan(recipe)
    return {"seconds": time.perf_counter() - begin}


def report_once(folder: Path) -> dict[str, Any]:
    from patchlight.bench.html import as_html
    from patchlight.bench.statistics import cells
    from patchlight.bench.store import Store
    from patchlight.bench.tables import as_csv, as_markdown, gather

    parts: dict[str, float] = {}
    now = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal now
        parts[name], now = time.perf_counter() - now, time.perf_counter()

    store = Store(folder)
    results = store.results()
    lap("of which reading")
    cells(results, store.manifest().resolved)
    lap("means, intervals and ties")
    del results
    begin = time.perf_counter()  # what follows is what `bench report` does
    run = gather(folder)
    as_markdown(run), as_csv(run)
    whole = time.perf_counter() - begin
    now = time.perf_counter()
    as_html(run)
    lap("the HTML page, besides")
    return {"seconds": whole, "parts": parts}


if __name__ == "__main__":
    done = {"plan": plan_once, "report": report_once}[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps({**done, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
