"""The counting task: the generator as published, the exact search for a threshold, and the whole task, small."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import patchlight as pl
from patchlight.core.errors import PatchlightError
from patchlight.data.counting import RED, counting_grids, draw_grids
from patchlight.study import counting
from patchlight.study.counting import CountingSize, CountingTask, best_threshold, judge
from patchlight.trained.diffmask import DiffMaskSettings


def test_grids_are_the_papers() -> None:
    sizes = [len(counting_grids(part=part)) for part in ("train", "validation", "test")]  # type: ignore[arg-type]
    assert sizes == [600, 33, 33]
    grids = counting_grids(3000, seed=1)
    assert grids.images.shape == (3000, 3, 48, 48)
    assert set(grids.images.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(grids.labels, grids.red.flatten(1).sum(1))
    assert torch.bincount(grids.labels, minlength=10).tolist() == pytest.approx([300] * 10, abs=70)
    patches = grids.images.unfold(2, 16, 16).unfold(3, 16, 16).flatten(4)
    assert bool((patches == patches[..., :1]).all()), "a patch has one colour"
    colours = {tuple(c) for c in patches[..., 0].permute(0, 2, 3, 1).reshape(-1, 3).tolist()}
    assert len(colours) == 6
    assert (-1.0, -1.0, -1.0) not in colours
    assert (1.0, 1.0, 1.0) not in colours
    red = patches[..., 0].permute(0, 2, 3, 1)[grids.red]
    assert {tuple(c) for c in red.tolist()} == {(1.0, -1.0, -1.0)}
    where = grids.red.double().mean(0)
    assert float((where - 0.5).abs().max()) < 0.05, "red patches stand anywhere"


def test_grids_follow_their_seed_and_parts_differ() -> None:
    a, b, c = counting_grids(20, 0), counting_grids(20, 0), counting_grids(20, 1)
    assert torch.equal(a.images, b.images)
    assert not torch.equal(a.images, c.images)
    assert not torch.equal(a.images, counting_grids(20, 0, "test").images)
    six = counting_grids(500, distractors=6).images
    assert bool((six[:, :, ::16, ::16].sum(1) == 3).any()), "white is the sixth"
    with pytest.raises(PatchlightError, match="give 5"):
        counting_grids(3, distractors=4)


def test_one_grid_by_hand() -> None:
    grid = draw_grids(torch.tensor([[[RED, 1, 2], [3, RED, 5], [6, 6, 1]]]))
    assert grid.labels.tolist() == [2]
    assert grid.images[0, :, 0, 0].tolist() == [1, -1, -1]
    assert grid.images[0, :, 0, 16].tolist() == [-1, -1, 1]
    assert grid.images[0, :, 47, 0].tolist() == [1, 1, -1]


def test_the_best_threshold_is_the_best_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = torch.rand(40, 5, generator=generator) < 0.5
    scores = torch.rand(40, 5, generator=generator).round(decimals=2) + 0.6 * inside
    share, at = best_threshold(scores, inside)
    tried = [float(((scores > t) == inside).all(1).double().mean()) for t in [*scores.flatten().tolist(), -1.0]]
    assert share == max(tried)
    assert float(((scores > at) == inside).all(1).double().mean()) == share


def test_verdicts_need_one_side_for_all_grids() -> None:
    red = counting_grids(60).red
    perfect = judge("m", red.float(), red, 0.5)
    assert (perfect.red, perfect.complement) == (1, 0)
    assert judge("m", (~red).float(), red, 0.5).exact == 1
    mixed = red.float()
    mixed[::2] = 1 - mixed[::2]
    assert judge("m", mixed, red, 0.5).exact == pytest.approx(0.5, abs=0.02)
    assert judge("m", 7 * red.float() - 3, red).exact == 1
    scaled = red.float() * torch.linspace(1, 100, 60)[:, None, None] + torch.linspace(0, 50, 60)[:, None, None]
    found = judge("m", scaled[red.flatten(1).any(1)], red[red.flatten(1).any(1)])
    assert found.normalised
    assert found.exact > 0.8


def test_sizes_and_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--size` is the ViT, `--preset` the objective of the gates."""
    trained: list[tuple[CountingSize, DiffMaskSettings]] = []

    class Enough(Exception):
        pass

    def train(vit: Any, loader: Any, settings: DiffMaskSettings, *_: Any, **__: Any) -> None:
        trained.append((vit, settings))
        raise Enough

    def train_counter(size: CountingSize, *_: Any) -> Any:
        return SimpleNamespace(model=torch.nn.Linear(1, 1), size=size)

    monkeypatch.setattr(counting, "train", train)
    monkeypatch.setattr(counting, "train_counter", train_counter)
    for size, preset in (("small", "default"), ("base", "paper"), ("small", "authors")):
        with pytest.raises(Enough):
            counting.run(tmp_path, CountingTask(size, preset, seed=3, changes={"margin": 0.2}))
    sizes, settings = [vit.size for vit, _ in trained], [s for _, s in trained]  # type: ignore[attr-defined]
    assert [size.width for size in sizes] == [64, 768, 64]
    assert [s.penalty for s in settings] == ["log-keep", "count", "log-keep"]
    assert [(s.steps, s.batch_size, s.gates) for s in settings] == [
        (1200, 32, "half"),
        (3750, 16, "all"),
        (7500, 8, "weighted"),
    ]
    assert [s.lambda_update for s in settings] == ["ascent", "ascent", "descent"]
    assert {(s.seed, s.margin) for s in settings} == {(3, 0.2)}
    with pytest.raises(PatchlightError, match="unknown size 'paper' of the counting task; give small or base"):
        counting.run(tmp_path, CountingTask("paper"))
    with pytest.raises(PatchlightError, match="no DiffMask preset is called 'code'"):
        counting.run(tmp_path, CountingTask(preset="code"))
    with pytest.raises(PatchlightError, match="device 'nowhere' cannot be used"):
        counting.run(tmp_path, CountingTask(device="nowhere"))
    with pytest.raises(PatchlightError, match="seed -1 is not possible; give at least 0"):
        counting.run(tmp_path, CountingTask(seed=-1))


@pytest.mark.slow
def test_the_whole_task(tmp_path: Path) -> None:
    rows, _ = counting.run(tmp_path, CountingTask(grids=50))
    exact = {row.method: row.exact for row in rows}
    assert exact["diffmask"] >= 0.95
    assert exact["diffmask"] > max(value for name, value in exact.items() if name != "diffmask")
    assert exact["random"] < 0.3
    assert "| diffmask |" in (tmp_path / "verdicts.md").read_text()
    assert pl.diffmask.load(tmp_path / "diffmask").model["name"] == "counting"
