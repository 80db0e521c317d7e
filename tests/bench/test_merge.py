"""Merging: what belongs together becomes one run, value for value, and what does not is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from typer.testing import CliRunner

from patchlight.bench import unit as units
from patchlight.bench.local import run
from patchlight.bench.manifest import write_manifest
from patchlight.bench.recipe import override
from patchlight.bench.rows import parquet, table_of
from patchlight.bench.share import bring, merge
from patchlight.bench.store import Store
from patchlight.bench.tables import as_markdown, read_tables
from patchlight.cli import app
from patchlight.core.errors import PatchlightError
from tests.bench.conftest import MORE, Shared
from tests.bench.small import replaced

Cells = dict[tuple[str, str, str, str], Any]


def values(folder: Path) -> Cells:
    """By model, method, metric and image, cell and value; each row once."""
    found: Cells = {}
    for table in Store(folder).tables():
        for row in table.to_pylist():
            key = row["model"], row["method"], row["metric"], row["image"]
            assert key not in found, f"{key} is there twice"
            found[key] = row["cell"], row["value"]
    return found


def copied(source: Path, folder: Path, **changes: Any) -> Path:
    """A run with another manifest."""
    shutil.copytree(source, folder)
    store = Store(folder)
    write_manifest(store.manifest_path, store.manifest().model_copy(update=changes))
    return folder


def of_recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"resolved": Store(folder).manifest().resolved.model_copy(update=changes)}


def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Which methods and metrics are run on which image, from now on."""
    made: list[tuple[str, str]] = []
    run_batch = units._run_batch

    def watched(group: Any, images: Any, pairs: Any, *rest: Any) -> Mapping[Any, Any]:
        made.extend((pair[0], name) for pair in pairs for name in images.names)
        return run_batch(group, images, pairs, *rest)

    monkeypatch.setattr(units, "_run_batch", watched)
    return made


def test_shards_cut_differently_are_the_whole_run(shared: Shared, tmp_path: Path) -> None:
    first, second = values(shared.first), values(shared.second)
    assert (len(first), len(second)) == (12, 12)
    merged = merge([shared.first, shared.second], tmp_path / "all")
    assert (merged.values, merged.done, merged.notes) == (24, 24, ())
    assert values(tmp_path / "all") == values(shared.whole)
    ours, theirs = (as_markdown(read_tables(folder)) for folder in (tmp_path / "all", shared.whole))
    assert [line.rpartition("|")[0].rpartition("|")[0] for line in ours.splitlines()] == [
        line.rpartition("|")[0].rpartition("|")[0] for line in theirs.splitlines()
    ]
    drawn = [Store(folder).maps("Pocket", ["0.png", "5.png"]) for folder in (tmp_path / "all", shared.whole)]
    for method in ("GenAtt", "Random"):
        assert torch.equal(*(own.scores[method][own.images.index("5.png")] for own in drawn))


def test_a_merged_run_resumes_and_nothing_is_measured_twice(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = measured(monkeypatch)
    merge([shared.first, shared.second], tmp_path / "all")
    before = values(tmp_path / "all")
    summary = run(shared.recipe(), tmp_path / "all")
    assert not made
    assert summary.left == 0
    assert summary.reused == summary.now
    assert values(tmp_path / "all") == before


def test_other_methods_are_joined_and_only_what_neither_has_is_run(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = merge([shared.first, shared.method], tmp_path / "all")
    told = Store(tmp_path / "all").manifest()
    assert list(told.resolved.methods) == ["GenAtt", "Random", "Rollout"]
    assert told.values == merged.values == 36
    state = CliRunner().invoke(app, ["bench", "status", str(tmp_path / "all"), "--json"])
    assert (json.loads(state.stdout)["done"], json.loads(state.stdout)["values"]) == (merged.done, 36)
    missing = {key[3] for key in values(shared.whole)} - {k[3] for k in values(shared.first) if k[1] == "Random"}
    made = measured(monkeypatch)
    summary = run(shared.recipe(MORE), tmp_path / "all")
    assert summary.left == 0
    assert sorted(set(made)) == sorted(("Random", name) for name in missing)
    whole, method = values(shared.whole), values(shared.method)
    assert values(tmp_path / "all") == whole | method


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (lambda f: of_recipe(f, name="other"), "the recipe is shared in"),
        (lambda f: of_recipe(f, seed=1), "the seed is 0 in"),
        (lambda f: of_recipe(f, target="label"), "the target is prediction in"),
        (lambda f: {"code": "0" * 16}, "the code of Patchlight"),
        (lambda f: {"versions": {"patchlight": "9.9"}}, "the version of Patchlight is"),
        (lambda f: {"device": "cuda:1"}, "the kind of device is cpu in"),
        (lambda f: {"models": {"Pocket": "0" * 16}}, "model 'Pocket' (weights"),
        (lambda f: {"classes": "0" * 16}, "the hash of the data's classes is"),
        (lambda f: {"made": {"GenAtt": {"Ins": "0", "Del": "1"}}}, "the code of method 'GenAtt' or of metric 'Ins'"),
        (
            lambda f: of_recipe(f, metrics=override(_resolved(f), settings={"Ins": {"steps": 3}}).metrics),
            "metric 'Ins' is",
        ),
        (
            lambda f: of_recipe(f, methods=override(_resolved(f), settings={"GenAtt": {"start": 1}}).methods),
            "method 'GenAtt' is",
        ),
        (lambda f: {"images": _images(f, contents=("x",) * 6)}, "different contents of 6 images"),
        (lambda f: {"images": _images(f, names=tuple("abcdef"))}, "6 of the 6 images of"),
    ],
)
def test_what_does_not_belong_together_is_refused(shared: Shared, tmp_path: Path, changes: Any, reason: str) -> None:
    other = copied(shared.second, tmp_path / "other", **changes(shared.second))
    with pytest.raises(PatchlightError, match="cannot be merged") as refused:
        merge([shared.first, other], tmp_path / "all")
    assert reason in str(refused.value)
    assert not (tmp_path / "all").exists()


