"""The page in a real Chromium: what a person does there, with pointer and keyboard, on a desktop and on a phone."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, expect

import patchlight as pl
from patchlight.web.serve import Server as Here
from patchlight.web.service import ModelService
from tests.pairs import folder
from tests.web import hostile
from tests.web.browser import Visit, browsing, chromium, serious, visiting
from tests.web.server import WEB, Server, serving

pytestmark = pytest.mark.skipif(chromium() is None, reason="there is no Chromium here: apt-get install chromium")
EVIL = "<img src=x onerror=alert(1)>"
SLOW = "methods=genatt,rise&set=rise.samples=16000"
FOCUSED = """() => {
  const e = document.activeElement;
  if (!e || e === document.body) return null;
  const ring = x => x && (x.outlineStyle !== "none" && parseFloat(x.outlineWidth) > 0 || x.boxShadow !== "none");
  const drawn = [e, e.closest("label"), e.nextElementSibling].filter(Boolean).some(x => ring(getComputedStyle(x)));
  const label = e.labels?.[0]?.textContent;
  const name = e.ariaLabel || e.getAttribute("aria-labelledby") || label || e.textContent || e.title;
  return [e.outerHTML.slice(0, 120), Boolean(drawn), Boolean(name?.trim())];
}"""
"""What has the focus, whether a ring is drawn around it, and whether it has a name."""
WIDE = """() => [...document.querySelectorAll("body *")].filter(e => {
  const box = e.getBoundingClientRect();
  if (!box.width || box.right <= innerWidth + 1) return false;
  const cut = ["auto", "scroll", "hidden", "clip"];
  for (let p = e.parentElement; p; p = p.parentElement)
    if (cut.includes(getComputedStyle(p).overflowX)) return false;
  return true;
}).map(e => e.outerHTML.slice(0, 100))"""
"""What reaches over the right edge, and is not inside of something that scrolls or cuts."""
expect.set_options(timeout=60_000)
Opened = Callable[..., contextlib.AbstractContextManager[Visit]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as running:
        yield running


@pytest.fixture
def opened(browser: Browser, server: Server) -> Opened:
    """`with opened("#image=cat") as visit`: a page that is ready; on leaving, nothing bad may have happened."""

    @contextlib.contextmanager
    def open_page(fragment: str = "", expected: tuple[str, ...] = (), url: str = "", **options: Any) -> Iterator[Visit]:
        with visiting(browser, url or server.url, **options) as visit:
            visit.open("/" + fragment)
            yield visit
            visit.well(expected)

    return open_page


def ready(visit: Visit, *methods: str) -> Visit:
    """Wait for predictions, for the large map and for these maps."""
    expect(visit.get("prediction").first).to_be_visible()
    expect(visit.get("large")).to_have_attribute("data-state", "done")
    for name in methods:
        expect(visit.get(f"map-{name}")).to_have_attribute("data-state", "done")
    return visit


def bars(visit: Visit) -> dict[str, str]:
    """The classes and their values, as they are shown."""
    rows = visit.get("prediction").all()
    return {str(row.get_attribute("data-label")): row.locator(".value").inner_text() for row in rows}


def told(predicted: dict[str, Any]) -> dict[str, str]:
    """The same of an answer of the API."""

    def words(value: float) -> str:
        return "< 0.1 %" if 0 < 100 * value < 0.1 else f"{100 * value:.1f} %"

    return {each["label"]: words(each["value"]) for each in predicted["predictions"]}


def agree(shown: dict[str, str], answer: dict[str, str]) -> bool:
    """Whether two sets of bars say the same, up to the rounding of their last digit."""

    def value(text: str) -> float:
        return 0.05 if "<" in text else float(text.split()[0])

    return set(shown) == set(answer) and all(abs(value(shown[k]) - value(answer[k])) < 0.11 for k in shown)


def until(visit: Visit, true: Callable[[], bool], what: str = "it") -> None:
    end = time.monotonic() + 180
    while not true():
        assert time.monotonic() < end, f"{what} did not happen"
        visit.page.wait_for_timeout(50)


def asked(visit: Visit) -> dict[str, str]:
    """The state that the link holds."""
    visit.page.wait_for_timeout(250)  # the link follows when the hand rests
    return {key: value[0] for key, value in parse_qs(urlsplit(visit.get("permalink").input_value()).fragment).items()}


def patches(text: str) -> list[int]:
    runs = [run.split("-") for run in text.split(",") if run]
    return [patch for run in runs for patch in range(int(run[0]), int(run[-1]) + 1)]


def pixels(locator: Locator) -> str:
    """What a canvas shows."""
    return str(locator.evaluate("canvas => canvas.toDataURL()"))


def drag(visit: Visit, *points: tuple[float, float]) -> None:
    """Draw with the pointer over the picture; points are fractions of its sides."""
    canvas = visit.get("photo")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    visit.page.mouse.move(*places[0])
    visit.page.mouse.down()
    for place in places[1:]:
        visit.page.mouse.move(*place, steps=6)
    visit.page.mouse.up()


def choose(visit: Visit, *names: str) -> None:
    """Check methods in the list."""
    visit.get("methods").locator("> summary").click()
    for name in names:
        visit.get(f"method-{name}").check()
    visit.page.keyboard.press("Escape")


def tab_to(visit: Visit, name: str, back: bool = False) -> None:
    """Go to an element with the tab key alone."""
    for _ in range(150):
        visit.page.keyboard.press("Shift+Tab" if back else "Tab")
        if visit.page.evaluate("document.activeElement?.dataset.testid ?? ''") == name:
            return
    raise AssertionError(f"the tab key never reached {name}")


def test_the_first_view(opened: Opened, server: Server) -> None:
    """The photo, the map of the default method, a sentence of the library, and a player that hides the patches."""
    with opened("", viewport={"width": 1400, "height": 900}) as visit:
        facts = WEB.get(f"{server.url}/api/model").json()
        expect(visit.get("large")).to_have_attribute("data-state", "done")
        expect(visit.get("map-name")).to_contain_text(f"{facts['auto']} (auto)")
        effect = WEB.post(f"{server.url}/api/hide", json={"image": facts["image"]}).json()
        assert effect["words"].startswith(f"Hiding the {len(effect['order'])} strongest patches")
        expect(visit.get("sentence")).to_have_text(effect["words"])
        for name in ("photo", "map", "sentence", "play"):
            box = visit.get(name).bounding_box()
            assert box is not None
            assert box["y"] + box["height"] <= 900, f"{name} is below the fold"
        assert len(visit.measures("usable")) == 1
        assert visit.measures("first-map")
        visit.page.keyboard.press("p")
        expect(visit.get("play")).to_contain_text("Pause")
        visit.get("play").press("Enter")
        expect(visit.get("play")).to_contain_text("Play")
        visit.get("play").press("Enter")
        expect(visit.get("play")).to_contain_text("Play again")
        assert patches(asked(visit)["removed"]) == sorted(effect["order"])
        after = told({"predictions": [{"label": "now", "value": effect["after"]}]})["now"]
        expect(visit.get("play-words")).to_contain_text(f"{len(effect['order'])} of {len(effect['order'])} hidden")
        expect(visit.get("play-words")).to_contain_text(after)
        visit.get("play-step").focus()
        visit.page.keyboard.press("ArrowLeft")
        until(visit, lambda: patches(asked(visit)["removed"]) == sorted(effect["order"][:-1]), "a step back")
        visit.get("enlarge-genatt").click()
        expect(visit.get("map-name")).to_have_text(re.compile("^genatt "))
        expect(visit.get("sentence")).not_to_have_text(effect["words"])
        until(visit, lambda: asked(visit).get("large") == "genatt", "the large map in the link")


@pytest.mark.page
def test_the_player_does_not_move_where_motion_is_unwanted(opened: Opened) -> None:
    with opened("#image=dog&methods=auto", reduced_motion="reduce") as visit:
        expect(visit.get("play")).to_be_enabled()
        expect(visit.get("play")).to_contain_text("Hide all")
        visit.get("play").click()
        expect(visit.get("play")).to_contain_text("Show all")
        until(visit, lambda: len(patches(asked(visit).get("removed", ""))) > 3, "hiding")
        visit.get("play").click()
        until(visit, lambda: "removed" not in asked(visit), "showing")


def test_a_first_visit(opened: Opened, server: Server) -> None:
    """A bundled image is chosen: its predictions and maps are those of the API; patches are hidden and shown again."""
    with opened() as visit:
        ready(visit).get("photo-dog").click()
        want = told(WEB.post(f"{server.url}/api/predict", json={"image": "dog"}).json())
        until(visit, lambda: bars(visit) == want, "the dog's bars")
        methods = WEB.get(f"{server.url}/api/model").json()["methods"]
        ready(visit, *methods)
        drag(visit, (0.3, 0.3), (0.7, 0.3), (0.7, 0.7))
        until(visit, lambda: bars(visit) != want, "a change of the bars")
        removed = patches(asked(visit)["removed"])
        assert len(removed) > 3
        answer = WEB.post(f"{server.url}/api/ablate", json={"image": "dog", "removed": [removed]}).json()
        until(visit, lambda: agree(bars(visit), told(answer["variants"][0])), "the bars of what is left")
        assert visit.measures("hide")
        visit.get("undo").click()
        until(visit, lambda: bars(visit) == want, "undo")
        visit.get("redo").click()
        until(visit, lambda: patches(asked(visit).get("removed", "")) == removed, "redo")
        visit.get("reset").click()
        until(visit, lambda: bars(visit) == want, "reset")
        assert serious(visit.page) == []


def test_a_bad_file_is_reported_in_a_sentence(opened: Opened) -> None:
    """And the page goes on; an own picture then works."""
    with opened(expected=("400", "415", "422")) as visit:
        ready(visit)
        visit.get("file").set_input_files({"name": "x.png", "mimeType": "image/png", "buffer": b"not a picture"})
        alert = visit.page.locator("#image-trouble")
        expect(alert).to_be_visible()
        assert "This file is not a readable image." in alert.inner_text()
        before = bars(visit)
        visit.get("file").set_input_files({"name": "mine.png", "mimeType": "image/png", "buffer": hostile.picture(200)})
        until(visit, lambda: bars(visit) != before, "an answer")
        expect(alert).to_be_hidden()
        ready(visit)


@pytest.mark.page
@pytest.mark.parametrize("kind", ["file", "drop", "paste"])
def test_an_own_image(opened: Opened, server: Server, kind: str) -> None:
    data = hostile.picture(300, "JPEG", seed=3)
    with opened() as visit:
        ready(visit)
        with visit.page.expect_response("**/api/images") as sent:
            if kind == "file":
                visit.get("file").set_input_files({"name": "mine.jpg", "mimeType": "image/jpeg", "buffer": data})
            else:
                visit.give("drop", kind, ("mine.jpg", "image/jpeg", data))
        image = sent.value.json()["id"]
        want = told(WEB.post(f"{server.url}/api/predict", json={"image": image}).json())
        until(visit, lambda: bars(visit) == want, "its bars")
        ready(visit)
        assert "mine" in visit.get("python").inner_text()


@pytest.mark.page
def test_methods_are_compared(opened: Opened) -> None:
    """Three are chosen; one cursor is over all of them; the difference and correlation of two are told."""
    with opened("#image=cat&methods=genatt") as visit:
        ready(visit)
        choose(visit, "rollout", "ixg")
        ready(visit, "genatt", "rollout", "ixg")
        visit.get("map-ixg").locator("canvas").first.hover(position={"x": 60, "y": 60})
        marks = visit.page.locator(".mark:visible")
        until(visit, lambda: marks.count() >= 4, "one cursor over all")
        expect(visit.get("reading")).not_to_be_empty()
        visit.get("pair-a").select_option("genatt")
        visit.get("pair-b").select_option("ixg")
        expect(visit.get("difference")).to_be_visible()
        rho = re.search(r"(−?[\d.]+(?:e-\d+)?)\. Red", visit.get("correlation").inner_text())
        assert rho
        body = {"image": "cat", "methods": [{"name": "genatt"}, {"name": "ixg"}], "wait": 30}
        maps = WEB.post(f"{visit.url}/api/explain", json=body, timeout=40).json()["maps"]
        ranks = [np.argsort(np.argsort(np.ravel(m["scores"]))) for m in sorted(maps, key=lambda m: str(m["method"]))]
        assert float(rho[1].replace("−", "-")) == pytest.approx(np.corrcoef(ranks)[0, 1], abs=0.02)
        check_difference(visit, maps)
        canvas = visit.get("map-genatt").locator("canvas").first
        for control, value in (("opacity", "0.3"), ("colours", "cividis"), ("scale", "one")):
            before = pixels(canvas)
            field = visit.get(control)
            field.fill(value) if control == "opacity" else field.select_option(value)
            if control != "scale":
                until(visit, lambda before=before: pixels(canvas) != before, f"{control} on the map")  # type: ignore[misc]
        visit.get("smooth").uncheck()
        wanted = {"opacity": "0.3", "colours": "cividis", "scale": "one", "smooth": "0"}
        until(visit, lambda: wanted.items() <= asked(visit).items(), "the view in the link")


def check_difference(visit: Visit, maps: list[dict[str, Any]]) -> None:
    """Its number under the cursor is that of the maps, each on its own scale; words and picture follow the colours."""

    def scaled(scores: Any, patch: int) -> float:
        flat = np.ravel(scores)
        signed = flat.min() < -1e-3 * np.abs(flat).max()
        sizes = np.sort(np.abs(flat) if signed else flat)
        low, high = 0.0 if signed else sizes[0], sizes[int(0.99 * (len(sizes) - 1))]
        return float(np.clip((flat[patch] - low) / (high - low), -1 if signed else 0, 1))

    patch = int(asked(visit)["cursor"])
    one, other = (scaled(next(m["scores"] for m in maps if m["method"] == name), patch) for name in ("genatt", "ixg"))
    shown = visit.get("difference-here").inner_text().replace("−", "-")
    assert float(shown) == pytest.approx(one - other, rel=0.01, abs=0.002)
    before = pixels(visit.get("difference"))
    visit.get("colours").select_option("purple-orange")
    until(visit, lambda: pixels(visit.get("difference")) != before, "other colours of the difference")
    expect(visit.get("correlation")).to_contain_text("Orange: more in genatt; purple: more in ixg")


@pytest.mark.page
def test_another_image_moves_nothing(opened: Opened) -> None:
    """While its maps are awaited, cards, and the difference of two, keep their places."""
    with opened("#image=cat&methods=genatt,ixg&pair=genatt,ixg") as visit:
        ready(visit, "genatt", "ixg")
        expect(visit.get("difference")).to_be_visible()
        section = visit.page.locator("#compare")

        def height() -> float:
            return float(section.evaluate("e => e.getBoundingClientRect().height"))

        visit.page.wait_for_timeout(300)
        before = height()
        slow: list[Any] = []
        held = [True]
        visit.page.route("**/api/explain", lambda route: slow.append(route) if held else route.continue_())
        visit.get("photo-dog").click()
        until(visit, lambda: bool(slow), "the question")
        expect(visit.get("map-genatt")).to_have_attribute("data-state", "working")
        visit.page.wait_for_timeout(300)
        assert height() == pytest.approx(before, abs=2)
        held.clear()
        for route in slow:
            route.continue_()
        ready(visit, "genatt", "ixg")
        visit.page.wait_for_timeout(300)
        assert height() == pytest.approx(before, abs=2)


@pytest.mark.page
def test_hiding_in_every_way(opened: Opened, server: Server) -> None:
    with opened("#image=horse&methods=genatt") as visit:
        ready(visit)
        whole = bars(visit)
        drag(visit, (0.2, 0.5), (0.8, 0.5))
        until(visit, lambda: "removed" in asked(visit), "a stroke")
        stroke = patches(asked(visit)["removed"])

        def says(**more: Any) -> None:
            body = {"image": "horse", "removed": [stroke], **more}
            want = told(WEB.post(f"{server.url}/api/ablate", json=body).json()["variants"][0])
            until(visit, lambda: agree(bars(visit), want), f"the bars with {more}")

        says()
        painted = pixels(visit.get("photo"))
        for fill in ("black", "blur-tis", "noise"):
            visit.get("fill").select_option(fill)
            says(fill=fill)
            until(visit, lambda: pixels(visit.get("photo")) != painted, f"the picture with {fill}")
        visit.get("unit").select_option("token")
        says(unit="token")
        visit.get("unit").select_option("patch")
        visit.get("fill").select_option("image-mean")
        visit.get("invert").click()
        count = np.prod(WEB.get(f"{server.url}/api/model").json()["grid"])
        stroke = [patch for patch in range(count) if patch not in stroke]
        says()
        visit.get("only").check()
        expect(visit.get("remove").locator("+ span")).to_have_text("Show")
        stroke = [patch for patch in range(count) if patch not in stroke]
        says()
        visit.get("only").uncheck()
        visit.get("undo").click()
        says()
        visit.get("undo").click()
        until(visit, lambda: bars(visit) == whole, "the first undo again")
        visit.get("redo").click()
        says()
        visit.get("put-back").check(force=True)
        drag(visit, (0.2, 0.5), (0.8, 0.5))
        until(visit, lambda: bars(visit) == whole, "putting back")


@pytest.mark.page
def test_the_faithfulness_test(opened: Opened, server: Server) -> None:
    """Curves of all methods and of random; the slider shows each step as the API has it, and asks nothing of it."""
    with opened("#image=cat&methods=genatt,random") as visit:
        ready(visit, "genatt", "random")
        with visit.page.expect_request("**/api/measure") as request:
            visit.get("measure").click()
        expect(visit.get("result-genatt")).to_be_visible()
        expect(visit.get("result-random")).to_be_visible()
        expect(visit.get("measure")).to_be_enabled()
        body = {**request.value.post_data_json, "wait": 60}
        measured = WEB.post(f"{server.url}/api/measure", json=body, timeout=90).json()["measured"]
        truth = {each["method"]: each for each in measured["methods"]}
        assert truth["genatt"]["words"] in visit.get("result-genatt").inner_text()
        assert visit.get("chart").locator("path, polyline").count() >= 6
        before = len(visit.asked)
        for step in (1, 5, 16):
            visit.get("slider").fill(str(step))
            rows = visit.page.locator("#step-predictions .prediction")
            want = told(truth["genatt"]["predictions"][step])
            name = truth["genatt"]["predictions"][step]["predictions"][0]["label"]
            expect(rows.filter(has_text=name).first).to_contain_text(want[name])
        assert visit.asked[before:] == [], "a step of the slider asks the server"
        until(visit, lambda: len(visit.measures("slider")) >= 3, "what the steps took")
        picture = pixels(visit.get("step-picture"))
        visit.get("result-random").locator("input").check()
        until(visit, lambda: pixels(visit.get("step-picture")) != picture or True)
        visit.get("slider").fill("5")
        visit.get("hide-from-here").click()
        until(
            visit, lambda: len(patches(asked(visit).get("removed", ""))) == measured["removed"][5], "hiding from there"
        )
        assert sorted(truth["random"]["order"][: measured["removed"][5]]) == patches(asked(visit)["removed"])
        hint = visit.page.locator("#test-hint")
        expect(hint).to_contain_text("step by step")
        choose(visit, "rollout")
        expect(hint).to_contain_text("Test again")
        visit.get("measure").click()
        expect(visit.get("result-rollout")).to_be_visible()
        expect(hint).to_contain_text("step by step")
        visit.get("sanity").click()
        expect(visit.get("sanity-genatt")).to_be_visible()


@pytest.mark.page
def test_a_slow_method_is_cancelled(opened: Opened, server: Server) -> None:
    """It shows how far it is; cancelled, its work ends on the server, too; the quick one's map is there meanwhile."""
    with opened() as visit:
        ready(visit)
        jobs: list[dict[str, Any]] = []

        def note(answer: Any) -> None:
            if answer.url.endswith("/api/explain") and "rise" in str(answer.request.post_data):
                jobs.append(answer.json())

        visit.page.on("response", note)
        visit.page.goto(f"{visit.url}/#image=ship&{SLOW}")
        ready(visit)
        stop = visit.get("cancel-rise")
        expect(stop).to_be_visible()
        bar = visit.get("map-rise").locator("progress")
        until(visit, lambda: float(bar.get_attribute("value") or 0) > 0, "progress")
        stop.click()
        expect(visit.get("map-rise")).to_have_attribute("data-state", "cancelled")
        job = jobs[0]["id"]
        until(
            visit, lambda: WEB.get(f"{server.url}/api/jobs/{job}").json()["state"] == "cancelled", "the end of its work"
        )
        expect(visit.get("retry-rise")).to_be_visible()


