"""Rows about runs: stores, recipes, statistics of few images, maps measured on what they are not of."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import patchlight as pl
from patchlight.bench.local import run
from patchlight.bench.recipe import override, parse
from patchlight.zoo import pocket
from tests.bench.small import pictures, recipe, text
from tests.strangers.table import command, refuses, row

QUICK = ("--metric", "deletion", "--set", "deletion.steps=2")


def photos(folder: Path, count: int = 2) -> Path:
    return pictures(folder / "photos", count)


def saved_maps(folder: Path, *options: str) -> tuple[str, str]:
    images, maps = str(photos(folder)), str(folder / "maps")
    command("explain", images, "--method", "genatt", "--save", maps, "--out", f"{folder}/out/", *options)
    return images, maps


def other_weights(folder: Path) -> str:
    """The bundled model's weights, of which one number is another."""
    tensors = {k: v.float() for k, v in load_file(pocket.WEIGHTS).items()}
    tensors["blocks.3.mlp.fc1.bias"][5] += 1e-3
    save_file(tensors, folder / "other.safetensors")
    return str(folder / "other.safetensors")


def _key_rows() -> None:
    from tests.bench import test_keys

    green_before = ("the weights file", "the code of a method", "the pictures", "a setting of the method", "the method")
    green_before += ("a setting of the metric", "the preprocessing", "the seed")
    for name in test_keys.CHANGES:
        if name not in green_before:

            def changes(folder: Path, name: str = name) -> None:
                test_keys.changed(name, folder)

            changes.__name__ = f"a row is made again when {name} changes"
            row(changes)


_key_rows()


@row
def flipped_bits_in_a_store_are_told_and_never_used(folder: Path) -> None:
    from tests.bench.test_damage import flipped, made

    flipped(made(folder, 2), 40, pages=0)


@row
def a_damaged_unit_or_map_is_made_again(folder: Path) -> None:
    from tests.bench.test_damage import made, mended

    mended(made(folder, 4), folder / "images", 2)


@row
def the_parquet_of_a_store_has_each_row_once(folder: Path) -> None:
    import pyarrow.parquet as pq

    images, out = photos(folder), folder / "run"
    run(recipe(images), out)
    run(override(recipe(images), settings={"Ins": {"steps": 2}}), out)
    run(parse(text(images).replace('Random = "random"', 'Random = "random"\nRaw = "rawatt"')), out)
    rows = pq.read_table(out / "units").to_pylist()
    assert len({(r["model"], r["image"], r["method"], r["metric"]) for r in rows}) == len(rows) == 2 * 5 * 2


@row
def manifests_of_nothing_are_refused(folder: Path) -> None:
    (folder / "run").mkdir()
    for words in ("[]", "{}", "null", "3", '"x"', '{"format": 3}'):
        (folder / "run" / "manifest.json").write_text(words)
        for action in ("status", "report"):
            command("bench", action, str(folder / "run"), code=2, says=("manifest.json' is damaged", "delete it"))


@row
def one_image_has_no_interval(folder: Path) -> None:
    vit = pl.load("pocket")
    images = sorted(photos(folder, 1).iterdir())
    found = pl.evaluate(vit, images, "genatt", "deletion", steps=2)
    assert all(math.isnan(side) for side in found.interval())
    told = command("evaluate", "--method", "genatt", "--images", str(folder / "photos"), *QUICK, says=("no interval",))
    assert not re.search(r"\[0\.\d+, 0\.\d+\]", told)
    told = command("evaluate", "--method", "genatt", "--images", str(folder / "photos"), *QUICK, "--json")
    assert json.loads(told)["results"][0]["interval"] is None


@row
def six_images_have_an_interval(folder: Path) -> None:
    found = pl.evaluate(pl.load("pocket"), sorted(photos(folder, 6).iterdir()), "genatt", "deletion", steps=2)
    low, high = found.interval()
    assert low < found.mean < high
    assert "mean of 6 image(s)" in repr(found)


@row
def two_images_have_no_best_method(folder: Path) -> None:
    from patchlight.bench.html import as_html
    from patchlight.bench.tables import as_csv, as_latex, as_markdown, gather

    run(recipe(photos(folder)), folder / "run")
    found = gather(folder / "run")
    said = "2 images of Pocket are too few for intervals, ranks and a best method; 6 or more are needed"
    table = as_markdown(found)
    assert said in table
    assert "**" not in table
    assert "0.5" in table
    assert not re.search(r"\d \[", table), "no interval behind a number"
    assert r"\textbf" not in as_latex(found)
    assert r"$\pm$" not in as_latex(found).split("\n", 1)[1]
    rows = list(csv.DictReader(io.StringIO(as_csv(found))))
    assert {(r["low"], r["high"], r["mark"], r["rank"]) for r in rows} == {("", "", "", "")}
    page = as_html(found)
    assert said in page
    assert 'class="best"' not in page
    assert "Friedman p" not in page


