"""On an accelerator: the same maps as on the CPU. Run by `make test-accelerator`, skipped without CUDA."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import get_args

import pytest
import timm
import torch

import patchlight as pl
from patchlight.core.errors import NotCaptured
from patchlight.evidence import taps
from patchlight.evidence.ablation import Ablation, TokenSubsets
from patchlight.evidence.imputation import imputed
from patchlight.evidence.kmeans import Empty, draw_initial, kmeans
from patchlight.evidence.rows import Entry, FusedAttention, Rows, attend, lengths, row_sums, times
from patchlight.methods.requests import refusal, resolve
from patchlight.testing import contract_names, spearman
from patchlight.trained.diffmask.gates import DiffMask, new_gates
from tests.families import ROOMY, STRUCTURAL, build, images, roomy
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
                pl.explain(v, b, name, target=1, precision="full").scores
                for v, b in ((vit, batch), (other, batch.float()))
            )
            assert bool(found.isfinite().all()), name
            assert min(spearman(a, b) for a, b in zip(found, expected, strict=True)) > 0.999, f"{name} in {dtype}"


def test_moving_a_wrapped_model_moves_what_explains_it() -> None:
    vit = build("vit")
    batch = images(vit, 2)
    here = pl.explain(vit, batch, "genatt", target=1, precision="full").scores
    vit.model.cuda()
    there = pl.explain(vit, batch, "genatt", target=1, precision="full").scores
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


SIZES = [(5, 16, 1, 1), (17, 24, 33, 2), (50, 64, 33, 3), (63, 88, 5, 2), (197, 64, 4, 12), (261, 72, 3, 2)]
SIZES += [(577, 80, 1, 3), (785, 32, 2, 3), (1370, 64, 2, 4), (1500, 128, 1, 2)]


@pytest.mark.parametrize(
    ("tokens", "width", "batch", "heads", "dtype"),
    [*((*size, torch.float16) for size in SIZES), (197, 64, 4, 12, torch.bfloat16)],
)
def test_tiles_are_rows_of_the_matrix(tokens: int, width: int, batch: int, heads: int, dtype: torch.dtype) -> None:
    """Entries with and without scales, over rows and columns, for a dense row and one read at CLS alone.

    Every entry at some sizes; each is a kernel of its own, which is compiled for each size.
    """
    torch.manual_seed(tokens)
    q, k, v = torch.randn(batch, tokens, 3, heads, width, device="cuda").to(dtype).permute(2, 0, 3, 1, 4).unbind(0)
    dO = torch.randn(batch, tokens, heads, width, device="cuda").to(dtype).transpose(1, 2)
    lse = (q.float() @ k.float().mT * width**-0.5).logsumexp(-1)
    seen = FusedAttention(q, k, v, lse, width**-0.5, dO, torch.rand(batch, device="cuda") + 0.5)
    columns, scales = torch.rand(2, batch, heads, tokens, device="cuda")
    dense, cls = torch.rand(batch, tokens, device="cuda"), torch.eye(tokens, device="cuda")[:1].expand(batch, -1)
    every: tuple[Entry, ...] = get_args(Entry)
    for entry in every if tokens in (17, 197) else every[::4]:
        for rows in (Rows(seen, entry), Rows(seen, entry, columns, scales), Rows(seen, entry, columns[:, :1])):
            whole = rows.written()
            pairs = [(times(row, rows), times(row, whole)) for row in (dense, cls)]
            for found, expected in [*pairs, (row_sums(rows), row_sums(whole))]:
                assert bool(found.isfinite().all())
                assert float((found - expected).norm()) <= 2e-5 * float(expected.norm()), (entry, tokens)
            assert torch.equal(times(dense, rows), times(dense, rows)), "another result the second time"


@pytest.mark.parametrize("shape", [(1, 5, 16), (3, 17, 768), (33, 50, 1000), (2, 3, 7, 64)])
def test_fused_elementwise_kernels(shape: tuple[int, ...]) -> None:
    from patchlight.evidence.kernels import times_ndtr  # there is no Triton where there is no CUDA

    torch.manual_seed(0)
    a, b = 3 * torch.randn(2, *shape, device="cuda")
    first, second, dot = lengths(a, b)
    for found, expected in ((first, a.norm(dim=-1)), (second, b.norm(dim=-1)), (dot, (a * b).sum(-1))):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)
    expected = a.double() * torch.special.ndtr(b.double())
    for dtype, limit in ((torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        found = times_ndtr(a.to(dtype), b.to(dtype)).double()
        assert float((found - expected).norm()) <= limit * float(expected.norm())


@pytest.mark.parametrize("family", [*ROOMY, "torchvision"])
@pytest.mark.parametrize("rule", ["", ".libra", ".conservative", ".attnlrp"])
def test_passes_with_fused_attention_are_those_with_matrices(
    family: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float16 with tiles beside full precision with matrices, under every rule."""
    vit = roomy(family)
    vit.model.cuda()
    batch = images(vit, 3)
    names = ["genatt", "gradsam", "attcat", "tokentm", "ixg", "grad", "attngrad", "genatt.plus"]
    names = [name + rule for name in names] + ([] if rule else ["rollout"])
    names = [name for name in names if refusal(resolve(name), vit) is None]
    full = pl.explain(vit, batch, names, target=1, precision="full")
    fused = []
    monkeypatch.setattr(taps, "attend", lambda *given: fused.append(given[0].dtype) or attend(*given))
    half = pl.explain(vit, batch, names, target=1, precision="fp16")
    assert fused == [torch.float16] * vit.depth
    for name in names:
        error = float((half[name].scores - full[name].scores).abs().max() / full[name].scores.abs().max())
        assert error < 0.05, f"{name}: {error:.3f}"