def _resolved(folder: Path) -> Any:
    return Store(folder).manifest().resolved


def _images(folder: Path, **changes: Any) -> Any:
    return replace(Store(folder).manifest().images, **changes)


def test_the_third_is_compared_with_the_second(shared: Shared, tmp_path: Path) -> None:
    settings = {"Rollout": {"fusion": "min"}}
    other = copied(
        shared.method,
        tmp_path / "other",
        **of_recipe(shared.method, methods=override(_resolved(shared.method), settings=settings).methods),
    )
    with pytest.raises(PatchlightError, match="method 'Rollout' is"):
        merge([shared.first, shared.method, other], tmp_path / "all")


def test_other_formats_and_folders_with_something_in_them_are_refused(shared: Shared, tmp_path: Path) -> None:
    shutil.copytree(shared.second, tmp_path / "newer")
    told = json.loads((tmp_path / "newer" / "manifest.json").read_text())
    (tmp_path / "newer" / "manifest.json").write_text(json.dumps({**told, "format": 99}))
    with pytest.raises(PatchlightError, match="format 99"):
        merge([shared.first, tmp_path / "newer"], tmp_path / "all")
    with pytest.raises(PatchlightError, match="no run in"):
        merge([shared.first, tmp_path / "nothing"], tmp_path / "all")
    with pytest.raises(PatchlightError, match="already holds a run; give an empty folder"):
        merge([shared.first], shared.second)


def changed_rows(folder: Path, column: str, change: Any) -> None:
    """Another value in a column of every row of a run."""
    for path in sorted((folder / "units").glob("*.parquet")):
        table = table_of(path.read_bytes())
        own = pa.array([change(value) for value in table[column].to_pylist()], table.schema.field(column).type)
        replaced(path, parquet(table.set_column(table.column_names.index(column), column, own)))


def test_equal_cells_that_differ_are_reported_and_the_first_are_kept(shared: Shared, tmp_path: Path) -> None:
    for name, factor in (("rounding", 1 + 1e-5), ("other", 1.01)):
        shutil.copytree(shared.whole, tmp_path / name)
        changed_rows(tmp_path / name, "value", lambda value, factor=factor: value * factor)
    assert merge([shared.whole, tmp_path / "rounding"], tmp_path / "near").notes == ()
    merged = merge([shared.whole, tmp_path / "other"], tmp_path / "far")
    assert len(merged.notes) == 1
    assert "has 24 values that differ" in merged.notes[0]
    assert values(tmp_path / "far") == values(shared.whole)
    run(shared.recipe(), tmp_path / "far")
    assert any("has 24 values that differ" in note for note in Store(tmp_path / "far").manifest().notes)


def test_a_value_is_kept_where_the_first_run_failed(shared: Shared, tmp_path: Path) -> None:
    shutil.copytree(shared.whole, tmp_path / "failed")
    changed_rows(tmp_path / "failed", "error", lambda _: "no memory")
    changed_rows(tmp_path / "failed", "value", lambda _: None)
    merge([tmp_path / "failed", shared.first], tmp_path / "all")
    found, good = values(tmp_path / "all"), values(shared.first)
    assert len(found) == 24
    assert {key: found[key] for key in good} == good
    assert all(found[key][1] is None for key in found.keys() - good.keys())


