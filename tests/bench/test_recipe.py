"""Recipes: what they say, what an error says, and what a user may put in their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchlight.anatomy.spec import PreprocessSpec
from patchlight.bench.recipe import Quick, override, parse, read_recipe, with_quick_settings
from patchlight.core.errors import PatchlightError
from patchlight.core.recipes import bundled_recipes, key_lines
from patchlight.methods.base import METHODS
from patchlight.study.spec import MetricSpec
from tests.bench.small import text

BENCH = list(bundled_recipes())


def line(of: str, word: str) -> int:
    return next(i for i, row in enumerate(of.splitlines(), 1) if word in row)


@pytest.mark.parametrize(
    ("old", "new", "at", "told"),
    [
        ('GenAtt = "genatt"', 'GenAtt = "genat"', "genat", "did you mean 'genatt'"),
        ('fusion = "max"', 'fusion = "most"', "most", "fusion='most'"),
        ('fusion = "max"', "fuse = 1", "fuse", "no setting 'fuse'"),
        ('metric = "deletion"', 'metric = "delete"', '"delete"', "no metric is called 'delete'"),
        ('kind = "folder"', 'kind = "folders"', "folders", "did you mean 'folder'"),
        ("batch_size = 2", "batch_size = 0", "batch_size", "'batch_size'"),
        ("batch_size = 2", "batchsize = 2", "batchsize", "did you mean 'batch_size'"),
        ('target = "prediction"', 'target = "truth"', "truth", "'label' or 'prediction'"),
        ("GenAtt = [0.5, nan]", "GenAtt = [0.5]", "[0.5]", "give 2 numbers"),
        ("GenAtt = [0.5, nan]", "Genatt = [0.5, nan]", "Genatt", "no method is called 'Genatt'"),
        ("[published.Pocket]", "[published.Pokket]", "Pokket", "did you mean 'Pocket'"),
        ("insertion = {steps = 2}", "insertion = {step = 2}", "{step =", "no setting 'step'"),
        ("insertion = {steps = 2}", "insert = {steps = 2}", "insert =", "the recipe has no 'insert'"),
        ("batch_size = 2", 'quick.leave_out = ["Genatt"]', "leave_out", "did you mean 'GenAtt'"),
        ("batch_size = 2", "batch_size = = 2", "= =", "not TOML"),
        ("[metrics]", "[metrix]", "metrix", "there is no key 'metrix'; did you mean 'metrics'?"),
        ('Rollout = "rollout"', 'Rollout = {method = "rollout", upsampling = "best"}', "best", "upsampling"),
        ('kind = "folder"', 'kind = "folder"\npik = "first"', "pik", "did you mean 'pick'"),
        ('"pocket"', '{name = "pocket", preprocess = {crop = 1.0}}', "crop", "did you mean 'crop_pct'"),
        ("insertion = {steps = 2}", "insertion = {steps = 2}\n[quick.methods]\nrollout = {fuse = 1}", "fuse", "'fuse'"),
    ],
)
def test_an_error_names_the_line_and_what_would_work(tmp_path: Path, old: str, new: str, at: str, told: str) -> None:
    good = text(tmp_path)
    bad = good.replace(old, new)
    assert bad != good
    expected = line(bad, at)
    with pytest.raises(PatchlightError) as caught:
        parse(bad, "r.toml")
    assert str(caught.value).startswith(f"r.toml, line {expected}: ")
    assert told in str(caught.value)


def test_a_missing_table_and_a_missing_file_are_reported(tmp_path: Path) -> None:
    with pytest.raises(PatchlightError, match=r"'data' is missing"):
        parse('name = "x"\n[models]\na = "pocket"\n[methods]\nb = "genatt"\n[metrics]\nc = "deletion"\n')
    with pytest.raises(PatchlightError, match="no recipe at"):
        read_recipe(tmp_path / "none.toml")


def test_lines_are_found_through_quotes_dots_and_long_strings() -> None:
    toml = 'a = """\nb = 1\n"""\n["x y".z]\n"k 1" = 2\nd.e = [\n 1,\n]\n'
    assert key_lines(toml) == {("a",): 1, ("x y", "z"): 4, ("x y", "z", "k 1"): 5, ("x y", "z", "d", "e"): 6}


def test_quick_settings_go_by_the_registered_name(tmp_path: Path) -> None:
    quick = with_quick_settings(parse(text(tmp_path).replace("[quick.", '[quick]\nleave_out = ["Random"]\n[quick.')))
    assert list(quick.methods) == ["GenAtt", "Rollout (max)", "Rollout"]
    assert quick.metrics["Ins"].settings["steps"] == 2
    assert quick.metrics["Del"].settings["steps"] == 3
    assert quick.metrics["Del"].scale == 100


def test_a_users_model_stands_for_the_one_whose_label_it_is_given(tmp_path: Path) -> None:
    two = text(tmp_path).replace(
        'Pocket = "pocket"', 'ViT = "vit_base_patch16_224"\nDeiT = "deit_base_patch16_224"\nPocket = "pocket"'
    )
    models = ["DeiT=deit_tiny_patch16_224", "ViT=pocket"]
    recipe = override(parse(two), models=models, weights=["w.safetensors"], data="pets:/data", images=5, seed=3)
    assert {k: (m.stands_for, m.weights) for k, m in recipe.models.items()} == {
        "deit_tiny_patch16_224": ("DeiT", "w.safetensors"),
        "pocket": ("ViT", None),
    }
    assert (recipe.data.kind, recipe.data.path, recipe.data.images) == ("pets", "/data", 5)
    assert recipe.data.stands_for == "folder"
    assert recipe.seed == 3
    with pytest.raises(PatchlightError, match="not a model of the recipe"):
        override(parse(two), models=["Vit=pocket"])
    with pytest.raises(PatchlightError, match="2 weights were given for 1 model"):
        override(parse(two), models=["ViT=pocket"], weights=["a", "b"])
    with pytest.raises(PatchlightError, match=r"several models; give 'ViT=a' or 'DeiT=a' or 'Pocket=a'"):
        override(parse(two), models=["a"])


def test_a_model_needs_no_label_where_the_recipe_has_one(tmp_path: Path) -> None:
    found = override(parse(text(tmp_path)), models=["vit_tiny_patch16_224"], weights=["w.safetensors"]).models
    assert {k: (m.stands_for, m.weights) for k, m in found.items()} == {
        "vit_tiny_patch16_224": ("Pocket", "w.safetensors")
    }
    assert override(parse(text(tmp_path)), weights=["w.safetensors"]).models["Pocket"].weights == "w.safetensors"


def test_the_same_model_given_again_keeps_its_stage(tmp_path: Path) -> None:
    staged = parse(text(tmp_path).replace('Pocket = "pocket"', 'Pocket = {name = "swin_tiny", stage = 2}'))
    assert override(staged, models=["Pocket=swin_tiny"], weights=["w.safetensors"]).models["Pocket"].stage == 2
    assert override(staged, models=["Pocket=pvt_v2_b0"]).models["pvt_v2_b0"].stage is None


def test_published_numbers_follow_a_stand_in(tmp_path: Path) -> None:
    recipe = parse(text(tmp_path))
    assert recipe.number("Pocket", "GenAtt", "Ins") == 0.5
    assert recipe.number("Pocket", "GenAtt", "Del") is None
    assert recipe.number("Pocket", "Rollout", "Ins") is None
    other = override(recipe, models=["Pocket=vit_tiny_patch16_224"])
    assert other.number("vit_tiny_patch16_224", "GenAtt", "Ins") == 0.5


@pytest.mark.parametrize("name", BENCH)
def test_every_recipe_of_the_project_is_valid(name: str) -> None:
    recipe, _ = read_recipe(name)
    assert recipe.name == name
    assert recipe.paper
    assert recipe.notes
    assert recipe.quick != Quick()


def test_a_methods_own_upsampling_reaches_the_metrics_that_enlarge_maps() -> None:
    table = with_quick_settings(read_recipe("diffmask-table-1")[0])
    ours, others = table.methods["Ours"], table.methods["Grad-CAM"]
    assert "upsampling" not in ours.settings
    for metric in table.metrics.values():
        assert ours.measured_by(metric).settings["upsampling"] == "nearest"
        assert others.measured_by(metric).settings["upsampling"] == "bilinear"
    assert "upsampling" not in ours.measured_by(MetricSpec(metric="max-sensitivity")).settings


def test_settings_of_a_user_are_checked_at_once(tmp_path: Path) -> None:
    recipe = parse(text(tmp_path))
    changed = override(recipe, settings={"Rollout": {"fusion": "min"}, "Del": {"steps": 9}})
    assert changed.methods["Rollout"].request.settings["fusion"] == "min"
    assert changed.metrics["Del"].request.settings["steps"] == 9
    assert changed.methods["GenAtt"].request is recipe.methods["GenAtt"].request, "nothing is resolved twice"
    for wrong, told in (({"fusion": "most"}, "fusion='most'"), ({"upsampling": "best"}, "upsampling='best'")):
        with pytest.raises(PatchlightError, match=told):
            override(recipe, settings={"Rollout": wrong})


def test_what_is_said_about_models_goes_to_each_in_order(tmp_path: Path) -> None:
    prepared = PreprocessSpec(crop_pct=0.5)
    options = {"labels": ["l.txt"], "preprocess": [prepared]}
    found = override(parse(text(tmp_path)), model_options=options, flags={"sigmoid": True, "pretrained": None}).models[
        "Pocket"
    ]
    assert (found.labels, found.preprocess, found.sigmoid, found.pretrained) == ("l.txt", prepared, True, None)
    with pytest.raises(PatchlightError, match="2 preprocess were given for 1 model"):
        override(parse(text(tmp_path)), model_options={"preprocess": [prepared, prepared]})


@pytest.mark.parametrize("name", ["tokentm-readings", "tokentm-readings-segmentation"])
def test_every_reading_of_tokentm_is_measured(name: str) -> None:
    """Both recipes have the same rows: each preset under its own name, and two rows to compare with."""
    methods = read_recipe(name)[0].methods
    assert methods == read_recipe("tokentm-readings")[0].methods
    readings = {label: spec.settings["preset"] for label, spec in methods.items() if spec.method == "tokentm"}
    assert readings == {preset: preset for preset in METHODS["tokentm"].presets}
    assert {spec.method for spec in methods.values()} == {"tokentm", "genatt", "random"}