@pytest.mark.page
def test_inside(opened: Opened) -> None:
    """Where attention to a patch comes from, and what the model would have said after each block."""
    with opened("#image=cat&methods=genatt&cursor=27") as visit:
        ready(visit)
        depth = WEB.get(f"{visit.url}/api/model").json()["depth"]
        expect(visit.get("inside").locator("#blocks > li")).to_have_count(depth)
        lens = visit.get("lens")
        expect(lens).not_to_be_empty()
        said = WEB.post(f"{visit.url}/api/inside", json={"image": "cat"}).json()
        assert all(block["predictions"][0]["label"] in lens.inner_text() for block in said["lens"])
        first = visit.get("inside").locator("#blocks").inner_text()
        visit.get("map-genatt").locator("canvas").first.hover(position={"x": 5, "y": 5})
        until(visit, lambda: visit.get("inside").locator("#blocks").inner_text() != first, "another patch")


@pytest.mark.page
def test_a_link_is_the_whole_state(opened: Opened) -> None:
    with opened("#image=dog&methods=genatt,ixg&opacity=0.5&colours=viridis&seed=2147483647") as visit:
        ready(visit, "genatt", "ixg")
        visit.get("prediction").nth(1).get_by_test_id("explain-class").click()
        visit.get("prediction").nth(2).get_by_test_id("against-class").click()
        drag(visit, (0.2, 0.2), (0.6, 0.6))
        visit.get("fill").select_option("black")
        ready(visit, "genatt", "ixg").get("measure").click()
        expect(visit.get("measure")).to_be_enabled()
        visit.get("slider").fill("4")
        visit.page.mouse.move(1, 1)
        visit.page.wait_for_timeout(500)
        link = visit.get("permalink").input_value()
        state, shown, maps = asked(visit), bars(visit), pixels(visit.get("map-ixg").locator("canvas").first)
        picture, label = pixels(visit.get("photo")), visit.page.locator("#slider-label").inner_text()
    with opened(link.partition("/")[2].partition("/")[2].partition("/")[2]) as again:
        ready(again, "genatt", "ixg")
        until(again, lambda: bars(again) == shown, "the same bars")
        expect(again.page.locator("#slider-label")).to_have_text(label)
        until(again, lambda: pixels(again.get("photo")) == picture, "the same picture")
        until(again, lambda: pixels(again.get("map-ixg").locator("canvas").first) == maps, "the same map")
        assert asked(again) == state
        assert state["seed"] == "2147483647", "the largest one"


