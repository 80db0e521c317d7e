"""`patchlight evaluate` and `patchlight metrics`: what they print and write, and how they refuse."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import patchlight as pl
from patchlight.core.images import open_image
from patchlight.data import Data, Sample
from patchlight.study.files import MeasureTask
from tests.cli.test_cli import folder as folder
from tests.cli.test_cli import refused, run
from tests.cli.test_cli import tiny as tiny
from tests.core.test_images import noise

QUICK = ("--set", "insertion.steps=4", "--set", "deletion.steps=4")


def test_label_is_the_true_class_unless_a_class_is_called_so(tiny: pl.Anatomy) -> None:
    task = MeasureTask([], [], target="label")
    for labels, truth in ((None, True), (["cat", "dog"], True), (["cat", "label"], False)):
        tiny.labels = labels
        assert task.by_label(tiny) == truth


@pytest.fixture
def saved(folder: Path, tiny: pl.Anatomy) -> Path:
    """The four photos of `folder`, explained by two methods, the maps where `explain --save maps` puts them.

    In one batch, as the command line explains them: another batch rounds otherwise, which breaks ties of pixels.
    """
    photos = {"a": "a.jpg", "b": "b.png", "cats/a.jpg": "cats/a.jpg", "cats/a.png": "cats/a.png"}
    for method, att in pl.explain(tiny, [f"photos/{p}" for p in photos.values()], ["genatt", "rollout"]).items():
        for i, name in enumerate(photos):
            att[i].save(f"maps/{name}/{method}")
    return folder


def test_saved_maps_are_measured(folder: Path, tiny: pl.Anatomy) -> None:
    run("explain", "photos", "--method", "genatt,rollout", "--save", "maps", "--out", "out/")
    metrics = ("--metric", "insertion,deletion", *QUICK)
    result = run("evaluate", "maps", "--images", "photos", *metrics)
    assert "insertion ↑" in result.stdout
    assert "deletion ↓" in result.stdout
    assert "genatt" in result.stdout
    found = json.loads(run("evaluate", "maps", "--images", "photos", *metrics, "--json").stdout)
    assert [(r["method"], r["metric"]) for r in found["results"]] == [
        (m, k) for m in ("genatt", "rollout") for k in ("insertion", "deletion")
    ]
    assert found["errors"] == []
    row = found["results"][0]
    assert row["images"] == 4
    assert row["interval"] is None, "four images are too few for one"
    assert "An interval needs at least 6 images with a value" in result.stdout
    paths = [f"photos/{name}" for name in row["values"]]
    expected = pl.evaluate(tiny, paths, pl.explain(tiny, paths, "genatt"), "insertion", steps=4)
    assert list(row["values"].values()) == pytest.approx(expected.values.tolist(), abs=1e-5)
    assert row["mean"] == pytest.approx(expected.mean, abs=1e-5)


def test_the_default_metric_is_cheap_and_a_long_run_is_announced(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(*options: str) -> int:
        asked = ("evaluate", "--images", "photos/a.jpg", "--method", "genatt", *options, "--json")
        settings: dict[str, int] = json.loads(run(*asked).stdout)["results"][0]["settings"]
        return settings["steps"]

    assert steps() == 28
    assert steps("--set", "ins-del.steps=3") == 3
    assert steps("--metric", "ins-del", "--set", "ins-del.steps=7") == 7
    monkeypatch.setattr("patchlight.study.cost.forward_seconds", lambda *about: 9.0)
    words = run("evaluate", "--images", "photos/a.jpg", "--method", "genatt").stderr
    assert "1 method by 1 metric on 1 image will take about" in words


def test_methods_are_explained_first(saved: Path, tiny: pl.Anatomy) -> None:
    metrics = ("--metric", "deletion", "--images", "photos", "--set", "deletion.steps=4", "--json")
    before = json.loads(run("evaluate", "maps", *metrics).stdout)["results"]
    anew = json.loads(run("evaluate", "--method", "genatt,rollout", *metrics).stdout)["results"]
    for one, other in zip(before, anew, strict=True):
        assert one["mean"] == pytest.approx(other["mean"], abs=1e-5)
        assert one["values"] == pytest.approx(other["values"], abs=1e-5)
    started = json.loads(
        run("evaluate", "--method", "rollout", *metrics, "--set", "rollout.start=2", "--target", "dog").stdout
    )
    assert started["results"][0]["mean"] != anew[1]["mean"]
    assert started["target"] == "dog"


def test_only_the_methods_asked_are_measured(saved: Path) -> None:
    found = json.loads(
        run("evaluate", "maps", "--images", "photos", "--method", "rollout", "--metric", "auc", "--json").stdout
    )
    assert [r["method"] for r in found["results"]] == ["rollout"]
    assert "'genat'" in refused("evaluate", "maps", "--images", "photos", "--method", "genat")


def test_what_is_missing_is_reported_and_the_rest_measured(saved: Path) -> None:
    shutil.rmtree("maps/b/rollout")
    Path("photos/cats/a.png").write_bytes(b"broken")
    Path("photos/a.jpg").unlink()
    noise(80, 80, seed=9).save("photos/new.png")
    result = run("evaluate", "maps", "--images", "photos", "--metric", "deletion", *QUICK[2:], "--json", code=3)
    found = json.loads(result.stdout)
    told = {error["image"]: error["error"] for error in found["errors"]}
    assert set(told) == {"a", "b.png", "cats/a.png"}
    assert told["a"] == "the maps of 'a' have no image in --images"
    assert told["b.png"] == "there is no map of 'b.png' by 'rollout'"
    assert [list(r["values"]) for r in found["results"]] == [["b.png", "cats/a.jpg"], ["cats/a.jpg"]]
    table = run("evaluate", "maps", "--images", "photos", "--metric", "deletion", *QUICK[2:], code=3).stdout
    assert "Means of different images cannot be compared." in table
    rows = [line.split() for line in table.splitlines()]
    assert next(row for row in rows if row[:1] == ["genatt"])[1] == "2"
    assert next(row for row in rows if row[:1] == ["rollout"])[:5] == ["rollout", "(ignores", "the", "class)", "1"]


def test_undefined_values_are_counted_and_named(saved: Path) -> None:
    for name, value in (("a", -1.0), ("b", 2.0)):
        att = pl.Attribution.load(f"maps/{name}/genatt")
        att.scores.fill_(value)
        att.save(f"maps/{name}/genatt", force=True)
    asked = ("evaluate", "maps", "--images", "photos", "--method", "genatt")
    result = run(*asked, "--metric", "sparseness", "--set", "sparseness.shift=none", "--csv", "d.csv")
    assert "1 undefined" in result.stdout
    assert "sparseness of genatt has no value for 'a.jpg': the map has negative scores" in result.stderr
    assert "the map of 'a.jpg' and 1 more by genatt is constant" in result.stderr
    with Path("d.csv").open() as file:
        rows = {row["image"]: row for row in csv.DictReader(file)}
    assert rows["a.jpg"]["value"] == ""
    assert "negative" in rows["a.jpg"]["reason"]
    assert abs(float(rows["b.png"]["value"])) < 1e-6
    assert "d.csv' already exists" in refused("evaluate", "maps", "--images", "photos", "--csv", "d.csv")


def test_a_map_with_nan_in_its_file_fails_alone(saved: Path) -> None:
    path = Path("maps/a/genatt/scores.safetensors")
    att = pl.Attribution.load(path.parent)
    with pytest.raises(pl.PatchlightError, match="contain NaN"):
        replace(att, scores=att.scores * torch.nan).save(path.parent, force=True)
    save_file({"scores": att.scores * torch.nan, "target": att.target}, path)
    result = run("evaluate", "maps", "--images", "photos", "--metric", "sparseness", "--method", "genatt", code=3)
    assert "genatt' is damaged: scores are not finite numbers" in result.stderr


def test_labels_of_a_data_set(saved: Path, tiny: pl.Anatomy) -> None:
    """Sub-folders named by classes are the labels of --data folder."""
    predicted, _ = tiny.predict("photos/b.png")[0][0]
    other = "cat" if predicted != "cat" else "ship"
    for name in (predicted, other):
        Path("classes", name).mkdir(parents=True)
        shutil.copy("photos/b.png", f"classes/{name}/1.png")
    clean = ("--set", "perturbation.points=1", "--set", "perturbation.low=0")
    labelled = ("--images", "classes", "--metric", "perturbation", *clean, "--json")
    found = json.loads(run("evaluate", "--method", "genatt", *labelled, "--data", "folder").stdout)
    assert found["results"][0]["values"] == {f"{predicted}/1.png": 1, f"{other}/1.png": 0}
    run("evaluate", "--method", "genatt", *labelled, "--data", "folder", "--target", "label")
    assert "--data" in refused("evaluate", "--method", "genatt", *labelled[:4], "--target", "label")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("evaluate", "maps"), "--images PATH"),
        (("evaluate", "maps", "--images", "nowhere"), "no image or folder at 'nowhere'"),
        (("evaluate", "nowhere", "--images", "photos"), "no folder of maps at 'nowhere'"),
        (("evaluate", "photos", "--images", "photos"), "no maps in 'photos'"),
        (("evaluate", "maps", "--images", "other"), "the maps in 'maps' belong to none of --images"),
        (("evaluate", "maps", "--images", "photos", "--metric", "delettion"), "did you mean 'deletion'"),
        (("evaluate", "maps", "--images", "photos", "--metric", "auc", "--preset", "tis"), "has no preset 'tis'"),
        (("evaluate", "maps", "--images", "photos", "--metric", "auc", "--set", "step=3"), "no setting 'step'"),
        (("evaluate", "maps", "--images", "photos", "--data", "imagenett"), "no data set is called 'imagenett'"),
        (("evaluate", "--method", "genat", "--images", "photos"), "did you mean 'genatt'"),
        (
            ("evaluate", "--method", "ig", "--images", "photos", "--metric", "deletion", "--set", "steps=3"),
            "does not name its metric or method; write deletion.steps=3 or ig.steps=3",
        ),
        (("evaluate", "maps", "--images", "photos", "--target", "unicorn"), "no class is called 'unicorn'"),
        (("metrics", "delettion"), "did you mean 'deletion'"),
    ],
)
def test_wrong_requests_get_one_sentence(saved: Path, arguments: tuple[str, ...], words: str) -> None:
    Path("other").mkdir()
    noise(70, 70, seed=1).save("other/z.png")
    assert words in refused(*arguments)


def test_metrics_are_listed_and_described() -> None:
    rows = {row["name"]: row for row in json.loads(run("metrics", "--json").stdout)}
    assert rows["deletion"]["higher_is_better"] is False
    assert rows["perturbation"]["presets"] == ["chefer", "diffmask"]
    table = run("metrics").stdout
    assert all(name in table for name in rows)
    told = run("metrics", "perturbation").stdout
    assert "Values: lower is better, from 0 to 1" in told
    assert "quantity: 'accuracy' | 'probability' | 'logit' | 'cosine' | 'kl' | 'nll' = 'accuracy'" in told
    assert "preset: chefer, diffmask" in told


def test_maps_of_another_model_are_reported(saved: Path, tiny: pl.Anatomy) -> None:
    tiny.name = "another"
    result = run("evaluate", "maps", "--images", "photos", "--metric", "auc", "--set", "points=2")
    assert "the maps are of vit, but are measured on another" in result.stderr


def test_one_image_without_a_label_is_the_only_one_without(
    saved: Path, tiny: pl.Anatomy, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a.jpg", "b.png"]
    right = tiny.predict("photos/a.jpg")[0][0][0]
    assert tiny.labels is not None
    label = list(tiny.labels).index(right)

    def opened(kind: str, path: Path, **options: object) -> Data:
        def read(name: str) -> Sample:
            return Sample(name, open_image(path / name), label if name == "a.jpg" else None)

        return Data("two", names, read, tiny.labels)

    monkeypatch.setattr("patchlight.data.open_data", opened)
    clean = ("--set", "perturbation.points=1", "--set", "perturbation.low=0", "--set", "perturbation.high=0")
    asked = ("evaluate", "--method", "genatt", "--images", "photos", "--data", "folder", "--metric", "perturbation")
    result = run(*asked, *clean, "--json")
    assert json.loads(result.stdout)["results"][0]["values"] == {"a.jpg": 1, "b.png": 1}
    assert "'b.png' has no label" in result.stderr
    found = json.loads(run(*asked, *clean, "--target", "label", "--json", code=3).stdout)
    assert found["results"][0]["values"] == {"a.jpg": 1}
    assert found["errors"] == [{"image": "b.png", "error": "'b.png' has no label"}]
