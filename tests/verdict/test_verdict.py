"""The verdict as a function of cells: who is best, tied, worse, behind; the same in whatever order they came."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from patchlight.errors import PatchlightError
from patchlight.verdict.cells import Cell, Cells
from patchlight.verdict.verdict import decide
from tests.verdict.synthetic import about, cells, lines

MEANS = {"good": 0.4, "near": 0.395, "weak": 0.1, "none": 0.0, "random": 0.0}


def test_who_stands_where() -> None:
    found = decide(cells(MEANS, 64, seconds={"good": 1.0, "near": 0.1}))
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


def test_nothing_is_best_where_nothing_beats_random() -> None:
    found = decide(cells(dict.fromkeys(("a", "b", "random"), 0.0), 64))
    assert found.best is None
    assert found.quick is None
    assert "Nothing is shown to beat random" in str(found)
    assert {row.status for row in found.rows} == {"undecided", "baseline"}


def test_fewer_than_six_images_decide_nothing() -> None:
    found = decide(cells({"a": 1.0, "random": 0.0}, 1))
    assert found.best is None
    assert found.leading == "a"
    assert "from fewer than 6 nothing can be" in str(found)


def test_one_that_was_set_aside_is_behind_and_not_worse() -> None:
    made = cells({"good": 0.4, "random": 0.0}, 64)
    made.about["methods"]["late"] = {"method": "late"}
    for line in lines({"late": 0.3}, 8, seed=5):
        made.add(Cell(**line))
    found = decide(made)
    assert found.row("late").status == "behind"
    assert "set aside for time before that was sure: late" in str(found)
    assert [u.second for u in found.undecided] == ["late"]


def test_of_two_that_are_alike_one_may_stop_early_and_still_be_tied() -> None:
    every = lines({"good": 0.4, "random": 0.0}, 64)
    made = cells({"good": 0.4, "random": 0.0}, 64)
    made.about["methods"]["twin"] = {"method": "twin"}
    for line in every:
        if line["method"] == "good" and line["place"] < 8:
            made.add(Cell(**{**line, "method": "twin"}))
    found = decide(made)
    assert found.best == "good"
    assert found.row("twin").status == "tied"


def test_lower_is_better_is_turned_round() -> None:
    made = cells({"good": 0.0, "random": 0.4}, 32)
    made.about["lower_is_better"] = ["gain"]
    assert decide(made).best == "good"


def test_another_metric_may_disagree() -> None:
    made = cells({"good": 0.4, "near": 0.39, "random": 0.0}, 32)
    made.about["metrics"]["other"] = {"metric": "saco"}
    for line in lines({"good": 0.1, "near": 0.5, "random": 0.0}, 32, seed=3):
        if line["metric"] == "gain":
            made.add(Cell(**{**line, "metric": "other"}))
    found = decide(made)
    rival = "near" if found.best == "good" else "good"
    assert bool(found.disagreements) == (rival == "near")
    assert found.best != "good" or "other prefers near" in str(found)


def test_sanity_is_told() -> None:
    made = cells({"good": 0.4, "near": 0.39, "random": 0.0}, 32)
    made.about["metrics"]["randomisation"] = {"metric": "randomisation"}
    for method, value in (("good", 0.9), ("near", 0.1)):
        made.add(Cell(0, "i0", method, "randomisation", value, 0.1))
    text = str(decide(made))
    assert "Fails the sanity check" in text
    assert "good (0.90)" in text
    assert "Passes it: near (0.10)" in text


def test_the_order_of_cells_does_not_matter() -> None:
    every = lines(MEANS, 24)
    verdicts = []
    for seed in range(3):
        shuffled = random.Random(seed).sample(every, len(every))
        made = Cells(about(list(MEANS), 24))
        for line in shuffled:
            made.add(Cell(**line))
        verdicts.append(decide(made).to_json())
    assert len(set(verdicts)) == 1


def test_a_torn_line_is_forgotten_and_the_rest_is_read(tmp_path: Path) -> None:
    made = Cells(about(list(MEANS), 8), tmp_path)
    made.begin()
    for line in lines(MEANS, 8):
        made.add(Cell(**line))
    made.fail("broken.jpg", "it is damaged")
    made.leave_out("dear", "no time was left for it", for_time=True)
    made.leave_out("odd", "it failed")
    path = tmp_path / "cells.jsonl"
    whole = path.read_bytes()
    read = Cells.opened(tmp_path)
    assert read is not None
    assert decide(read).to_json() == decide(made).to_json()
    assert read.set_aside == {"dear"}
    path.write_bytes(whole + whole[40:90])
    torn = Cells.opened(tmp_path)
    assert torn is not None
    assert len(torn) == len(made)
    torn.take_in("dear")
    assert path.read_bytes().startswith(whole)
    again = Cells.opened(tmp_path)
    assert again is not None
    assert set(again.left_out) == {"odd"}
    for count in (len(whole) // 3, len(whole) // 2):
        path.write_bytes(whole[:count])
        part = Cells.opened(tmp_path)
        assert part is not None
        assert len(part) < len(made)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cells.jsonl").write_text("[1, 2]\n")
    with pytest.raises(PatchlightError, match="holds no cells"):
        Cells.opened(tmp_path)


def test_files_are_written_and_escaped(tmp_path: Path) -> None:
    found = decide(cells({"<b>good</b>": 0.4, "random": 0.0}, 16))
    found.save(tmp_path)
    page = (tmp_path / "verdict.html").read_text()
    assert "<b>good" not in page
    assert "&lt;b&gt;good" in page
    assert "<svg" in page
    assert "http" not in page
    read = json.loads((tmp_path / "verdict.json").read_text())
    assert read["best"] == "<b>good</b>"
    assert (tmp_path / "verdict.txt").read_text().startswith("made up: 2 methods on 16 of 16 image(s)")
    assert list(found.table["method"]) == [row.method for row in found.rows]
