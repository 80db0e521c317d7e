"""Scenes with known causes: only the cause decides, and all tasks have the same pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import patchlight as pl
from patchlight.bench.local import run
from patchlight.bench.recipe import override, parse, read_recipe
from patchlight.bench.store import Store
from patchlight.core.errors import PatchlightError
from patchlight.data import open_data
from patchlight.data.ground_truth import COLD, DOTS, SIGNS, TASKS, WARM, find_task, sample_scenes
from patchlight.zoo import ground_truth
from tools.ground_truth_checks import answers, check_model, resample

YELLOW = torch.tensor([250.0, 230.0, 40.0])


class Counter(nn.Module):
    """Counts dots by their colour, and optionally also the ring."""

    def __init__(self, cheats: bool = False) -> None:
        super().__init__()
        self.colour = nn.Parameter(YELLOW / 127.5 - 1)
        self.cheats = cheats

    def forward(self, images: Tensor) -> Tensor:
        def count(colour: Tensor) -> Tensor:
            same = ((images - colour[:, None, None]).abs() < 0.02).all(1).float()
            return (nn.functional.max_pool2d(same[:, None], 8) > 0).flatten(1).sum(1)

        dots = count(self.colour)
        if self.cheats:
            dots = (dots + count(torch.tensor([210.0, 60.0, 210.0]) / 127.5 - 1)).clamp_max(3)
        return -(torch.arange(4) - dots[:, None]).abs()


@pytest.mark.parametrize("task", TASKS)
def test_the_signs_decide_and_nothing_else(task: str) -> None:
    generator = torch.Generator().manual_seed(3)
    scenes = sample_scenes(200, generator)
    signs = find_task(task).signs
    rest = [sign for sign in range(len(SIGNS)) if sign not in signs]
    other, moved = resample(scenes, rest, generator, ground=True), resample(scenes, signs, generator)
    assert torch.equal(answers(other, task), answers(scenes, task))
    assert (answers(moved, task) != answers(scenes, task)).any(1).double().mean() > 0.2
    for both in (other, moved):
        assert all(len(set(row)) == len(SIGNS) for row in both.places.tolist())
    assert torch.equal(other.places[:, list(signs)], scenes.places[:, list(signs)])
    assert torch.equal(moved.places[:, rest], scenes.places[:, rest])
    label = scenes.label(task)
    causes = scenes.causes(task, label)
    here = other.causes(task, other.label(task))
    assert torch.equal(causes, here)
    pixels = (scenes.images() != other.images()).any(1)
    cells = pixels.view(-1, 8, 8, 8, 8).any(4).any(2)
    assert cells.double().mean() > 0.9  # the background is another one


def test_pictures_are_shared_and_masks_are_not() -> None:
    every = {task: open_data("ground-truth", task=task, scenes=6) for task in TASKS}
    for i in range(6):
        samples = {task: data[i] for task, data in every.items()}
        assert len({sample.image.tobytes() for sample in samples.values()}) == 1
        sizes = {task: int((sample.mask == 1).sum()) // 64 for task, sample in samples.items()}
        assert sizes["count"] == samples["count"].label in (1, 2, 3)
        assert sizes == {**dict.fromkeys(TASKS, 1), "either": 2, "both": 2, "count": sizes["count"]}
        assert torch.equal(samples["either"].mask, samples["both"].mask)
        assert torch.equal(samples["mosaic"].mask, samples["distractor"].mask) == (i % 2 == 0)
    longer = open_data("ground-truth", scenes=9)
    assert longer[5].image.tobytes() == every["mosaic"][5].image.tobytes()
    assert open_data("ground-truth", scenes=6, seed=1)[5].image.tobytes() != longer[5].image.tobytes()
    with pytest.raises(PatchlightError, match="unknown task 'colour'"):
        find_task("colour")


def test_a_mosaic_has_a_cause_for_each_texture() -> None:
    scenes = sample_scenes(50, torch.Generator().manual_seed(0), shown=True)
    for sign in (WARM, COLD):
        causes = scenes.causes("mosaic", scenes.label("mosaic", ask_cold=sign == COLD)).flatten(1)
        assert torch.equal(causes.nonzero()[:, 1], scenes.places[:, sign])


def test_checks_tell_a_counter_from_one_that_cheats() -> None:
    honest = check_model(Counter(), "count", 300)
    assert honest["accuracy"] == honest["explained"] == honest["follows"] == honest["ignores"] == 1
    assert honest["without"] == 0
    cheat = check_model(Counter(cheats=True), "count", 300)
    assert cheat["accuracy"] < 0.8
    assert cheat["ignores"] < 0.8


def test_dots_are_the_cause_of_the_count() -> None:
    scenes = sample_scenes(40, torch.Generator().manual_seed(1), shown=True)
    causes = scenes.causes("count", scenes.label("count"))
    seen = ((scenes.images().float() - YELLOW[:, None, None]).abs() < 1).all(1)
    cells = seen.view(-1, 8, 8, 8, 8).any(4).any(2)
    assert torch.equal(cells, causes)
    assert torch.equal(causes.flatten(1).sum(1), scenes.present[:, list(DOTS)].sum(1))


RECIPE = """\
name = "tasks"
[models]
position = "pocket"
both = {name = "pocket", sigmoid = false}
[data]
kind = "ground-truth"
images = 2
[data_of]
position = {task = "position"}
both = {task = "both"}
[methods]
random = "random"
[metrics]
AP = {metric = "ap", unit = "patch"}
"""


def test_a_recipe_has_data_of_its_own_for_each_model(tmp_path: Path) -> None:
    recipe = parse(RECIPE)
    assert recipe.data_for("both").options == {"task": "both"}
    run(recipe, tmp_path / "run")
    columns = Store(tmp_path / "run").results().columns
    vit = pl.load("pocket")
    for task in recipe.models:
        data = open_data("ground-truth", task=task)
        samples = [data[i * 500] for i in range(2)]
        batch = vit.batch([sample.image for sample in samples])
        masks = torch.stack([vit.preprocess.mask(sample.mask) for sample in samples])
        found = pl.evaluate(vit, batch, "random", "ap", masks=masks, unit="patch")
        assert torch.equal(columns[task, "random", "AP"].values, found.values)
    assert not torch.equal(columns["both", "random", "AP"].values, columns["position", "random", "AP"].values)
    with pytest.raises(PatchlightError, match="no model is called 'colour'"):
        parse(RECIPE.replace("both = {task", "colour = {task"))
    assert override(recipe, data="counting:").data_of == {}


@pytest.mark.parametrize("task", ground_truth.tasks())
def test_models_know_their_task(task: str) -> None:
    vit = pl.load(f"ground-truth:{task}")
    card = ground_truth.description()["tasks"][task]
    assert tuple(vit.labels) == TASKS[task].classes
    assert vit.grid == (8, 8)
    assert min(card["checked"][key] for key in ("accuracy", "explained", "follows", "ignores")) >= 0.98
    assert tuple(card["classes"]) == TASKS[task].classes
    shares = check_model(vit.model, task, 60, seed=7)
    assert min(shares[key] for key in ("accuracy", "explained", "follows", "ignores")) >= 0.9
    assert shares["without"] < 0.6


def test_the_recipe_asks_each_model_its_own_task() -> None:
    recipe, _ = read_recipe("ground-truth")
    assert list(recipe.models) == list(recipe.data_of) == list(ground_truth.tasks())
    for task, model in recipe.models.items():
        assert model.name == f"ground-truth:{task}"
        assert recipe.data_for(task).options == {"task": task}
    with pytest.raises(PatchlightError, match="unknown ground-truth task 'colour'"):
        pl.load("ground-truth:colour")
