"""The command line: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import patchlight as pl
from patchlight import cli
from patchlight.cli import names
from patchlight.cli.common import read_settings
from patchlight.methods.base import METHODS, Ablates
from patchlight.methods.requests import resolve
from tests import families
from tests.core.test_images import noise, png_header

ROOT = Path(__file__).parents[2]

LABELS = ["cat", "dog", "bird", "fish", "frog", "ship", "5"]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> pl.Anatomy:
    """A small random model in place of whichever is asked for."""
    vit = families.build("vit")
    vit.labels = LABELS
    monkeypatch.setattr("patchlight.anatomy.load.load", lambda *_, **__: vit)
    return vit


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: photos/ with four good images in a tree."""
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("a.jpg", "b.png", "cats/a.jpg", "cats/a.png")):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        noise(70 + i, 90, seed=i).save(tmp_path / "photos" / name)
    return tmp_path


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == code, result.output + repr(result.exception)
    assert "Traceback" not in result.output
    return result


def refused(*arguments: str) -> str:
    """The one sentence of a wrong request."""
    lines = run(*arguments, code=2).stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


def files(below: Path) -> set[str]:
    return {str(p.relative_to(below)) for p in below.rglob("*") if p.is_file()}


LISTS: dict[str, tuple[str, ...]] = {
    "--help": ("demo", "explain", "methods", "models"),
    "methods": ("genatt", "Recommended", "Perturbation"),
    "methods tis": ("keep: float > 0",),
    "metrics --json": ("deletion",),
    "metrics gini": ("sparseness",),
    "figures": ("skipplus-2", "tis-masks"),
    "models deit_tiny*": ("deit_tiny_patch16_224",),
    "explain --help": ("--method",),
}
"""Commands that list and describe, and words of what they print."""


def test_lists_and_help_import_no_torch() -> None:
    code = (
        "import sys; from patchlight.cli import app\n"
        f"for words in {list(LISTS)!r}:\n"
        "    app(words.split(), standalone_mode=False); print('NEXT')\n"
        "    assert not {'torch', 'timm', 'numpy'} & set(sys.modules), words"
    )
    names.table(), names.table("models")  # cached now
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for words, printed in zip(LISTS.values(), done.stdout.split("NEXT"), strict=False):
        assert all(word in printed for word in words)


def test_names_are_collected_again_where_the_cache_is_old_or_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path))
    names.table.cache_clear()
    try:
        assert "genatt" in run("methods").stdout
        (cached,) = tmp_path.glob("names-*.json")
        stored = json.loads(cached.read_text())
        assert stored == json.loads(json.dumps({"key": stored["key"], **names.from_registries()}))
        cached.write_text(json.dumps({**stored, "key": "of older files", "methods": []}))
        names.table.cache_clear()
        assert "genatt" in run("methods").stdout
        cached.write_text("{")
        names.table.cache_clear()
        assert "deletion" in run("metrics").stdout
    finally:
        names.table.cache_clear()


