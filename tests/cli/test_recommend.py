"""`patchlight recommend`: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import patchlight as pl
from tests.cli.test_cli import folder as folder
from tests.cli.test_cli import refused, run
from tests.cli.test_cli import tiny as tiny

ASKED = ("recommend", "--method", "genatt,rollout", "--metric", "srg", "--set", "srg.steps=2", "--budget", "2m")


def test_a_verdict_is_printed_and_written(folder: Path, tiny: pl.Anatomy) -> None:
    result = run(*ASKED, "--images", "photos", "--out", "verdict")
    assert "No method is recommended: 4 images measured" in result.stdout
    assert Path("verdict/verdict.html").is_file()
    found = json.loads(run(*ASKED, "--images", "photos", "--out", "verdict", "--resume", "--json").stdout)
    assert {row["method"] for row in found["rows"]} == {"genatt", "rollout", "random"}
    assert found["about"]["metrics"] == {"srg": {"metric": "srg", "steps": 2, "score": "probability"}}


def test_unreadable_images_are_reported(folder: Path, tiny: pl.Anatomy) -> None:
    Path("photos/broken.jpg").write_bytes(b"no image")
    result = run(*ASKED, "--images", "photos", code=3)
    assert "1 image could not be read" in result.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("recommend",), "no images were given"),
        (("recommend", "--images", "nowhere"), "no image or folder at 'nowhere'"),
        (("recommend", "--images", "photos", "--budget", "soon"), "budget 'soon' is not a valid duration"),
        (("recommend", "--images", "photos", "--set", "steps=2"), "needs a method or metric"),
        ((*ASKED, "--images", "photos", "--budget", "0.001s"), "is too small for one image"),
    ],
)
def test_refusals(words: tuple[str, ...], sentence: str, folder: Path, tiny: pl.Anatomy) -> None:
    assert sentence in refused(*words)
