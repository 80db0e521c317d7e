"""Lists of images: names or indices, one per line, for every kind of data, in recipes and at the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from patchlight.bench.local import run
from patchlight.bench.plan import plan
from patchlight.bench.recipe import override, parse
from patchlight.cli import app
from patchlight.cli.options import TrainedModelOptions
from patchlight.cli.training import TrainingOptions
from patchlight.core.errors import PatchlightError
from patchlight.data import open_data, read_list
from patchlight.trained.recipe import open_images
from patchlight.trained.shapley.settings import ShapleyRecipe
from tests.bench.small import cells, pictures, text

NAMES = ["a/0.png", "a/1.png", "b/0.png", "7", "b/c d.jpg"]


def written(folder: Path, content: str) -> Path:
    (folder / "list.txt").write_text(content, encoding="utf-8", newline="")
    return folder / "list.txt"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a/1.png\na/0.png\n", [1, 0]),
        ("1\nc d\n7", [1, 4, 3]),  # one line is not a number, so all are names: 1 is a/1.png
        ("0\n4\n3", [0, 4, 3]),
        ("7", [3]),  # each line is a number, and a name as well
        ("\ufeff# a comment\r\n\r\n  2  \r\n# another\r\n0\r\n", [2, 0]),
        ("- 4\n- 2\n- 0", [4, 2, 0]),
        ("- b/c d.jpg\n- 7\n", [4, 3]),
    ],
)
def test_lines_are_names_or_indices(content: str, expected: list[int], tmp_path: Path) -> None:
    assert read_list(written(tmp_path, content), NAMES) == expected


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("a/1.png\n\na/2.png", "line 3: no image is called 'a/2.png'; did you mean"),
        ("-1", "line 1: no image is called '-1'"),
        ("a/1.png\n0.png", "line 2: '0.png' may be 'a/0.png' or 'b/0.png'; write the full name"),
        ("0\n# two\n5", "line 3: there is no image 5; indices are 0 to 4"),
        ("9" * 5000, "line 1: there is no image 99999999999999999999; indices are 0 to 4"),
        ("0\n1\n00", "line 3: '00' is already on line 1; list each image once"),
        ("b/c d\n7\nc d.jpg", "line 3: 'c d.jpg' is already on line 1; list each image once"),
        ("# nothing\n\n", "lists no images; write one name or index per line"),
    ],
)
def test_what_is_wrong_with_a_list_is_reported_with_its_line(content: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(PatchlightError) as error:
        read_list(written(tmp_path, content), NAMES)
    assert sentence in str(error.value)
    assert str(error.value).startswith(f"'{tmp_path / 'list.txt'}'")
    assert "\n" not in str(error.value)


def test_a_list_that_cannot_be_read(tmp_path: Path) -> None:
    for missing in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(PatchlightError, match="cannot be read: "):
            read_list(missing, NAMES)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe0")
    with pytest.raises(PatchlightError, match="not a text file in UTF-8"):
        read_list(tmp_path / "bytes", NAMES)


def test_an_index_is_a_place_in_the_data_s_own_order(tmp_path: Path) -> None:
    """ImageNet's images are sorted by class, as in torchvision."""
    from torchvision.datasets import ImageFolder

    synsets = {3: "n01443537", 9: "n01440764", 2: "n01440764"}
    for (number, synset), source in zip(synsets.items(), pictures(tmp_path / "some", 3).iterdir(), strict=True):
        place = f"{synset}/ILSVRC2012_val_{number:08d}"
        (tmp_path / "val" / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, tmp_path / "val" / f"{place}.png")
    theirs = [Path(path).stem for path, _ in ImageFolder(str(tmp_path / "val")).samples]
    data = open_data("imagenet", tmp_path / "val")
    assert list(data.names) == theirs == [f"ILSVRC2012_val_0000000{i}" for i in (2, 9, 3)]
    listed = data.listed(written(tmp_path, "2\n0\n"))
    assert listed.names == [theirs[2], theirs[0]]
    assert [sample.label for sample in listed] == [1, 0]


@pytest.mark.parametrize("kind", ["counting", "folder"])
def test_every_kind_of_data_takes_lists(kind: str, tmp_path: Path) -> None:
    path = None if kind == "counting" else pictures(tmp_path / "images", 4)
    data = open_data(kind, path, **({"count": 4} if kind == "counting" else {}))
    wanted = [data.names[3], data.names[0]]
    assert data.listed(written(tmp_path, "\n".join(wanted))).names == wanted
    assert data.listed(written(tmp_path, "3\n0\n")).names == wanted


