"""The verdict as a function of cells: who is best, tied, worse, behind; the same in whatever order they came."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import patchlight as pl
from patchlight.core.errors import PatchlightError
from patchlight.study.recommend.decide import decide
from patchlight.study.recommend.record import RaceRecord
from patchlight.study.recommend.verdict import Undecided
from tests.study.synthetic import about, join, lines, record

MEANS = {"good": 0.4, "near": 0.395, "weak": 0.1, "none": 0.0, "random": 0.0}
FOUR = {"good": 0.4, "fair": 0.2, "weak": 0.1, "random": 0.0}


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
    for words in (
        "Best: ",
        "No significant difference to it: ",
        "Significantly worse: weak, none",
        "No better than random: none",
    ):
        assert words in text
    if found.best == "good":
        assert "10 times cheaper" in text


@pytest.mark.parametrize(
    ("mean", "images", "words"),
    [(0.0, 64, "No method is shown to beat random"), (1.0, 1, "1 image measured, and a comparison needs at least 6")],
)
def test_nothing_is_best_where_nothing_beats_random(mean: float, images: int, words: str) -> None:
    found = decide(record({"a": mean, "b": mean - 0.5, "c": mean - 0.6, "random": 0.0}, images))
    assert found.best is None
    assert found.quick is None
    assert found.leading == "a"
    assert words in str(found)
    assert ("Give at least 6 images." in str(found)) == (images < 6)
    assert {row.status for row in found.rows} == {"undecided", "baseline"}


@pytest.mark.parametrize("late", [0, 4])
def test_fewer_than_three_methods_on_shared_images_have_no_best(late: int) -> None:
    """Neither random nor images that the methods do not share make a comparison."""
    made = join(record({"good": 0.4, "weak": 0.1, "random": 0.0, "chance": 0.0}, 32), {"late": 0.2}, late)
    made.about["methods"]["chance"] = {"method": "random"}
    found = replace(decide(made), comparison_seconds=140.0)
    assert (found.best, found.quick, found.leading) == (None, None, "good")
    assert found.compared == ("good", "weak")
    assert "only good, weak had them" in str(found)
    assert "Best:" not in str(found)
    assert "A comparison of 3 methods needs a budget of about 2.3 min on this machine." in str(found)
    assert decide(join(made, {"late": 0.2}, 6)).best == "good"


def blanked(change: Sequence[float], untrained: float | None = None) -> pl.Verdict:
    made = record(FOUR, 32)
    for place in range(32):
        made.add(place, "", "score", 0.5)
        made.add(place, "", "blanked zero", change[place % len(change)])
        if untrained is not None and place < 12:
            made.add(place, "good", "untrained", untrained + 1e-3 * (place % 2))
    return decide(made)


def test_a_score_that_rises_without_the_image_depends_on_it() -> None:
    found = blanked([0.46, -0.46])
    assert found.best == "good"
    assert not found.blind
    assert found.blanked["zero"].change == pytest.approx(0.46)
    assert (found.blanked["zero"].falls, found.blanked["zero"].rises) == (16, 16)
    words = "0.460 under zero (falls on 16 images, rises on 16) on average."
    assert words in str(replace(found, best=None))


def test_falls_and_rises_are_counted_each() -> None:
    effect = blanked([-0.2, -0.2, -0.2, 0.6]).blanked["zero"]
    assert (effect.change, effect.falls, effect.rises) == (pytest.approx(0.3), 24, 8)


def test_a_method_that_beats_random_and_the_untrained_copy_is_never_withheld() -> None:
    found = blanked([1e-3], untrained=-1.0)
    assert found.blind
    assert found.best == "good"
    alone = blanked([1e-3])
    assert alone.best is None
    assert alone.row("good").above_random is True
    assert "good beats random, but it is not shown to use anything the model has learnt" in str(alone)
    assert "less than 0.1: the prediction hardly depends on the image." in str(alone)


def test_methods_that_ignore_the_class_are_marked() -> None:
    made = record(FOUR, 16)
    made.about["ignores_class"] = ["fair"]
    assert "fair (ignores the class)" in str(decide(made))
    assert "good (ignores the class)" not in str(decide(made))


def test_one_that_was_set_aside_is_behind_and_not_worse() -> None:
    found = decide(join(record(FOUR, 64), {"late": 0.3}, 8, seed=5))
    assert found.row("late").status == "behind"
    assert "stopped for lack of time before that was significant: late" in str(found)
    assert [u.second for u in found.undecided] == ["late"]


def test_of_two_that_are_alike_one_may_stop_early_and_still_be_tied() -> None:
    made = record(FOUR, 64)
    made.about["methods"]["twin"] = {"method": "twin"}
    for line in lines(FOUR, 64):
        if line["method"] == "good" and line["place"] < 8:
            made.add(**{**line, "method": "twin"})
    found = decide(made)
    assert found.best == "good"
    assert found.row("twin").status == "tied"


def test_other_metrics_may_disagree_and_sanity_is_reported() -> None:
    made = record({"good": 0.4, "near": 0.3, "weak": 0.1, "random": 0.0}, 32)
    made.about["metrics"] |= {"other": {"metric": "saco"}, "randomisation": {"metric": "randomisation"}}
    for line in lines({"good": 0.1, "near": 0.5, "weak": 0.0, "random": 0.0}, 32, seed=3):
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
    turned = record({"good": 0.0, "fair": 0.2, "weak": 0.3, "random": 0.4}, 32)
    turned.about["lower_is_better"] = ["gain"]
    assert decide(turned).best == "good"


def test_a_folder_that_was_moved_ends_the_run_and_can_be_resumed(tmp_path: Path) -> None:
    made = RaceRecord.begin(about(MEANS, 8), tmp_path / "here")
    made.add(0, "good", "srg", 0.5)
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(PatchlightError, match="the folder was moved or deleted during the run"):
        made.add(1, "good", "srg", 0.4)
    assert not (tmp_path / "here").exists()
    assert len(resumed(tmp_path / "there")) == 1


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
    torn.readmit("dear")
    assert path.read_bytes().startswith(complete)
    assert set(resumed(tmp_path).left_out) == {"odd"}
    for count in (len(complete) // 3, len(complete) // 2):
        path.write_bytes(complete[:count])
        assert len(resumed(tmp_path)) < len(made)
    path.write_text("[1, 2]\n")
    with pytest.raises(PatchlightError, match="does not contain cells"):
        RaceRecord.resume(tmp_path)


def test_files_are_written_and_escaped(tmp_path: Path) -> None:
    found = decide(record({"<b>[red]good</b>": 0.4, "fair": 0.2, "weak": 0.1, "random": 0.0}, 16))
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
    assert text.startswith("made up: 4 methods on 16 of 16 images")
    assert "\n<b>[red]good</b>" in text
    assert list(found.table["method"]) == [row.method for row in found.rows]


def test_methods_of_too_few_images_are_not_said_to_beat_random() -> None:
    made = record(FOUR, 64)
    assert "Every method tested beat random." in str(decide(made))
    text = str(decide(join(made, {"late": 0.3}, 4, seed=5)))
    assert "Every method tested beat random" not in text
    assert "Not compared with random, for lack of 6 images: late." in text


@pytest.mark.parametrize(("copied", "words"), [(0.005, "its maps are not shown to depend"), (0.1, "its maps depend")])
def test_more_than_in_an_untrained_model_is_by_what_is_worth_anything(copied: float, words: str) -> None:
    """As what decides is: a difference below `worth` counts as none, however sure it is."""
    made = record(FOUR, 32)
    own = made.values("gain")["good"]
    for place in range(12):
        made.add(place, "good", "untrained", own[place] - copied - 1e-5 * (place % 2))
    found = decide(made)
    assert (found.best is None) == (copied < 0.01)
    assert f"{words} on what the model has learnt" in str(found)


def test_why_there_is_no_comparison_with_an_untrained_copy() -> None:
    made = record(FOUR, 32)
    said = "good was not compared with itself on an untrained copy of the model: "
    assert f"{said}there was not enough time." in str(decide(made))
    made.add(0, "good", "untrained", 0.1)
    assert f"{said}only 1 of 1 images have a score there, and at least 6 are needed." in str(decide(made))
    made.add(1, "good", "untrained", error="it failed: no copy")
    assert f"{said}it failed: no copy." in str(decide(made))


def test_none_is_level_only_where_none_is_open() -> None:
    alone = "It is significantly better than the other 2 methods compared."
    made = record(FOUR, 32)
    assert alone in str(decide(made))
    found = decide(join(made, {"wild": 0.3}, 32, seed=5, spread=2.0))
    assert found.row("wild").status == "undecided"
    assert "Undecided, without a significant difference to it or to random: wild" in str(found)
    assert alone not in str(found)


def test_a_loss_is_sure_only_against_the_best() -> None:
    """`worse` may be by another method."""
    found = decide(record({"good": 0.4, "cheap": 0.2, "weak": 0.1, "random": 0.0}, 64, seconds={"cheap": 0.01}))
    assert found.quick == "cheap"
    assert "its score is 0.2" in str(found)
    assert " lower, significant." in str(found)
    rows = [
        replace(row, beaten_by="other", difference_low=-0.5, difference_high=0.1) if row.method == "cheap" else row
        for row in found.rows
    ]
    assert " lower, not significant." in str(replace(found, rows=tuple(rows)))


def test_pairs_that_cannot_be_settled_take_no_time_of_the_hour() -> None:
    found = decide(record(FOUR, 64))
    never = Undecided("good", "never", 0.05, 64, 1000.0, 3000.0)
    soon = Undecided("good", "soon", 0.05, 32, 60.0, 3100.0)
    text = str(replace(found, undecided=(never, soon)))
    assert "Another hour would settle, if differences and spreads stay the same: good against soon" in text
    assert "Would need more than these 64 images: good against never" in text