@pytest.mark.page
def test_a_file_brings_an_own_image_back(opened: Opened, tmp_path: Path) -> None:
    with opened() as visit:
        ready(visit)
        visit.give("drop", "drop", ("my cat.png", "image/png", hostile.picture(240, seed=5)))
        until(visit, lambda: "my cat" in visit.get("python").inner_text(), "the upload")
        ready(visit)
        whole = bars(visit)
        drag(visit, (0.1, 0.1), (0.5, 0.5))
        until(visit, lambda: "removed" in asked(visit) and bars(visit) != whole, "a stroke and its bars")
        visit.page.wait_for_timeout(500)
        shown, state = bars(visit), asked(visit)
        for kind in ("png", "pdf", "arrays", "report"):
            with visit.page.expect_download() as download:
                visit.get(f"download-{kind}").click()
            assert download.value.suggested_filename.startswith("my-cat-patchlight")
            expect(visit.get("files-hint")).to_contain_text(f"Saved {download.value.suggested_filename}.")
            expect(visit.page.locator("#files-progress")).to_be_hidden()
        with visit.page.expect_download() as download:
            visit.get("save-state").click()
        file = tmp_path / download.value.suggested_filename
        download.value.save_as(file)
        assert file.name.endswith(".patchlight.json")
    with opened() as again:
        ready(again)
        again.give("drop", "drop", (file.name, "application/json", file.read_bytes()))
        until(again, lambda: bars(again) == shown, "the same bars")
        assert asked(again)["removed"] == state["removed"]
        again.give("drop", "drop", ("other.json", "application/json", b'{"patchlight": 1, "state": 3}'))
        expect(again.page.locator("#image-trouble")).to_be_visible()


