"""Questions to a vision-language model at the command line, with its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import patchlight as pl
from patchlight.anatomy.vlm import BUNDLED
from tests.cli.test_cli import refused, run

pytest.importorskip("transformers")
PHOTO = str(BUNDLED / "scenes/scene-4.png")
PROMPT = ("explain", PHOTO, "--model", "pocket-vlm", "--prompt", "what color is the star")


def test_a_word_is_explained_with_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = (*PROMPT, "--words", "black", "--method", "token-activation,tis", "--set", "tis.samples=16")
    done = json.loads(run(*asked, "--report", "why.html", "--json").stdout)
    (image,) = done["images"]
    assert image["target"]["label"] == "black"
    assert [each["word"] for each in image["words"]] == ["the", "star", "is", "black"]
    assert image["words"][3]["gain"] > 0.5 > abs(image["words"][1]["gain"])
    page = (tmp_path / "why.html").read_text()
    assert "<small>what color is the star</small>" in page
    assert page.count('nats" style=') == 4
    assert "1 classes" not in page


def test_refusals() -> None:
    assert "--answer and --words need --prompt" in refused("explain", PHOTO, "--words", "black")
    assert "--box and --prompt cannot be combined" in refused(*PROMPT, "--box", "1,2,3,4")
    assert "--prompt of the command line" in run("explain", PHOTO, "--model", "pocket-vlm", code=2).stderr
    failed = run(*PROMPT, "--words", "star", "--json", code=3).stdout
    assert "the image has almost no effect on 'star'" in json.loads(failed)["errors"][0]["error"]


def test_a_sentence_is_shaded_by_gain() -> None:
    vlm = pl.load("pocket-vlm")
    att = pl.explain(vlm, PHOTO, "token-activation", head=pl.heads.Answer(PROMPT[-1]), target="black")
    shown = att._repr_html_()
    spans = [part.split("</span>")[0] for part in shown.split("<span ")[1:]]
    shades = {span.rpartition(">")[2]: float(span.partition("220,")[2].partition(")")[0]) for span in spans}
    assert list(shades) == ["the", "star", "is", "black"]
    assert shades["black"] == 0.6
    assert shades["star"] == shades["the"] == 0
    (note,) = [text.get_text() for text in att.figure().texts if "Answer" in text.get_text()]
    assert note.startswith("Answer (gains in nats): the (0.0) star (0.0) is (")
