"""A failed training starts again with a new seed and reports it; other trainings are not changed."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import patchlight as pl
from patchlight.trained.diffmask import DiffMaskProgress, DiffMaskSettings, TrainingWarning, watch
from patchlight.trained.diffmask.gates import Gates, Seen, observe
from patchlight.trained.diffmask.watch import Probe, Watch, probe_sums, read_probe
from patchlight.trained.loop import fresh_seed
from tests.helpers import command
from tests.trained.test_explainers import rows, same
from tests.trained.toys import batches, pictures, toy

SHORT: dict[str, Any] = {
    "steps": 60,
    "batch_size": 4,
    "warmup": 0,
    "log_every": 5,
    "calibrate": None,
    "finish": 0,
    "baseline_rate": 1e-9,
}
TRAIN = sys.modules["patchlight.trained.diffmask.train"]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes every fifth step; a failure counts after ten."""
    monkeypatch.setattr(TRAIN, "EVERY", 5)
    monkeypatch.setattr(watch, "FIRST", 10)
    monkeypatch.setattr(watch, "LONGEST", 10)


def shut(monkeypatch: pytest.MonkeyPatch, *seeds: int) -> None:
    """Gates of these seeds are closed at the start; all others are open."""
    new = TRAIN.new_gates

    def new_gates(vit: Any, seed: int = 0, **options: Any) -> Gates:
        gates: Gates = new(vit, seed, **{**options, "beta": -40.0 if seed in seeds else 6.0})
        return gates

    monkeypatch.setattr(TRAIN, "new_gates", new_gates)


