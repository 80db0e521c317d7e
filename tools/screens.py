"""Take the screenshots of the page for docs/: `python -m tools.screens` (needs playwright and Chromium)."""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

import patchlight as pl
from patchlight.web.serve import Server
from patchlight.web.service import ModelService

DOCS = Path(__file__).resolve().parents[1] / "docs"
METHODS = "auto,genatt,decompx.skipplus,posterior,random"
FACE = "17-22,25-30,36,37,44,45,52,53"


def compare(page: Page, url: str) -> None:
    """The first view: half of the strongest patches are hidden."""
    page.goto(f"{url}#image=dog-and-cat")
    _ready(page)
    page.get_by_test_id("play-step").fill("4")
    page.wait_for_function("performance.getEntriesByName('hide').length > 0")


def poke(page: Page, url: str) -> None:
    """Patches are hidden by hand, and the bars have followed."""
    page.goto(f"{url}#image=cat&methods={METHODS}&removed={FACE}")
    _ready(page)
    page.wait_for_function("performance.getEntriesByName('hide').length > 0")


def truth(page: Page, url: str) -> None:
    """The curves of all maps and of random orders."""
    page.goto(f"{url}#image=cat&methods={METHODS}&tested=1&step=5&shown=posterior")
    page.get_by_test_id("result-random").wait_for(timeout=120_000)
    page.wait_for_function("!document.querySelector('[data-testid=measure]').disabled", timeout=120_000)
    page.evaluate("document.querySelector('[data-testid=measure]').closest('section').scrollIntoView()")


def _ready(page: Page) -> None:
    page.wait_for_function("!document.querySelector('[data-testid=play]').disabled", timeout=120_000)


VIEWS = {"compare": (compare, 860), "poke": (poke, 860), "truth": (truth, 1060)}
"""The views, and the height of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", default="/usr/bin/chromium")
    options = parser.parse_args()
    server = Server(ModelService(pl.load("pocket"), "pl.load('pocket')", "--model pocket"))
    server.start()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=options.browser, args=["--no-sandbox"])
        for name, (view, height) in VIEWS.items():
            page = browser.new_page(viewport={"width": 1320, "height": height}, bypass_csp=True)  # to wait for words
            view(page, server.url)
            page.wait_for_timeout(1000)
            page.screenshot(path=DOCS / f"page-{name}.png")
            print(DOCS / f"page-{name}.png")
        browser.close()
    server.stop()


if __name__ == "__main__":
    main()
