"""Several threads explain, evaluate and use one model at once: all as if alone, and the model bit for bit as it was."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import patchlight as pl
from tests.families import images, shared
from tests.helpers import tiny

FORWARDS = 100
"""Plain forwards beside the others."""
METHODS: dict[str, dict[str, Any]] = {
    "genatt": {},
    "ixg.plus.libra": {},
    "gradcam": {},
    "tokentm": {},
    "transatt": {},
    "ig": {"steps": 3},
    "tis": {"samples": 32},
    "rise": {"samples": 32},
    "occlusion": {"unit": "token"},
    "kernel-shap": {"samples": 32},
}


def dropping(training: bool) -> nn.Module:
    """A model on which a mode that leaks shows: dropout everywhere, in training mode or not."""
    model = tiny(drop_rate=0.5, attn_drop_rate=0.3, drop_path_rate=0.3)
    model.load_state_dict(tiny().state_dict())
    model.requires_grad_(True)
    return model.train(training)  # type: ignore[no-any-return]


def state(model: nn.Module) -> dict[str, Any]:
    return {
        "weights": {k: v.clone() for k, v in model.state_dict().items()},
        "types": [p.dtype for p in model.parameters()],
        "flags": [p.requires_grad for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "places": [p.data_ptr() for p in model.parameters()],
    }


def together(*jobs: Callable[[], None]) -> None:
    """Run jobs at once, each in its own thread; the first error is raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], None]) -> None:
        start.wait()
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("precision", ["full", "bf16"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.filterwarnings("ignore")
def test_threads_see_nothing_of_each_other(training: bool, precision: str) -> None:
    model = dropping(training)
    vit = pl.wrap(model)
    batch = images(vit, 2)
    scoring = {"tis", "rise", "occlusion", "kernel-shap"}

    def explained(name: str) -> Tensor:
        settings = {"precision": precision} if name in scoring else {}
        return pl.explain(vit, batch, name, target=1, **METHODS[name], **settings).scores

    def measured() -> Tensor:
        maps = pl.explain(vit, batch, "rollout", target=1)
        return pl.evaluate(vit, batch, maps, metric="insertion", steps=8, precision=precision).values

    def forward() -> Tensor:
        with torch.no_grad():
            return model(batch)  # type: ignore[no-any-return]

    alone = {name: explained(name) for name in METHODS}
    alone_measured, alone_forward = measured(), forward()
    before = state(model)
    right = []

    def explains() -> None:
        for name in METHODS:
            assert torch.equal(explained(name), alone[name]), f"{name} differs beside other threads"

    def measures() -> None:
        for _ in range(4):
            assert torch.equal(measured(), alone_measured), "a metric differs beside other threads"

    def uses() -> None:
        for _ in range(FORWARDS):
            out = forward()
            right.append(bool(out.isfinite().all()) if training else torch.equal(out, alone_forward))

    with warnings.catch_warnings():
        together(explains, explains, measures, uses)
    assert sum(right) == FORWARDS, f"{sum(right)} of {FORWARDS} plain forwards are right"
    after = state(model)
    weights, weights_after = before.pop("weights"), after.pop("weights")
    assert all(torch.equal(weights[k], weights_after[k]) for k in weights), "a weight changed"
    assert before == after


def test_a_model_is_trained_while_it_is_explained() -> None:
    """The user's optimiser steps between two explanations are seen, and gradients reach the user's own parameters."""
    model = dropping(True)
    vit = pl.wrap(model)
    batch = images(vit, 2)
    optimiser = torch.optim.SGD(model.parameters(), 1e-3)  # more would end in NaN with some draws of dropout
    first = pl.explain(vit, batch, "ixg", target=1).scores

    def trains() -> None:
        for _ in range(3):
            optimiser.zero_grad()
            model(batch).square().sum().backward()
            assert all(p.grad is not None for p in model.parameters())
            optimiser.step()

    def explains() -> None:
        for _ in range(6):
            try:
                pl.explain(vit, batch, "genatt")
            except pl.PatchlightError as error:
                assert "were changed while it was explained" in str(error)  # noqa: PT017

    together(trains, explains)
    calm = copy.deepcopy(model).eval()
    assert torch.equal(pl.explain(vit, batch, "ixg", target=1).scores, pl.explain(calm, batch, "ixg", target=1).scores)
    assert not torch.equal(pl.explain(vit, batch, "ixg", target=1).scores, first)


@pytest.mark.parametrize("kind", ["a module around a model", "a feature map"])
def test_threads_share_models_that_run_their_own_forward(kind: str) -> None:
    vit = shared("pit") if kind == "a feature map" else pl.wrap(nn.Sequential(nn.Identity(), tiny()))
    names = ["gradcam", "occlusion"] if kind == "a feature map" else ["genatt", "tis"]
    batches = [images(vit, 2, seed) for seed in range(4)]
    alone = [pl.explain(vit, batch, names) for batch in batches]

    def explains(index: int) -> None:
        for name, found in pl.explain(vit, batches[index], names).items():
            torch.testing.assert_close(found.scores, alone[index][name].scores)

    together(*(partial(explains, index) for index in range(4)))


@pytest.mark.filterwarnings("ignore")
def test_threads_share_a_model_in_half_precision() -> None:
    """Its float32 weights are renewed before every pass, beside passes that still need them."""
    vit = pl.wrap(tiny().bfloat16())
    batch = images(vit, 2)
    alone = pl.explain(vit, batch, "genatt", target=1).scores

    def explains() -> None:
        for _ in range(15):
            assert torch.equal(pl.explain(vit, batch, "genatt", target=1).scores, alone)

    together(explains, explains, explains)


class Watched(nn.Dropout):
    """Dropout that records every change of its mode."""

    changes = 0

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["changes"] = self.changes + (name == "training")
        super().__setattr__(name, value)


def test_functions_of_the_users_own_run_on_the_twin() -> None:
    """A model described by plain functions stays in training mode, and is never switched, not even for a moment."""
    model: Any = dropping(True)
    model.pos_drop = Watched(0.5)
    before = model.pos_drop.changes
    about: dict[str, Any] = {"grid": (4, 4), "prefix": 1, "pooling": "cls", "heads": 4, "classes": 7}
    vit = pl.wrap(
        model,
        embed=lambda x: model.norm_pre(model._pos_embed(model.patch_embed(x))),
        blocks=model.blocks,
        readout=lambda tokens: model.forward_head(model.norm(tokens)),
        preprocess=pl.Preprocess((64, 64)),
        **about,
    )
    batch = images(vit, 2)
    alone = {name: pl.explain(vit, batch, name, target=1).scores for name in ("genatt", "ixg")}

    def explains() -> None:
        for _ in range(5):
            for name, expected in alone.items():
                assert torch.equal(pl.explain(vit, batch, name, target=1).scores, expected)

    together(explains, explains, explains)
    assert all(m.training for m in model.modules())
    assert model.pos_drop.changes == before
    plain = pl.wrap(tiny())
    torch.testing.assert_close(alone["genatt"], pl.explain(plain, batch, "genatt", target=1).scores)
