"""Files to take along: what is in them is what the engine says, and nothing of a client's words gets out of hand."""

from __future__ import annotations

import io
import shlex
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image

import patchlight as pl
from patchlight.cli.common import read_settings
from patchlight.web.app import create_app
from patchlight.web.service import ModelService
from patchlight.zoo import pocket

METHODS = [{"name": "genatt"}, {"name": "rollout", "settings": {"start": 1}}]
PAIR = {"target": 3, "against": 5, "seed": 2}
"""One question for all reports, so that its random orders are computed once."""


@pytest.fixture(scope="module")
def service() -> ModelService:
    return ModelService(pl.load("pocket"), cli="--model pocket")


@pytest.fixture(scope="module")
def client(service: ModelService) -> Iterator[TestClient]:
    with TestClient(create_app(service)) as client:
        yield client


def job(client: TestClient, **asked: Any) -> dict[str, Any]:
    answer = client.post("/api/files", json={"image": "cat", "methods": METHODS, "wait": 60, **asked})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def made(client: TestClient, **asked: Any) -> tuple[bytes, str, str]:
    """The bytes of a file, their type, and its name."""
    told = job(client, **asked)
    assert told["file"] == f"/api/jobs/{told['id']}/file", told["error"]
    answer = client.get(told["file"])
    name = answer.headers["content-disposition"].removeprefix('attachment; filename="').removesuffix('"')
    return answer.content, answer.headers["content-type"], name


def test_arrays_are_what_load_opens(service: ModelService, client: TestClient, tmp_path: Path) -> None:
    data, kind, name = made(client, kind="arrays", target=5, name="cat.jpg")
    assert (kind, name) == ("application/zip", "cat-patchlight.zip")
    assert data == made(client, kind="arrays", target=5)[0], "the same maps give the same bytes"
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        opened.extractall(tmp_path)
    wanted = pl.explain(service.vit, pocket.PHOTOS / "cat.jpg", {"genatt": {}, "rollout": {"start": 1}}, target=5)
    for label, att in wanted.items():
        read = pl.Attribution.load(tmp_path / label)
        torch.testing.assert_close(read.scores, att.scores, rtol=1e-4, atol=1e-6)
        assert (read.method, read.settings["start"], read.labels) == (label, att.settings["start"], ("dog",))
        assert (read.images, read.weights) == (att.images, att.weights)
        att.save(tmp_path / "saved" / label)
        saved = {file.name for file in (tmp_path / "saved" / label).iterdir()}
        assert saved == {file.name for file in (tmp_path / label).iterdir()}


def test_pictures_are_sharp(client: TestClient) -> None:
    data, kind, name = made(client, kind="png")
    assert (kind, name) == ("image/png", "image-patchlight.png")
    picture = Image.open(io.BytesIO(data))
    assert picture.format == "PNG"
    assert picture.width > 1200, "three pictures of 400 dots"
    data, kind, name = made(client, kind="pdf")
    assert data.startswith(b"%PDF")
    assert (kind, name) == ("application/pdf", "image-patchlight.pdf")


def test_a_report_has_its_test_and_escapes_its_name(client: TestClient) -> None:
    data, kind, name = made(client, kind="report", name="<img src=x onerror=alert(1)>.jpg", **PAIR)
    page = data.decode()
    assert (kind, name) == ("text/html; charset=utf-8", "img-src-x-onerror-alert-1-patchlight.html")
    assert "<img src=x" not in page
    assert "&lt;img src=x onerror" in page
    assert "cat against dog" in page
    assert page.count("than random here: it beats") == 2, "rollout is refused for a pair; genatt: lead and list"
    assert "<script" not in page


def test_a_report_says_the_command_that_makes_it(client: TestClient) -> None:
    page = made(client, kind="report", name="my cat.jpg", **PAIR)[0].decode()
    command = page.partition('class="code">')[2].partition("<")[0].replace("&#39;", "'")
    words = shlex.split(command)
    assert words[:4] == ["patchlight", "explain", "my cat.jpg", "--model"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options["--target"] == "3"
    assert options["--against"] == "5"
    assert options["--seed"] == "2"
    asked = read_settings(options["--method"].split(","), [options["--set"]])
    assert asked == {"genatt": {}, "rollout": {"start": 1}}
    other = made(client, kind="report", unit="token", steps=2, randoms=2)[0].decode()
    assert "are removed from the model" in other
    assert "<h3>Command</h3>" not in other, "the command line removes no tokens in its test"


def test_what_gives_no_map_is_reported(client: TestClient) -> None:
    told = job(client, kind="png", methods=[{"name": "genatt", "settings": {"start": 99}}])
    assert (told["state"], told["file"]) == ("failed", None)
    assert "block 99 does not exist" in told["error"]
    assert client.get(f"/api/jobs/{told['id']}/file").status_code == 409
    page = made(client, kind="report", methods=[*METHODS, {"name": "no-such"}], **PAIR)[0].decode()
    assert "No map" in page
    assert "no-such" in page
