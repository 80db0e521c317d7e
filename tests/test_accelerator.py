"""On an accelerator: the same maps as on the CPU. Run by `make test-accelerator`, skipped without CUDA."""

from __future__ import annotations

import copy

import pytest
import torch

import patchlight as pl
from patchlight.diffmask.gates import DiffMask, new_gates
from patchlight.registry import refusal, resolve
from patchlight.testing import contract_names, spearman
from tests.families import STRUCTURAL, build, images

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::patchlight.DegenerateMap"),
]


@pytest.fixture(autouse=True)
def _exact_matmul() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("family", [f for f in STRUCTURAL if not f.startswith("hf-")])
def test_maps_are_those_of_the_cpu(family: str) -> None:
    """In float64, so that only a wrong device path can differ; random ones in shape only."""
    cpu = build(family, torch.float64)
    cuda = pl.wrap(copy.deepcopy(cpu.model).cuda(), name=family)
    batch = images(cpu, 2)
    target = cpu.logits(batch).argmax(1).tolist()
    for name in contract_names():
        request = resolve(name, resolve(name).method.quick)
        if refusal(request, cpu) is not None:
            continue
        quick = {**request.method.quick, "precision": "full"} if request.method.ablates else request.method.quick
        here, there = (pl.explain(v, batch, name, target=target, **quick).scores for v in (cpu, cuda))
        assert here.shape == there.shape, name
        assert bool(torch.isfinite(there).all()), name
        if request.method.stochastic:
            continue
        if request.method.exact:
            worst = float((here - there).abs().max() / here.abs().max())
            assert worst < 1e-5, f"{name}: {worst:.1e}"
        else:
            assert all(spearman(a, b) > 0.99 for a, b in zip(here, there, strict=True)), name


def test_gates_give_the_maps_of_the_cpu() -> None:
    cpu = build("vit", torch.float64)
    cuda = pl.wrap(copy.deepcopy(cpu.model).cuda(), name=cpu.name)
    dm = DiffMask.of(new_gates(cpu, beta=2.0).cpu(), cpu)
    here, there = (pl.explain(v, images(cpu, 2), "diffmask", target=0, explainer=dm).scores for v in (cpu, cuda))
    assert float((here - there).abs().max()) < 1e-5


def test_memory_is_given_back() -> None:
    vit = build("vit")
    vit.model.cuda()
    batch = images(vit, 2)
    pl.explain(vit, batch, ["genatt", "ixg.libra"])
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        pl.explain(vit, batch, ["genatt", "ixg.libra"])
    assert torch.cuda.memory_allocated() <= before
