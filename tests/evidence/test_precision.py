"""Passes in less than full precision: near it, whatever the gradients' size; and what `auto` comes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import patchlight as pl
from patchlight import engine
from patchlight.core.errors import NotFinite
from patchlight.core.targets import Targets
from patchlight.evidence.passes import in_memory, run_pass, surely_predicted
from patchlight.evidence.precision import chosen
from patchlight.evidence.runner import LayerJob
from patchlight.methods import maps, requests
from patchlight.methods.requests import resolve
from tests.families import build, images, shared

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NAMES = [
    "genatt",
    "ixg.plus.libra",
    "tokentm",
    "fullgrad-plus",
    "gradcam",
    "genatt.attnlrp",
    "rollout",
    "grad",
    "attin",
]


@pytest.mark.parametrize("family", ["vit", "eva02", "reg4-gap", "torchvision", "hf-clip", "beit"])
@pytest.mark.parametrize(("precision", "limit"), [("fp16", 0.03), ("bf16", 0.2)])
def test_maps_in_half_precision_are_near_those_in_full(family: str, precision: str, limit: float) -> None:
    vit = shared(family)
    batch = images(vit, 2)
    full, half = (pl.explain(vit, batch, NAMES[:8], target=1, precision=p) for p in ("full", precision))
    for name, attribution in full.items():
        error = float((half[name].scores - attribution.scores).abs().max() / attribution.scores.abs().max())
        assert 0 < error < limit, f"{name}: {error:.4f}"
        assert (half[name].precision, attribution.precision) == (precision, "full")


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e9])
@pytest.mark.parametrize("name", NAMES)
def test_float16_neither_loses_small_gradients_nor_overflows_at_large_ones(name: str, size: float) -> None:
    """The gradient is put into the middle of float16's range for each image, and taken back out of it."""
    vit = shared("vit")
    batch = images(vit, 2)
    per_image = torch.tensor([[1.0], [1e-5]])
    one = pl.explain(vit, batch, name, target=1, precision="fp16").scores
    other = pl.explain(vit, batch, name, target=1, precision="fp16", score=lambda y: size * per_image * y).scores
    assert bool(other.isfinite().all())
    assert all(float(o.std()) > 0 for o in other)
    if name in ("genatt", "tokentm", "genatt.attnlrp"):  # products of I + M are not proportional to M
        return
    factor = (size * per_image).flatten()[:, None, None] if resolve(name).backward else torch.ones(2, 1, 1)
    error = (other / factor - one).abs().amax((1, 2)) / one.abs().amax((1, 2))
    assert float(error.max()) < 0.03


def test_evidence_is_unscaled_for_every_class() -> None:
    vit = shared("vit")
    batch = images(vit, 2)
    targets = Targets(torch.tensor([[0, 1], [2, 3]]), several=True)
    needs = ("g", "gy", "gn", "G", "bias")
    job = LayerJob(lambda e: {n: e.read(n) for n in needs}, frozenset({*needs, "A", "n"}), (0, 1, 2))
    full, half = (run_pass(vit, batch, targets, jobs=[job], precision=p) for p in ("full", "fp16"))
    for t in range(2):
        for layer in range(3):
            for n in needs:
                a, b = full.at(layer, target=t)[n], half.at(layer, target=t)[n]
                assert float((a - b).norm()) < 0.03 * float(a.norm()), (n, layer, t)


@pytest.mark.parametrize(
    ("asked", "device", "auto", "found"),
    [
        ("auto", CPU, "fp16", "full"),
        ("auto", CUDA, "fp16", "fp16"),
        ("auto", CUDA, "full", "full"),
        ("tf32", CPU, "fp16", "full"),
        ("tf32", CUDA, "fp16", "tf32"),
        ("fp16", CPU, "full", "fp16"),
    ],
)
def test_what_a_precision_comes_to(asked: Any, device: torch.device, auto: Any, found: str) -> None:
    assert chosen(asked, device, torch.float32, auto) == found
    if asked == "auto":
        assert chosen(asked, device, torch.float64, auto) == "full"


