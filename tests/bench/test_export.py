"""Exports: all that others need is there, nothing of this machine is, and a method of theirs costs itself alone."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

import patchlight
from patchlight.bench.manifest import Manifest
from patchlight.bench.paths import PathRemover, last_name
from patchlight.bench.recipe import parse, read_recipe
from patchlight.bench.rows import SCHEMA, parquet, table_of
from patchlight.bench.share import as_toml, export, merge
from patchlight.bench.store import Store
from patchlight.bench.tables import as_markdown, read_tables
from patchlight.cli import app
from patchlight.core.errors import PatchlightError
from patchlight.core.recipes import bundled_recipes
from tests.bench.conftest import MORE, Shared
from tests.bench.small import replaced
from tests.bench.test_merge import copied, measured, values


@pytest.fixture(scope="module")
def public(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "public"
    export(shared.whole, out, licence="CC-BY-4.0")
    return out


def words_in(folder: Path) -> str:
    """All that is in the files of an export, text and names and what Parquet and safetensors hold."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        found.append(str(path.relative_to(folder)))
        if path.suffix == ".parquet":
            table = table_of(path.read_bytes())
            found += [str(table.schema.metadata), json.dumps(table.to_pylist())]
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                found += [json.dumps(file.metadata()), *file.keys()]
        else:
            found.append(path.read_text(encoding="utf-8"))
    return "\n".join(found)


def test_it_is_a_run_that_reports_the_same(shared: Shared, public: Path) -> None:
    assert values(public) == values(shared.whole)
    assert as_markdown(read_tables(public)) == as_markdown(read_tables(shared.whole))
    assert sorted(path.name.partition("-")[0] for path in (public / "units").iterdir()) == [
        "Pocket.GenAtt",
        "Pocket.Random",
    ]
    names = Store(public).manifest().images.names
    for method in ("GenAtt", "Random"):
        ours, theirs = (Store(folder).maps("Pocket", names) for folder in (public, shared.whole))
        assert torch.equal(ours.scores[method], theirs.scores[method])
        assert list(ours.images) == list(names)


def test_others_read_it_without_patchlight(shared: Shared, public: Path) -> None:
    frame = pd.read_parquet(public / "units")
    assert list(frame.columns) == SCHEMA.names
    own = {(r.model, r.method, r.metric, r.image): (r.cell, r.value) for r in frame.itertuples()}
    assert own == values(shared.whole)
    with safe_open(next((public / "maps").glob("Pocket.GenAtt-*")), "pt") as file:
        assert list(file.get_tensor("GenAtt").shape) == [6, 8, 8]
        assert json.loads(file.metadata()["images"]) == [f"{i}.png" for i in range(6)]
    listed = list(csv.DictReader(io.StringIO((public / "images.csv").read_text())))
    told = Store(shared.whole).manifest().images
    assert [(row["image"], row["content"]) for row in listed] == list(zip(told.names, told.contents, strict=True))


def test_the_card_says_what_it_is(shared: Shared, public: Path) -> None:
    told = (public / "README.md").read_text()
    manifest = Store(shared.whole).manifest()
    for words in (
        patchlight.__version__,
        manifest.code,
        manifest.models["Pocket"],
        manifest.versions["torch"],
        "These values and maps: CC-BY-4.0.",
        "which are not included: unknown",
        "Patchlight: Apache-2.0.",
        'GenAtt = "genatt"',
        '"steps": 2',
        "bench run recipe.toml --images DIR --out mine --from public",
        "| Pocket | GenAtt | `Pocket.GenAtt` |",
    ):
        assert words in told
    licence = Path(patchlight.__file__).parents[2] / "LICENSE"
    assert "Apache License" in licence.read_text()


def test_nothing_of_this_machine_is_in_it(shared: Shared, tmp_path: Path) -> None:
    """Paths in errors, notes, recipe, settings, labels of models; the data lie below a folder with a space in it."""
    folder = shared.images.as_posix()
    whole = Store(shared.whole).manifest()
    label = f"{folder}/models/my model"
    resolved = whole.resolved.model_copy(
        update={
            "models": {
                label: whole.resolved.models["Pocket"].model_copy(update={"weights": f"{folder}/w.safetensors"})
            },
            "data": whole.resolved.data.model_copy(update={"options": {"labels": f"{folder}/labels.csv"}}),
            "notes": f"made by {folder}/make.py and file://{folder}/x",
        }
    )
    run = copied(
        shared.whole,
        tmp_path / "run",
        resolved=resolved,
        models={label: whole.models["Pocket"]},
        groups=tuple(group.model_copy(update={"model": label}) for group in whole.groups),
        notes=(
            f"the 'folder' data at '{folder}' has none",
            f"see /home/jane/notes.txt, {Path.home()}/x or C:\\jane\\y",
        ),
    )
    for path in sorted((run / "units").glob("*.parquet")):
        table = table_of(path.read_bytes())
        rows = [
            {**row, "model": label, "error": f"'{folder}/0.png' and /home/jane/a.py:12"} for row in table.to_pylist()
        ]
        replaced(path, parquet(type(table).from_pylist(rows, table.schema)))
    for path in sorted((run / "maps").glob("*.safetensors")):
        data = path.read_bytes()
        replaced(path, _relabelled(data, label))
    export(run, tmp_path / "public")
    told = words_in(tmp_path / "public")
    for secret in ("jane", str(tmp_path), str(Path.home()) + "/", os.getcwd(), "C:\\\\jane"):
        assert secret not in told, secret
    host = socket.gethostname()
    assert len(host) < 5 or host not in told
    manifest = Store(tmp_path / "public").manifest()
    assert list(manifest.resolved.models) == ["my model"] == list(manifest.models)
    assert manifest.resolved.models["my model"].weights == "w.safetensors"
    assert manifest.resolved.data.path == "pictures"
    assert set(Store(tmp_path / "public").failures()) == {"'0.png' and a.py:12"}
    assert "notes.txt" in manifest.notes[1]
    assert Store(tmp_path / "public").maps("my model", ["0.png"]).scores["GenAtt"].shape == (1, 8, 8)


