"""Logs are read back from TensorBoard's files and from an offline run of Weights & Biases."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import patchlight as pl
from patchlight.callbacks import TrainingLog
from patchlight.callbacks.writers import open_tensorboard, open_wandb, open_writer
from tests.callbacks.pieces import NAMES, TARGET, events, images, model

PICTURE = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    import wandb

    found = wandb.init(mode="offline", dir=tmp_path, project="test", settings=wandb.Settings(silent=True))
    yield found
    wandb.finish()


def test_tensorboard_holds_what_was_written(tmp_path: Path) -> None:
    for write, step in ((open_writer(open_tensorboard(tmp_path / "a")), 3), (open_writer(tmp_path / "a"), 5)):
        write(step, {"patchlight/seconds": step / 2}, {"patchlight/maps": PICTURE})
    numbers, pictures = events(tmp_path)
    assert numbers == {"patchlight/seconds": {3: 1.5, 5: 2.5}}
    assert set(pictures["patchlight/maps"]) == {3, 5}
    assert np.array_equal(pictures["patchlight/maps"][3], np.asarray(PICTURE))


def test_a_run_of_wandb_holds_what_was_written(run: Any) -> None:
    """Other code also logs to the run, with other steps."""
    told: list[int] = []
    writers = [run, lambda step, *rest: told.append(step)]
    log = TrainingLog(model(), images(), writers, every=2, target=TARGET, budget=None)
    run.log({"loss": 1.0}, step=50)
    log(2)
    run.log({"loss": 0.5}, step=60)
    log(4)
    assert NAMES | {"patchlight/step", "patchlight/maps"} <= set(run.summary.keys())
    assert run.summary["patchlight/step"] == 4
    assert told == [2, 4]
    kept = sorted(Path(run.dir).glob("media/images/patchlight/maps_*.png"))
    assert len(kept) == 2
    assert np.asarray(Image.open(kept[0])).std() > 10


@pytest.mark.parametrize("writer", [None, 3, [], object()])
def test_what_is_no_writer_is_refused(writer: Any) -> None:
    with pytest.raises(pl.PatchlightError, match="give a SummaryWriter of TensorBoard, a run of wandb"):
        open_writer(writer)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(pl.PatchlightError, match="there is no active wandb run"):
        open_wandb()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(pl.PatchlightError, match=r"needs tensorboard: pip install 'patchlight\[train\]'"):
        open_writer(tmp_path)
    with pytest.raises(pl.PatchlightError, match="needs wandb: pip install wandb"):
        open_wandb()
