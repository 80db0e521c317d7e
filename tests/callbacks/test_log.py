"""A training log has the maps and numbers of each step, keeps its budget, and does not change the training."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import patchlight as pl
from patchlight.callbacks import TrainingLog, log_maps
from patchlight.callbacks import log as room
from patchlight.callbacks.log import Budget
from patchlight.core.drawing import figure_picture
from patchlight.core.errors import Cancelled, LogSkipped
from tests.callbacks.pieces import NAMES, TARGET, images, model, same, train

Logged = dict[int, tuple[dict[str, float], dict[str, Any]]]


def logged(net: Any, **options: Any) -> tuple[TrainingLog, Logged]:
    found: Logged = {}
    options = {"every": 1, "target": TARGET, "budget": None, **options}
    return TrainingLog(net, images(), lambda step, *rest: found.update({step: rest}), **options), found


def walk(log: TrainingLog, *steps: int) -> None:
    for step in steps:
        log(step)


def test_a_training_with_a_log_gives_the_same_weights_to_the_bit() -> None:
    def draws(step: int, numbers: Any, pictures: Any) -> None:
        random.random(), np.random.rand(), torch.rand(3)
        told.append(step)

    told: list[int] = []
    random.seed(3)
    np.random.seed(3)
    plain, alone = train(model()), (random.random(), np.random.rand())
    net = model()
    log = TrainingLog(net, images(), draws, every=2, target=TARGET, method=["genatt", "rise"], metric=None, budget=None)
    random.seed(3)
    np.random.seed(3)
    assert same(train(net, log), plain)
    assert (random.random(), np.random.rand()) == alone
    assert told == [0, 2, 4]
    assert not same(plain, model()), "nothing was trained"


def test_a_model_keeps_its_mode_gradients_and_autocast() -> None:
    net = model()
    net.blocks[0].requires_grad_(False)
    net(images()).sum().backward()
    modes = [m.training for m in net.modules()]
    before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    asked = [p.requires_grad for p in net.parameters()]
    log, found = logged(net)
    log(0)
    with torch.autocast("cpu", torch.bfloat16):
        log(1)
        assert torch.is_autocast_enabled("cpu")
    with torch.no_grad():
        log(2)
        assert not torch.is_grad_enabled()
    assert [m.training for m in net.modules()] == modes
    assert [p.requires_grad for p in net.parameters()] == asked
    for p, grad in zip(net.parameters(), before, strict=True):
        assert (p.grad is None) == (grad is None)
        assert grad is None or torch.equal(p.grad, grad)
    numbers = [{k: v for k, v in found[step][0].items() if k != "patchlight/seconds"} for step in range(3)]
    assert numbers[0] == numbers[1] == numbers[2]


def test_what_is_logged_is_of_the_weights_of_that_step() -> None:
    """Compared with a copy of the model at each step."""
    net = model()
    log, found = logged(net, method=["auto", "rollout"])
    copies = {}

    def log_and_copy(step: int) -> None:
        log(step)
        copies[step] = copy.deepcopy(net).eval()

    train(net, log_and_copy, steps=3)
    assert sorted(found) == [0, 1, 2]
    assert len({found[step][0]["patchlight/probability"] for step in found}) == 3
    for step, (numbers, pictures) in found.items():
        assert set(numbers) == NAMES | {"patchlight/rollout/ins-del"}
        still = copies[step]
        with torch.no_grad():
            p = still(images()).softmax(1)
        assert numbers["patchlight/probability"] == pytest.approx(float(p[[0, 1], TARGET].mean()), abs=1e-5)
        maps = pl.explain(still, images(), ["auto", "rollout", "random"], TARGET)
        for name, own in maps.items():
            value = pl.evaluate(still, images(), own.scores, "ins-del", TARGET, steps=14).mean
            assert numbers[f"patchlight/{name}/ins-del"] == pytest.approx(value, abs=1e-4)
        maps.pop("random")
        drawn = np.asarray(figure_picture(pl.figure(images(), maps, vit=still)), dtype=int)
        shown = np.asarray(pictures["patchlight/maps"], dtype=int)
        assert shown.shape == drawn.shape
        assert np.abs(shown - drawn).mean() < 1
        assert shown.std() > 10


def test_only_steps_that_are_due_are_logged_and_each_once() -> None:
    net = model()
    log, found = logged(net, every=3, target=None, metric=None)
    walk(log, 0, 0, 1, 2, 3, 3, 4, 9)
    assert list(found) == [0, 3, 9]
    assert set(found[0][0]) == {"patchlight/probability", "patchlight/seconds"}
    with torch.no_grad():
        p = copy.deepcopy(net).eval()(images()).softmax(1).max(1).values.mean()
    assert found[0][0]["patchlight/probability"] == pytest.approx(float(p), abs=1e-5)


def test_pairs_metrics_with_settings_and_plain_numbers_as_outputs() -> None:
    net = model()
    vit = pl.wrap(net, regression=True)
    log, found = logged(vit, target=(1, 2), metric={"few": {"metric": "deletion", "steps": 3}})
    log(0)
    with torch.no_grad():
        out = copy.deepcopy(net).eval()(images())
    assert set(found[0][0]) == {
        "patchlight/logit",
        "patchlight/auto/few",
        "patchlight/random/few",
        "patchlight/seconds",
    }
    assert found[0][0]["patchlight/logit"] == pytest.approx(float((out[:, 1] - out[:, 2]).mean()), abs=1e-4)


def test_a_budget_is_a_share_of_the_time_since_training_began(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(room, "monotonic", lambda: now)
    time = Budget(0.1, None)
    time.begin()
    assert not time.lacks(), "the first time is always there: what it takes is not known"
    with time.spending():
        now += 2
    now = 139.0
    assert time.lacks() == "it takes 2 s, and 1.9 s of a budget of 10 % are left"
    time.begin()
    now = 140.0
    assert not time.lacks(), "2 s spent and 2 s to come are a tenth of 40 s"
    with time.spending():
        now += 2
    now = 159.0
    assert time.lacks(), "4 s are spent, and the next takes 2 s"
    now = 160.0
    assert not time.lacks()
    unlimited = Budget(None, None)
    unlimited.begin()
    with unlimited.spending():
        now += 1000
    assert not unlimited.lacks()


def test_steps_beyond_the_budget_are_left_out_and_that_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(room, "monotonic", lambda: now)

    def slow(*args: Any, **kwargs: Any) -> Any:
        nonlocal now
        now += 6
        return maps(*args, **kwargs)

    def write(step: int, numbers: Any, pictures: Any) -> None:
        nonlocal now
        found[step] = numbers["patchlight/seconds"]
        now += 4

    found: dict[int, float] = {}
    log = TrainingLog(model(), images(), write, every=1, metric=None, budget=0.5)
    maps = room.explain
    monkeypatch.setattr(room, "explain", slow)
    log(0)
    with pytest.warns(LogSkipped, match=r"step 1 is not logged: it takes 10 s, and 0 s of a budget of 50 %") as told:
        walk(log, 1, 2)
    assert len(told) == 1
    now = 40.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        walk(log, 3, 4)
    assert found == {0: 6, 3: 6}, "what a log took is told before it is written"


def test_a_writer_that_fails_stops_the_log_and_not_the_training() -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    log = TrainingLog(model(), images(), full, every=1, metric=None, budget=None)
    with pytest.warns(
        LogSkipped, match=r"step 0 is not logged: its writer failed with OSError: .*No space left"
    ) as told:
        walk(log, 0, 1)
    assert len(told) == 1
    with pytest.raises(pl.PatchlightError, match="its writer failed"):
        log.log(2)


def test_a_log_that_takes_too_long_is_cut_off_and_that_is_reported_once() -> None:
    log, found = logged(model(), seconds=1e-9)
    with pytest.warns(LogSkipped, match=r"the maps of step 0 took over 1e-09 s; give more seconds=") as told:
        walk(log, 0, 1, 2, 3)
    assert len(told) == 1
    assert list(found) == [0, 1, 2, 3]
    assert all(set(numbers) == {"patchlight/seconds"} and not pictures for numbers, pictures in found.values())


def test_numbers_that_take_too_long_are_left_out_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*args: Any, **kwargs: Any) -> Any:
        tried.append(args[2])
        if args[2] == "random":
            return measured(*args, **kwargs)
        raise Cancelled

    tried: list[Any] = []
    measured = room.evaluate
    monkeypatch.setattr(room, "evaluate", late)
    log, found = logged(model(), seconds=100.0)
    with pytest.warns(LogSkipped, match=r"the numbers of auto of step 0 took over 100 s"):
        walk(log, 0, 1, 2, 3)
    assert [name if isinstance(name, str) else name.method for name in tried] == [
        "fullgrad-plus.libra",
        "fullgrad-plus.libra",
        "random",
        "random",
    ]
    assert all(pictures for _, pictures in found.values())
    assert "patchlight/random/ins-del" in found[3][0]


def test_weights_that_are_not_finite_stop_the_log_and_not_the_training() -> None:
    net = model()
    log, found = logged(net, metric=None)
    log(0)
    with torch.no_grad():
        held = net.norm.weight.clone()
        net.norm.weight.fill_(float("nan"))
    with pytest.warns(LogSkipped, match=r"step 1 is not logged: .*this warning appears once") as told:
        walk(log, 1, 2)
    assert len(told) == 1
    with torch.no_grad():
        net.norm.weight.copy_(held)
    log(3)
    assert list(found) == [0, 3]
    assert found[3][0]["patchlight/probability"] == found[0][0]["patchlight/probability"]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"method": "genat"}, "did you mean 'genatt'"),
        ({"metric": "ins-dell"}, "did you mean 'ins-del'"),
        ({"target": [1]}, "target has length 1 but there are 2 images"),
        ({"target": [[1, 2], [3, 4]]}, "target has 2 classes per image"),
        ({"every": 0}, "every 0 is not possible"),
        ({"budget": 5}, "budget is 5; give a share"),
        ({"seconds": 0}, "seconds is 0; give a number above 0"),
        ({"writer": 3}, "writer is 3; give a SummaryWriter"),
        ({"images": torch.zeros(2, 3, 8, 8)}, "images have shape"),
        ({"images": torch.zeros(65, 3, 64, 64), "target": None}, "65 images are too many"),
    ],
)
def test_what_cannot_be_logged_is_refused_before_training(wrong: dict[str, Any], sentence: str) -> None:
    options = {"images": images(), "writer": print, "target": TARGET, **wrong}
    with pytest.raises(pl.PatchlightError, match=sentence):
        TrainingLog(model(), options.pop("images"), options.pop("writer"), **options)


def test_the_plain_function_logs_one_step() -> None:
    with pytest.raises(pl.PatchlightError, match="there is no writer"):
        log_maps(model(), images(), None, 17)
    found: list[Any] = []
    log_maps(model(), images(), lambda *given: found.append(given), 17, target=TARGET)
    ((step, numbers, pictures),) = found
    assert step == 17
    assert set(numbers) == NAMES
    assert set(pictures) == {"patchlight/maps"}


@pytest.fixture
def process_group(tmp_path: Path) -> Any:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_only_the_first_process_logs(process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    spread = torch.nn.parallel.DistributedDataParallel(net)
    log, found = logged(spread, metric=None)
    log(0)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    log(1)
    assert list(found) == [0]


@pytest.mark.parametrize("place", [lambda net: net, torch.nn.Sequential], ids=["itself", "inside another"])
@pytest.mark.parametrize("own", [True, False], ids=["own parameters", "one flat parameter"])
def test_weights_that_are_flattened_are_not_touched(process_group: None, own: bool, place: Any) -> None:
    """The weights of a model in FullyShardedDataParallel may be in freed memory, so reading them would crash."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = model()
    log, found = logged(net)
    trained = FullyShardedDataParallel(place(net), use_orig_params=own, device_id=torch.device("cpu"))
    log.attach(lambda: None, trained)
    with pytest.warns(LogSkipped, match="sharded over processes"):
        log(0)
    assert not found


def test_weights_that_are_spread_over_processes_are_not_touched(process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    log, _ = logged(net)
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(pl.PatchlightError, match="sharded over processes"):
        log.log(0)


TWO = """
import sys, torch
from pathlib import Path
from patchlight.callbacks import TrainingLog
from tests.callbacks.pieces import TARGET, images, model, train

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank, folder = torch.distributed.get_rank(), Path(sys.argv[1])
net = model()
log = TrainingLog(net, images(), lambda step, *rest: (folder / f"{rank}-{step}").touch(), every=2, budget=None)
train(torch.nn.parallel.DistributedDataParallel(net), log if sys.argv[2] == "log" else lambda step: None)
torch.save(net.state_dict(), folder / f"{sys.argv[2]}-{rank}.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_train_as_without_and_one_logs(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for word in ("log", "plain"):
        done = subprocess.run(
            [*launch, str(tmp_path), word], env=environment, timeout=300, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    states = [torch.load(tmp_path / f"{word}-{rank}.pt") for word in ("log", "plain") for rank in (0, 1)]
    for other in states[1:]:
        assert all(torch.equal(states[0][key], other[key]) for key in other)
    assert sorted(p.name for p in tmp_path.glob("?-?")) == ["0-0", "0-2", "0-4"]