def _relabelled(data: bytes, label: str) -> bytes:
    from safetensors.torch import load, save

    size = int.from_bytes(data[:8], "little")
    about = json.loads(data[8 : 8 + size])["__metadata__"]
    return bytes(save(load(data), {**about, "model": json.dumps(label)}))


def test_links_and_fractions_are_no_paths(shared: Shared) -> None:
    cleaner = PathRemover(Store(shared.whole).manifest())
    for words in ("https://arxiv.org/abs/1/2", "s/image, 3/16", "ViT-B/8 and/or DeiT", "google/vit-base", "a / b"):
        assert cleaner.text(words) == words
    assert cleaner.text("read /data/val/x.png, then") == "read x.png, then"
    assert cleaner.text("'hf:/home/jane doe/m' or hf:/data/m or file:///data/m") == "'hf:m' or hf:m or m"
    assert cleaner.text("'https://x.org/a b/c'") == "'https://x.org/a b/c'"
    assert last_name("..\\x\\y") == "y"


def test_names_of_images_that_are_paths_lose_the_common_folder(shared: Shared) -> None:
    whole: Manifest = Store(shared.whole).manifest()
    names = tuple(f"/home/jane/{i % 2}/{i}.png" for i in range(6))
    told = whole.model_copy(update={"images": replace(whole.images, names=names)})
    assert list(PathRemover(told).images.values()) == [f"{i % 2}/{i}.png" for i in range(6)]


def test_somebody_else_adds_a_method_and_only_it_is_measured(
    shared: Shared, public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(shared.images, tmp_path / "elsewhere")
    text = (public / "recipe.toml").read_text().replace("[methods]\n", f"[methods]\n{MORE}")
    (tmp_path / "recipe.toml").write_text(text)
    made = measured(monkeypatch)
    words = ["bench", "run", tmp_path / "recipe.toml", "--images", tmp_path / "elsewhere", "--out", tmp_path / "mine"]
    answer = CliRunner().invoke(app, [*map(str, words), "--from", str(public)])
    assert answer.exit_code == 0, answer.output
    assert {method for method, _ in made} == {"Rollout"}
    assert "12 measured now, 24 reused" in answer.stderr
    assert values(tmp_path / "mine") == values(shared.whole) | values(shared.method)
    assert not made[12:]
    merged = merge([public, shared.method], tmp_path / "merged")
    assert (merged.done, merged.values) == (36, 36)


def test_where_nothing_can_be_used_it_says_why(shared: Shared, public: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(shared.text())
    words = ["bench", "run", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "mine"), "--seed", "3"]
    answer = CliRunner().invoke(app, [*words, "--limit", "1", "--from", str(public)])
    assert answer.exit_code == 0, answer.output
    assert f"no value of '{public}' could be used; the seed is 0 in" in answer.stderr
    other = copied(public, tmp_path / "older", code="0" * 16, versions={"patchlight": "0.0.1"})
    answer = CliRunner().invoke(app, [*words, "--from", str(other)])
    assert answer.exit_code == 2
    assert "was measured with Patchlight 0.0.1" in answer.stderr


def test_an_incomplete_run_is_reported_as_such(shared: Shared, tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["bench", "export", str(shared.first), "--out", str(tmp_path / "x"), "--json"])
    told = json.loads(answer.stdout)
    assert "Incomplete: 12 of 24 values are missing" in told["notes"][0]
    assert told["notes"][0] in (tmp_path / "x" / "README.md").read_text()
    with pytest.raises(PatchlightError, match="is not empty; give an empty folder"):
        export(shared.first, tmp_path / "x")
    shutil.copytree(shared.first, tmp_path / "empty")
    shutil.rmtree(tmp_path / "empty" / "shards")
    with pytest.raises(PatchlightError, match="nothing to export"):
        export(tmp_path / "empty", tmp_path / "y")
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize("name", bundled_recipes("bench"))
def test_every_recipe_survives_toml(name: str) -> None:
    recipe = read_recipe(name)[0]

    def told(own: Any) -> str:
        return json.dumps(own.model_dump(), sort_keys=True, default=str)

    assert told(parse(as_toml(recipe))) == told(recipe)
