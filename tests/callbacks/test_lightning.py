"""The callback in Lightning's Trainer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patchlight as pl
from tests.callbacks.pieces import NAMES, TARGET, data, events, images, model, same

lightning = pytest.importorskip("lightning")
pytestmark = pytest.mark.filterwarnings("ignore")


def module(net: nn.Module) -> Any:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    return Module()


def train(net: nn.Module, loggers: list[Any], callbacks: list[Any], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    quiet = dict.fromkeys(("enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=loggers, callbacks=callbacks, **{"max_steps": 5, **quiet, **options}
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), 4, shuffle=True)
    trainer.fit(module(net), loader)
    return net


def callback(net: nn.Module, *writer: Any, **options: Any) -> Any:
    return pl.callbacks.LightningCallback(net, images(), *writer, target=TARGET, every=2, budget=None, **options)


def board(folder: Path) -> Any:
    from lightning.pytorch.loggers import TensorBoardLogger

    return TensorBoardLogger(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        *(pytest.param(o, marks=pytest.mark.slow) for o in ({}, {"precision": "bf16-mixed"})),
    ],
    ids=str,
)
def test_the_trainer_logs_and_trains_as_without(options: dict[str, Any], tmp_path: Path) -> None:
    net = model()
    train(net, [board(tmp_path / "with")], [callback(net)], **options)
    plain = train(model(), [board(tmp_path / "without")], [], **options)
    assert same(net, plain)
    assert not same(plain, model()), "nothing was trained"
    numbers, pictures = events(tmp_path / "with")
    for name in NAMES:
        assert sorted(numbers[name]) == [0, 2, 4]
    assert len(set(numbers["patchlight/probability"].values())) == 3
    assert sorted(pictures["patchlight/maps"]) == [0, 2, 4]


def test_it_logs_to_wandb_beside_loggers_that_take_no_pictures(tmp_path: Path) -> None:
    import wandb
    from lightning.pytorch.loggers import CSVLogger, WandbLogger

    net = model()
    logger = WandbLogger(save_dir=tmp_path, offline=True, project="test", settings=wandb.Settings(silent=True))
    try:
        train(net, [CSVLogger(tmp_path), logger], [callback(net)], max_steps=2)
        assert NAMES | {"patchlight/maps"} <= set(logger.experiment.summary.keys())
        assert logger.experiment.summary["patchlight/step"] == 2
    finally:
        wandb.finish()


def test_what_cannot_be_logged_is_refused_before_the_first_step(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    net = model()
    with pytest.raises(pl.PatchlightError, match=r"the trainer's loggers \(CSVLogger\) do not support images"):
        train(net, [CSVLogger(tmp_path)], [callback(net)])
    with pytest.raises(pl.PatchlightError, match="shares no weights with the model in training"):
        train(net, [board(tmp_path)], [callback(model())])


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "patchlight.callbacks.lightning", raising=False)
    monkeypatch.delitem(vars(pl.callbacks), "LightningCallback", raising=False)
    with pytest.raises(pl.PatchlightError, match="needs lightning: pip install lightning"):
        _ = pl.callbacks.LightningCallback


OLDER = """
import sys
import pytorch_lightning
sys.modules["lightning"] = pytorch_lightning
from tests.callbacks import test_lightning as room
net, told = room.model(), []
callback = room.callback(net, lambda step, *rest: told.append(step), metric=None)
assert isinstance(callback, pytorch_lightning.Callback)
room.train(net, [], [callback])
print(told)
"""


@pytest.mark.slow
def test_the_older_package_is_taken_where_that_is_in_use() -> None:
    told = subprocess.run([sys.executable, "-c", OLDER], capture_output=True, text=True, timeout=300)
    assert told.stdout.splitlines()[-1:] == ["[0, 2, 4]"], told.stderr
