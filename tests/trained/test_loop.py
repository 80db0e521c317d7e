"""The shared loop with another explainer: it learns, resumes exactly after a kill, and refuses other runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from patchlight.core.errors import PatchlightError
from patchlight.trained.loop import Devices, Learner
from tests.trained.test_explainers import rows
from tests.trained.toys import StudentSettings, Told, batches, pictures, teach, toy

QUICK: dict[str, Any] = {"steps": 20, "log_every": 3, "checkpoint_steps": 4}


def settings(**changes: Any) -> StudentSettings:
    return StudentSettings(**{**QUICK, **changes})


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_second_explainer_learns() -> None:
    told: list[Told] = []
    _, last = teach(settings(steps=None, epochs=20.5, log_every=41), callback=told.append)
    assert [now.step for now in told] == [41, 82, 123]
    assert {now.steps for now in told} == {123}
    assert told[-1].loss < 0.5 * told[0].loss
    assert (last["loss"], last["agreement"]) == (told[-1].loss, told[-1].agreement)


def test_reports_are_means_of_the_steps_between_them() -> None:
    each, every = ([now.loss for now in some] for some in (told_of(log_every=1), told_of(log_every=5)))
    assert every == pytest.approx([sum(each[i : i + 5]) / 5 for i in range(0, 20, 5)], rel=1e-5)


def told_of(**changes: Any) -> list[Told]:
    told: list[Told] = []
    teach(settings(**changes), callback=told.append)
    return told


SCRIPT = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.trained.test_loop import settings
from tests.trained.test_explainers import rows
from tests.trained.toys import teach
teach(settings(log_every=1), Path(sys.argv[1]), lambda now: time.sleep(0.1))
"""


def test_killed_and_resumed_it_ends_with_the_same_weights_and_numbers(tmp_path: Path) -> None:
    whole, last = teach(settings(log_every=1), tmp_path / "whole")
    folder = tmp_path / "killed"
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)], cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if (folder / "checkpoint.safetensors").exists() and len(rows(folder)) >= 6:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with safe_open(folder / "checkpoint.safetensors", "pt") as file:
        assert '"step": 20' not in file.metadata()["about"]
    begun: list[Told] = []
    resumed, again = teach(settings(log_every=1), folder, begun.append)
    assert begun[0].step > 4
    assert same(whole, resumed)
    assert rows(folder) == rows(tmp_path / "whole")
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in last.items() if k != "seconds"}


def test_a_finished_run_is_left_and_a_longer_one_continues(tmp_path: Path) -> None:
    first, last = teach(settings(), tmp_path)
    again, same_last = teach(settings(), tmp_path)
    assert same(first, again)
    assert same_last == last
    longer, _ = teach(settings(steps=30), tmp_path)
    assert same(longer, teach(settings(steps=30))[0])


def test_what_lies_there_of_another_run_is_refused_or_replaced(tmp_path: Path) -> None:
    teach(settings(), tmp_path)
    with pytest.raises(PatchlightError, match="holds a run with another rate, seed; choose another folder"):
        teach(settings(rate=0.5, seed=3), tmp_path)
    with pytest.raises(PatchlightError, match="belongs to another model"):
        teach(settings(), tmp_path, vit=toy(classes=3))
    other, _ = teach(settings(rate=0.5), tmp_path, resume=False)
    assert same(other, teach(settings(rate=0.5))[0])
    assert len(rows(tmp_path)) == 7
    (tmp_path / "checkpoint.safetensors").write_bytes(b"cut")
    with pytest.raises(PatchlightError, match="is damaged, or of an earlier version; remove it"):
        teach(settings(), tmp_path)


def test_a_loss_that_is_not_a_number_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    spoilt = [pictures(4)] * 9 + [torch.full((4, 3, 16, 16), torch.nan)] * 11
    with pytest.raises(PatchlightError, match=r"became nan by step 12; the checkpoint of step 8 is in .* lower rate"):
        teach(settings(), tmp_path, loader=spoilt)
    with safe_open(tmp_path / "checkpoint.safetensors", "pt") as file:
        assert all(bool(file.get_tensor(key).isfinite().all()) for key in file.keys())  # noqa: SIM118


def test_a_loader_that_is_spent_is_reported() -> None:
    class Once:
        def __init__(self) -> None:
            self.some = iter([pictures(4)] * 3)

        def __iter__(self) -> Any:
            return self.some

    with pytest.raises(PatchlightError, match="the loader gave no batch"):
        teach(settings(), loader=Once())


def test_a_folder_that_cannot_be_written_is_reported_before_any_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PatchlightError, match="is not a folder"):
        teach(settings(), tmp_path / "file" / "run", loader=[])


def test_tensorboard_files_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    teach(settings(tensorboard=True, steps=3), tmp_path)
    assert list(tmp_path.glob("events.out.*"))


def test_a_learner_must_define_how_it_resumes() -> None:
    class Forgetful(Learner[Told]):
        def step(self, batch: Any, index: int) -> Tensor:
            return torch.zeros(1)

    with pytest.raises(TypeError, match="abstract"):
        Forgetful()  # type: ignore[abstract]


def test_alone_a_process_has_all_batches() -> None:
    devices = Devices(toy())
    loader, network = batches(), torch.nn.Linear(2, 2)
    assert devices.share(loader) is loader
    assert devices.parallel(network) is network
    assert (devices.rank, devices.main) == (0, True)
