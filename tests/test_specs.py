"""What recipes name: which images, whose preprocessing, and names that are resolved once."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import patchlight as pl
from patchlight import engine
from patchlight.anatomy.spec import ModelSpec, PreprocessSpec
from patchlight.bench.local import run
from patchlight.bench.plan import plan
from patchlight.bench.recipe import override, parse
from patchlight.bench.unit import Resources, run_unit
from patchlight.core.errors import PatchlightError
from patchlight.data.spec import DataSpec
from patchlight.study import evaluate, spec
from patchlight.study.spec import MethodSpec, MetricSpec
from patchlight.trained.diffmask.settings import DiffMaskRecipe
from patchlight.trained.recipe import data_at
from tests.bench.small import pictures, recipe, text, units


def numbered(count: int) -> list[str]:
    return [f"{i}.png" for i in range(count)]


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"images": 9}, [0, 1, 2, 3, 4, 5]),
        ({"images": 3}, [0, 2, 4]),
        ({"images": 3, "pick": "first"}, [0, 1, 2]),
        ({"skip": 2}, [2, 3, 4, 5]),
        ({"skip": 2, "images": 2}, [2, 4]),
        ({"skip": 2, "images": 3, "pick": "first"}, [2, 3, 4]),
        ({"skip": 4, "images": 3, "pick": "random"}, [4, 5]),
        ({"list": "some"}, [5, 1, 4, 0]),
        ({"list": "some", "skip": 1}, [1, 4, 0]),
        ({"list": "some", "every": 2}, [5, 4]),
        ({"list": "some", "images": 2}, [5, 4]),
        ({"list": "some", "images": 2, "pick": "first"}, [5, 1]),
        ({"list": "some", "images": 9, "pick": "random"}, [5, 1, 4, 0]),
    ],
)
def test_which_images(
    about: dict[str, Any], expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("some").write_text("5.png\n1.png\n4.png\n0.png\n", encoding="utf-8")
    assert list(DataSpec(kind="folder", **about).select_indices(numbered(6))) == expected


def test_a_list_belongs_to_its_data(tmp_path: Path) -> None:
    spec = DataSpec(kind="cifar10", list="mine.txt", skip=3, every=2, images=4)
    assert spec.at("/x").list == spec.at("cifar10:/x").list == "mine.txt"
    assert spec.at("pets:/x").list is None
    other = spec.with_list("other.txt")
    assert (other.list, other.skip, other.every, other.images) == ("other.txt", 0, 1, None)
    (tmp_path / "two").write_text("3.png\n1.png\n", encoding="utf-8")
    with pytest.raises(PatchlightError, match=r"no images in '.*two' after the first 2"):
        DataSpec(kind="folder", path="x", list=str(tmp_path / "two"), skip=2).select_indices(numbered(5))


def test_images_at_random_follow_the_seed() -> None:
    spec = DataSpec(kind="folder", images=10, skip=5, pick="random")
    drawn = [list(spec.select_indices(numbered(100), seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == sorted(set(drawn[0]))
    assert all(5 <= i < 100 for i in drawn[0])
    with pytest.raises(PatchlightError, match="no images in 'x' after the first 5"):
        DataSpec(kind="folder", path="x", skip=5).select_indices(numbered(5))


def test_the_images_of_a_training_are_the_first_ones() -> None:
    cifar = DiffMaskRecipe.read("diffmask-cifar10")
    assert cifar.data is not None
    assert cifar.held_out is not None
    assert list(cifar.data.select_indices(numbered(50_000))) == list(range(40_000))
    assert list(cifar.held_out.select_indices(numbered(10_000))) == list(range(1000, 1512))
    assert (cifar.data.options, cifar.held_out.options) == ({"split": "train"}, {"split": "test"})


def test_data_at_a_folder_or_of_a_kind(tmp_path: Path) -> None:
    spec = DataSpec(kind="cifar10", options={"split": "test"}, images=5)
    assert spec.at("/x") == spec.at("cifar10:/x") == spec.model_copy(update={"path": "/x"})
    other = spec.at("pets:/x")
    assert (other.kind, other.path, other.options, other.images, other.stands_for) == ("pets", "/x", {}, 5, "cifar10")
    assert spec.at("C:/x").path == "C:/x"
    assert data_at(str(tmp_path)).kind == "folder"
    (tmp_path / "data_batch_1.bin").touch()
    assert data_at(str(tmp_path)).kind == "cifar10"
    assert data_at(f"folder:{tmp_path}").kind == "folder"


def test_a_model_of_another_name_keeps_nothing_of_the_recipes() -> None:
    own = ModelSpec(name="a", weights="w", labels="l", stage=2, preprocess=PreprocessSpec(crop_pct=0.5))
    assert own.other() == own.other("a") == own
    assert own.other("a", weights="v") == own.model_copy(update={"weights": "v"})
    assert own.other("b", labels="m") == ModelSpec(name="b", labels="m")


def test_a_model_is_shown_images_as_the_recipe_says(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("\n".join(f"class {i}" for i in range(10)))
    plain = pl.load("pocket").preprocess
    spec = ModelSpec.model_validate(
        {"name": "pocket", "labels": str(tmp_path / "labels.txt"), "preprocess": {"mean": [0.5, 0.5, 0.5]}}
    )
    vit = spec.load()
    assert (vit.preprocess.mean, vit.preprocess.std) == ((0.5, 0.5, 0.5), plain.std)
    assert vit.label(3) == "class 3"


def test_a_name_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(counts: list[str], original: Callable[..., Any]) -> Callable[..., Any]:
        def call(label: str, *args: Any, **options: Any) -> Any:
            counts.append(label)
            return original(label, *args, **options)

        return call

    resolved: list[str] = []
    anew: list[str] = []
    monkeypatch.setattr(spec, "resolve", counted(resolved, spec.resolve))
    monkeypatch.setattr(spec, "resolve_metric", counted(resolved, spec.resolve_metric))
    monkeypatch.setattr(engine, "resolve", counted(anew, engine.resolve))
    monkeypatch.setattr(evaluate, "resolve_metric", counted(anew, evaluate.resolve_metric))
    read = parse(text(pictures(tmp_path / "images", 4)).partition("[quick.")[0])
    run(override(read, seed=1), tmp_path / "run")
    assert sorted(resolved) == ["deletion", "genatt", "insertion", "random", "rollout", "rollout"]
    assert not anew


def test_explain_and_evaluate_take_what_is_resolved() -> None:
    vit, images = pl.load("pocket"), torch.rand(2, 3, 32, 32)
    method = MethodSpec.model_validate({"method": "rollout", "fusion": "max"})
    maps = pl.explain(vit, images, [method.request])["rollout"]
    assert torch.equal(maps.scores, pl.explain(vit, images, "rollout", fusion="max").scores)
    metric = MetricSpec.model_validate({"metric": "deletion", "steps": 3})
    found = pl.evaluate(vit, images, maps, [metric.request])["deletion"]
    assert torch.equal(found.values, pl.evaluate(vit, images, maps, "deletion", steps=3).values)
    with pytest.raises(PatchlightError, match="is not a method"):
        pl.explain(vit, images, [metric.request])  # type: ignore[list-item]


def test_a_unit_can_be_sent_to_another_process(tmp_path: Path) -> None:
    unit = units(plan(recipe(pictures(tmp_path / "images", 2))))[0]
    run_unit(unit, Resources())
    sent = pickle.loads(pickle.dumps(unit))
    assert (sent.key, sent.group.methods) == (unit.key, unit.group.methods)
    values = [[row.value for row in run_unit(one, Resources()).rows] for one in (unit, sent)]
    assert values[0] == values[1]


def test_a_model_is_loaded_as_the_recipe_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from patchlight.anatomy import load

    vit = load.load("pocket")
    asked: dict[str, object] = {}
    monkeypatch.setattr(load, "load", lambda name, **options: asked.update(options) or vit)
    ModelSpec(name="pocket", sigmoid=True, pretrained=False).load()
    assert (asked["sigmoid"], asked["pretrained"]) == (True, False)
    asked.clear()
    ModelSpec(name="pocket").load()
    assert "sigmoid" not in asked
    spec = ModelSpec(name="pocket", sigmoid=True).other(weights="w", pretrained=False, preprocess=None)
    assert (spec.weights, spec.sigmoid, spec.pretrained) == ("w", True, False)
    assert ModelSpec(name="pocket", sigmoid=True).other("vit_tiny_patch16_224", labels="l").sigmoid is None


def test_a_recipe_s_model_may_be_asked_by_images(tmp_path: Path) -> None:
    """Reference images are shown to the model as the recipe's images are, and tell its runs apart."""
    from patchlight.bench.plan import model_digest
    from patchlight.zoo import pocket

    cat, dog = (str(pocket.PHOTOS / f"{name}.jpg") for name in ("cat", "dog"))
    squashed = {"fit": "squash"}
    plain = ModelSpec(name="pocket", preprocess=squashed).load()
    one = ModelSpec(name="pocket", similar_to=(cat, dog), preprocess=squashed).load()
    assert one.labels == ["cat", "dog"]
    expected = torch.nn.functional.cosine_similarity(plain.features_of([cat]), plain.features_of([dog]))
    assert one.logits(one.batch([cat]))[0, 1] == pytest.approx(float(expected), abs=1e-5)
    other = ModelSpec(name="pocket", similar_to=(cat,), preprocess=squashed).load()
    assert len({model_digest(vit) for vit in (plain, one, other)}) == 3
    with pytest.raises(PatchlightError, match="one of the two"):
        ModelSpec(name="pocket", similar_to=(cat,), texts=("a dog",)).load()
