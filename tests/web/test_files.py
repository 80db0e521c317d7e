"""Files to take along: what is in them is what the engine says, and nothing of a client's words gets out of hand."""

from __future__ import annotations

import asyncio
import io
import shlex
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image

import patchlight as pl
from patchlight.cli.common import read_settings
from patchlight.errors import PatchlightError
from patchlight.web.files import make_file
from patchlight.web.jobs import Work
from patchlight.web.schemas import FileAsked, MethodAsked
from patchlight.web.site import Site
from patchlight.zoo import pocket

METHODS = [MethodAsked(name="genatt"), MethodAsked(name="rollout", settings={"start": 1})]


@pytest.fixture(scope="module")
def site() -> Site:
    return Site(pl.load("pocket"), cli="--model pocket")


def made(site: Site, **asked: object) -> tuple[bytes, str, str]:
    loop = asyncio.new_event_loop()
    try:
        work = Work("file", lambda _: None, 60, loop)
        question = FileAsked.model_validate({"image": "cat", "methods": METHODS, **asked})
        make_file(site, question, site.album.find("cat"), work)
    finally:
        loop.close()
    assert work.file is not None
    assert work.job.file == f"/api/jobs/{work.job.id}/file"
    return work.file


def test_arrays_are_what_load_opens(site: Site, tmp_path: Path) -> None:
    data, kind, name = made(site, kind="arrays", target=5, name="cat.jpg")
    assert (kind, name) == ("application/zip", "cat-jpg-patchlight.zip")
    assert data == made(site, kind="arrays", target=5)[0], "the same maps give the same bytes"
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        opened.extractall(tmp_path)
    wanted = pl.explain(site.vit, pocket.PHOTOS / "cat.jpg", {"genatt": {}, "rollout": {"start": 1}}, target=5)
    for label, att in wanted.items():
        read = pl.Attribution.load(tmp_path / label)
        torch.testing.assert_close(read.scores, att.scores, rtol=1e-4, atol=1e-6)
        assert (read.method, read.settings["start"], read.labels) == (label, att.settings["start"], ("dog",))
        assert (read.images, read.weights) == (att.images, att.weights)
        att.save(tmp_path / "saved" / label)
        saved = {file.name for file in (tmp_path / "saved" / label).iterdir()}
        assert saved == {file.name for file in (tmp_path / label).iterdir()}


def test_pictures_are_sharp(site: Site) -> None:
    data, kind, name = made(site, kind="png")
    assert (kind, name) == ("image/png", "image-patchlight.png")
    picture = Image.open(io.BytesIO(data))
    assert picture.format == "PNG"
    assert picture.width > 1200, "three pictures of 400 dots"
    data, kind, name = made(site, kind="pdf")
    assert data.startswith(b"%PDF")
    assert (kind, name) == ("application/pdf", "image-patchlight.pdf")


def test_a_report_has_its_test_and_escapes_its_name(site: Site) -> None:
    data, kind, name = made(site, kind="report", name="<img src=x onerror=alert(1)>.jpg", against=5, target=3)
    page = data.decode()
    assert (kind, name) == ("text/html; charset=utf-8", "img-src-x-onerror-alert-1-jpg-patchlight.html")
    assert "<img src=x" not in page
    assert "&lt;img src=x onerror" in page
    assert "cat against dog" in page
    assert page.count("than random here: it beats") == 2
    assert "<script" not in page


def test_a_report_says_the_command_that_makes_it(site: Site) -> None:
    page = made(site, kind="report", name="my cat.jpg", target=3, seed=2)[0].decode()
    command = page.partition('class="code">')[2].partition("<")[0].replace("&#39;", "'")
    words = shlex.split(command)
    assert words[:4] == ["patchlight", "explain", "my cat.jpg", "--model"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options["--target"] == "3"
    assert options["--seed"] == "2"
    asked = read_settings(options["--method"].split(","), [options["--set"]])
    assert asked == {"genatt": {}, "rollout": {"start": 1}}


def test_what_gives_no_map_is_told(site: Site) -> None:
    only_wrong = [MethodAsked(name="genatt", settings={"start": 99})]
    with pytest.raises(PatchlightError, match="start"):
        made(site, kind="png", methods=only_wrong)
    page = made(site, kind="report", methods=[*METHODS, MethodAsked(name="no-such")])[0].decode()
    assert "No map" in page
    assert "no-such" in page
