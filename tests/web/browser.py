"""A real Chromium, and visits to the page that take note of all that must not happen during them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Locator, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation",
  e => window.violations.push(e.violatedDirective + " " + e.blockedURI));
window.stricken = [];
window.alert = text => window.stricken.push(String(text));
"""
GIVEN = """
([element, kind, files]) => {
  const data = new DataTransfer();
  for (const [name, type, bytes] of files) data.items.add(new File([new Uint8Array(bytes)], name, {type}));
  if (kind === "paste") {
    element.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true}));
  } else {
    for (const name of ["dragenter", "dragover", "drop"])
      element.dispatchEvent(new DragEvent(name, {dataTransfer: data, bubbles: true, cancelable: true}));
  }
}
"""


def chromium() -> str | None:
    """Where a browser is, if there is one: `PATCHLIGHT_CHROMIUM`, or one of the usual names."""
    own = os.environ.get("PATCHLIGHT_CHROMIUM")
    return own or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page at a site, with what it said and asked for."""

    url: str
    page: Page
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda m: self.said.append(f"{m.type}: {m.text} {m.location.get('url')}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("dialog", lambda dialog: (self.said.append(f"error: dialog {dialog.message}"), dialog.dismiss()))

    def open(self, fragment: str = "") -> Visit:
        self.page.goto(self.url + fragment)
        return self

    def get(self, name: str) -> Locator:
        return self.page.get_by_test_id(name)

    def give(self, name: str, kind: str, *files: tuple[str, str, bytes]) -> None:
        """Drop or paste files on an element."""
        told = [[file, media, list(data)] for file, media, data in files]
        self.page.evaluate(GIVEN, [self.get(name).element_handle(), kind, told])

    def measures(self, name: str) -> list[float]:
        """Milliseconds that the page itself measured under a name."""
        return list(
            self.page.evaluate("name => performance.getEntriesByName(name, 'measure').map(m => m.duration)", name)
        )

    def well(self, expected: tuple[str, ...] = ()) -> None:
        """Nothing left the host, no policy was broken, no script of a stranger ran, and the console is empty.

        Chromium itself reports every answer of 4xx there: those whose status is expected are left out.
        """
        foreign = [url for url in self.asked if urlsplit(url).scheme not in ("blob", "data") and not self.own(url)]
        assert not foreign, foreign
        assert self.page.evaluate("window.violations") == []
        assert self.page.evaluate("window.stricken") == []
        bad = [line for line in self.said if line.startswith(("error", "warning"))]
        bad = [line for line in bad if not any(f"status of {status}" in line for status in expected)]
        assert not bad, bad

    def own(self, url: str) -> bool:
        return urlsplit(url).netloc == urlsplit(self.url).netloc


@contextlib.contextmanager
def visiting(browser: Browser, url: str, **options: Any) -> Iterator[Visit]:
    """A visit in a context of its own; nothing is kept from others."""
    options = {"viewport": {"width": 1400, "height": 900}, "accept_downloads": True, **options}
    context: BrowserContext = browser.new_context(**options)
    context.set_default_timeout(180_000)
    context.add_init_script(WATCH)
    yield Visit(url, context.new_page())
    context.close()


def serious(page: Page) -> list[str]:
    """What axe-core finds that is serious or critical."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{v['id']} ({v['impact']}): {v['help']}: {[node['target'] for node in v['nodes']][:5]}"
        for v in found
        if v["impact"] in ("serious", "critical")
    ]
