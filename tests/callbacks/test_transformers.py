"""The callback in Hugging Face's Trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import patchlight as pl
from tests.callbacks.pieces import NAMES, TARGET, data, events, images, model, same

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::patchlight.AssumedPreprocess")


def train(net: nn.Module, folder: Path, callbacks: list[Any], **options: Any) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    rows = [{"pixel_values": x, "labels": int(y)} for x, y in zip(*data(), strict=True)]
    options = {"report_to": ["tensorboard"], "max_steps": 5, **options}
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=4, use_cpu=True, save_strategy="no", disable_tqdm=True, **options
    )
    Trainer(net, args, train_dataset=rows, callbacks=callbacks).train()
    return net


def callback(net: nn.Module, *writer: Any, **options: Any) -> Any:
    return pl.callbacks.TransformersCallback(net, images(), *writer, target=TARGET, every=2, budget=None, **options)


@pytest.mark.filterwarnings("error::patchlight.core.errors.LogSkipped")
@pytest.mark.parametrize(
    "options",
    [{"bf16": True}, *(pytest.param(o, marks=pytest.mark.slow) for o in ({}, {"gradient_checkpointing": True}))],
    ids=str,
)
def test_the_trainer_logs_and_trains_as_without(options: dict[str, Any], tmp_path: Path) -> None:
    net = model("hf-vit")
    train(net, tmp_path / "with", [callback(net)], **options)
    plain = train(model("hf-vit"), tmp_path / "without", [], **options)
    assert same(net, plain)
    assert not same(plain, model("hf-vit")), "nothing was trained"
    numbers, pictures = events(tmp_path / "with")
    for name in NAMES:
        assert sorted(numbers[name]) == [0, 2, 4]
    assert len(set(numbers["patchlight/probability"].values())) == 3
    assert sorted(pictures["patchlight/maps"]) == [0, 2, 4]
    assert pictures["patchlight/maps"][4].std() > 10


def test_it_logs_to_the_run_of_wandb_that_the_trainer_reports_to(tmp_path: Path) -> None:
    import wandb

    wandb.init(mode="offline", dir=tmp_path, project="test", settings=wandb.Settings(silent=True))
    net = model("hf-vit")
    try:
        train(net, tmp_path, [callback(net)], report_to=["wandb"], max_steps=2, logging_steps=1)
        assert wandb.run is not None
        assert NAMES | {"patchlight/maps", "train/loss"} <= set(wandb.run.summary.keys())
        assert wandb.run.summary["patchlight/step"] == 2
    finally:
        wandb.finish()


def test_a_users_writer_is_used(tmp_path: Path) -> None:
    told: list[int] = []
    net = model("hf-vit")
    train(net, tmp_path, [callback(net, lambda step, *rest: told.append(step), metric=None)], report_to=[])
    assert told == [0, 2, 4]


def test_what_cannot_be_logged_is_refused_before_the_first_step(tmp_path: Path) -> None:
    net = model("hf-vit")
    with pytest.raises(pl.PatchlightError, match="the Trainer reports to nothing; give the callback a writer="):
        train(net, tmp_path, [callback(net)], report_to=[])
    with pytest.raises(pl.PatchlightError, match="shares no weights with the model in training"):
        train(net, tmp_path, [callback(model("hf-vit"))])


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "patchlight.callbacks.transformers", raising=False)
    monkeypatch.delitem(vars(pl.callbacks), "TransformersCallback", raising=False)
    with pytest.raises(pl.PatchlightError, match=r"needs transformers: pip install 'patchlight\[hf\]'"):
        _ = pl.callbacks.TransformersCallback
