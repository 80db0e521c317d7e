"""The contract of all trained explainers: determined by the seed, resumed to the same weights, errors."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import patchlight as pl
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.trained.diffmask import DiffMask, DiffMaskProgress, DiffMaskSettings
from patchlight.trained.explainer import Explainer
from patchlight.trained.settings import Training
from patchlight.trained.shapley import ShapleyProgress, ShapleySettings, SurrogateProgress, ViTShapley
from tests.families import shared
from tests.helpers import refuses
from tests.trained.toys import batches, toy


@dataclass(frozen=True)
class Kind:
    """A kind of explainer, and settings with which its training takes a second."""

    explainer: type[Explainer[Any]]
    train: Callable[..., Any]
    settings: type[Training]
    quick: dict[str, Any]


DIFFMASK = Kind(
    DiffMask,
    pl.diffmask.train,
    DiffMaskSettings,
    {"steps": 14, "batch_size": 4, "warmup": 4, "log_every": 3, "checkpoint_steps": 4},
)
SHAPLEY = Kind(
    ViTShapley,
    pl.shapley.train,
    ShapleySettings,
    {"steps": 10, "surrogate_steps": 8, "batch_size": 4, "masks": 4, "rank": 2, "rate": 1e-2, "surrogate_rate": 1e-2}
    | {"warmup": 2, "log_every": 3, "checkpoint_steps": 4},
)
KINDS = pytest.mark.parametrize("kind", [DIFFMASK, SHAPLEY], ids=["diffmask", "shapley"])


def weights(explainer: Explainer[Any]) -> dict[str, Tensor]:
    return dict(explainer.network.state_dict())


def same(a: Explainer[Any], b: Explainer[Any]) -> bool:
    return all(torch.equal(weights(a)[key], value) for key, value in weights(b).items())


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


@KINDS
def test_training_is_a_function_of_its_seed_and_leaves_the_model_alone(kind: Kind) -> None:
    vit = toy()
    before = {k: v.clone() for k, v in vit.model.state_dict().items()}
    state = torch.get_rng_state()
    first, second, other = (kind.train(vit, batches(), kind.settings(seed=s, **kind.quick)) for s in (0, 0, 1))
    assert same(first, second)
    assert not same(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in vit.model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in vit.model.parameters())
    assert not any(module._forward_hooks for module in vit.model.modules())


@pytest.mark.parametrize(
    ("kind", "preset", "changes", "stops"),
    [
        (DIFFMASK, "default", {"gates": "weighted"}, [(DiffMaskProgress, 9, 8)]),
        (DIFFMASK, "paper", {"gates": "weighted"}, [(DiffMaskProgress, 9, 8)]),
        (SHAPLEY, "default", {}, [(SurrogateProgress, 6, 4), (ShapleyProgress, 6, 4)]),
    ],
)
def test_stopped_anywhere_it_resumes_to_the_same_weights_and_metrics(
    kind: Kind, preset: str, changes: dict[str, Any], stops: list[tuple[type, int, int]], tmp_path: Path
) -> None:
    """Also between two reports, in the middle of an epoch."""

    class Stop(Exception):
        pass

    vit, folder = toy(), tmp_path / "stopped"
    settings = kind.settings.preset(preset, **kind.quick, **changes)
    whole = kind.train(vit, batches(), settings, out=tmp_path / "whole")
    for report, step, saved in stops:

        def stop(now: Any, report: type = report, step: int = step) -> None:
            if isinstance(now, report) and now.step == step:
                raise Stop

        with pytest.raises(Stop):
            kind.train(vit, batches(), settings, stop, folder)
        place = folder / "surrogate" if report is SurrogateProgress else folder
        with safe_open(place / "checkpoint.safetensors", "pt") as file:
            assert f'"step": {saved}' in file.metadata()["about"]
    assert not (folder / f"{kind.explainer.weights}.safetensors").exists()
    resumed = kind.train(vit, batches(), settings, out=folder)
    assert same(whole, resumed)
    assert same(whole, kind.explainer.read(folder, vit))
    again = kind.train(vit, batches(), settings, out=folder)
    assert same(whole, again)
    assert again.about == resumed.about
    for place in (".", "surrogate")[: len(stops)]:
        assert rows(folder / place) == rows(tmp_path / "whole" / place)


@pytest.mark.parametrize(
    ("kind", "changes"), [(DIFFMASK, {"margin": 0.2}), (SHAPLEY, {"rate": 1e-3}), (SHAPLEY, {"steps": 12})]
)
def test_a_run_with_other_settings_is_not_resumed(kind: Kind, changes: dict[str, Any], tmp_path: Path) -> None:
    vit = toy()
    kind.train(vit, batches(), kind.settings(**kind.quick), out=tmp_path)
    other = kind.settings(**{**kind.quick, **changes})
    with pytest.raises(PatchlightError, match=f"another {next(iter(changes))}"):
        kind.train(vit, batches(), other, out=tmp_path)
    assert same(kind.train(vit, batches(), other, out=tmp_path, resume=False), kind.explainer.read(tmp_path))


@KINDS
def test_bad_data_and_models_are_refused_before_any_work(kind: Kind) -> None:
    use = {"DiffMask": "calibrate", "ViT-Shapley": "check"}[kind.settings.title]
    with pytest.raises(PatchlightError, match="no images to train on"):
        kind.train(toy(), [], kind.settings())
    with pytest.raises(PatchlightError, match=f"no images to {use} on"):
        kind.train(toy(), batches(), kind.settings(), held_out=[])
    with pytest.raises(Unsupported, match="no plain grid"):
        kind.train(shared("swin"), [], kind.settings())


@pytest.mark.parametrize(
    ("kind", "preset", "changes", "words"),
    [
        (DIFFMASK, "default", {"gate_rat": 1}, "no setting 'gate_rat'; did you mean"),
        (DIFFMASK, "default", {"margin": -1}, "margin=-1"),
        (DIFFMASK, "papr", {}, "no DiffMask preset is called 'papr'"),
        (DIFFMASK, "default", {"clip": 1.0}, "no setting 'clip'; it was removed"),
        (DIFFMASK, "default", {"lambda_start": 0.1}, "lambda_start=0.1 is not from lambda_low=0.5 to lambda_high=200"),
        (SHAPLEY, "default", {"rat": 1}, "no setting 'rat'; did you mean"),
        (SHAPLEY, "default", {"masks": 3}, "masks=3"),
        (SHAPLEY, "papr", {}, "no ViT-Shapley preset is called 'papr'"),
    ],
)
def test_bad_settings_are_refused(kind: Kind, preset: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PatchlightError, match=words):
        kind.settings.preset(preset, **changes)


@KINDS
def test_an_explainer_that_does_not_fit_or_is_damaged_is_refused(kind: Kind, tmp_path: Path) -> None:
    quick = {key: min(value, 2) if "steps" in key else value for key, value in kind.quick.items()}
    kind.train(toy(), batches(), kind.settings(**quick), out=tmp_path)
    half = toy()
    half.model.bfloat16()
    kind.explainer.read(tmp_path, half)
    for vit, words in ((toy(depth=3), "trained for toy with 2 blocks, not 3"), (toy(seed=1), "other weights of toy")):
        with pytest.raises(PatchlightError, match=words):
            kind.explainer.read(tmp_path, vit)
    file = tmp_path / f"{kind.explainer.kind}.json"
    text, number = file.read_text(), kind.explainer.format
    for old, new, words in (
        (
            f'"format": {number}',
            '"format": 0',
            rf"an earlier version of Patchlight \(format 0; this version reads {number}\)",
        ),
        (f'"format": {number}', '"format": 9', "a later version of Patchlight"),
        (f'"kind": "{kind.explainer.kind}"', '"kind": "other"', "of another kind: 'other'"),
    ):
        file.write_text(text.replace(old, new))
        with pytest.raises(PatchlightError, match=words):
            kind.explainer.read(tmp_path)
    header = json.loads(text)
    option = next(key for key in header if key not in ("format", "kind", "model", "hashes", "about"))
    damaged = [{**header, "model": None}, {**header, option: "many"}, {**header, "model": {**header["model"], "x": 1}}]
    damaged += [
        {key: value for key, value in header.items() if key != missing} for missing in header if missing != "hashes"
    ]
    for each in damaged:  # other damage: tests/test_damaged_files.py
        file.write_text(json.dumps(each))
        refuses("is damaged: ", kind.explainer.read, tmp_path)
    file.write_text(text)
    (tmp_path / f"{kind.explainer.weights}.safetensors").write_bytes(b"cut")
    with pytest.raises(PatchlightError, match="damaged"):
        kind.explainer.read(tmp_path)
    file.unlink()
    with pytest.raises(PatchlightError, match=rf"not hold a {kind.explainer.title} explainer: {file.name} is missing"):
        kind.explainer.read(tmp_path)


@KINDS
def test_all_weights_of_the_model_are_compared_in_every_precision(kind: Kind, tmp_path: Path) -> None:
    quick = {key: min(value, 2) if "steps" in key else value for key, value in kind.quick.items()}
    kind.train(toy(), batches(), kind.settings(**quick), out=tmp_path)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        vit = toy()
        vit.model.to(dtype)
        kind.explainer.read(tmp_path, vit)
    changed = toy()
    with torch.no_grad():
        max(changed.model.parameters(), key=Tensor.numel).view(-1)[100] += 1e-3
    with pytest.raises(PatchlightError, match="other weights of toy"):
        kind.explainer.read(tmp_path, changed)
    file = tmp_path / f"{kind.explainer.kind}.json"
    header = json.loads(file.read_text())
    assert list(header.pop("hashes")) == ["torch.float32", "torch.float16", "torch.bfloat16"]
    file.write_text(json.dumps(header))  # as older versions wrote it: four numbers of every weight are compared
    kind.explainer.read(tmp_path, toy())
    kind.explainer.read(tmp_path, changed)
    with pytest.raises(PatchlightError, match="other weights of toy"):
        kind.explainer.read(tmp_path, toy(seed=1))