@pytest.fixture
def first_is_shut(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    shut(monkeypatch, 0)


@pytest.mark.usefixtures("first_is_shut")
def test_a_training_that_fails_starts_again_and_says_so(tmp_path: Path) -> None:
    told: list[DiffMaskProgress] = []
    with pytest.warns(TrainingWarning, match=r"step 20: the mask loses the output .* starts again with seed \d+"):
        dm = pl.diffmask.train(toy(), batches(), DiffMaskSettings(**SHORT), told.append, tmp_path / "dm")
    (failed,) = dm.about["result"]["failed_attempts"]
    assert (failed["seed"], failed["step"]) == (0, 20)
    assert failed["reason"].startswith("the mask loses the output (kept 0.0%")
    assert dm.about["result"]["restarts"] == 1
    assert json.loads((tmp_path / "dm" / "diffmask.json").read_text())["about"]["result"]["failed_attempts"] == [failed]
    assert [now.restarts for now in told] == [0] * 3 + [1] * 12
    assert [(row["restarts"], row["step"]) for row in rows(tmp_path / "dm")][2:5] == [
        ("0", "15"),
        ("1", "5"),
        ("1", "10"),
    ]
    seed = fresh_seed(0, 1)
    assert same(dm, pl.diffmask.train(toy(), batches(), DiffMaskSettings(seed=seed, **SHORT))), (
        "as if that seed were given"
    )
    assert seed == fresh_seed(0, 1) != fresh_seed(0, 2)
    assert fresh_seed(5, 0) == 5


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("stop", [(0, 10), (1, 5), (2, 5), (2, 35)])
def test_stopped_before_or_after_a_restart_it_resumes_to_the_same(
    stop: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shut(monkeypatch, 0, fresh_seed(0, 1))

    class Stop(Exception):
        pass

    def halt(now: DiffMaskProgress) -> None:
        if (now.restarts, now.step) == stop:
            raise Stop

    settings = DiffMaskSettings(**SHORT, checkpoint_steps=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)
        whole = pl.diffmask.train(toy(), batches(), settings, out=tmp_path / "whole")
        with pytest.raises(Stop):
            pl.diffmask.train(toy(), batches(), settings, halt, tmp_path / "stopped")
        resumed = pl.diffmask.train(toy(), batches(), settings, out=tmp_path / "stopped")
    assert same(whole, resumed)
    assert resumed.about["result"]["failed_attempts"] == whole.about["result"]["failed_attempts"]
    assert rows(tmp_path / "stopped") == rows(tmp_path / "whole")
    assert resumed.about["result"]["restarts"] == 2


@pytest.mark.usefixtures("soon")
def test_restarts_are_bounded_and_then_a_warning_says_what_to_change() -> None:
    stuck = DiffMaskSettings(**SHORT, beta=-40.0, gate_rate=1e-9)
    with pytest.warns(TrainingWarning) as told:
        dm = pl.diffmask.train(toy(), batches(), stuck)
    assert [one["seed"] for one in dm.about["result"]["failed_attempts"]] == [0, fresh_seed(0, 1)]
    words = [str(w.message) for w in told]
    assert len(words) == 3
    assert "lower gate_rate and baseline_rate" in words[-1]
    open_gates = DiffMaskSettings(**SHORT, beta=40.0, gate_rate=1e-9, restarts=0)
    with pytest.warns(TrainingWarning, match="nothing is masked: lower beta"):
        assert "failed_attempts" not in pl.diffmask.train(toy(), batches(), open_gates).about["result"]


def test_a_training_that_does_not_fail_is_unchanged_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither probes nor allowed restarts change it."""
    settings = DiffMaskSettings(**{**SHORT, "calibrate": 0.8})
    monkeypatch.setattr(TRAIN, "EVERY", 10**9)
    plain = pl.diffmask.train(toy(), batches(), settings.model_copy(update={"restarts": 0}))
    monkeypatch.setattr(TRAIN, "EVERY", 3)
    probed = pl.diffmask.train(toy(), batches(), settings)
    assert same(plain, probed)
    left_out = {"seconds"}
    assert {k: v for k, v in plain.about["result"].items() if k not in left_out} == {
        k: v for k, v in probed.about["result"].items() if k not in left_out
    }


def test_what_counts_as_a_failure() -> None:
    assert Probe(kl=0.5, error=0.1, kept=0.0, spare=0.0).failure(0.1) == "lost"
    assert Probe(kl=4.5, error=0.5, kept=0.1, spare=0.1).failure(0.1) == "lost"
    assert Probe(kl=0.9, error=0.1, kept=0.1, spare=0.1).failure(0.1) is None, "it may still fall"
    assert Probe(kl=0.05, error=0.1, kept=0.0, spare=0.0).failure(0.1) is None, "nothing was needed"
    assert Probe(kl=0.0, error=0.0, kept=1.0, spare=1.0).failure(0.1) == "nothing"
    assert Probe(kl=0.01, error=0.01, kept=0.6, spare=0.2).failure(0.1) == "stuck"
    assert Probe(kl=0.01, error=0.01, kept=0.5, spare=0.05).failure(0.1) is None, "every patch is needed"
    assert Probe(kl=0.08, error=0.01, kept=0.6, spare=0.4).failure(0.1) is None, "the margin is used"


def test_a_failure_must_last_without_progress() -> None:
    stuck, fine = Probe(0.01, 0.0, 0.6, 0.3), Probe(0.01, 0.0, 0.6, 0.0)
    follow = Watch(margin=0.1, warmup=100, steps=1200)
    assert follow.patience == 240
    assert (Watch(0.1, 0, 300).patience, Watch(0.1, 0, 10**5).patience) == (200, 1000)
    assert [follow.add(step, stuck) for step in (50, 100, 150)] == [None] * 3
    assert follow.add(200, stuck) is None
    assert follow.add(400, stuck) is None
    assert follow.add(450, stuck) == "stuck"
    assert follow.add(500, fine) is None
    assert [follow.add(step, stuck) for step in (550, 750)] == [None, None]
    assert Watch(0.1, 0, 700).add(700, stuck) is None
    assert Watch(0.1, 0, 700).add(700, Probe(4.0, 0.1, 0.2, 0.0)) == "lost", "there is no time left"
    assert Watch(0.1, 0, 60).add(60, Probe(4.0, 0.1, 0.2, 0.0)) is None, "too short to tell"
    assert follow.add(800, Probe(0.01, 0.0, 0.5, 0.3)) is None, "less is kept: it goes on"
    assert follow.add(1000, Probe(0.01, 0.0, 0.49, 0.3)) is None
    assert follow.add(1050, Probe(0.01, 0.0, 0.49, 0.3)) == "stuck"
    follow.steps = 2000
    assert follow.add(1100, Probe(6.0, 0.1, 0.2, 0.0)) is None
    assert follow.add(1300, Probe(5.5, 0.1, 0.1, 0.0)) is None, "the divergence falls"
    assert follow.add(1500, Probe(5.4, 0.1, 0.0, 0.0)) is None
    assert follow.add(1550, Probe(5.4, 0.1, 0.0, 0.0)) == "lost"


@pytest.mark.parametrize(("kept", "spare"), [([0], 0.0), ([0, 5], 1.0), ([5], 0.0), ([], 0.0)])
def test_spare_patches_are_those_the_output_does_not_need(kept: list[int], spare: float) -> None:
    """A model that reads patch 0 alone: patch 5 can be masked, patch 0 cannot."""
    vit = toy(classes=2)
    x = pictures(64)
    u = torch.full((vit.depth + 2, 64, 16), -30.0)
    u[:, :, kept] = 30.0
    gates: Any = SimpleNamespace(locations=lambda h0, states: u, baseline=torch.zeros(16))

    def read_first(vit: Any, images: Any, patches: torch.Tensor) -> torch.Tensor:
        return torch.stack([20 * patches[:, 0, 0], -20 * patches[:, 0, 0]], 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "masked_logits", read_first)
        patch.setattr(watch, "observe", lambda vit, images: Seen(h0, [h0], read_first(vit, images, h0)))
        h0 = observe(vit, x).h0
        sums = probe_sums(gates, vit, x, 1e-3, torch.Generator().manual_seed(0), "full")
    found = read_probe(sums, 64)
    assert found.kept == pytest.approx(len(kept) / 16)
    assert found.spare == pytest.approx(spare, abs=0.05)
    assert (found.kl > 0.1) == (0 not in kept)


@pytest.mark.usefixtures("soon")
def test_the_command_says_that_it_started_again(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (32, 32), (100 * i, 50, 200)).save(tmp_path / "data" / name / f"{i}.png")
    words = ["diffmask", "train", "--images", f"{tmp_path}/data", "--out", f"{tmp_path}/dm", "--preset", "authors"]
    for change in ("beta=40", "steps=25", "batch_size=2", "restarts=1", "warmup=0", "gate_rate=1e-9"):
        words += ["--set", change]
    command(*words, says=("; restarted once (step 20: nothing is masked (kept 100.0%",))