def test_a_model_too_large_for_float16_is_explained_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `auto` tried float16 and its numbers were lost, they are computed again, and the map says in what."""
    monkeypatch.setattr(requests, "chosen", lambda p, device, dtype, auto: auto if p == "auto" else p)
    vit = build("vit")
    with torch.no_grad():
        for block in vit.model.blocks:
            block.mlp.fc1.weight.mul_(1e6)
            block.mlp.fc2.weight.mul_(1e-6)
    batch = images(vit, 2)
    for target in (1, None):
        vit.overflows = False
        found = pl.explain(vit, batch, ["genatt", "ixg"], target=target)
        assert vit.overflows
        full = pl.explain(vit, batch, ["genatt", "ixg"], target=target, precision="full")
        for name, attribution in found.items():
            assert attribution.precision == "tf32"
            assert torch.equal(attribution.scores, full[name].scores)
            assert torch.equal(attribution.target, full[name].target)
    with pytest.raises(NotFinite, match="overflow float16; precision='tf32'"):
        pl.explain(vit, batch, "genatt", target=1, precision="fp16")


def test_each_method_has_its_own_precision_in_one_call() -> None:
    vit = shared("vit")
    batch = images(vit, 2)
    asked = {"a": {"method": "genatt", "precision": "fp16"}, "b": {"method": "genatt"}, "c": {"method": "rollout"}}
    together = pl.explain(vit, batch, asked, target=1)
    assert [together[label].precision for label in "abc"] == ["fp16", "full", "full"]
    for label, settings in asked.items():
        alone = pl.explain(vit, batch, {label: settings}, target=1)[label]
        torch.testing.assert_close(together[label].scores, alone.scores)


def test_a_close_prediction_is_looked_up_in_full() -> None:
    vit = shared("vit")
    batch = images(vit, 3)
    full = vit.logits(batch)
    rounded = full.clone()
    right = full.argmax(1)
    rounded[0, (right[0] + 1) % vit.classes] = full[0].max() + 1e-3  # rounding makes another class win
    rounded[1] = 0
    rounded[1, 2] = 100.0  # far from all others: believed
    found = surely_predicted(vit, batch, rounded, "fp16").index.flatten()
    assert found.tolist() == [int(right[0]), 2, int(right[2])]
    assert surely_predicted(vit, batch, rounded, "full").index[0] != right[0]
    lost = torch.full_like(full, torch.nan)
    assert torch.equal(surely_predicted(vit, batch, lost, "fp16").index.flatten(), right.cpu())


def test_a_close_decision_of_one_output_is_looked_up_in_full() -> None:
    vit = build("vit-binary")
    batch = images(vit, 4)
    with torch.no_grad():
        vit.model.head.bias -= vit.logits(batch).median() - 0.05
    full = vit.logits(batch)
    rounded = torch.where(full.abs() < 0.2, -1e-3 * full.sign(), full)
    assert torch.equal(surely_predicted(vit, batch, rounded, "fp16").index, (full > 0).long().cpu())


def test_a_changed_model_is_seen_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = build("vit")
    batch = images(vit, 2)
    before = pl.explain(vit, batch, "genatt", target=1, precision="fp16").scores
    vit.model.blocks[1].register_forward_hook(lambda module, given, out: out + 0.5)
    vit.model.head = torch.nn.Linear(48, 7)
    torch.nn.init.normal_(vit.model.head.weight)
    after, full = (pl.explain(vit, batch, "genatt", target=1, precision=p).scores for p in ("fp16", "full"))
    assert float((after - full).abs().max()) < 0.03 * float(full.abs().max())
    assert float((after - before).abs().max()) > 0.1 * float(full.abs().max())


def test_a_hook_in_the_last_block_is_not_passed_by() -> None:
    """What it does at one call says nothing of the next."""
    vit, on = build("vit"), [0.0]
    vit.model.blocks[-1].attn.register_forward_hook(lambda module, given, out: out * (1 + on[0]))
    batch = images(vit, 2)
    before = pl.explain(vit, batch, "ixg", target=1).scores
    on[0] = 1.0
    assert not vit.reads_first
    assert float((pl.explain(vit, batch, "ixg", target=1).scores - before).abs().max()) > 1e-3


def test_rows_are_run_in_halves_when_memory_runs_out() -> None:
    sizes = []

    def run(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        if len(rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 2 * rows

    assert in_memory(run, torch.arange(7)).tolist() == list(range(0, 14, 2))
    assert sizes == [7, 4, 2, 2, 3, 2, 1]
    with pytest.raises(torch.OutOfMemoryError):
        in_memory(lambda rows: run(torch.zeros(9)), torch.arange(2))


def test_a_batch_is_halved_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = shared("vit", torch.float64)
    batch, sizes = images(vit, 7), []
    expected = pl.explain(vit, batch, ["genatt", "rollout"], target=list(range(7)))
    real = engine.estimate

    def compute(vit: pl.Anatomy, some: torch.Tensor, *rest: Any) -> Any:
        sizes.append(len(some))
        if len(some) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(vit, some, *rest)

    monkeypatch.setattr(engine, "estimate", compute)
    found = pl.explain(vit, batch, ["genatt", "rollout"], target=list(range(7)), batch_size=6)
    assert sizes == [6, 3, 1, 1, 1, 1, 1, 1, 1]
    for name, attribution in expected.items():
        torch.testing.assert_close(found[name].scores, attribution.scores)
        assert found[name].target.tolist() == list(range(7))
    monkeypatch.setattr(engine, "estimate", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none")))
    with pytest.raises(pl.PatchlightError, match="one image does not fit into memory"):
        pl.explain(vit, batch, "genatt", target=0)


@pytest.mark.parametrize("target", [1, [[0, 1], [2, 3]], (1, 2), None])
def test_a_captured_pass_is_given_all_it_depends_on(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are of CUDA; here what would be captured is called with copies of its inputs, once recorded, twice run."""
    vit = shared("vit")
    ignoring = [] if isinstance(target, tuple) else ["rollout"]  # refused with a contrast
    names = ["genatt", *ignoring, "gradcam", "ixg.libra"]
    keys: list[Any] = []
    recorded: dict[Any, Any] = {}

    def captured(owner: Any, key: Any, function: Any, inputs: Any) -> Any:
        keys.append(key)
        return recorded.setdefault(key, function)(*(t.clone() for t in inputs))

    monkeypatch.setattr(maps, "captured", captured)
    monkeypatch.setattr(maps, "_capturable", lambda requests, vit: all(r.settings["compile"] for r in requests))
    for batch in (images(vit, 2), images(vit, 2).flip(0)):
        graph = pl.explain(vit, batch, names, target=target, compile=True)
        steps = pl.explain(vit, batch, names, target=target)
        for name in names:
            assert torch.equal(graph[name].target, steps[name].target)
            torch.testing.assert_close(graph[name].scores, steps[name].scores)
    assert len(recorded) == len(keys) / 2, "the second batch is replayed"
    pl.explain(vit, images(vit, 2), {"genatt": {"rectify": "mean"}}, target=1, compile=True)
    assert keys[-1] not in keys[:-1], "another setting is another graph"


def test_what_cannot_be_captured_is_computed_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = shared("vit")
    monkeypatch.setattr(maps, "captured", lambda *_: None)
    monkeypatch.setattr(maps, "_capturable", lambda requests, vit: True)
    for target in (1, None):
        found = pl.explain(vit, images(vit, 2), "genatt", target=target, compile=True)
        assert torch.equal(found.scores, pl.explain(vit, images(vit, 2), "genatt", target=target).scores)
