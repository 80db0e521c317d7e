"""Photograph the page for docs/: `python -m tools.screens` (needs playwright, and Chromium at --browser)."""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

import patchlight as pl
from patchlight.web.serve import Server
from patchlight.web.service import ModelService

DOCS = Path(__file__).resolve().parents[1] / "docs"
METHODS = "genatt,tokentm,decompx.skipplus,posterior,random"
FACE = "17-22,25-30,36,37,44,45,52,53"


def compare(page: Page, url: str) -> None:
    """Predictions, and maps beside each other."""
    page.goto(f"{url}#image=dog-and-cat&target=5&against=3&methods={METHODS}")
    _maps_are_there(page)


def poke(page: Page, url: str) -> None:
    """Patches are painted over, and the bars have followed."""
    page.goto(f"{url}#image=cat&methods={METHODS}&removed={FACE}")
    _maps_are_there(page)
    page.wait_for_function("performance.getEntriesByName('poke').length > 0")


def truth(page: Page, url: str) -> None:
    """Curves of all maps and of random orders."""
    page.goto(f"{url}#image=cat&methods={METHODS}&tested=1&step=5&shown=posterior")
    page.get_by_test_id(f"truth-{METHODS.split(',')[-1]}").wait_for(timeout=120_000)
    page.wait_for_function("!document.querySelector('[data-testid=measure]').disabled", timeout=120_000)
    page.evaluate("document.querySelector('[data-testid=measure]').closest('section').scrollIntoView()")


def _maps_are_there(page: Page) -> None:
    page.wait_for_function(
        f"document.querySelectorAll('[data-testid^=map-][data-state=done]').length >= {METHODS.count(',') + 1}",
        timeout=60_000,
    )


VIEWS = {"compare": (compare, 800), "poke": (poke, 800), "truth": (truth, 1280)}
"""What is photographed, and how high it is."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", default="/usr/bin/chromium")
    given = parser.parse_args()
    server = Server(ModelService(pl.load("pocket"), "pl.load('pocket')", "--model pocket"))
    server.start()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=given.browser, args=["--no-sandbox"])
        for name, (view, height) in VIEWS.items():
            page = browser.new_page(viewport={"width": 1200, "height": height}, bypass_csp=True)  # to wait for words
            view(page, server.url)
            page.wait_for_timeout(1000)
            page.screenshot(path=DOCS / f"page-{name}.png")
            print(DOCS / f"page-{name}.png")
        browser.close()
    server.stop()


if __name__ == "__main__":
    main()