def test_nothing_of_the_size_of_a_matrix_is_kept() -> None:
    """A model of many tokens: its float16 pass holds less than one block's attention matrices in float32 would."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=448, depth=2, num_classes=5, patch_size=8).cuda()
    vit = pl.wrap(model)
    batch = images(vit, 2).cuda()
    pl.explain(vit, batch, "genatt", target=1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    pl.explain(vit, batch, "genatt", target=1)
    assert torch.cuda.max_memory_allocated() - before < 2 * vit.heads * vit.tokens**2 * 4


def test_graphs_replay_what_is_computed_step_by_step() -> None:
    vit = roomy("vit")
    vit.model.cuda()
    names = ["genatt", "rollout", "tokentm", "gradcam", "fullgrad-plus", "ixg.libra"]
    for seed, target in ((0, 1), (1, 2), (2, [[0, 1], [2, 3]]), (3, (1, 2)), (4, None)):
        batch = images(vit, 2) + 0.1 * torch.randn(2, 1, 1, 1, generator=torch.Generator().manual_seed(seed))
        graph, steps = (pl.explain(vit, batch, names, target=target, compile=c) for c in (True, False))
        for name in names:
            torch.testing.assert_close(graph[name].scores, steps[name].scores)
            assert torch.equal(graph[name].target, steps[name].target)
        with torch.no_grad():  # a graph reads the weights where they lie
            next(vit.model.parameters()).mul_(1.01)
            vit.model.blocks[1].attn.qkv.weight.add_(0.01)


def test_memory_is_given_back_in_half_precision() -> None:
    vit = build("vit")
    vit.model.cuda()
    batch = images(vit, 2)
    pl.explain(vit, batch, ["genatt", "ixg.libra", "rollout"])
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        pl.explain(vit, batch, ["genatt", "ixg.libra", "rollout"])
    assert torch.cuda.memory_allocated() <= before


def test_what_cannot_be_captured_is_computed_step_by_step() -> None:
    """A decomposition on the way waits for the host; the card is none the worse for it."""
    vit = build("vit")
    vit.model.cuda()
    batch = images(vit, 2)
    steps = pl.explain(vit, batch, ["eigencam", "rollout"], target=1)
    with pytest.warns(NotCaptured, match="cannot be captured as a CUDA graph"):
        graph = pl.explain(vit, batch, ["eigencam", "rollout"], target=1, compile=True)
    torch.testing.assert_close(graph["rollout"].scores, steps["rollout"].scores)
    torch.testing.assert_close(
        pl.explain(vit, batch, "rollout", target=1, compile=True).scores, steps["rollout"].scores
    )


def _heads(vit: pl.Anatomy) -> dict[str, pl.heads.Head]:
    width = vit.features_of(images(vit, 1)).shape[1]
    rows = torch.randn(6, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {
        "texts": pl.heads.Texts(rows[:3]),
        "similar": pl.heads.Similar(images(vit, 2, seed=5)),
        "nearest": pl.heads.Prototypes(rows, list("aabbcc"), neighbours=1),
        "linear": pl.heads.Linear(rows, sigmoid=True),
        "neurons": pl.heads.Neurons(2, [1, 5], pool="max"),
    }


@pytest.mark.parametrize("kind", ["texts", "similar", "nearest", "linear", "neurons"])
def test_heads_give_the_maps_of_the_cpu(kind: str) -> None:
    """In float64 step by step; a head is bound where its model was, and follows it."""
    cpu = roomy("vit", torch.float64)
    asked = cpu.ask(_heads(cpu)[kind])
    moved = pl.wrap(copy.deepcopy(cpu.model), name=cpu.name).ask(asked.head)
    moved.model.cuda()
    batch = images(cpu, 2)
    for name in ("genatt", "ixg.plus.libra", "rollout", "gradcam", "occlusion", "decompx.skipplus"):
        here, there = (pl.explain(v, batch, name, target=1, precision="full").scores for v in (asked, moved))
        worst = float((here - there).abs().max() / here.abs().max())
        assert worst < 1e-5, f"{name}: {worst:.1e}"


@pytest.mark.parametrize("kind", ["texts", "similar", "linear", "neurons"])
def test_heads_in_half_precision_and_in_graphs(kind: str) -> None:
    vit = roomy("vit")
    vit.model.cuda()
    asked = vit.ask(_heads(vit)[kind])
    batch = images(vit, 4)
    names = ["genatt", "tokentm", "ixg.plus.libra"]
    full = pl.explain(asked, batch, names, target=0, precision="full")
    steps = pl.explain(asked, batch, names, target=0)
    graph = pl.explain(asked, batch, names, target=0, compile=True)
    for name in names:
        assert steps[name].precision == "fp16"
        assert min(spearman(a, b) for a, b in zip(full[name].scores, steps[name].scores, strict=True)) > 0.97, name
        torch.testing.assert_close(graph[name].scores, steps[name].scores, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_imputation_is_that_of_the_cpu_also_where_products_are_rounded(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 3, 96, 80, generator=generator, dtype=dtype)
    missing = torch.rand(16, 1, 6, 5, generator=generator).repeat_interleave(16, 2).repeat_interleave(16, 3) < 0.7
    expected = imputed(x, missing)
    torch.backends.cudnn.allow_tf32 = True
    with torch.autocast("cuda", torch.bfloat16):
        found = imputed(x.cuda(), missing.cuda()).cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-2 if dtype == torch.float32 else 1e-7)


def test_two_processes_on_one_card_do_what_one_does(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from patchlight.bench.local import RunOptions, run
    from patchlight.bench.store import Store
    from tests.bench.small import pictures, recipe

    asked = recipe(pictures(tmp_path / "images", 12))
    alone = run(asked, tmp_path / "one", RunOptions(device="cuda:0"))
    summary = run(asked, tmp_path / "two", RunOptions(device="cuda:0", workers=2))
    assert (alone.failures, summary.failures, summary.left) == ({}, {}, 0)
    one, two = (Store(tmp_path / name).results().columns for name in ("one", "two"))
    assert one.keys() == two.keys()
    for key, column in one.items():
        assert torch.allclose(column.values, two[key].values, rtol=1e-6, atol=1e-6), key
