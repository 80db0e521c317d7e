"""Fifty thousand images: the time of a plan, without and with cached hashes, and of a report of 7.2 million rows.

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

import numpy as np
from PIL import Image

from benchmarks.common import record
from benchmarks.workers import overhead, workers
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
    rows = [*planning(), *reporting(), *workers(), *overhead()]
    record(
        "scale",
        "Fifty thousand images, two workers, and what a unit costs",
        ["what", "seconds", "processor seconds", "most memory"],
        rows,
        cpu=True,
    )


def planning() -> list[list[str]]:
    """Plan these images twice: list the folder, hash the files, load the model."""
    found = []
    for images in (IMAGES // 10, IMAGES):
        with tempfile.TemporaryDirectory() as folder:
            size = make_images(Path(folder) / "images", images)
            time.sleep(3)  # a file that changed just now is not kept
            for words in (f"plan {images:,} images of {size / 1000:.0f} KB each, for the first time", "the same again"):
                found.append([words, *measured("plan", folder)])
    return found


def reporting() -> list[list[str]]:
    """Rows of 50,000 images, 12 methods and 12 metrics: read, means, intervals, ties and ranks, tables, the page."""
    with tempfile.TemporaryDirectory() as folder:
        rows = synthesise(Path(folder), IMAGES).values.size
        units = len(list((Path(folder) / "units").iterdir()))
        return [
            [f"report of {rows / 1e6:.1f} million rows in {units:,} units", *measured("report", folder)],
            ["of which reading", *measured("read", folder)],
            ["the report as an HTML page", *measured("page", folder)],
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


def measured(what: str, folder: str) -> list[str]:
    """Seconds, CPU seconds and memory of a process that runs this code."""
    own = {**os.environ, "PATCHLIGHT_CACHE": str(Path(folder) / "cache")}
    command = [sys.executable, "-m", "benchmarks.bench_scale", what, folder]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=own)
    seconds, busy, memory = json.loads(found.stdout.splitlines()[-1])
    print(what, seconds, busy, memory, flush=True)
    return [f"{seconds:.1f}", f"{busy:.1f}", f"{memory / 1000:.2f} GB"]


def plan_once(folder: Path) -> None:
    from patchlight.bench.plan import plan
    from patchlight.bench.recipe import parse

    plan(parse(RECIPE.format(path=(folder / "images").as_posix())))


def read_once(folder: Path) -> None:
    from patchlight.bench.store import Store

    Store(folder).results()


def report_once(folder: Path) -> None:
    from patchlight.bench.tables import as_csv, as_markdown, read_tables

    run = read_tables(folder)
    as_markdown(run), as_csv(run)


def page_once(folder: Path) -> None:
    from patchlight.bench.html import as_html
    from patchlight.bench.tables import read_tables

    as_html(read_tables(folder))


ONCE = {"plan": plan_once, "read": read_once, "report": report_once, "page": page_once}

if __name__ == "__main__":
    begin, busy = time.perf_counter(), time.process_time()
    ONCE[sys.argv[1]](Path(sys.argv[2]))
    spent = time.perf_counter() - begin, time.process_time() - busy
    print(json.dumps([*spent, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