def test_metrics_measured_apart_are_joined(shared: Shared, tmp_path: Path) -> None:
    whole = Store(shared.whole).manifest()
    for metric in ("Del", "Ins"):
        made = {method: {metric: own[metric]} for method, own in whole.made.items()}
        recipe = of_recipe(shared.whole, metrics={metric: whole.resolved.metrics[metric]})
        run = copied(shared.whole, tmp_path / metric, **recipe, made=made, plan=metric)
        for path in sorted((run / "units").glob("*.parquet")):
            table = table_of(path.read_bytes())
            replaced(path, parquet(table.filter(pa.array([own == metric for own in table["metric"].to_pylist()]))))
    merged = merge([tmp_path / "Ins", tmp_path / "Del"], tmp_path / "all")
    assert (merged.done, merged.values) == (24, 24)
    assert values(tmp_path / "all") == values(shared.whole)
    assert Store(tmp_path / "all").manifest().made == whole.made


def test_models_measured_apart_are_joined(shared: Shared, tmp_path: Path) -> None:
    whole = Store(shared.whole).manifest()
    other = copied(
        shared.whole,
        tmp_path / "other",
        **of_recipe(shared.whole, models={"Other": whole.resolved.models["Pocket"]}),
        models={"Other": "0" * 16},
        groups=tuple(group.model_copy(update={"model": "Other"}) for group in whole.groups),
        plan="other",
    )
    changed_rows(other, "model", lambda _: "Other")
    merged = merge([shared.first, other], tmp_path / "all")
    assert merged.values == 48
    assert merged.done == 24 + len(values(shared.first))
    assert Store(tmp_path / "all").manifest().models == {"Other": "0" * 16, "Pocket": whole.models["Pocket"]}


def test_a_damaged_file_is_left_out_and_reported(shared: Shared, tmp_path: Path) -> None:
    shutil.copytree(shared.whole, tmp_path / "damaged")
    path = sorted((tmp_path / "damaged" / "units").glob("*.parquet"))[0]
    path.write_bytes(path.read_bytes()[:-1])
    merged = merge([tmp_path / "damaged"], tmp_path / "all")
    assert f"'units/{path.name}' of" in merged.notes[0]
    assert 0 < merged.done < merged.values


def test_rows_without_their_maps_are_taken_from_another_run(shared: Shared, tmp_path: Path) -> None:
    shutil.copytree(shared.whole, tmp_path / "partial")
    gone = sorted((tmp_path / "partial" / "maps").iterdir())[0]
    gone.unlink()
    alone = merge([tmp_path / "partial"], tmp_path / "alone")
    assert alone.done == len(values(tmp_path / "alone")) < 24
    assert merge([tmp_path / "partial", shared.whole], tmp_path / "all").done == 24
    assert values(tmp_path / "all") == values(shared.whole)


def test_the_command_says_what_was_merged(shared: Shared, tmp_path: Path) -> None:
    out = str(tmp_path / "all")
    answer = CliRunner().invoke(app, ["bench", "merge", str(shared.first), str(shared.second), "--out", out])
    assert answer.exit_code == 0
    assert "24 of 24 values" in answer.stderr
    answer = CliRunner().invoke(app, ["bench", "merge", str(shared.first), "--out", out, "--json"])
    assert answer.exit_code == 2
    assert "already holds a run" in json.loads(answer.stdout)["error"]


def test_values_are_not_taken_from_other_code_or_another_device(shared: Shared, tmp_path: Path) -> None:
    other = copied(shared.whole, tmp_path / "code", code="0" * 16)
    with pytest.raises(PatchlightError, match=r"was measured with Patchlight .* other code of that version"):
        bring(other, tmp_path / "mine", shared.recipe())
    other = copied(shared.whole, tmp_path / "device", device="cuda:0")
    with pytest.raises(PatchlightError, match="was measured on cuda:0, but cpu rounds differently"):
        bring(other, tmp_path / "mine", shared.recipe())
    assert not (tmp_path / "mine").exists()


def test_nothing_is_brought_to_another_recipe_or_device(shared: Shared, tmp_path: Path) -> None:
    out = copied(shared.first, tmp_path / "mine", **of_recipe(shared.first, name="other"))
    with pytest.raises(PatchlightError, match="mine' holds a run of 'other', not of 'shared'; use another --out"):
        bring(shared.whole, out, shared.recipe())
    out = copied(shared.first, tmp_path / "gpu", device="cuda:0")
    with pytest.raises(PatchlightError, match="this run was started on cuda:0; cpu rounds differently"):
        bring(shared.whole, out, shared.recipe())
    assert not list(tmp_path.glob("*/earlier"))


def test_two_that_call_their_files_alike_are_both_brought(shared: Shared, tmp_path: Path) -> None:
    for k, source in enumerate((shared.first, shared.second)):
        other = tmp_path / str(k)
        shutil.copytree(source, other)
        for i, key in enumerate(Store(other).files()):
            for path in other.rglob(f"{key}-*"):
                path.rename(path.parent / f"unit{i}-{path.name.partition('-')[2]}")
        bring(other, tmp_path / "mine", shared.recipe())
        bring(other, tmp_path / "mine", shared.recipe())
    summary = run(shared.recipe(), tmp_path / "mine")
    assert summary.reused == 24
