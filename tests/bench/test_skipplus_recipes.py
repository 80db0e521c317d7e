"""The recipes of SkipPLUS's figures: siblings measure the same, and MURA's run on a model with one output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from patchlight.bench.local import run
from patchlight.bench.recipe import Recipe, override, read_recipe
from patchlight.bench.store import Store
from patchlight.core.errors import PatchlightError
from patchlight.core.registry import settings_of
from patchlight.report.figures import FIGURES
from patchlight.zoo import pocket


def recipe_named(name: str) -> Recipe:
    return read_recipe(name)[0]


@pytest.mark.parametrize("figure", ["3", "4", "7"])
def test_mura_has_a_recipe_for_each_figure(figure: str) -> None:
    """Another model and other data, and everything else as on ImageNet."""
    imagenet, mura = recipe_named(f"skipplus-figure-{figure}"), recipe_named(f"skipplus-figure-{figure}-mura")
    for same in ("target", "seed", "batch_size", "methods", "metrics", "quick"):
        assert getattr(mura, same) == getattr(imagenet, same), same
    assert (imagenet.data.kind, imagenet.data.images, imagenet.data.pick) == ("imagenet", 5000, "random")
    assert (mura.data.kind, mura.data.images, mura.data.pick) == ("mura", 2000, "random")
    assert mura.data.options == {"split": "train"}
    assert [model.name for model in mura.models.values()] == ["vit_base_patch16_224"]


@pytest.mark.parametrize(
    "name", ["skipplus-figure-3", "skipplus-figure-4", "skipplus-segmentation", "skipplus-figures-8-12"]
)
def test_eva_large_is_beside_vit_base(name: str) -> None:
    assert list(recipe_named(name).models) == ["ViT-B/8", "EVA-L/14"]


@pytest.mark.parametrize(("name", "depth"), [("skipplus-figure-7", 12), ("skipplus-figure-7-eva", 24)])
def test_the_first_blocks_of_figure_7_are_blocks_of_the_model(name: str, depth: int) -> None:
    import timm

    recipe = recipe_named(name)
    (model,) = recipe.models.values()
    with torch.device("meta"):
        assert len(timm.create_model(model.name.partition(".")[0]).blocks) == depth
    starts: dict[str, set[int]] = {}
    for spec in recipe.methods.values():
        starts.setdefault(spec.registered_name, set()).add(spec.request.settings.get("start", 0))
    for method in ("decompx", "ixg", "genatt"):
        assert {0, depth // 2} <= starts[method], "PLUS and SkipPLUS are among them"
        assert max(starts[method]) < depth
    assert depth - 1 in starts["decompx"]
    assert recipe.metrics == recipe_named("skipplus-figure-7").metrics


def test_figures_and_recipes_show_the_same_methods() -> None:
    def drawn(*figures: int) -> dict[str, Any]:
        tables = (settings_of(FIGURES[f"skipplus-{figure}"].function)["methods"].default for figure in figures)
        return {label: {"method": m} if isinstance(m, str) else m for table in tables for label, m in table.items()}

    tables = {"figure-3": drawn(3), "figure-4": drawn(4), "figures-8-12": drawn(*range(8, 13))}
    for name, methods in {**tables, "segmentation": drawn(3, 4)}.items():
        specs = recipe_named(f"skipplus-{name}").methods
        assert methods == {label: {"method": spec.method, **spec.settings} for label, spec in specs.items()}, name


@pytest.fixture
def mura(tmp_path: Path) -> Path:
    """Four radiographs of MURA's training set, cut from the bundled photographs."""
    root = tmp_path / "MURA-v1.1"
    photos = sorted(pocket.PHOTOS.glob("*.jpg"))
    names = [
        f"train/XR_WRIST/patient{i}/study1_{word}/image1.png"
        for i, word in enumerate(["positive", "negative", "positive", "negative"])
    ]
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True)
        with Image.open(photos[i % len(photos)]) as photo:
            photo.convert("L").resize((72, 64)).rotate(9 * i).save(root / name)
    (root / "train_image_paths.csv").write_text("".join(f"MURA-v1.1/{name}\n" for name in names), encoding="utf-8")
    return root


def one_output(path: Path) -> Path:
    """Weights of a ViT with one output."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=1)
    torch.nn.init.normal_(model.head.weight)
    save_file(model.state_dict(), path)
    return path


def test_a_mura_recipe_runs_on_a_model_with_one_output(mura: Path, tmp_path: Path) -> None:
    """Labels 0 and 1 are the two outcomes of the one output, and every cell has a value."""
    weights = one_output(tmp_path / "one.safetensors")
    recipe = override(
        recipe_named("skipplus-figure-4-mura"),
        models=["vit_tiny_patch16_224"],
        weights=[str(weights)],
        data=str(mura),
        quick=True,
    )
    kept = {label: recipe.methods[label] for label in ("Random", "AttIxG∘PLUS", "DecompX∘PLUS")}
    recipe = recipe.model_copy(update={"methods": kept})
    run(recipe, tmp_path / "run")
    results = Store(tmp_path / "run").results()
    assert len(results.images["vit_tiny_patch16_224"]) == 4
    assert len(results.columns) == 3 * 4
    for column in results.columns.values():
        assert torch.as_tensor(column.values).isfinite().all()


def test_a_mura_recipe_without_its_weights_says_which_file_is_missing(
    mura: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PatchlightError, match=r"mura-vit-base\.safetensors"):
        run(override(recipe_named("skipplus-figure-3-mura"), data=str(mura), quick=True), tmp_path / "run")