def listing(images: Path, file: Path) -> str:
    path = f'path = "{images.as_posix()}"'
    return text(images).replace(path, f'{path}\nlist = "{file.as_posix()}"')


def test_a_run_of_listed_images_resumes_with_the_same_list_elsewhere(tmp_path: Path) -> None:
    images = pictures(tmp_path / "images")
    first = written(tmp_path, "4.png\n1.png\n")
    assert run(parse(listing(images, first)), tmp_path / "run").now == 16
    (tmp_path / "elsewhere").mkdir()
    again = written(tmp_path / "elsewhere", "# the same images\n4\n1\n")
    one, other = (plan(parse(listing(images, file))) for file in (first, again))
    assert one.images.names == ("4.png", "1.png")
    assert (one.key, cells(one)) == (other.key, cells(other))
    first.unlink()
    assert run(parse(listing(images, again)), tmp_path / "run").now == 0
    everything = cells(plan(parse(text(images))))
    assert all(everything[key] == cell for key, cell in cells(one).items())
    written(tmp_path / "elsewhere", "4\n2\n")
    assert plan(parse(listing(images, again))).key != one.key
    summary = run(parse(listing(images, again)), tmp_path / "run")
    assert (summary.before, summary.now) == (8, 8), "image 4 is not measured again"


def test_a_list_given_with_a_recipe_takes_the_place_of_its_choice(tmp_path: Path) -> None:
    images = pictures(tmp_path / "images")
    file = str(written(tmp_path, "5\n3\n1\n0\n"))
    recipe = parse(text(images).replace("[methods]", "skip = 1\nevery = 2\nimages = 1\n[methods]", 1))
    assert plan(override(recipe, listed=file)).images.names == ("5.png", "3.png", "1.png", "0.png")
    assert plan(override(recipe, listed=file, images=2)).images.names == ("5.png", "1.png")
    assert plan(override(recipe, listed=file, images=9)).notes == (
        "9 images were requested; the list has 4, and all are used",
    )


def test_a_training_takes_a_list(tmp_path: Path) -> None:
    import patchlight as pl

    images, file = str(pictures(tmp_path / "images", 4)), str(written(tmp_path, "2\n0\n"))
    options = TrainingOptions(tmp_path, images=images, data="folder", listed=file)
    given = options.read(ShapleyRecipe, TrainedModelOptions())
    assert given.data is not None
    assert open_images(given.data, pl.load("pocket")).names == ["2.png", "0.png"]


def asked(*words: object) -> tuple[int, str]:
    answer = CliRunner().invoke(app, [str(word) for word in words])
    return answer.exit_code, answer.stdout if answer.exit_code == 0 else answer.output


def test_lists_at_the_command_line(tmp_path: Path) -> None:
    images = pictures(tmp_path / "images", 4)
    file = written(tmp_path, "3.png\n1.png\n")
    metric = ("--metric", "deletion", "--set", "deletion.steps=2", "--list", file, "--json")
    saved = tmp_path / "maps"
    assert asked("explain", images, "--method", "genatt", "--save", saved, "--out", tmp_path / "drawn/")[0] == 0
    for what in (["evaluate", "--method", "genatt"], ["evaluate", saved]):
        code, out = asked(*what, "--images", images, *metric)
        assert code == 0, out
        assert list(json.loads(out)["results"][0]["values"]) == ["3.png", "1.png"]
    (tmp_path / "recipe.toml").write_text(text(images), encoding="utf-8")
    code, out = asked("bench", "plan", tmp_path / "recipe.toml", "--list", file, "--json")
    assert code == 0, out
    assert json.loads(out)["images"] == 2
    job = ("--out", tmp_path / "run", "--array", 2, "--time", "1h")
    code, out = asked("bench", "slurm", tmp_path / "recipe.toml", "--list", file, *job)
    assert code == 0, out
    assert f"--list {file}" in " ".join(out.replace("\\\n", " ").split())
    figure = ("figure", "skipplus-2", "--images", images, "--set", "starts=[0]", "--out", tmp_path / "fig.png")
    code, out = asked(*figure, "--list", file)
    assert code == 0, out
    code, out = asked(*figure, "--list", written(tmp_path, "9\n"), "--force")
    assert code == 2
    assert "there is no image 9; indices are 0 to 3" in " ".join(out.split())
