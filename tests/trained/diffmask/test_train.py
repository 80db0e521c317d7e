"""Training: it masks patches that do not matter, resumes after a kill, and refuses bad input."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import patchlight as pl
from patchlight.core.errors import PatchlightError
from patchlight.core.targets import kl_divergence
from patchlight.trained.diffmask import DiffMask, DiffMaskSettings, TrainingWarning
from patchlight.trained.diffmask.calibration import calibrate, finish
from patchlight.trained.diffmask.gates import aggregate, masked_logits, new_gates, observe
from patchlight.trained.diffmask.train import GateLearner
from patchlight.trained.loop import Devices
from tests.trained.test_explainers import DIFFMASK, weights
from tests.trained.toys import batches, pictures, toy

QUICK = DIFFMASK.quick


def learner(**changes: Any) -> GateLearner:
    vit = toy()
    return GateLearner(vit, batches(), DiffMaskSettings(**{**QUICK, **changes}), Devices(vit))


def test_steps_are_reported() -> None:
    told: list[tuple[int, int | None]] = []
    settings = DiffMaskSettings(**{**QUICK, "steps": 3})
    pl.diffmask.train(toy(), batches(), settings, progress=lambda *done: told.append(done))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_every_setting_of_the_paper_and_its_code_trains() -> None:
    vit = toy()
    for preset, changes in (
        ("paper", {}),
        ("authors", {"gates": "weighted"}),
        ("default", {"gates": "all", "penalty": "count"}),
    ):
        settings = DiffMaskSettings.preset(preset, **{**QUICK, "steps": 4, "baseline": "zero", **changes})
        dm = pl.diffmask.train(vit, batches(), settings)
        assert float(dm.gates.baseline.abs().max()) == 0
        assert all(bool(torch.isfinite(value).all()) for value in weights(dm).values())


def test_calibration_places_the_first_mask() -> None:
    vit = toy()
    seen = observe(vit, pictures(8))
    gates = new_gates(vit)
    calibrate(gates, seen.h0, torch.stack(seen.states), 0.8)
    assert float(aggregate(gates.locations(seen.h0, seen.states), "keep").mean().detach()) == pytest.approx(
        0.8, abs=1e-3
    )


def test_at_the_end_beta_is_raised_until_the_mask_itself_keeps_the_output() -> None:
    """By the smallest shift, which is 0 if the limit holds."""
    vit = toy()
    gates = new_gates(vit, beta=-3.0)
    seen = observe(vit, pictures(24))
    with torch.no_grad():
        u = gates.locations(seen.h0, seen.states)

        def divergence_at(shift: float) -> Tensor:
            z = (aggregate(u + shift) > 0.5).float()[..., None]
            masked = masked_logits(vit, pictures(24), torch.lerp(gates.baseline, seen.h0, z))
            return kl_divergence(seen.logits, masked, vit.outputs)

        def bound(shift: float) -> float:
            kl = divergence_at(shift)
            return float(kl.mean() + 2 * kl.std(correction=0) / len(kl) ** 0.5)

        margin = bound(0.0) / 4
        done = finish(gates, vit, pictures(24).split(8), margin, "full")
        assert done.shift > 0
        assert gates.beta.tolist() == pytest.approx([-3 + done.shift] * gates.count)
        assert bound(done.shift) <= margin < bound(done.shift - 0.1)
        assert (done.kl, done.images) == (pytest.approx(float(divergence_at(done.shift).mean()), abs=1e-5), 24)
        assert finish(gates, vit, pictures(24).split(8), margin * 1.01, "full").shift == 0


def test_half_of_the_batches_use_all_gates() -> None:
    gates = learner()
    drawn = [gates.draw(np.random.default_rng([0, step])) for step in range(400)]
    assert sum(k == 3 for k in drawn) / 400 == pytest.approx(0.5 + 0.5 / 4, abs=0.06)
    assert set(drawn) == {0, 1, 2, 3}


def test_a_patch_the_model_cannot_see_is_masked_and_one_it_reads_is_kept() -> None:
    """The class is the colour of patch 0 alone, the other patches are noise.

    The baseline may take the place of one of the colours, so that only the other one must be kept.
    """
    generator = torch.Generator().manual_seed(0)
    x = 0.3 * torch.randn(256, 3, 16, 16, generator=generator)
    label = torch.arange(256) % 2
    x[:, :, :4, :4] = (label * 2.0 - 1)[:, None, None, None]
    vit = toy(classes=2)
    vit.model.train()
    optimiser = torch.optim.Adam(vit.model.parameters(), 3e-3)
    for step in range(60):
        rows = slice(64 * (step % 4), 64 * (step % 4) + 64)
        loss = torch.nn.functional.cross_entropy(vit.model(x[rows]), label[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    vit.model.eval()
    assert float((vit.logits(x).argmax(1) == label).float().mean()) == 1
    data = torch.utils.data.TensorDataset(x, label)
    loader = torch.utils.data.DataLoader(data, 32, shuffle=True)
    dm = pl.diffmask.train(vit, loader, DiffMaskSettings(steps=250, gate_rate=3e-3, warmup=10))
    maps = pl.explain(vit, x[:32], "diffmask", explainer=dm).scores.flatten(1)
    assert max(float(maps[:, 0][label[:32] == kind].mean()) for kind in (0, 1)) > 0.9
    assert float(maps[:, 1:].mean()) < 0.2


def test_gates_and_packages_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    initial = DiffMask.of(new_gates(toy(depth=3)), toy(depth=3))
    with pytest.raises(PatchlightError, match="toy needs 4 of width 16"):
        pl.diffmask.train(toy(), batches(), DiffMaskSettings(**QUICK), initial=initial)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(PatchlightError, match=r"pip install 'patchlight\[train\]'"):
        pl.diffmask.train(toy(), batches(), DiffMaskSettings(**QUICK))


def test_a_last_calibration_that_keeps_everything_is_reported() -> None:
    long = {**QUICK, "steps": 200, "warmup": 0, "log_every": 200, "calibrate": None, "gate_rate": 1e-9, "restarts": 0}
    with pytest.warns(TrainingWarning, match="must be kept to hold"):
        pl.diffmask.train(toy(), batches(), DiffMaskSettings(beta=1.0, margin=1e-7, **long))
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        pl.diffmask.train(toy(), batches(), DiffMaskSettings(beta=1.0, finish=0, **long))


@pytest.mark.parametrize(("prices", "mean"), [(1.0, 1.5), (10.0, 1.0)])
def test_images_at_another_price_are_not_reported(prices: float, mean: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def numbered(clean: Tensor, masked: Tensor, sigmoid: bool) -> Tensor:
        return 0 * masked.sum(1) + torch.arange(len(masked))

    monkeypatch.setattr(sys.modules["patchlight.trained.diffmask.train"], "kl_divergence", numbered)
    assert float(learner(prices=prices).step(pictures(4), 0)[0]) == pytest.approx(mean)


def test_gates_can_begin_from_others() -> None:
    vit = toy()
    first = pl.diffmask.train(vit, batches(), DiffMaskSettings(**QUICK))
    second = pl.diffmask.train(
        vit,
        batches(),
        DiffMaskSettings(**{**QUICK, "steps": 1, "gate_rate": 1e-12, "baseline_rate": 1e-12}),
        initial=first,
    )
    assert all(torch.allclose(weights(first)[k], v, atol=1e-6) for k, v in weights(second).items())


TWO = """
import sys
import torch
torch.set_num_threads(1)
from accelerate import PartialState
from safetensors.torch import save_file
import patchlight as pl
from patchlight.trained.diffmask import DiffMaskSettings
from tests.trained.diffmask.test_train import QUICK
from tests.trained.toys import batches, toy
dm = pl.diffmask.train(toy(), batches(), DiffMaskSettings(**QUICK), out=sys.argv[1])
save_file(dict(dm.gates.state_dict()), f"{sys.argv[1]}/rank-{PartialState().process_index}.safetensors")
"""


@pytest.mark.slow
def test_two_processes_end_with_the_same_gates(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO)
    root = Path(__file__).resolve().parents[3]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(root / "src"), str(root)])
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    subprocess.run([*launch, str(tmp_path / "two.py"), str(tmp_path)], cwd=root, env=env, check=True, timeout=300)
    ranks = []
    for rank in (0, 1):
        with safe_open(tmp_path / f"rank-{rank}.safetensors", "pt") as file:
            ranks.append({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    assert all(torch.equal(ranks[0][key], value) for key, value in ranks[1].items())
