"""Questions about detections and regions on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchlight.anatomy.vlm import BUNDLED
from patchlight.zoo.shapes import SCENES
from tests.helpers import command

DETECTOR = ("explain", str(SCENES / "scene-4.png"), "--model", "pocket-detector", "--method", "genatt")
SEGMENTER = ("explain", str(SCENES / "scene-2.png"), "--model", "pocket-segmenter", "--method", "genatt")


def test_at_most_as_many_detections_as_there_are(tmp_path: Path) -> None:
    output = command(*DETECTOR, "--detections", "9", "--json", "--out", str(tmp_path / "a.png"))
    said, _ = json.JSONDecoder().raw_decode(output)  # the warning follows
    labels = [image["target"]["label"] for image in said["images"]]
    assert len(labels) == 4
    assert labels[0].startswith("square at ")
    assert said["warnings"] == [
        "scene-4.png: detection 4 does not exist; pocket-detector has 4 detections with a score of at least 0.5"
    ]
    assert (tmp_path / "a.png").is_file()


def test_an_image_without_detections_fails_once(tmp_path: Path) -> None:
    Image.new("RGB", (96, 96), "gray").save(tmp_path / "empty.png")
    said = command("explain", str(tmp_path / "empty.png"), *DETECTOR[2:], "--detections", "3", code=3)
    assert said.count("detects nothing with a score of at least 0.5") == 1
    assert "1 of 1 images failed" in said


def test_a_missed_object(tmp_path: Path) -> None:
    asked = ("--box", "7,47,24,65", "--label", "circle", "--missed", "--json", "--out", str(tmp_path / "a.png"))
    (image,) = json.loads(command(*DETECTOR, *asked))["images"]
    assert image["target"]["label"].startswith("circle at ")
    assert image["predictions"][0]["label"].startswith("star ")
    contrast = ("--target", "0", "--against", "1", "--force")
    (image,) = json.loads(command(*DETECTOR, *asked, *contrast))["images"]
    assert image["against"]["label"].startswith("star at ")


def test_words_of_an_answer_fail_one_by_one(tmp_path: Path) -> None:
    scene, prompt = BUNDLED / "scenes/scene-2.png", ("--prompt", "what shape is the yellow thing")
    words = (*prompt, "--words", "the,yellow", "--out", str(tmp_path / "a.png"))
    said = command("explain", str(scene), "--model", "pocket-vlm", "--method", "genatt", *words, code=3)
    assert "almost no effect on 'the'" in said
    assert "1 of 2 explanations failed" in said


def test_regions(tmp_path: Path) -> None:
    mask = np.zeros((96, 96), dtype=np.uint8)
    mask[29:58, 35:64] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    for asked in (("--region-mask", str(tmp_path / "mask.png"), "--label", "square"), ("--point", "50,44")):
        said = command(*SEGMENTER, *asked, "--out", str(tmp_path / "a.png"), "--force")
        assert "Share of the positive scores inside the region of square:" in said


@pytest.mark.parametrize(
    ("words", "sentence", "code"),
    [
        ((*DETECTOR, "--box", "200,40,300,80"), "lies outside the image, which is 96 pixels wide and 96 high", 3),
        ((*DETECTOR, "--box", "30,40,20"), "--box 30,40,20 is not four numbers; write LEFT,TOP,RIGHT,BOTTOM", 2),
        ((*DETECTOR, "--box", "39,30,68,59", "--label", "dog"), "pocket-detector has no label 'dog'", 3),
        ((*DETECTOR, "--missed"), "--missed needs --label and --box or --region", 2),
        ((*SEGMENTER, "--region", "9,9,9,20"), "is empty; give (left, top, right, bottom)", 3),
        ((*SEGMENTER, "--region", "35,29,64,58", "--label", "star"), "has no class 'star' in this region", 3),
        ((*DETECTOR, "--detections", "999999999"), "--detections 999999999 is not possible; give 1 to 1000", 2),
        ((*SEGMENTER, "--point", "300,3"), "point [300, 3] lies outside the image", 3),
        ((*SEGMENTER, "--region", "9,9,20,20", "--against-region", "1,1,5,5"), "contrasted with another class", 2),
        ((*SEGMENTER[:-1], "tis"), "pixels can be filled (--unit patch); methods that work", 2),
        ((*SEGMENTER, "--detections", "2"), "and pocket-segmenter is a model for segmentation", 2),
    ],
)
def test_what_is_refused(words: tuple[str, ...], sentence: str, code: int) -> None:
    command(*words, code=code, says=(sentence,))
