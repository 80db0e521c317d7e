"""Page response times, in a real Chromium: `python -m benchmarks.page [--weights FILE]`.

The page measures from the input to the drawn picture (`performance.measure`): `usable`, `first-map`, `hide` and
`slider`. Every visit has its own browser context and seed, so that no map is cached. With `--weights` (those of
`vit_tiny_patch16_224`), its first map is measured too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from playwright.sync_api import Browser

from benchmarks.common import record
from tests.web.browser import Visit, browsing, visiting
from tests.web.server import serving

PHOTOS = ("kitten", "dog", "bird", "deer", "horse", "ship")
TARGETS = {"usable": 1000, "first-map": 500, "hide": 100, "slider": 100, "first-map, vit_tiny": 1500}
"""Target of the 95th percentile, in milliseconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Page response times")
    parser.add_argument("--weights", type=Path, help="of vit_tiny_patch16_224")
    parser.add_argument("--visits", type=int, default=20)
    options = parser.parse_args()
    times: dict[str, list[float]] = {}
    with browsing() as browser:
        visits(browser, "pocket", [], options.visits, times)
        if options.weights:
            found: dict[str, list[float]] = {}
            weights = ["--weights", str(options.weights.resolve())]
            visits(browser, "vit_tiny_patch16_224", weights, options.visits, found, hides=False)
            times["first-map, vit_tiny"] = found["first-map"]
    rows = [
        [what, str(len(ms)), *(f"{np.percentile(ms, q):.0f}" for q in (50, 95)), f"{max(ms):.0f}", str(TARGETS[what])]
        for what, ms in times.items()
    ]
    command = "python -m benchmarks.page" + (" --weights FILE" if options.weights else "")
    record("page", "Page response times", ["ms", "times", "p50", "p95", "longest", "target"], rows, command, cpu=True)


def visits(
    browser: Browser, model: str, more: list[str], count: int, times: dict[str, list[float]], hides: bool = True
) -> None:
    """Open the page several times; each time choose an image, hide patches and move the slider."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "here", *more, model=model) as server:
        for i in range(count):
            with visiting(browser, server.url) as visit:
                first = one_visit(visit.open(f"/#seed={i + 1}"), PHOTOS[i % len(PHOTOS)], hides)
                times.setdefault("usable", []).extend(visit.measures("usable"))
                times.setdefault("first-map", []).extend(first)
                for what in ("hide", "slider") if hides else ():
                    times.setdefault(what, []).extend(visit.measures(what))


def one_visit(visit: Visit, photo: str, hides: bool) -> list[float]:
    """Choose an image, hide patches and move the slider; returns the milliseconds until the first map."""
    page = visit.page
    wait(visit, lambda: bool(visit.measures("usable") and visit.measures("first-map")))
    page.wait_for_timeout(1500)  # thumbnails, fills
    before = len(visit.measures("first-map"))
    visit.get(f"photo-{photo}").click()
    wait(visit, lambda: len(visit.measures("first-map")) > before)
    first = visit.measures("first-map")[before:]
    if hides:
        page.wait_for_timeout(1000)
        hide_patches(visit)
        visit.get("measure").click()
        wait(visit, visit.get("measure").is_disabled, 2)
        wait(visit, visit.get("measure").is_enabled)
        for step in range(1, 11):
            visit.get("slider").fill(str(step))
            page.wait_for_timeout(100)
    return first


def hide_patches(visit: Visit) -> None:
    """Hide ten patches one by one with the pointer."""
    canvas = visit.get("photo")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    for i in range(10):
        count = len(visit.measures("hide"))
        visit.page.mouse.click(box["x"] + (i + 0.5) * box["width"] / 10, box["y"] + box["height"] / 2)
        wait(visit, lambda count=count: len(visit.measures("hide")) > count, 2)  # type: ignore[misc]


def wait(visit: Visit, true: Callable[[], bool], seconds: float = 120) -> None:
    """Wait until a condition holds, or the time is over."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        visit.page.wait_for_timeout(20)


if __name__ == "__main__":
    main()
