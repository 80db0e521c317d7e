"""`pl.show`: a real server beside this thread, one for each model, that answers who has its token and nobody else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import torch
from PIL import Image

import patchlight as pl
from patchlight.core.errors import PatchlightError
from patchlight.web.show import View, close_all
from patchlight.zoo import pocket
from tests.core.test_images import noise


@pytest.fixture(scope="module")
def vit() -> Iterator[pl.Anatomy]:
    yield pl.load("pocket")
    close_all()


def fragment(view: View) -> dict[str, list[str]]:
    return parse_qs(urlsplit(view.url).fragment)


def ask(view: View, path: str, token: bool = True, **asked: Any) -> httpx.Response:
    given = {"Authorization": f"Bearer {fragment(view)['token'][0]}"} if token else {}
    where = view.url.partition("#")[0] + path
    with httpx.Client(trust_env=False, timeout=60) as client:
        return client.post(where, headers=given, json=asked) if asked else client.get(where, headers=given)


def test_the_page_is_served_to_who_has_the_token(vit: pl.Anatomy, capsys: pytest.CaptureFixture[str]) -> None:
    view = pl.show(vit, "cat", {"genatt": {}, "attcat": {"start": 1}}, target=("cat", 5), seed=7)
    told = fragment(view)
    assert len(told.pop("token")[0]) >= 32
    wanted = {"image": ["cat"], "target": ["3"], "against": ["5"], "methods": ["genatt,attcat"]}
    assert told == {**wanted, "set": ["attcat.start=1"], "seed": ["7"]}
    assert capsys.readouterr().out == f"pocket: {view.url}\n"
    assert urlsplit(view.url).hostname == "127.0.0.1"
    assert ask(view, "api/model", token=False).status_code == 401
    assert ask(view, "api/model").json()["name"] == "pocket"
    page = ask(view, "", token=False)
    policy = page.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "frame-ancestors" not in policy, "a notebook is another origin, and '*' leaves out editors' own schemes"
    found = ask(view, "api/explain", image="cat", target=3, methods=[{"name": "genatt"}], wait=60).json()
    scores = torch.tensor(found["maps"][0]["scores"])
    expected = pl.explain(vit, pocket.PHOTOS / "cat.jpg", "genatt", target=3).scores[0]
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)


def test_a_model_has_one_server(vit: pl.Anatomy) -> None:
    first, second = pl.show(vit, "cat"), pl.show(vit, "dog")
    assert first.url.replace("image=cat", "image=dog") == second.url
    other = pl.show(vit.model)
    assert urlsplit(other.url).port != urlsplit(first.url).port
    other.close()
    with pytest.raises(httpx.ConnectError):
        ask(other, "api/model")
    assert ask(first, "api/model").status_code == 200
    first.close()
    again = pl.show(vit)
    assert fragment(again)["token"] != fragment(first)["token"]
    assert ask(again, "api/model").status_code == 200


def test_a_model_that_was_trained_is_shown_as_it_is_now() -> None:
    model = pl.load("pocket").model
    before = ask(pl.show(model, "cat"), "api/predict", image="cat").json()
    with torch.no_grad():
        model.head.bias[8] += 100
    after = ask(pl.show(model, "cat"), "api/predict", image="cat").json()
    assert [told["predictions"][0]["index"] for told in (before, after)] == [3, 8]


@pytest.mark.parametrize("kind", ["path", "text", "picture"])
def test_images_of_the_user(vit: pl.Anatomy, kind: str, tmp_path: Path) -> None:
    picture = noise(70, 90)
    picture.save(tmp_path / "<mine>.png")
    given: dict[str, Any] = {"path": tmp_path / "<mine>.png", "text": str(tmp_path / "<mine>.png"), "picture": picture}
    view = pl.show(vit, given[kind])
    name = fragment(view)["image"][0]
    assert name == fragment(pl.show(vit, picture))["image"][0], "the same pixels are the same image"
    said = ask(view, "api/predict", image=name).json()["predictions"][0]
    label, probability = vit.predict(picture, k=1)[0][0]
    assert (said["label"], said["value"]) == (label, pytest.approx(probability, rel=1e-3))


class Frame(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_notebook_shows_a_frame(
    vit: pl.Anatomy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(vit, "name", 'po"cket<b>')
    view = pl.show(vit, "cat", "genatt", height=500)
    assert capsys.readouterr().out == "", "the frame is enough"
    ((tag, attributes),) = Frame(view._repr_html_()).found
    assert (tag, attributes["src"], attributes["height"]) == ("iframe", view.url, "500")
    assert attributes["title"] == 'Patchlight: po"cket<b>'


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"image": torch.zeros(3, 32, 32)}, "image is a Tensor; give a path, a PIL image"),
        ({"image": "caat"}, "No image at 'caat', and no bundled photograph has that name: bird, cat"),
        ({"image": "nowhere.jpg"}, "no image at 'nowhere.jpg'"),
        ({"methods": "genat"}, "did you mean 'genatt'"),
        ({"methods": 3}, "give a name, a list of names"),
        ({"methods": {"a": {"method": "genatt"}}}, "leave out the setting 'method'"),
        ({"target": "caat"}, "did you mean 'cat'"),
        ({"target": [[1, 2]]}, "names 2 classes; "),
        ({"methods": "rollout", "target": (3, 5)}, "'rollout' ignores the class"),
        ({"height": 3}, "height 3 is not possible"),
        ({"heigth": 300}, "'show' has no option 'heigth'; did you mean 'height'"),
    ],
)
def test_what_cannot_be_shown_is_refused(vit: pl.Anatomy, asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PatchlightError, match=sentence):
        pl.show(vit, **asked)


def test_the_extra_is_named_where_it_is_missing(vit: pl.Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchlight.core.extras.find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(PatchlightError, match=r"the page needs uvicorn: pip install 'patchlight\[web\]'"):
        pl.show(vit)


@pytest.mark.slow
def test_a_process_ends_with_its_servers() -> None:
    code = "import patchlight as pl; view = pl.show(pl.load('pocket'), 'cat'); print(repr(view))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("http://127.0.0.1:") == 2
    assert done.stderr == ""


def test_a_picture_may_have_any_mode(vit: pl.Anatomy) -> None:
    view = pl.show(vit, Image.new("RGBA", (40, 30), (10, 200, 30, 128)))
    assert ask(view, f"api/images/{fragment(view)['image'][0]}").headers["content-type"] == "image/png"


@pytest.mark.page
def test_a_browser_shows_the_page_inside_another_sites(vit: pl.Anatomy, tmp_path: Path) -> None:
    """From a file, which is an origin of its own, as editors' are."""
    from tests.web.browser import browsing

    view = pl.show(vit, noise(70, 90), ["genatt", "ixg"], target=("dog", "cat"))
    (tmp_path / "notebook.html").write_text(f"<!doctype html>{view._repr_html_()}")
    with browsing() as browser:
        page = browser.new_page()
        page.goto((tmp_path / "notebook.html").as_uri())
        inside = page.frame_locator("iframe")
        inside.get_by_text("Why dog rather than cat?").wait_for(timeout=180_000)
        inside.locator("[data-testid=map-ixg][data-state=done]").wait_for(timeout=180_000)
        assert "token" not in page.frames[1].url, "it is taken out of the address"
