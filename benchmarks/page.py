"""How soon the page answers, in a real Chromium: `python -m benchmarks.page [--weights FILE]`.

The page itself measures from the hand to the picture (`performance.measure`): `usable`, `first-map`, `poke` and
`slider`. Every visit is in a browser context of its own, so nothing is cached. With `--weights` (those of
`vit_tiny_patch16_224`) its first map is measured too.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from playwright.sync_api import Browser

from benchmarks.common import record
from tests.web.browser import Visit, browsing, visiting
from tests.web.server import serving

PHOTOS = ("kitten", "dog", "bird", "deer", "horse", "ship")
WANTED = {"usable": 1000, "first-map": 500, "poke": 100, "slider": 100, "first-map, vit_tiny": 1500}
"""Milliseconds of the 95th percentile."""


def main() -> None:
    parser = argparse.ArgumentParser(description="How soon the page answers")
    parser.add_argument("--weights", type=Path, help="of vit_tiny_patch16_224")
    parser.add_argument("--visits", type=int, default=20)
    options = parser.parse_args()
    times: dict[str, list[float]] = {}
    with browsing() as browser:
        visits(browser, "pocket", [], options.visits, times)
        if options.weights:
            found: dict[str, list[float]] = {}
            weights = ["--weights", str(options.weights.resolve())]
            visits(browser, "vit_tiny_patch16_224", weights, options.visits, found, poked=False)
            times["first-map, vit_tiny"] = found["first-map"]
    rows = [
        [what, str(len(ms)), *(f"{np.percentile(ms, q):.0f}" for q in (50, 95)), f"{max(ms):.0f}", str(WANTED[what])]
        for what, ms in times.items()
    ]
    command = "python -m benchmarks.page" + (" --weights FILE" if options.weights else "")
    record("page", "How soon the page answers", ["ms", "times", "p50", "p95", "longest", "wanted"], rows, command, cpu=True)


def visits(
    browser: Browser, model: str, more: list[str], count: int, times: dict[str, list[float]], poked: bool = True
) -> None:
    """Open the page again and again: choose an image, and poke and slide there."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "here", *more, model=model) as server:
        for _ in range(count):
            with visiting(browser, server.url) as visit:
                one_visit(visit.open(), poked)
                for what in ("usable", "first-map", *(("poke", "slider") if poked else ())):
                    times.setdefault(what, []).extend(visit.measures(what))


def one_visit(visit: Visit, poked: bool) -> None:
    raise NotImplementedError