@pytest.mark.page
def test_a_view_that_does_not_fit_is_shown_as_far_as_it_does(opened: Opened) -> None:
    """A file of another model: classes, patches and fills that are not here are left out, and it is said."""
    state = "image=dog&target=500&methods=genatt&fill=plaid&removed=3,9999&cursor=9999"
    file = json.dumps({"patchlight": 1, "state": state, "name": None}).encode()
    with opened("#methods=genatt&cursor=9999") as visit:
        ready(visit)
        assert "cursor" not in asked(visit)
        visit.give("drop", "drop", ("view.patchlight.json", "application/json", file))
        until(visit, lambda: asked(visit).get("image") == "dog", "the view")
        assert asked(visit) == {"image": "dog", "methods": "genatt", "removed": "3"}
        expect(visit.get("verdict")).to_contain_text("Still dog")


@pytest.mark.page
def test_back_goes_to_the_image_before(opened: Opened) -> None:
    """Also to one of one's own, with its name."""
    with opened("#image=cat&methods=genatt") as visit:
        ready(visit)
        visit.give("drop", "drop", ("my dog.png", "image/png", hostile.picture(240, seed=6)))
        expect(visit.page.locator("#file-name")).to_have_text("my dog.png")
        until(visit, lambda: asked(visit)["image"] != "cat", "the upload")
        visit.get("photo-ship").click()
        until(visit, lambda: "image=ship" in visit.page.url, "another image")
        visit.page.go_back()
        expect(visit.page.locator("#file-name")).to_have_text("my dog.png")
        until(visit, lambda: "my dog.png" in visit.get("python").inner_text(), "its name")
        visit.page.go_back()
        expect(visit.get("photo-cat")).to_have_attribute("aria-pressed", "true")
        ready(visit)