def completed(words: str) -> list[str]:
    """What bash is offered for the last of these words."""
    typed = words.split(" ")
    asked = {"_PATCHLIGHT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(typed) - 1)}
    result = CliRunner().invoke(cli.app, [], env=asked, prog_name="patchlight")
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout.split()


def test_names_are_completed() -> None:
    assert {"explain", "evaluate", "methods", "bench"} <= set(completed("patchlight "))
    assert completed("patchlight explain a.jpg --meth") == ["--method"]
    assert completed("patchlight bench run tis-table-") == [f"tis-table-{i}" for i in (1, 2, 3, 4)]
    assert completed("patchlight shapley train --recipe ") == ["shapley-cifar10"]
    assert completed("patchlight explain a.jpg --method roll") == ["rollout"]
    assert completed("patchlight explain a.jpg --method insi") == ["inside"]
    assert completed("patchlight explain a.jpg --method genatt,ixg.pl") == ["genatt,ixg.plus"]
    assert completed("patchlight explain a.jpg --method inputxgradient.plus.li") == ["inputxgradient.plus.libra"]
    assert "decompx.skipplus" in completed("patchlight methods decompx.")
    assert completed("patchlight methods rise.plus") == [], "it has no layer maps to sum"
    assert completed("patchlight methods nothing.") == []
    assert completed("patchlight explain a.jpg --score ") == ["logit", "probability", "cosine"]
    assert "deit_tiny_patch16_224" in completed("patchlight methods --model deit_t")
    assert completed("patchlight evaluate --metric deletion,inserti") == ["deletion,insertion"]
    assert "rise" in completed("patchlight evaluate --metric deletion --preset ")
    assert completed("patchlight figure tis-ma") == ["tis-masks"]
    assert completed("patchlight evaluate --data imagenet-seg") == ["imagenet-segmentation"]
    assert completed("patchlight explain --method rollout,ixg.plus --set rollout.d") == ["rollout.discard="]
    assert completed("patchlight bench run a.toml --target ") == ["label", "prediction"]


def test_every_composition_and_rule_that_is_offered_is_taken() -> None:
    for row in names.table()["methods"]:
        offered = completed(f"patchlight methods {row['name']}.")
        assert {resolve(name).name for name in offered} == set(offered)


def test_a_shell_is_answered_without_torch() -> None:
    code = (
        "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules));"
        "sys.argv[0] = 'patchlight'; from patchlight.cli import main; main()"
    )
    asked = {"_PATCHLIGHT_COMPLETE": "complete_bash", "COMP_WORDS": "patchlight methods tokent", "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **asked})
    assert done.stdout.split() == ["tokentm", "False"], done.stderr
    named = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # typer asks which shell runs it
    command = [sys.executable, "-c", code, "--show-completion", "bash"]
    shown = subprocess.run(command, capture_output=True, text=True, env=named)
    assert "_PATCHLIGHT_COMPLETE=complete_bash" in shown.stdout


def test_one_image_one_figure(folder: Path, tiny: pl.Anatomy) -> None:
    result = run("explain", "photos/a.jpg", "--method", "genatt, rollout", "--out", "a.png")
    assert "Wrote a.png" in result.stdout
    label, _ = tiny.predict("photos/a.jpg")[0][0]
    assert label in result.stdout
    assert Image.open("a.png").size[0] > 400
    run("explain", "photos/a.jpg")
    assert Path("a-explained.png").is_file()


def test_several_images_in_one_figure_are_rows(folder: Path, tiny: pl.Anatomy) -> None:
    run("explain", "photos/a.jpg", "--out", "one.png")
    run("explain", "photos/a.jpg", "photos/b.png", "photos/cats/a.png", "photos/a.jpg", "--out", "three.png")
    one, three = Image.open("one.png"), Image.open("three.png")
    assert 2.3 < three.height / one.height < 3, "the same image twice is one row"


def test_folders_are_mirrored_and_names_never_collide(folder: Path, tiny: pl.Anatomy) -> None:
    run("explain", "photos", "--out", "out/", "--batch-size", "3", "--save", "maps", "--method", "genatt,ixg.libra")
    assert files(folder / "out") == {"a.png", "b.png", "cats/a.jpg.png", "cats/a.png.png"}
    kept = pl.Attribution.load(folder / "maps" / "cats" / "a.jpg" / "ixg.libra")
    batch = tiny.batch("photos/cats/a.jpg")
    expected = pl.explain(tiny, batch, "ixg.libra")
    assert (kept.scores - expected.scores).abs().max() < 1e-5 * expected.scores.abs().max()
    assert kept.labels == expected.labels


def test_output_inside_the_folder_is_no_input(folder: Path, tiny: pl.Anatomy) -> None:
    for _ in range(2):
        run("explain", "photos", "--out", "photos/explained", "--force")
    assert len(files(folder / "photos" / "explained")) == 4


def test_two_folders_keep_their_names(folder: Path, tiny: pl.Anatomy) -> None:
    noise(50, 50).save(folder / "a.jpg")
    run("explain", "photos/cats", "a.jpg", "--out", "out")
    assert files(folder / "out") == {"a.png", "cats/a.jpg.png", "cats/a.png.png"}


def test_bad_images_are_reported_and_the_rest_continue(folder: Path, tiny: pl.Anatomy) -> None:
    photos = folder / "photos"
    (photos / "b.png").write_bytes((photos / "b.png").read_bytes()[:2000])
    (photos / "cats" / "huge.png").write_bytes(png_header(30_000, 30_000))
    (photos / "text.jpg").write_text("hello")
    result = run("explain", "photos", "--out", "out", "--json", code=3)
    told = json.loads(result.stdout)
    assert {Path(e["path"]).name for e in told["errors"]} == {"b.png", "huge.png", "text.jpg"}
    assert len(told["images"]) == len(files(folder / "out")) == 3
    assert result.stderr.count("failed: ") == 3
    bad = [str(photos / name) for name in ("b.png", "text.jpg", "cats/huge.png")]
    assert "3 of 3 images failed" in run("explain", *bad, "--out", "x.png", code=3).stdout
    assert not Path("x.png").exists()


def test_json_says_everything(folder: Path, tiny: pl.Anatomy) -> None:
    arguments = ("explain", "photos/a.jpg", "--method", "genatt,rollout", "--set", "rollout.start=1", "--seed", "4")
    told = json.loads(run(*arguments, "--target", "dog", "--out", "a.png", "--json").stdout)
    assert told["model"] == tiny.name
    assert told["methods"] == {"genatt": {}, "rollout": {"start": 1}}
    assert told["seed"] == 4
    assert told["written"] == ["a.png"]
    (image,) = told["images"]
    assert image["target"] == {"index": 1, "label": "dog"}
    best = tiny.predict("photos/a.jpg", k=3)[0]
    assert [(p["label"], p["probability"]) for p in image["predictions"]] == [
        (n, pytest.approx(p, abs=1e-5)) for n, p in best
    ]
    assert told["errors"] == told["warnings"] == []
    assert "error" in json.loads(run("explain", "nowhere.jpg", "--json", code=2).stdout)


def test_targets(folder: Path, tiny: pl.Anatomy) -> None:
    def target(*arguments: str) -> Any:
        image = json.loads(run("explain", "photos/a.jpg", "--force", "--json", *arguments).stdout)["images"][0]
        return image["target"]["index"], image.get("against", {}).get("index")

    assert target("--target", "2") == (2, None)
    assert target("--target", "5") == (6, None), "a label that is a number is meant before an index"
    contrast = ("--target", "cat", "--against", "ship")
    assert target(*contrast) == (0, 5)
    assert "cat against ship" in run("explain", "photos/a.jpg", "--force", "--save", "maps", *contrast).stdout
    assert pl.Attribution.load("maps/a/auto").captions == ("cat against ship",)


def test_settings_reach_the_method(folder: Path, tiny: pl.Anatomy) -> None:
    given = {"layer": "blocks[1].input", "prefix": "include"}
    words = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    run("explain", "photos/a.jpg", "--method", "gradcam", *words, "--save", "maps")
    assert given.items() <= pl.Attribution.load("maps/a/gradcam").settings.items()
    words = ["--method", "ixg.plus.libra,rollout", "--set", "rollout.discard=0.5"]
    run("explain", "photos/b.png", *words, "--save", "maps")
    assert pl.Attribution.load("maps/b/rollout").settings["discard"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--method", "ixg.pluss"), "did you mean 'plus'"),
        (("--method", ","), "no method was named"),
        (("--target", "99"), "out of range"),
        (("--score", "logits"), "'logit'"),
        (("--method", "rollout", "--set", "start=x"), "start='x'"),
        (("--method", "rollout", "--set", "start"), "is not a setting"),
        (("--method", "rollout,genatt", "--set", "start=1"), "write rollout.start=1 or genatt.start=1"),
        (("--method", "rollout", "--set", "rolout.start=1"), "did you mean 'rollout'"),
        (("--out", "a.gif"), "must end in .png"),
        (("--out", "photos/a.jpg", "--force"), "is one of the images"),
        (("--out", "photos/a.jpg/x.png"), "is not a folder"),
        (("--out", "/proc/patchlight/x.png"), "cannot be written"),
        (("--save", "photos/a.jpg/maps"), "is not a folder"),
    ],
)
def test_wrong_requests(folder: Path, tiny: pl.Anatomy, arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused("explain", "photos/a.jpg", *arguments)
    assert files(folder) == {f"photos/{n}" for n in ("a.jpg", "b.png", "cats/a.jpg", "cats/a.png")}


def test_no_write_permission(folder: Path, tiny: pl.Anatomy) -> None:
    (folder / "locked").mkdir(mode=0o500)
    try:
        (folder / "locked" / "probe").touch()
    except PermissionError:
        assert "no permission" in refused("explain", "photos/a.jpg", "--out", "locked/x.png")
    else:
        pytest.skip("running as root, who may write everywhere; /proc stands in for this in test_wrong_requests")


def test_wrong_paths(folder: Path, tiny: pl.Anatomy) -> None:
    assert "no image or folder at 'nowhere.jpg'" in refused("explain", "nowhere.jpg")
    (folder / "empty").mkdir()
    assert "no images in 'empty'" in refused("explain", "empty")
    many = folder / "many"
    many.mkdir()
    for i in range(65):
        (many / f"{i}.png").write_bytes(b"")
    assert "name a folder instead" in refused("explain", "many", "--out", "all.png")


def test_existing_output_is_refused_without_force(folder: Path, tiny: pl.Anatomy) -> None:
    arguments = ("explain", "photos", "--out", "out", "--save", "maps")
    run(*arguments)
    before = (folder / "out" / "a.png").read_bytes()
    (folder / "out" / "a.png").write_bytes(b"precious")
    assert "already exists" in refused(*arguments)
    assert (folder / "out" / "a.png").read_bytes() == b"precious"
    run(*arguments, "--force")
    assert (folder / "out" / "a.png").read_bytes() == before
    assert not [n for n in files(folder) if "/." in n], "nothing half-written stays"


def test_warnings_are_one_line_each(folder: Path, tiny: pl.Anatomy) -> None:
    result = run("explain", "photos", "--method", "ixg", "--set", "start=2", "--out", "out", "--batch-size", "1")
    lines = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 1
    assert ".libra" in lines[0]


def test_bugs_are_reported_and_debug_shows_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("patchlight.anatomy.load.load", broken)
    result = run("explain", "photos/a.jpg", code=1)
    assert result.stderr.strip() == "error: unexpected RuntimeError: two lines (--debug shows the traceback)"
    assert isinstance(CliRunner().invoke(cli.app, ["explain", "photos/a.jpg", "--debug"]).exception, RuntimeError)
    assert isinstance(CliRunner().invoke(cli.app, ["explain", "no.jpg", "--debug"]).exception, pl.PatchlightError)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("words", ["metrics gini", "metrics gini --json"])
def test_a_full_disk_behind_stdout_is_reported_once(words: str) -> None:
    names.table()  # cached now
    with open("/dev/full", "w") as full:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
        command = [sys.executable, "-m", "patchlight", *words.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (2, "error: [Errno 28] No space left on device\n")


def test_a_setting_that_is_deeply_nested_is_text() -> None:
    deep = 100_000 * "["
    assert read_settings(["a"], [f"key={deep}"]) == {"a": {"key": deep}}


def test_methods(tiny: pl.Anatomy) -> None:
    names = {m.name for m in pl.list_methods()}
    listed = json.loads(run("methods", "--json").stdout)
    assert {m["name"] for m in listed} == names
    assert "supported" not in listed[0]
    assert all(m["supported"] in (True, False) for m in json.loads(run("methods", "--model", "x", "--json").stdout))
    table = run("methods").stdout
    assert all(name in table for name in names)
    assert "discard: float >= 0 and < 1 = 0.0" in run("methods", "attention-rollout").stdout
    assert "did you mean 'rollout'" in refused("methods", "rolout")


def test_models() -> None:
    names = json.loads(run("models", "--json").stdout)
    assert {"pocket", "deit_tiny_patch16_224"} <= set(names)
    assert run("models", "deit_tiny*").stdout.split() == ["deit_tiny_distilled_patch16_224", "deit_tiny_patch16_224"]
    assert "no model name matches" in refused("models", "densenet")
    assert "did you mean" in refused("explain", __file__, "--model", "deit_tiny_patch61_224", "--out", "/tmp/never.png")


def test_demo_replaces_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "patchlight-demo.png").write_bytes(b"old")
    result = run("demo", "--out", str(tmp_path / "d"))
    assert files(tmp_path / "d") == {"patchlight-demo.png", "patchlight-two-classes.png"}
    for name in files(tmp_path / "d"):
        assert str(tmp_path / "d" / name) in result.stdout
        assert 100_000 < (tmp_path / "d" / name).stat().st_size < 1_500_000
    assert all(label in result.stdout for label in ("cat", "dog", "horse", "bird", "deer", "ship"))


def test_a_real_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from patchlight.cli import main; main()", "explain", "nowhere.jpg"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: no image or folder at 'nowhere.jpg'\n"
    assert done.stdout == ""


def test_groups_of_methods_leave_out_what_a_model_cannot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vit = families.build("siglip")
    monkeypatch.setattr("patchlight.anatomy.load.load", lambda *_, **__: vit)
    done = run("explain", "photos/a.jpg", "--method", "inside", "--json", "--out", "w.png")
    asked = json.loads(done.stdout)["methods"]
    assert "genatt" in asked
    assert "transatt" not in asked, "siglip has no CLS token for LRP"
    assert "skipped 'transatt': " in done.stderr
    assert not {n for n, e in METHODS.items() if isinstance(e, Ablates)} & set(asked)


def test_a_method_is_described_with_its_wrappers() -> None:
    text = run("methods", "decompx.skipplus").stdout
    assert text.startswith("decompx.skipplus")
    assert "rounding: 'ceil' | 'floor' = 'ceil'" in text
    assert "start: int or None = None" in text
    assert "keep: float > 0" in run("methods", "tis").stdout
    assert run("--version").stdout.strip() == pl.__version__
    module = [sys.executable, "-m", "patchlight", "--version"]
    assert subprocess.run(module, capture_output=True, text=True, check=True).stdout.strip() == pl.__version__


def test_an_unknown_kind_of_figure_is_refused(folder: Path, tiny: pl.Anatomy) -> None:
    assert "end the name of a folder with '/'" in refused("explain", "photos/a.jpg", "--out", "a.pgn")
    run("explain", "photos/a.jpg", "--out", "a.pgn/")
    assert Path("a.pgn/a.png").is_file()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a command asked of `load`, which gives a small random model."""
    vit, found = families.build("vit"), {}

    def load(name: str, **options: Any) -> pl.Anatomy:
        found.update(name=name, **options)
        return vit

    monkeypatch.setattr("patchlight.anatomy.load.load", load)
    return found


def test_what_is_said_about_a_model_reaches_it(folder: Path, asked: dict[str, Any]) -> None:
    (folder / "own.json").write_text('{"mean": [0.1, 0.1, 0.1]}')
    said = ["--preprocess", "own.json", "--sigmoid", "--no-pretrained"]
    for command in (
        ["explain", "photos/a.jpg", "--out", "a.png"],
        ["evaluate", "--images", "photos/a.jpg", "--method", "random", "--metric", "gini"],
    ):
        asked.clear()
        run(*command, *said)
        assert (asked["preprocess"].mean, asked["sigmoid"], asked["pretrained"]) == ((0.1, 0.1, 0.1), True, False)
        asked.clear()
        run(*command, *(["--force"] if command[0] == "explain" else []))
        assert not {"preprocess", "sigmoid", "pretrained"} & set(asked)


def test_a_model_is_prepared_as_a_file_says(folder: Path) -> None:
    """Through to the model itself, random weights and all."""
    (folder / "own.toml").write_text("mean = [0.25, 0.25, 0.25]\n")
    (folder / "bad.toml").write_text("middle = 3\n")
    save = ["explain", "photos/a.jpg", "--method", "random", "--save", "maps", "--out", "a.png", "--preprocess"]
    run(*save, "own.toml", "--sigmoid")
    (found,) = (folder / "maps").rglob("*.json")
    about = json.loads(found.read_text())
    assert about["preprocess"]["mean"] == [0.25, 0.25, 0.25]
    assert "line 1: there is no key 'middle'" in refused(*save, "bad.toml", "--force")
    assert "no preprocessing at 'none'" in refused(*save, "none", "--force")


def test_classes_are_reference_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    from patchlight.zoo import pocket

    cat, dog, kitten = (str(pocket.PHOTOS / f"{name}.jpg") for name in ("cat", "dog", "kitten"))
    asked = ["--similar-to", cat, "--similar-to", dog]
    told = json.loads(run("explain", kitten, *asked, "--target", "dog", "--save", "maps", "--json").stdout)
    (image,) = told["images"]
    assert image["target"] == {"index": 1, "label": "dog"}
    vit = pl.load("pocket", head=pl.heads.Similar([cat, dog]))
    expected = dict(zip(("cat", "dog"), vit.logits(vit.batch(kitten))[0].tolist(), strict=True))
    assert {p["label"]: p["score"] for p in image["predictions"]} == pytest.approx(expected, abs=1e-5)
    assert pl.Attribution.load(Path(image["maps"]["auto"])).head["labels"] == ["cat", "dog"]
    shown = run("explain", kitten, *asked, "--out", "again.png").stdout
    assert f"cat {expected['cat']:.3g}" in shown
    found = run("evaluate", "maps", "--images", kitten, *asked, "--metric", "deletion", "--set", "steps=2", "--json")
    (row,) = json.loads(found.stdout)["results"]
    assert row["settings"]["score"] == "probability"
    assert "another head" in run("evaluate", "maps", "--images", kitten, "--metric", "deletion", code=2).stderr


def test_wrong_heads_are_one_sentence(folder: Path) -> None:
    photo = "photos/a.jpg"
    assert "no file at 'nowhere.jpg'" in refused("explain", photo, "--similar-to", "nowhere.jpg")
    assert "--text and --similar-to cannot be combined" in refused(
        "explain", photo, "--text", "a", "--similar-to", photo
    )
    assert "--template needs --text" in refused("explain", photo, "--template", "a {}")
    assert "no text encoder" in refused("explain", photo, "--text", "a dog", "--text", "a cat")
    assert "no placeholder for the text" in refused("explain", photo, "--text", "a dog", "--template", "a photo")
    assert "text 0 is empty" in refused("explain", photo, "--text", " ")


@pytest.mark.usefixtures("tiny")
def test_a_report_is_one_file(folder: Path) -> None:
    asked = ("photos", "--method", "genatt,rollout", "--set", "rollout.start=1", "--target", "dog", "--seed", "3")
    told = json.loads(run("explain", *asked, "--report", "out/r.html", "--json").stdout)
    assert told["written"] == ["out/r.html"]
    assert told["images"][0]["picture"] is None
    assert files(folder / "out") == {"r.html"}
    page = Path("out/r.html").read_text()
    assert page.count("<h2 id=") == 4
    assert page.count("than random here: it beats") + page.count("Inconclusive:") == 4 * 3, (
        "in the lead, and of each method"
    )
    line = "patchlight explain photos --method genatt,rollout --target dog --set rollout.start=1 --report out/r.html"
    assert f"{line} --seed 3<" in page

    assert "'out/r.html' already exists" in refused("explain", *asked, "--report", "out/r.html")
    before = Path("out/r.html").read_bytes()
    run("explain", *asked, "--report", "out/r.html", "--out", "pictures", "--force")
    assert len(files(folder / "pictures")) == 4
    other = Path("out/r.html").read_bytes()
    assert other.replace(b" --out pictures", b"") == before, "the same command gives the same report"
    assert "'r.txt' is not an HTML file" in refused("explain", "photos", "--report", "r.txt")


@pytest.mark.usefixtures("tiny")
def test_a_report_says_which_files_are_in_it_and_which_are_not(folder: Path) -> None:
    """Files of one name are told apart, each by what it holds; what could not be read is told in the report itself."""
    (folder / "photos" / "text.jpg").write_text("hello")
    (folder / "other").mkdir()
    noise(50, 50).save(folder / "other" / "a.jpg")
    given = ("photos/a.jpg", "other/a.jpg", "photos/cats", "photos/text.jpg")
    told = json.loads(run("explain", *given, "--report", "r.html", "--json", code=3).stdout)
    page = Path("r.html").read_text()
    names = re.findall(r'<h2 id="image-\d+"[^>]*>(.*?)</h2>', page)
    assert names == ["photos/a.jpg", "other/a.jpg", "cats/a.jpg", "cats/a.png"]
    for image in told["images"]:
        assert hashlib.sha256(Path(image["path"]).read_bytes()).hexdigest() in page
    (failed,) = told["errors"]
    assert "Not in this report" in page
    assert failed["error"] in html.unescape(page)
    run("explain", "photos/cats", "--report", "whole.html")
    assert "Not in this report" not in Path("whole.html").read_text()


@pytest.mark.parametrize("token", ["schlüssel", " around ", "two\nlines"])
def test_a_token_that_no_header_carries_is_refused(token: str) -> None:
    pytest.importorskip("fastapi")
    assert "printable ASCII" in refused("serve", "--token", token)
    assert "--token is empty" in refused("serve", "--token", " ")
