"""On an accelerator: the same maps as on the CPU. Run by `make test-accelerator`, skipped without CUDA."""

from __future__ import annotations

import copy
from typing import get_args

import pytest
import torch

import patchlight as pl
from patchlight.evidence.ablation import Ablation, TokenSubsets
from patchlight.evidence.kmeans import Empty, draw_initial, kmeans
from patchlight.methods.requests import refusal, resolve
from patchlight.testing import contract_names, spearman
from patchlight.trained.diffmask.gates import DiffMask, new_gates
from tests.families import STRUCTURAL, build, images
from tests.test_threads import together

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
        quick = (
            {**request.method.quick, "precision": "full"} if "precision" in request.settings else request.method.quick
        )
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


def test_threads_see_nothing_of_each_other() -> None:
    """Scoring is in bfloat16 here by default; plain forwards beside it, and the weights, are what they were."""
    vit = build("vit")
    vit.model.cuda().train().requires_grad_(True)
    batch = images(vit, 2).cuda()
    before = {name: value.clone() for name, value in vit.model.state_dict().items()}
    names = ("genatt", "tis", "rise", "occlusion", "gradcam")
    alone = {name: pl.explain(vit, batch, name, target=1, **resolve(name).method.quick).scores for name in names}
    with torch.no_grad():
        expected = vit.model(batch)
    right: list[bool] = []

    def explains() -> None:
        for _ in range(3):
            for name, scores in alone.items():
                found = pl.explain(vit, batch, name, target=1, **resolve(name).method.quick).scores
                torch.testing.assert_close(found, scores, atol=1e-3 * float(scores.abs().max()), rtol=1e-3)

    def uses() -> None:
        with torch.no_grad():
            for _ in range(100):
                out = vit.model(batch)
                right.append(out.dtype == torch.float32 and torch.allclose(out, expected, atol=1e-5))

    together(explains, explains, uses)
    assert sum(right) == 100, f"{sum(right)} of 100 plain forwards are right"
    assert all(torch.equal(before[name], value) for name, value in vit.model.state_dict().items())
    assert all(m.training for m in vit.model.modules())


def test_half_precision_models_have_the_maps_of_their_weights() -> None:
    wide = build("vit")
    for dtype in (torch.float16, torch.bfloat16):
        half = copy.deepcopy(wide.model).cuda().to(dtype)
        vit, other = pl.wrap(half), pl.wrap(copy.deepcopy(half).float())
        batch = images(wide, 2).cuda().to(dtype)
        for name in ("tokentm", "globenc", "lrp", "transatt", "genatt", "ixg.plus.libra"):
            found, expected = (
                pl.explain(v, b, name, target=1).scores for v, b in ((vit, batch), (other, batch.float()))
            )
            assert bool(found.isfinite().all()), name
            assert min(spearman(a, b) for a, b in zip(found, expected, strict=True)) > 0.999, f"{name} in {dtype}"


def test_moving_a_wrapped_model_moves_what_explains_it() -> None:
    vit = build("vit")
    batch = images(vit, 2)
    here = pl.explain(vit, batch, "genatt", target=1).scores
    vit.model.cuda()
    there = pl.explain(vit, batch, "genatt", target=1).scores
    torch.testing.assert_close(here, there, atol=1e-5, rtol=1e-3)


def test_tf32_rounds_the_variants_and_nothing_after() -> None:
    vit = pl.wrap(build("vit").model.cuda())
    batch = images(vit, 2)
    full, tf32, bf16, after = (
        pl.explain(vit, batch, "occlusion", target=1, score="logit", precision=precision).scores
        for precision in ("full", "tf32", "bf16", "full")
    )
    assert torch.equal(full, after), "the flag was left set"
    near, far = (float((full - one).abs().max() / full.abs().max()) for one in (tf32, bf16))
    assert 0 < near < far
    assert near < 0.05


def test_kmeans_is_that_of_the_cpu() -> None:
    """In float64, where no two distances are nearly equal."""
    points = torch.randn(3, 1500, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    initial = torch.stack([draw_initial(1500, 150, seed) for seed in range(3)])
    for empty in get_args(Empty):
        here, there = (kmeans(p, initial, empty=empty) for p in (points, points.cuda()))
        torch.testing.assert_close(there.cpu(), here, atol=1e-12, rtol=0)


@pytest.mark.parametrize("compile", [False, True])
def test_the_first_row_scores_variants_as_whole_blocks_do(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    vit = pl.wrap(build("vit").model.cuda())
    batch = images(vit, 2).cuda()
    keep = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(k))[:9] for k in range(40)])
    ablation = Ablation(vit, batch, compile=compile)
    assert vit.reads_first
    row = ablation.logits(TokenSubsets(torch.arange(40) % 2, keep))
    monkeypatch.setattr(vit, "reads_first", False)
    whole = ablation.logits(TokenSubsets(torch.arange(40) % 2, keep))
    torch.testing.assert_close(row, whole, atol=0.02 * float(whole.abs().max()), rtol=0)