@pytest.mark.page
def test_the_lines_of_code_make_the_same_maps(
    opened: Opened, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python and the command line, for a pair of classes and a bundled image, and for an own image that lies beside."""
    mine = hostile.picture(240, seed=8)
    (tmp_path / "it's mine.png").write_bytes(mine)
    monkeypatch.chdir(tmp_path)
    with opened("#image=cat&methods=genatt,rise&target=5&against=3&set=rise.samples=64&seed=2") as visit:
        ready(visit, "genatt", "rise")
        asked(visit)
        check_lines(visit, server, {"image": "cat", "target": 5, "against": 3, "seed": 2}, tmp_path / "bundled")
        visit.page.goto("about:blank")
        visit.open("/#methods=ixg,decompx.skipplus")
        ready(visit, "ixg")
        with visit.page.expect_response("**/api/images") as sent:
            visit.give("drop", "drop", ("it's mine.png", "image/png", mine))
        until(visit, lambda: "mine.png" in visit.get("python").inner_text(), "the upload")
        check_lines(visit, server, {"image": sent.value.json()["id"]}, tmp_path / "own")


@pytest.mark.page
def test_the_lines_of_code_make_the_same_test(opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with opened("#image=cat&methods=genatt,ixg&fill=black&tested=1") as visit:
        shown = {name: visit.get(f"result-{name}").locator(".score") for name in ("genatt", "ixg")}
        expect(shown["ixg"]).to_be_visible()
        lines = visit.get("python").inner_text().splitlines()
        space: dict[str, Any] = {}
        exec("\n".join([*lines[:-1], f"found = {lines[-1].removeprefix('print')}"]), space)
        for name, score in shown.items():
            value = float(score.inner_text().replace("−", "-"))
            assert float(space["found"][name].values[0]) == pytest.approx(value, rel=0.01, abs=1e-3)
        assert "--report" not in visit.get("cli").inner_text(), "the command tests with another fill"


def check_lines(visit: Visit, server: Server, question: dict[str, Any], folder: Path) -> None:
    text = visit.get("python").inner_text()
    space: dict[str, Any] = {}
    exec(text, space)
    maps = space["maps"]
    methods = [{"name": name} for name in maps]
    for method in methods:
        method |= {"settings": {"samples": 64}} if method["name"] == "rise" else {}
    body = {**question, "methods": methods, "wait": 60}
    want = {
        m["method"]: np.array(m["scores"])
        for m in WEB.post(f"{server.url}/api/explain", json=body, timeout=90).json()["maps"]
    }
    assert set(want) == set(maps)
    Path("explained.png").unlink()
    command = visit.get("cli").inner_text() + f" --save '{folder}'"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = command.replace("patchlight explain", f"{sys.executable} -m patchlight explain", 1)
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (command, done.stderr[-1000:])
    saved = {att.method: att for att in map(pl.Attribution.load, {f.parent for f in folder.rglob("*.safetensors")})}
    for name, scores in want.items():
        for found in (maps[name], saved[name]):
            atol = 1e-4 * np.abs(scores).max()
            np.testing.assert_allclose(found.scores[0].numpy(), scores, atol=atol, rtol=1e-3, err_msg=name)


@pytest.mark.page
def test_the_keyboard_alone(opened: Opened) -> None:
    """An image, a class, a method, patches, the test and its slider, a link: all without a pointer."""
    with opened("#methods=genatt") as visit:
        keys = visit.page.keyboard
        ready(visit)
        first = bars(visit)
        tab_to(visit, "photo-dog")
        keys.press("Enter")
        until(visit, lambda: bars(visit) != first, "another image")
        ready(visit)
        whole = bars(visit)
        tab_to(visit, "photo")
        for key in ("ArrowRight", "Space", "ArrowRight", "Space", "ArrowDown", "Enter"):
            keys.press(key)
        until(visit, lambda: bars(visit) != whole, "hiding by keys")
        assert len(patches(asked(visit)["removed"])) == 3
        keys.press("Control+z")
        until(visit, lambda: len(patches(asked(visit)["removed"])) == 2, "undo by keys")
        keys.press("Control+Shift+Z")
        until(visit, lambda: len(patches(asked(visit)["removed"])) == 3, "redo by keys")
        keys.press("r")
        until(visit, lambda: bars(visit) == whole, "reset by keys")
        tab_to(visit, "explain-class")
        tab_to(visit, "explain-class")
        keys.press("Enter")
        until(visit, lambda: "target" in asked(visit), "a class by keys")
        assert visit.page.evaluate("document.activeElement?.dataset.testid") == "explain-class", "the focus is lost"
        visit.page.locator("#picker > summary").focus()
        keys.press("Enter")
        visit.page.wait_for_timeout(200)
        tab_to(visit, "method-rollout")
        keys.press("Space")
        keys.press("Escape")
        ready(visit, "genatt", "rollout")
        assert visit.page.evaluate("document.activeElement?.tagName") == "SUMMARY"
        tab_to(visit, "measure")
        keys.press("Enter")
        expect(visit.get("result-rollout")).to_be_visible()
        expect(visit.get("measure")).to_be_enabled()
        tab_to(visit, "slider")
        keys.press("ArrowRight")
        keys.press("ArrowRight")
        until(visit, lambda: asked(visit).get("step") == "2", "a step by keys")
        tab_to(visit, "permalink")
        assert visit.page.evaluate("getSelection().toString()").startswith("http")
        visit.page.locator("#theme").focus()
        keys.press("?")
        expect(visit.page.get_by_role("dialog")).to_be_visible()
        assert serious(visit.page) == []
        keys.press("Escape")
        expect(visit.page.get_by_role("dialog")).to_be_hidden()


@pytest.mark.page
def test_what_has_the_focus_can_be_seen(opened: Opened) -> None:
    """Every element that the tab key reaches is drawn differently while it has the focus, and has a name."""
    with opened("#image=cat&methods=genatt") as visit:
        ready(visit)
        nameless, unseen = [], []
        for _ in range(80):
            visit.page.keyboard.press("Tab")
            found = visit.page.evaluate(FOCUSED)
            if found is None:
                break
            unseen += [] if found[1] else [found[0]]
            nameless += [] if found[2] else [found[0]]
        assert not unseen
        assert not nameless


@pytest.mark.page
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(opened: Opened, scheme: str) -> None:
    """390 pixels wide: the map is under the photo, nothing scrolls sideways, a finger hides patches, axe is content."""
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "color_scheme": scheme}
    with opened("#methods=genatt,ixg", **phone) as visit:
        ready(visit, "genatt", "ixg")
        whole = bars(visit)
        box, below = visit.get("photo").bounding_box(), visit.get("map").bounding_box()
        assert box is not None
        assert below is not None
        assert box["width"] <= 390
        assert 0 < below["y"] - (box["y"] + box["height"]) < 60, "the map is not directly under the photo"
        assert visit.get("status").evaluate("e => getComputedStyle(e).display") != "none", "nothing is read out"
        visit.page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        until(visit, lambda: bars(visit) != whole, "hiding by a finger")
        visit.get("measure").click()
        expect(visit.get("measure")).to_be_enabled()
        visit.get("methods").locator("> summary").click()
        fits(visit)
        visit.page.keyboard.press("Escape")
        fits(visit)
        assert serious(visit.page) == []
        for name in ("photo-cat", "undo", "measure", "download-png", "slider"):
            height = visit.get(name).bounding_box()
            assert height is not None
            assert height["height"] >= 24, f"{name} is too small for a finger"


def fits(visit: Visit) -> None:
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
    wide = visit.page.evaluate(WIDE)
    assert wide == []


@pytest.mark.page
def test_dark(opened: Opened) -> None:
    """As the system prefers, and by the button, which is remembered; nothing serious in either, everything open."""
    with opened("#image=cat&methods=genatt,ixg", color_scheme="dark") as visit:
        ready(visit, "genatt", "ixg")

        def light() -> float:
            colour = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
            return float(np.mean([float(n) for n in re.findall(r"[\d.]+", colour)[:3]]))

        assert light() < 80
        for details in visit.page.locator("details").all():
            details.evaluate("d => { d.open = true; }")
        assert serious(visit.page) == []
        visit.get("theme").click()
        assert light() > 180
        assert serious(visit.page) == []
        visit.page.reload()
        ready(visit)
        assert light() > 180


@pytest.mark.page
@pytest.mark.parametrize(
    "fragment",
    [
        "#image=" + EVIL,
        "#methods=" + EVIL + ",genatt",
        "#methods=no-such-method,genatt",
        "#methods=genatt&set=genatt.start=%22" + EVIL + "%22",
        "#methods=genatt&target=99999&removed=1-999999999&step=999&cursor=99999",
        "#methods=genatt&removed=" + "0-65534," * 3000,
        "#image=gone&methods=genatt",
        "#methods=genatt&pair=" + EVIL + ",b&shown=" + EVIL.replace(" ", ""),
        "#%ff%00=&&&=;;image",
        "#methods=genatt&set=__proto__.x=1&set=genatt.__proto__=1",
    ],
)
def test_a_link_of_nonsense_is_a_page(opened: Opened, fragment: str) -> None:
    """It shows what is wrong in a sentence, or nothing; and then a bundled image works as ever."""
    with opened(fragment, expected=("400", "404", "422")) as visit:
        visit.get("photo-cat").wait_for(timeout=30_000)
        visit.page.wait_for_timeout(500)
        assert visit.page.locator("img[src=x]").count() == 0
        visit.get("photo-ship").click()
        expect(visit.get("photo-ship")).to_have_attribute("aria-pressed", "true")
        expect(visit.get("prediction").first).to_be_visible()


@pytest.mark.page
def test_names_of_markup_are_text(opened: Opened) -> None:
    """A model whose classes are called so, and a file."""
    vit = pl.load("pocket", labels=[EVIL, "</script><b>", "'\"`${1}", "a\nb", *map(str, range(100, 106))])
    with beside(ModelService(vit)) as url, opened("#methods=genatt&target=0", url=url) as visit:
        ready(visit)
        visit.give("drop", "drop", (f"{EVIL}.png", "image/png", hostile.picture(100, seed=9)))
        until(visit, lambda: f"{EVIL}.png" in visit.get("python").inner_text(), "the name")
        ready(visit)
        until(visit, lambda: EVIL in visit.page.locator("#why-title").inner_text(), "the question")
        visit.get("measure").click()
        expect(visit.get("measure")).to_be_enabled()
        assert visit.page.locator("img[src=x]").count() == 0
        with visit.page.expect_download() as download:
            visit.get("download-report").click()
        assert EVIL not in Path(str(download.value.path())).read_text(encoding="utf-8")


@pytest.mark.page
def test_sentences_are_the_classes(opened: Opened, tmp_path: Path) -> None:
    """An image-text model opened without any is asked about the photographs, and then about what is typed."""
    where = folder("CLIPModel", tmp_path / "clip")
    typed = ["a cat", "a dog on a lawn"]
    with (
        serving(tmp_path / "work", model=f"hf:{where}") as own,
        opened("#image=dog&methods=genatt,legrad", url=own.url) as visit,
    ):
        ready(visit, "genatt", "legrad")
        first = visit.get("texts").input_value().splitlines()
        assert "a photo of a cat" in first
        assert set(bars(visit)) == set(first)
        visit.get("texts").fill("\n".join(typed))
        visit.get("template").fill("this is {}")
        until(visit, lambda: set(bars(visit)) == set(typed), "asking about what was typed")
        until(visit, lambda: asked(visit).get("template") == "this is {}", "the template")
        vit = pl.load(f"hf:{where}", texts=typed, template="this is {}")
        photo = Path(pl.__path__[0]) / "zoo" / "photos" / "dog.jpg"
        predicted = [{"label": label, "value": value} for label, value in vit.predict(photo)[0]]
        until(visit, lambda: agree(bars(visit), told({"predictions": predicted})), "the library's probabilities")
        visit.page.locator("[data-label='a cat']").get_by_test_id("explain-class").click()
        visit.page.locator("[data-label='a dog on a lawn']").get_by_test_id("against-class").click()
        expect(visit.page.locator("#why-title")).to_have_text("Why a cat rather than a dog on a lawn?")
        ready(visit, "genatt", "legrad").get("measure").click()
        expect(visit.get("result-legrad")).to_be_visible()
        assert "a dog on a lawn" in visit.get("python").inner_text()
        assert "--template 'this is {}'" in visit.get("cli").inner_text()


@pytest.mark.page
def test_a_token(opened: Opened) -> None:
    """It is taken from the address, which then no longer shows it; without it, a sentence says what is missing."""
    with beside(ModelService(pl.load("pocket")), token="correct-horse") as url:
        with opened("#token=correct-horse&methods=genatt", url=url) as visit:
            ready(visit)
            assert "correct-horse" not in visit.page.url
            assert "correct-horse" not in visit.get("permalink").input_value()
            visit.page.reload()
            ready(visit)
            assert visit.get("photo-cat").locator("img").evaluate("i => i.complete")
            visit.page.wait_for_timeout(2000)
            assert visit.get("photo-cat").locator("img").evaluate("i => i.naturalWidth") > 0
        with opened("", url=url, expected=("401",)) as visit:
            alert = visit.page.locator("#image-trouble")
            expect(alert).to_contain_text("token")


@contextlib.contextmanager
def beside(site: ModelService, **options: Any) -> Iterator[str]:
    """A server in this process."""
    server = Here(site, **options)
    server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.stop()


@pytest.mark.page
def test_a_server_that_is_gone_is_reported(browser: Browser) -> None:
    with beside(ModelService(pl.load("pocket"))) as url, visiting(browser, url) as visit:
        ready(visit.open("/#methods=genatt"))
        visit.page.route("**/api/**", lambda route: route.abort())
        visit.get("photo-dog").click()
        expect(visit.page.locator("#says-trouble")).to_contain_text("serve")
        expect(visit.page.locator("#why-title")).to_have_text("Why?")
        expect(visit.page.locator("#inside-trouble")).to_be_visible()
        visit.page.unroute_all()
        visit.page.locator("#says-trouble button").click()
        expect(visit.get("prediction").first).to_be_visible()
        expect(visit.page.locator(".trouble:visible, .failed:visible")).to_have_count(0)
        ready(visit)


@pytest.mark.page
def test_a_busy_server_is_asked_again(browser: Browser, server: Server) -> None:
    """After 429 the page waits as it is told, and goes on by itself."""
    with visiting(browser, server.url) as visit:
        refused: list[str] = []

        def busy(route: Any) -> None:
            if len(refused) < 2:
                refused.append(route.request.url)
                answer = {"error": "too much is waiting"}
                route.fulfill(
                    status=429, headers={"Retry-After": "1"}, content_type="application/json", body=json.dumps(answer)
                )
            else:
                route.continue_()

        visit.page.route("**/api/predict", busy)
        visit.open("/#methods=genatt")
        ready(visit)
        assert len(refused) == 2


@pytest.mark.page
def test_an_error_of_the_sentence_is_not_kept(browser: Browser, server: Server) -> None:
    """It is shown, and the next visit of the same map measures again."""
    with visiting(browser, server.url) as visit:
        failed = json.dumps({"error": "This took too long."})
        answer = {"status": 503, "content_type": "application/json", "body": failed}
        visit.page.route("**/api/hide", lambda route: route.fulfill(**answer))
        ready(visit.open("/#methods=auto,genatt"))
        expect(visit.get("sentence")).to_have_text("This took too long.")
        visit.page.unroute_all()
        visit.get("enlarge-genatt").click()
        expect(visit.get("sentence")).to_contain_text("Hiding the")
        visit.page.locator("[data-testid^=enlarge-]:not([data-testid=enlarge-genatt])").first.click()
        expect(visit.get("map-name")).to_contain_text("(auto)")
        expect(visit.get("sentence")).to_contain_text("Hiding the")


@pytest.mark.page
def test_a_link_puts_no_code_into_the_lines_of_python(browser: Browser) -> None:
    """What a link says is text in them; a question with other names than the API's is ignored, and the page works."""
    code = "__import__('os').getcwd()"
    heads: list[Any] = [{"kind": "box", "box": [[code]]}, {"kind": "box", "box": "x"}, {"kind": f"box({code})"}]
    heads += [{"kind": "box", f"x={code}, y": 1}, {"kind": "box", "label": {"a": code}}, {"kind": [code]}, {"box": 3}]
    links = [f"set=ixg.start={quote(json.dumps([code]))}", *(f"head={quote(json.dumps(head))}" for head in heads)]
    with beside(ModelService(pl.load("pocket-detector"))) as url, visiting(browser, url) as visit:
        for link in links:
            visit.page.goto("about:blank")
            visit.open(f"/#image=cat&methods=ixg&{link}")
            until(visit, lambda: "pl.explain" in visit.get("python").inner_text(), "the lines of Python")
            names = {
                node.id for node in ast.walk(ast.parse(visit.get("python").inner_text())) if isinstance(node, ast.Name)
            }
            assert "__import__" not in names, link
        visit.well(expected=("400", "422"))


@pytest.mark.page
def test_a_detector_is_asked(browser: Browser, tmp_path: Path) -> None:
    """A detection is clicked, a box is drawn, a label is chosen, and the link brings the question back."""
    pytest.importorskip("transformers")
    from tests import detectors

    noise = np.random.default_rng(0).integers(0, 256, (100, 180, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    with beside(ModelService(detectors.opened("yolos"))) as url, visiting(browser, url) as visit:
        visit.open("/#methods=ixg")
        visit.get("file").set_input_files(tmp_path / "noise.png")
        ready(visit, "ixg")
        title = visit.page.locator("#why-title")
        expect(title).to_contain_text("Why this “")
        expect(visit.get("inside-share")).to_contain_text("inside the box")
        first = pixels(visit.get("map"))
        visit.get("choice").nth(1).locator("button").click()
        expect(visit.get("choice").nth(1)).to_have_class(re.compile("target"))
        expect(visit.page.locator("#photo-marks .asked")).to_have_count(1)
        until(visit, lambda: pixels(visit.get("map")) != first, "another map")
        visit.get("ask-label").select_option("dog")
        drag(visit, (0.1, 0.1), (0.5, 0.5), (0.9, 0.9))
        expect(title).to_have_text("Why “dog” here?")
        expect(visit.get("ask-box")).to_have_value("18, 10, 162, 90")
        expect(visit.get("photo")).to_have_attribute("aria-label", re.compile("0 of 24 hidden"))
        visit.get("ask-missed").check()
        expect(title).to_have_text("Why was “dog” missed here?")
        expect(visit.get("prediction")).to_have_count(2)
        assert json.loads(asked(visit)["head"]) == {
            "kind": "box",
            "box": [18, 10, 162, 90],
            "label": "dog",
            "missed": True,
        }
        assert 'head=pl.heads.Box(box=(18, 10, 162, 90), label="dog", missed=True)' in visit.get("python").inner_text()
        link = visit.get("permalink").input_value()
        visit.get("remove").check(force=True)
        drag(visit, (0.1, 0.1), (0.3, 0.1))
        expect(visit.get("photo")).not_to_have_attribute("aria-label", re.compile("0 of 24 hidden"))
        assert serious(visit.page) == []
        visit.well()
        visit.page.goto("about:blank")
        visit.page.goto(link)
        expect(title).to_have_text("Why was “dog” missed here?")
        expect(visit.get("ask-missed")).to_be_checked()
        visit.get("ask-box").fill("900, 900, 950, 950")
        visit.get("ask-box-now").click()
        expect(visit.page.locator("#ask-trouble")).to_contain_text("outside the image")
        visit.page.locator("#ask-trouble button").click()
        expect(title).to_contain_text("Why this “")
        assert "box" not in asked(visit)
        visit.well(expected=("400",))


@pytest.mark.page
def test_a_segmenter_is_asked(browser: Browser) -> None:
    """A region is clicked, then a box is drawn for a label; the maps and the link follow."""
    pytest.importorskip("transformers")
    from patchlight.zoo.shapes import SCENES

    with beside(ModelService(pl.load("pocket-segmenter"))) as url, visiting(browser, url) as visit:
        visit.open("/#methods=genatt")
        visit.get("file").set_input_files(SCENES / "scene-2.png")
        ready(visit, "genatt")
        first = pixels(visit.get("map"))
        drag(visit, (50.5 / 96, 44.5 / 96))  # the square
        until(visit, lambda: pixels(visit.get("map")) != first, "another map")
        expect(visit.page.locator("#why-title")).to_contain_text("square")
        expect(visit.get("inside-share")).to_contain_text("inside the region")
        assert json.loads(asked(visit)["head"]) == {"kind": "region", "point": [50, 44], "predicted": True}
        visit.get("ask-label").select_option("square")
        drag(visit, (35.5 / 96, 29.5 / 96), (0.5, 0.5), (64.2 / 96, 58.2 / 96))
        until(visit, lambda: "box" in json.loads(asked(visit)["head"]), "another question")
        expect(visit.get("large")).to_have_attribute("data-state", "done")
        assert json.loads(asked(visit)["head"])["label"] == "square"
        assert serious(visit.page) == []
        visit.well()


@pytest.mark.page
def test_a_model_that_answers_is_asked(browser: Browser, tmp_path: Path) -> None:
    """A prompt is typed, a word of the answer is clicked, and the link brings both back."""
    pytest.importorskip("transformers")
    from patchlight.anatomy.vlm import BUNDLED

    with beside(ModelService(pl.load("pocket-vlm"))) as url, visiting(browser, url) as visit:
        visit.open("/#methods=genatt")
        visit.get("file").set_input_files(BUNDLED / "scenes/scene-4.png")
        ready(visit, "genatt")
        visit.get("prompt").fill("what color is the star")
        visit.get("prompt-ask").click()
        words = visit.get("word")
        expect(words).to_have_text(["the", "star", "is", "black"])
        expect(words.nth(3)).to_have_attribute("aria-pressed", "true")
        expect(words.nth(1)).to_have_attribute("aria-label", re.compile("the image has almost no effect"))
        title = visit.page.locator("#why-title")
        expect(title).to_have_text("Why “black”?")
        expect(visit.get("large")).to_have_attribute("data-state", "done")
        first = pixels(visit.get("map"))
        words.nth(2).click()
        expect(title).to_have_text("Why “is”?")
        until(visit, lambda: pixels(visit.get("map")) != first, "another map")
        assert json.loads(asked(visit)["head"])["prompt"] == "what color is the star"
        assert 'Answer(prompt="what color is the star", force=True), target=2)' in visit.get("python").inner_text()
        assert serious(visit.page) == []
        visit.well()
        link = visit.get("permalink").input_value()
        visit.page.goto("about:blank")
        visit.page.goto(link)
        expect(title).to_have_text("Why “is”?")
        words.nth(1).click()  # shown although the image adds nothing to it, because it was asked for
        expect(title).to_have_text("Why “star”?")
        expect(visit.get("large")).to_have_attribute("data-state", "done")
        visit.get("prompt").fill(" ")
        visit.get("prompt-ask").click()
        expect(title).to_have_text("Why “star”?")
        visit.well()
