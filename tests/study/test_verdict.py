"""The verdict as a function of cells: who is best, tied, worse, behind; the same in whatever order they came."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from patchlight.core.errors import PatchlightError
from patchlight.study.recommend.decide import decide
from patchlight.study.recommend.record import RaceRecord
from patchlight.study.recommend.verdict import Undecided
from tests.study.synthetic import about, join, lines, record

MEANS = {"good": 0.4, "near": 0.395, "weak": 0.1, "none": 0.0, "random": 0.0}
TWO = {"good": 0.4, "random": 0.0}


def test_who_stands_where() -> None:
    found = decide(record(MEANS, 64, seconds={"good": 1.0, "near": 0.1}))
    status = {row.method: row.status for row in found.rows}
    assert found.best in ("good", "near")
    assert {status["good"], status["near"]} == {"best", "tied"}
    assert status["weak"] == status["none"] == "worse"
    assert status["random"] == "baseline"
    assert [row.method for row in found.rows if row.above_random is False] == ["none"]
    assert found.quick == "near"
    assert found.images == 64
    text = str(found)
    for words in ("Best: ", "Not told apart from it: ", "Surely worse: weak, none", "No better than random: none"):
        assert words in text
    if found.best == "good":
        assert "10 times cheaper" in text


@pytest.mark.parametrize(
    ("mean", "images", "words"),
    [(0.0, 64, "Nothing is shown to beat random"), (1.0, 1, "from fewer than 6 nothing can be")],
)
def test_nothing_is_best_where_nothing_beats_random(mean: float, images: int, words: str) -> None:
    found = decide(record({"a": mean, "b": mean - 0.5, "random": 0.0}, images))
    assert found.best is None
    assert found.quick is None
    assert found.leading == "a"
    assert words in str(found)
    assert {row.status for row in found.rows} == {"undecided", "baseline"}


def test_one_that_was_set_aside_is_behind_and_not_worse() -> None:
    found = decide(join(record(TWO, 64), {"late": 0.3}, 8, seed=5))
    assert found.row("late").status == "behind"
    assert "set aside for time before that was sure: late" in str(found)
    assert [u.second for u in found.undecided] == ["late"]


def test_of_two_that_are_alike_one_may_stop_early_and_still_be_tied() -> None:
    made = record(TWO, 64)
    made.about["methods"]["twin"] = {"method": "twin"}
    for line in lines(TWO, 64):
        if line["method"] == "good" and line["place"] < 8:
            made.add(**{**line, "method": "twin"})
    found = decide(made)
    assert found.best == "good"
    assert found.row("twin").status == "tied"


def test_other_metrics_may_disagree_and_sanity_is_reported() -> None:
    made = record({"good": 0.4, "near": 0.3, "random": 0.0}, 32)
    made.about["metrics"] |= {"other": {"metric": "saco"}, "randomisation": {"metric": "randomisation"}}
    for line in lines({"good": 0.1, "near": 0.5, "random": 0.0}, 32, seed=3):
        made.add(**{**line, "metric": "other"})
    for method, value in (("good", 0.9), ("near", 0.1)):
        made.add(0, method, "randomisation", value)
    found = decide(made)
    assert found.best == "good"
    assert found.disagreements
    for words in ("other prefers near", "Fails the sanity check", "good (0.90)", "Passes it: near (0.10)"):
        assert words in str(found)


def test_the_order_of_cells_does_not_matter_and_lower_may_be_better() -> None:
    every = lines(MEANS, 24)
    shuffled = RaceRecord.begin(about(MEANS, 24))
    for line in random.Random(0).sample(every, len(every)):
        shuffled.add(**line)
    assert decide(shuffled).to_json() == decide(record(MEANS, 24)).to_json()
    turned = record({"good": 0.0, "random": 0.4}, 32)
    turned.about["lower_is_better"] = ["gain"]
    assert decide(turned).best == "good"


def resumed(folder: Path) -> RaceRecord:
    found = RaceRecord.resume(folder)
    assert found is not None
    return found


def test_a_torn_line_is_forgotten_and_the_rest_is_read(tmp_path: Path) -> None:
    made = RaceRecord.begin(about(MEANS, 8), tmp_path)
    for line in lines(MEANS, 8):
        made.add(**line)
    made.fail("broken.jpg", "it is damaged")
    made.leave_out("dear", "no time was left for it", for_time=True)
    made.leave_out("odd", "it failed")
    path = tmp_path / "cells.jsonl"
    complete = path.read_bytes()
    read = resumed(tmp_path)
    assert decide(read).to_json() == decide(made).to_json()
    assert read.set_aside == {"dear"}
    path.write_bytes(complete + complete[40:90])
    torn = resumed(tmp_path)
    assert len(torn) == len(made)
    torn.take_in("dear")
    assert path.read_bytes().startswith(complete)
    assert set(resumed(tmp_path).left_out) == {"odd"}
    for count in (len(complete) // 3, len(complete) // 2):
        path.write_bytes(complete[:count])
        assert len(resumed(tmp_path)) < len(made)
    path.write_text("[1, 2]\n")
    with pytest.raises(PatchlightError, match="holds no cells"):
        RaceRecord.resume(tmp_path)


def test_files_are_written_and_escaped(tmp_path: Path) -> None:
    found = decide(record({"<b>[red]good</b>": 0.4, "random": 0.0}, 16))
    found.save(tmp_path)
    page = (tmp_path / "verdict.html").read_text()
    for text in (page, found._repr_html_()):
        assert "<b>[red]good" not in text
        assert "&lt;b&gt;[red]good" in text
        assert "<svg" in text
    assert "http" not in page.replace("http://www.w3.org", "")  # the names of SVG, nothing to load
    read = json.loads((tmp_path / "verdict.json").read_text())
    assert read["best"] == "<b>[red]good</b>"
    text = (tmp_path / "verdict.txt").read_text()
    assert text.startswith("made up: 2 methods on 16 of 16 image(s)")
    assert "\n<b>[red]good</b>   best" in text
    assert list(found.table["method"]) == [row.method for row in found.rows]


def test_methods_of_too_few_images_are_not_said_to_beat_random() -> None:
    made = record(TWO, 64)
    assert "All methods that were followed beat random." in str(decide(made))
    text = str(decide(join(made, {"late": 0.3}, 4, seed=5)))
    assert "All methods that were followed beat random" not in text
    assert "Not compared with random, on fewer than 6 images: late." in text


@pytest.mark.parametrize(("copied", "words"), [(0.005, "is not surely more than in"), (0.1, "is more than in")])
def test_more_than_in_an_untrained_model_is_by_what_is_worth_anything(copied: float, words: str) -> None:
    """As what decides is: a difference below `worth` counts as none, however sure it is."""
    made = record(TWO, 32)
    own = made.values("gain")["good"]
    for place in range(12):
        made.add(place, "good", "untrained", own[place] - copied - 1e-5 * (place % 2))
    found = decide(made)
    assert (found.best is None) == (copied < 0.01)
    assert f"{words} a model that has learnt nothing" in str(found)


def test_why_there_is_no_comparison_with_an_untrained_copy() -> None:
    made = record(TWO, 32)
    said = "good was not compared with itself on an untrained copy of the model: "
    assert f"{said}there was no time for it." in str(decide(made))
    made.add(0, "good", "untrained", 0.1)
    assert f"{said}only 1 of 1 images have a score there, fewer than 6." in str(decide(made))
    made.add(1, "good", "untrained", error="it failed: no copy")
    assert f"{said}it failed: no copy." in str(decide(made))


def test_none_is_level_only_where_none_is_open() -> None:
    alone = "No other method is level with it."
    made = record(TWO, 32)
    assert alone in str(decide(made))
    found = decide(join(made, {"wild": 0.3}, 32, seed=5, spread=2.0))
    assert found.row("wild").status == "undecided"
    assert "Undecided, told apart neither from it" in str(found)
    assert alone not in str(found)


def test_a_loss_is_sure_only_against_the_best() -> None:
    """`worse` may be by another method."""
    found = decide(record({"good": 0.4, "cheap": 0.2, "random": 0.0}, 64, seconds={"cheap": 0.01}))
    assert found.quick == "cheap"
    assert "and loses 0.2" in str(found)
    assert ", surely." in str(found)
    rows = [
        replace(row, beaten_by="other", difference_low=-0.5, difference_high=0.1) if row.method == "cheap" else row
        for row in found.rows
    ]
    assert ", which is not sure." in str(replace(found, rows=tuple(rows)))


def test_pairs_that_cannot_be_settled_take_no_time_of_the_hour() -> None:
    found = decide(record(TWO, 64))
    never = Undecided("good", "never", 0.05, 64, 1000.0, 3000.0)
    soon = Undecided("good", "soon", 0.05, 32, 60.0, 3100.0)
    text = str(replace(found, undecided=(never, soon)))
    assert "Another hour would settle, by present differences and spreads: good against soon" in text
    assert "More than these 64 image(s) would be needed for: good against never" in text