@row
def statistics_of_no_images_do_not_raise(folder: Path) -> None:
    from patchlight.bench.statistics import critical_difference
    from patchlight.core.statistics import bootstrap_weights
    from patchlight.metrics.base import Evaluation
    from patchlight.study.ranking import friedman

    assert friedman(torch.ones(0, 3)) == (0.0, 1.0)
    assert critical_difference(3, 0) == math.inf
    assert bootstrap_weights(0, 3).shape == (3, 0)
    nothing = Evaluation("deletion", torch.empty(0, dtype=torch.float64), False, (0.0, 1.0))
    assert math.isnan(nothing.interval()[0])
    assert "0 image(s)" in repr(nothing)


@row
def twenty_thousand_values_are_shown_and_resampled_in_little_memory(folder: Path) -> None:
    """In another process, whose highest memory Linux tells."""
    if sys.platform != "linux":
        return
    script = """
import torch
from patchlight.metrics.base import Evaluation
values = torch.rand(20_000, dtype=torch.float64)
found = Evaluation("deletion", values, False, (0.0, 1.0))
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))
found.interval(samples=10)
before = peak()
repr(found)
shown = peak() - before
low, high = found.interval()
assert low < found.mean < high
print(shown, peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    shown, resampled = map(float, done.stdout.split())
    assert shown < 8
    assert resampled < 200  # the pages a process gets vary by some 80 MB; all resamples at once took 459


@row
def maps_of_other_weights_are_refused(folder: Path) -> None:
    vit, images = pl.load("pocket"), sorted(photos(folder).iterdir())
    maps = pl.explain(vit, images, "genatt")
    other = pl.load("pocket", weights=other_weights(folder))
    refuses(lambda: pl.evaluate(other, images, maps, "deletion", steps=2), "other weights", "maps.scores")
    assert pl.evaluate(vit, images, maps, "deletion", steps=2).count == 2
    assert pl.evaluate(other, images, maps.scores, "deletion", steps=2).count == 2


@row
def a_weight_that_changes_in_place_is_noticed(folder: Path) -> None:
    vit, images = pl.load("pocket"), sorted(photos(folder).iterdir())
    maps = pl.explain(vit, images, "genatt")
    with torch.no_grad():
        vit.model.get_parameter("blocks.5.attn.proj.weight")[7, 7] += 1e-4
    refuses(lambda: pl.evaluate(vit, images, maps, "deletion", steps=2), "other weights")


@row
def saved_maps_of_other_weights_are_refused(folder: Path) -> None:
    images, maps = saved_maps(folder)
    command("evaluate", maps, "--images", images, *QUICK)
    weights = other_weights(folder)
    command("evaluate", maps, "--images", images, *QUICK, "--weights", weights, code=2, says=("other weights",))


@row
def another_picture_of_the_same_name_is_refused(folder: Path) -> None:
    images, maps = saved_maps(folder)
    shutil.copy(f"{images}/0.png", f"{images}/1.png")
    told = command("evaluate", maps, "--images", images, *QUICK, "--json", code=3, says=("is not the picture",))
    found = json.loads(told[: told.rindex("}") + 1])
    assert [list(r["values"]) for r in found["results"]] == [["0.png"]]


@row
def images_in_another_order_are_refused(folder: Path) -> None:
    vit, images = pl.load("pocket"), sorted(photos(folder, 3).iterdir())
    maps = pl.explain(vit, images, "genatt")
    refuses(lambda: pl.evaluate(vit, images[::-1], maps, "deletion", steps=2), "image 0 is not the one", "maps.scores")
    assert pl.evaluate(vit, images[1:], maps[1:], "deletion", steps=2).count == 2


@row
def hashes_survive_saving(folder: Path) -> None:
    vit, images = pl.load("pocket"), sorted(photos(folder).iterdir())
    maps = pl.explain(vit, images, "genatt")
    again = pl.Attribution.load(maps.save(folder / "maps"))
    assert (again.weights, again.images) == (maps.weights, maps.images)
    assert again.weights
    assert len(set(again.images)) == 2
    assert again[1].images == maps.images[1:]


@row
def maps_of_classes_that_a_model_has_not_are_refused(folder: Path) -> None:
    from dataclasses import replace

    vit, images = pl.load("pocket"), sorted(photos(folder).iterdir())
    maps = pl.explain(vit, images, "genatt")
    for wrong in (802, -1, 10):
        odd = replace(maps, target=torch.tensor([1, wrong]))
        refuses(lambda odd=odd: pl.evaluate(vit, images, odd, "deletion", steps=2), f"class {wrong}", "10 classes")  # type: ignore[misc]
    odd.save(folder / "saved" / "0" / "genatt")
    command("evaluate", str(folder / "saved"), "--images", str(folder / "photos"), *QUICK, code=2)


def _replayed(name: str, folder: Path) -> None:
    vit, images = pl.load("pocket"), sorted(photos(folder).iterdir())
    maps = pl.explain(vit, images, name, level="pixel")
    found = pl.evaluate(vit, images, maps, ["deletion", "max-sensitivity"], batch_size=2)
    assert found["deletion"].count == found["max-sensitivity"].count == 2
    anew = pl.explain(vit, images, name, level="pixel")
    assert torch.equal(anew.scores, maps.scores)


@row
def pixel_maps_of_grad_are_measured(folder: Path) -> None:
    _replayed("grad", folder)


@row
def pixel_maps_of_ixg_are_measured(folder: Path) -> None:
    _replayed("ixg", folder)


def odd_names(folder: Path) -> Path:
    """Two pictures, one of a name that is not UTF-8, and a broken one of such a name."""
    images = photos(folder)
    os.rename(images / "1.png", os.fsencode(images) + b"/b\xff.png")
    Path(os.fsdecode(os.fsencode(images) + b"/c\xfe.png")).write_bytes(b"no picture")
    return images


@row
def names_that_are_not_utf8_do_not_stop_a_benchmark(folder: Path) -> None:
    from patchlight.bench.store import Store

    images = odd_names(folder)
    (folder / "r.toml").write_text(text(images), encoding="utf-8")
    out = str(folder / "run")
    command("bench", "run", str(folder / "r.toml"), "--out", out, code=3)
    found = Store(out).results()
    assert found.images == {"Pocket": ("0.png", "b\\xff.png", "c\\xfe.png")}
    column = found.columns["Pocket", "GenAtt", "Del"]
    assert column.values.isfinite().tolist() == [True, True, False]
    assert "c\\xfe.png' is not an image" in column.errors[2]
    command("bench", "report", out, "--html", str(folder / "r.html"))
    command("bench", "run", str(folder / "r.toml"), "--out", out, "--json", code=3)


@row
def names_that_are_not_utf8_are_explained_and_measured(folder: Path) -> None:
    images, maps = str(odd_names(folder)), str(folder / "maps")
    command("explain", images, "--method", "genatt", "--save", maps, "--out", f"{folder}/out/", code=3)
    command("explain", images, "--method", "genatt", "--out", f"{folder}/out2/", "--json", code=3)
    table = folder / "v.csv"
    command("evaluate", maps, "--images", images, *QUICK, "--csv", str(table))
    assert [line.partition(b",")[0] for line in table.read_bytes().splitlines()[1:]] == [b"0.png", b"b\xff.png"]
    command("evaluate", "--method", "genatt", "--images", images, *QUICK, "--json", code=3, says=("b\\udcff.png",))
    command("evaluate", maps, "--images", images, "--data", "folder", *QUICK)


def _recipe_row(name: str, old: str, new: str, *words: str) -> None:
    def refused(folder: Path) -> None:
        whole = text(photos(folder))
        assert old in whole
        (folder / "r.toml").write_text(whole.replace(old, new), encoding="utf-8")
        command("bench", "run", str(folder / "r.toml"), "--out", str(folder / "run"), code=2, says=words)

    refused.__name__ = f"a recipe with {name} is refused"
    row(refused)


def _with_cut(cut: str) -> tuple[str, str]:
    return 'Pocket = "pocket"', f'Pocket = {{name = "pocket", preprocess = {{{cut}}}}}'


_recipe_row("lists in lists", "batch_size = 2", f"notes = {'[' * 5000}{']' * 5000}", "nested too deeply")
_recipe_row("NaN means", *_with_cut("mean = [nan, 0.5, 0.5]"), "line 6", "mean", "finite number")
_recipe_row("no spread", *_with_cut("std = [0.0, 0.5, 0.5]"), "line 6", "std", "greater than 0")
_recipe_row(
    "sizes that do not fit", *_with_cut("size = [100, 100]"), "[1, 3, 100, 100]", "(32)", "of the size it takes"
)
_recipe_row("sizes of nothing", *_with_cut("size = [0, 32]"), "line 6", "size")
_recipe_row("images true", "[methods]", "images = true\n\n[methods]", "line 12", "data.images", "True")
_recipe_row("a seed too large", "batch_size = 2", f"seed = {2**70}", "line 3", "seed")
_recipe_row("numbers that are words", "[0.5, nan]", '["a", "b"]', "give 2 numbers")
_recipe_row("an option of another type", 'kind = "folder"', 'kind = "folder"\noptions = {labels = 3}', "labels=3")


class Page(HTMLParser):
    """What a browser would make of a page: elements closed in order, the text of its scripts, and its visible text."""

    VOID = ("meta", "img", "br", "link", "path")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        else:
            self.text += data


@row
def odd_labels_leave_a_report_whole(folder: Path) -> None:
    from patchlight.bench.html import as_html
    from patchlight.bench.tables import as_markdown, gather

    odd = ["<!--<script>", "</script><b>", "a & b &lt;", "=cmd|'/c calc'!A0"]
    whole = text(photos(folder, 3)).replace("GenAtt = [0.5, nan]", "")
    for name, label in zip(("GenAtt", '"Rollout (max)"', "Rollout", "Random"), odd, strict=True):
        whole = whole.replace(f"{name} = ", f"{json.dumps(label)} = ")
    run(parse(whole), folder / "run", text=whole)
    found = gather(folder / "run")
    page = Page()
    page.feed(as_html(found))
    page.close()
    assert page.open == []
    assert page.tags.count("script") == 2
    script = page.scripts[-1]
    assert "<!--" not in script
    assert "</" not in script
    (charts,) = re.findall(r"^const charts = (.*);$", script, flags=re.M)
    drawn = json.loads(charts)
    names = [trace["name"] for trace in drawn["curve-0-0"]["data"]]
    assert names == [label.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") for label in odd]
    assert all(label in page.text for label in odd)
    assert "<script" not in as_markdown(found)


@row
def cells_of_a_csv_are_no_formulas(folder: Path) -> None:
    from patchlight.bench.tables import as_csv, gather

    whole = text(photos(folder)).replace("GenAtt = [0.5, nan]", "")
    for name, label in (("GenAtt", "=1+1"), ("Rollout", "@x"), ("Random", "-2")):
        whole = whole.replace(f"\n{name} = ", f'\n"{label}" = ')
    run(parse(whole), folder / "run")
    rows = list(csv.DictReader(io.StringIO(as_csv(gather(folder / "run")))))
    assert [r["method"] for r in rows[::2]] == ["'=1+1", "Rollout (max)", "'@x", "'-2"]
    assert all(0 <= float(r["mean"]) <= 1 for r in rows)
    shutil.copy(folder / "photos" / "0.png", folder / "photos" / "=HYPERLINK(1).png")
    table = folder / "v.csv"
    about = ("--method", "grad", "--metric", "completeness-error,ins-del", "--set", "ins-del.steps=2")
    command("evaluate", "--images", str(folder / "photos"), *about, "--csv", str(table))
    cells = list(csv.reader(table.open()))
    assert {r[0] for r in cells[1:]} == {"0.png", "1.png", "'=HYPERLINK(1).png"}
    assert all(math.isfinite(float(r[3])) for r in cells[1:]), "numbers stay numbers"


@row
def a_counting_task_that_is_not_passed_exits_with_3(folder: Path) -> None:
    from patchlight.trained.diffmask import counting_task

    with pytest.MonkeyPatch.context() as patch:
        missed = counting_task.Verdict("diffmask", 0.5, 0.25, 0.5, False)
        explainer = SimpleNamespace(about={"result": {}})
        patch.setattr(counting_task, "run", lambda *args: SimpleNamespace(verdicts=[missed], explainer=explainer))
        command("diffmask", "counting", "--out", str(folder), code=3, says=("exact on 50.0% of the grids",))


@row
def maps_of_random_bytes_are_told(folder: Path) -> None:
    run(recipe(photos(folder)), folder / "run")
    for maps in (folder / "run" / "maps").iterdir():
        maps.write_bytes(random.Random(0).randbytes(500))
    command("bench", "report", str(folder / "run"), says=("is damaged and left out",))
    command("bench", "status", str(folder / "run"), says=("is damaged and left out",))
