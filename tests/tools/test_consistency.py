"""What is said about metrics: known orders and effects, and the tables of a run of the recipe on the bundled model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from patchlight.bench.local import RunOptions
from patchlight.bench.local import run as run_local
from patchlight.bench.recipe import override, read_recipe
from patchlight.core.errors import PatchlightError
from tests.bench.small import pictures
from tools.consistency import Run, agreement, as_markdown, between_halves, consistency, main, separation

METHODS = ["random", "a", "b", "c"]


def made(worths: dict[str, list[float]], spread: float = 0.0, images: int = 40) -> Run:
    """By metric, the methods' values: the same on every image, but for noise."""
    generator = torch.Generator().manual_seed(0)

    def column(worth: float) -> Tensor:
        return worth + spread * torch.randn(images, generator=generator, dtype=torch.float64)

    values = {(m, n): column(w) for n, own in worths.items() for m, w in zip(METHODS, own, strict=True)}
    kinds = {n: n.split()[0] for n in worths}
    return Run(values, METHODS, list(worths), kinds, kinds)


def test_separation_is_the_paired_effect() -> None:
    chance, values = torch.tensor([0.0, 1, 2, 3]), torch.tensor([1.0, 1, 5, 3.5])
    share, effect, t = separation(values, chance)
    gaps = [1, 0, 3, 0.5]
    mean = sum(gaps) / 4
    spread = math.sqrt(sum((g - mean) ** 2 for g in gaps) / 3)
    assert share == 3.5 / 4
    assert effect == pytest.approx(mean / spread)
    assert t == pytest.approx(mean / (spread / 2))
    assert separation(chance, chance)[:2] == (0.5, 0)
    assert separation(torch.tensor([math.nan, 1.0]), torch.zeros(2)).effect != 0, "one image is no pair"


def test_orders_agree_over_fills_models_and_halves() -> None:
    rising, falling = [0.0, 1, 2, 3], [0.0, 3, 2, 1]
    same = {"srg zero": rising, "srg black": [0.0, 2, 4, 9], "other": falling}  # kin do not count as others
    runs = {"one": made(same, 0.01), "two": made({**same, "other": rising}, 0.01)}
    found, taus = consistency(runs)
    by = {one.metric: one for one in found}
    assert taus["srg zero", "srg black"] == pytest.approx(1)
    assert taus["srg zero", "other"] == pytest.approx(0), "-1 on one model, 1 on the other"
    assert by["srg zero"].fills == pytest.approx(1)
    assert math.isnan(by["other"].fills), "it has one fill"
    assert by["srg zero"].models == pytest.approx(1)
    assert by["other"].models == pytest.approx(-1)
    assert by["other"].halves == pytest.approx(1)
    assert by["srg zero"].others == pytest.approx(0)
    assert by["srg zero"].told == 3
    assert by["srg zero"].share == 1
    assert abs(between_halves(made({"n": [0.0] * 4}, 1.0, images=400).table("n", METHODS))) < 0.35
    assert agreement([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)


FEW = ("SRG zero", "SRG road", "SaCo patch")


@pytest.mark.parametrize("metrics", [FEW, pytest.param(None, marks=pytest.mark.slow)])
def test_a_run_of_the_recipe_makes_tables(
    metrics: tuple[str, ...] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, text = read_recipe("metric-consistency")
    data = f"folder:{pictures(tmp_path / 'pictures', 4)}"
    own = {n: {"steps": 7} for n in metrics or () if n.startswith("SRG")}
    recipe = override(recipe, models=["vit_tiny=pocket"], data=data, quick=metrics is None, settings=own)
    if metrics is not None:
        few = {m: recipe.methods[m] for m in ("random", "rollout", "genatt")}
        recipe = recipe.model_copy(update={"methods": few, "metrics": {n: recipe.metrics[n] for n in metrics}})
    run_local(recipe, tmp_path / "run", RunOptions(text=text))
    assert main([str(tmp_path / "run"), str(tmp_path / "run"), "--out", str(tmp_path / "table.md")]) == 0
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    for label in (*recipe.metrics, *(f"{n}: mif" for n in recipe.metrics if n.startswith("SRG"))):
        assert table.count(f"\n| {label} |") == 3, label
    first = next(line for line in table.splitlines() if line.startswith("| SRG zero |"))
    assert first.split(" | ")[6] == "1.00", "the same run twice"
    assert "nan" not in table
    assert main([str(tmp_path / "run"), "--random", "chance"]) == 2
    assert "no method of these runs is called 'chance'" in capsys.readouterr().err


def test_one_method_has_no_order() -> None:
    run = made({"n": [0.0, 1, 2, 3]})
    alone = Run(
        {key: v for key, v in run.values.items() if key[0] in ("random", "a")},
        METHODS[:2],
        ["n"],
        {"n": "n"},
        {"n": "n"},
    )
    with pytest.raises(PatchlightError, match="one method beside random"):
        as_markdown({"m": alone})
