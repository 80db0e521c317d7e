"""The pass: jobs run inside one forward and one backward a class, see what autograd sees, and keep their maps alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import Cancelled
from patchlight.core.progress import Watcher
from patchlight.core.progress import watch as watched_by
from patchlight.core.targets import Targets
from patchlight.engine import default_batch_size
from patchlight.evidence import passes
from patchlight.evidence.passes import fitting, rows_at_once, run_pass
from patchlight.evidence.record import PARTS, Evidence
from patchlight.evidence.rules import RULES
from patchlight.evidence.runner import FEATURES, PIXELS, Course, LayerJob
from patchlight.methods.requests import resolve
from tests.families import build, images, shared
from tests.literal.plain import Written, states
from tests.literal.toys import linear

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
CLASSES = Targets(torch.tensor([[2], [5]]))


def model() -> tuple[Anatomy, Tensor]:
    vit = shared("vit", torch.float64)
    return vit, images(vit, 2)


def job(needs: str, *layers: int, function: Callable[[Evidence], Any] | None = None) -> LayerJob:
    """A job that gives what it reads, as a dict."""
    names = needs.split()
    return LayerJob(function or (lambda e: {n: getattr(e, n) for n in names}), frozenset(names), layers, "mine")


def watched(vit: Anatomy, monkeypatch: pytest.MonkeyPatch) -> tuple[list[bool], list[str]]:
    """Whether each block runs with a graph; and "forward" or "backward" as they happen."""
    graphs: list[bool] = []
    events: list[str] = []
    embed, block, grad = vit.embed, vit.block, torch.autograd.grad

    def seen_embed(given: Tensor) -> Tensor:
        graphs.append(torch.is_grad_enabled())
        events.append("forward")
        return embed(given)

    def seen_block(index: int, *args: Any) -> Tensor:
        graphs.append(torch.is_grad_enabled())
        return block(index, *args)

    def seen_grad(*args: Any, **options: Any) -> Any:
        events.append("backward")
        return grad(*args, **options)

    monkeypatch.setattr(vit, "embed", seen_embed)
    monkeypatch.setattr(vit, "block", seen_block)
    monkeypatch.setattr(torch.autograd, "grad", seen_grad)
    return graphs, events


def test_tokens_and_gradients_are_those_of_autograd() -> None:
    vit, batch = model()
    xs, gs = states(vit, batch, [2, 5])
    seen = run_pass(vit, batch, CLASSES, jobs=[job("x y g gy", 0, 1, 2)])
    for layer in range(3):
        found = seen.at(layer)
        for name, expected in (("x", xs[layer]), ("y", xs[layer + 1]), ("g", gs[layer]), ("gy", gs[layer + 1])):
            torch.testing.assert_close(found[name], expected, **CLOSE)
    logits = vit.logits(batch)
    torch.testing.assert_close(seen.logits, logits, **CLOSE)
    torch.testing.assert_close(seen.scores, logits.gather(1, CLASSES.index), **CLOSE)


@pytest.mark.parametrize("rule", ["plain", "libra"])
def test_what_is_inside_a_block_is_that_of_the_block_written_out(rule: str) -> None:
    vit, batch = model()
    written = Written(vit, vit.embed(batch), libra=rule == "libra")
    biases, rest = written.bias_maps([2, 5])
    seen = run_pass(vit, batch, CLASSES, rule=RULES[rule], jobs=[job("A v u n bias", 0, 1, 2), job("G gn", 0, 1, 2)])
    for layer in range(3):
        found, block = seen.at(layer), vit.model.blocks[layer]
        torch.testing.assert_close(found["A"], written.attention[layer], **CLOSE)
        torch.testing.assert_close(found["u"], written.u[layer].detach(), **CLOSE)
        n = block.norm1(written.x[layer]).detach()
        torch.testing.assert_close(found["n"], n, **CLOSE)
        v = block.attn.qkv(n)[..., 96:].unflatten(-1, (4, 12)).transpose(1, 2).detach()
        torch.testing.assert_close(found["v"], v, **CLOSE)
        torch.testing.assert_close(found["bias"], biases[layer], **CLOSE)
        assert seen.at(layer, 1)["G"].shape == (2, 4, 17, 17)
    end = seen.end()
    torch.testing.assert_close(end.bias, biases[3], **CLOSE)
    torch.testing.assert_close(end.scalar_bias, rest, **CLOSE)


def test_pixels_have_the_gradient_of_the_image() -> None:
    vit, batch = model()
    given = batch.clone().requires_grad_()
    (expected,) = torch.autograd.grad(vit.model(given).gather(1, CLASSES.index).sum(), given)
    found = run_pass(vit, batch, CLASSES, jobs=[job("x g", PIXELS)]).at(PIXELS)
    torch.testing.assert_close(found["g"], expected.movedim(1, -1), **CLOSE)
    assert torch.equal(found["x"], batch.movedim(1, -1))


@pytest.mark.parametrize(
    ("jobs", "graphs", "events"),
    [
        ([], [False] * 3, ["forward"]),  # of the last block, the first token alone is computed
        ([job("x", 0, 1)], [False] * 3, ["forward"]),
        ([job("g", 0)], [False, True, True], ["forward", "backward"]),
        ([job("A", 0, 1, 2), job("y", 2)], [False] * 4, ["forward"]),
        ([job("g", 2)], [False, False, False, True], ["forward", "backward"]),
        ([job("G", 1, 2), job("A", 0, 1, 2)], [False, False, True, True], ["forward", "backward"]),
        ([job("bias", 2), job("gy", 0)], [False, True, True, True], ["forward", "backward"]),
        ([job("g", PIXELS), job("G", 2)], [True] * 4, ["forward", "backward"]),
    ],
)
def test_only_blocks_from_the_first_backward_job_on_have_a_graph(
    jobs: list[LayerJob], graphs: list[bool], events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    vit = build("vit")
    found, happened = watched(vit, monkeypatch)
    run_pass(vit, images(vit, 2), CLASSES, jobs=jobs)
    assert found == graphs
    assert happened == events


@pytest.mark.parametrize("score", ["logit", "probability"])
def test_the_first_token_of_the_last_block_is_enough_where_no_other_is_read(
    score: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    vit, batch = model()
    jobs = [job("g", 0), job("x", 1)]
    assert vit.reads_first
    row = run_pass(vit, batch, CLASSES, score, jobs=jobs)
    monkeypatch.setattr(vit, "reads_first", False)
    whole = run_pass(vit, batch, CLASSES, score, jobs=jobs)
    torch.testing.assert_close(row.logits, whole.logits, **CLOSE)
    torch.testing.assert_close(row.at(0)["g"], whole.at(0)["g"], **CLOSE)


def test_jobs_together_are_jobs_alone() -> None:
    vit, batch = model()
    jobs = [job("x g", 0), job("A G", 1, 2), job("y A", 0, 2), job("bias gn n", 1), job("g", PIXELS)]
    together = run_pass(vit, batch, CLASSES, jobs=jobs)
    for j, one in enumerate(jobs):
        alone = run_pass(vit, batch, CLASSES, jobs=[one])
        assert list(together.layers(j)) == sorted(together.layers(j), reverse=one.backward)
        assert set(together.layers(j)) == set(one.layers)
        for layer in one.layers:
            torch.testing.assert_close(together.at(layer, j), alone.at(layer), **CLOSE)


def test_several_classes_take_one_forward_and_a_backward_each(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = build("vit", torch.float64)
    batch = images(vit, 2)
    classes = torch.tensor([[2, 0, 6], [5, 1, 5]])
    jobs = [job("x g G bias", 0, 2), job("A", 1)]
    alone = [run_pass(vit, batch, Targets(classes[:, t : t + 1]), jobs=jobs) for t in range(3)]
    _, happened = watched(vit, monkeypatch)
    seen = run_pass(vit, batch, Targets(classes, several=True), jobs=jobs)
    assert happened == ["forward", "backward", "backward", "backward"]
    torch.testing.assert_close(seen.scores, seen.logits.gather(1, classes), **CLOSE)
    for t, one in enumerate(alone):
        for layer in (0, 2):
            torch.testing.assert_close(seen.at(layer, target=t), one.at(layer), **CLOSE)
        torch.testing.assert_close(seen.at(1, 1, t), one.at(1, 1), **CLOSE)
        torch.testing.assert_close(seen.end(t).bias, one.end().bias, **CLOSE)
        torch.testing.assert_close(seen.end(t).scalar_bias, one.end().scalar_bias, **CLOSE)
    assert not torch.allclose(seen.at(0, target=0)["g"], seen.at(0, target=1)["g"])


def test_a_forward_job_runs_once_whatever_the_classes() -> None:
    vit, batch = model()
    runs: list[int] = []
    forward = job("A", 0, 1, function=lambda e: runs.append(e.index))
    run_pass(vit, batch, Targets(torch.tensor([[0, 1], [2, 3]]), several=True), jobs=[forward, job("g", 1)])
    assert runs == [0, 1]


def test_a_shared_quantity_is_made_once_a_block_and_class() -> None:
    vit, batch = model()
    made: list[int] = []

    def reads(e: Evidence) -> Tensor:
        return e.once("xg", lambda: (made.append(e.index), e.x * e.g)[1])

    both = [job("x g", 1, 2, function=reads), job("g x", 1, 2, function=reads)]
    seen = run_pass(vit, batch, Targets(torch.tensor([[0, 1], [2, 3]]), several=True), jobs=both)
    assert made == [2, 1, 2, 1]
    assert not torch.equal(seen.at(1, target=0), seen.at(1, target=1))


def test_evidence_is_forgotten_as_soon_as_its_block_is_done() -> None:
    """In the last backward the block above is gone when the one below is read; without a backward all are, at once."""
    vit, batch = model()
    alive: dict[int, weakref.ref[Tensor]] = {}
    others: list[list[int]] = []

    def look(e: Evidence) -> float:
        others.append([layer for layer, seen in alive.items() if seen() is not None])
        alive[e.index] = weakref.ref(e.A)
        return float(e.A.sum())

    run_pass(vit, batch, CLASSES, jobs=[job("A G", 0, 1, 2, function=look)])
    assert others == [[], [], []]
    others.clear()
    alive.clear()
    run_pass(vit, batch, CLASSES, jobs=[job("A", 0, 1, 2, function=look)])
    assert others == [[], [], []]
    assert all(seen() is None for seen in alive.values())


def test_nothing_larger_than_the_maps_is_kept() -> None:
    vit, batch = model()

    def held() -> list[Tensor]:
        gc.collect()
        return [o for o in gc.get_objects() if issubclass(type(o), Tensor)]

    def small(e: Evidence) -> Tensor:
        return (e.A * e.G).sum((1, 2)) + e.bias

    run_pass(vit, batch, CLASSES, jobs=[job("A G bias", 0, 1, 2, function=small)])
    before = set(map(id, held()))
    seen = run_pass(vit, batch, CLASSES, jobs=[job("A G bias", 0, 1, 2, function=small)])
    kept = [tensor for tensor in held() if id(tensor) not in before]
    assert all(t.numel() <= 2 * vit.tokens and t.grad_fn is None and not t.requires_grad for t in kept)
    assert {id(seen.at(layer)) for layer in range(3)} <= {id(t) for t in kept}


def test_other_tokens_may_enter_and_their_classes_repeat() -> None:
    vit, batch = model()
    tokens = vit.embed(batch).detach()
    doubled = torch.cat([tokens, tokens * 0.5])
    seen = run_pass(vit, batch, CLASSES.repeat(2), jobs=[job("x g", 0)], course=Course(tokens=doubled))
    for part, scale in ((slice(0, 2), 1.0), (slice(2, 4), 0.5)):
        alone = run_pass(vit, batch, CLASSES, jobs=[job("x g", 0)], course=Course(tokens=tokens * scale))
        torch.testing.assert_close(seen.at(0)["g"][part], alone.at(0)["g"], **CLOSE)
    torch.testing.assert_close(seen.at(0)["x"], doubled, **CLOSE)


def test_scores_and_default_targets() -> None:
    vit, batch = model()
    logits = vit.logits(batch)
    seen = run_pass(vit, batch, jobs=[job("g", 0)])
    assert seen.targets.index[:, 0].tolist() == logits.argmax(1).tolist()
    probability = run_pass(vit, batch, CLASSES, "probability", jobs=[job("g", 0)])
    torch.testing.assert_close(probability.scores, logits.softmax(1).gather(1, CLASSES.index), **CLOSE)
    doubled = run_pass(vit, batch, CLASSES, lambda y: 2 * y, jobs=[job("g", 0)])
    plain = run_pass(vit, batch, CLASSES, jobs=[job("g", 0)])
    torch.testing.assert_close(doubled.at(0)["g"], 2 * plain.at(0)["g"], **CLOSE)
    chain = probability.at(0)["g"]
    x = vit.embed(batch).detach().requires_grad_()
    (expected,) = torch.autograd.grad(vit.readout(vit.run(x)).softmax(1).gather(1, CLASSES.index).sum(), x)
    torch.testing.assert_close(chain, expected, **CLOSE)


def test_the_callers_modes_do_not_matter() -> None:
    vit, batch = model()
    expected = run_pass(vit, batch, CLASSES, jobs=[job("g A", 0)]).at(0)
    with torch.no_grad():
        torch.testing.assert_close(run_pass(vit, batch, CLASSES, jobs=[job("g A", 0)]).at(0), expected, **CLOSE)
    with torch.inference_mode():
        given = batch.clone()
        torch.testing.assert_close(run_pass(vit, given, CLASSES, jobs=[job("g A", 0)]).at(0), expected, **CLOSE)


def test_projected_patches_are_the_embedding_without_positions() -> None:
    vit, batch = model()
    found = run_pass(vit, batch, CLASSES, jobs=[job("p", 0, 2)])
    expected = vit.model.patch_embed(batch).detach()
    for layer in (0, 2):
        torch.testing.assert_close(found.at(layer)["p"], expected, **CLOSE)


def test_a_feature_map_stands_for_a_block() -> None:
    vit = shared("swin", torch.float64)
    batch = images(vit, 2)
    seen = run_pass(vit, batch, CLASSES, jobs=[job("x g", FEATURES), job("x", FEATURES)])
    tokens = vit.run(vit.embed(batch), stop=vit.stage_end).detach().requires_grad_()
    logits = vit.readout(vit.run(tokens, vit.stage_end))
    (expected,) = torch.autograd.grad(logits.gather(1, CLASSES.index).sum(), tokens)
    torch.testing.assert_close(seen.at(FEATURES)["g"], expected, **CLOSE)
    torch.testing.assert_close(seen.at(FEATURES, 1)["x"], tokens.detach(), **CLOSE)


def test_a_layer_map_that_reads_more_than_it_declares_is_reported() -> None:
    vit, batch = model()
    for needs, part in (("A", "G"), ("g", "A"), ("x", "y")):
        careless = LayerJob(lambda e, part=part: getattr(e, part), frozenset({needs}), (1,), "mine")
        with pytest.raises(pl.PatchlightError, match=f"`mine` reads {part} but declares needs={{'{needs}'}}"):
            run_pass(vit, batch, CLASSES, jobs=[careless])
    assert {"A", "G", "x"} <= PARTS


class Blocked(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block(*args, **kwargs)


def test_a_model_without_gradients_is_reported() -> None:
    made = build("vit").model
    made.head = Blocked(made.head)
    vit = pl.wrap(made, name="dammed")
    with pytest.raises(pl.Unsupported, match="no gradient flows back through dammed"):
        run_pass(vit, images(vit, 2), jobs=[job("g", 0)])
    assert run_pass(vit, images(vit, 2), jobs=[job("A", 0)]).at(0)["A"].shape == (2, 4, 17, 17)


def test_weights_that_change_on_the_way_are_reported() -> None:
    vit = build("vit")

    def train(e: Evidence) -> None:
        vit.model.blocks[1].mlp.fc2.weight.add_(1.0)

    with pytest.raises(pl.PatchlightError, match="the weights of vit were changed while it was explained"):
        run_pass(vit, images(vit, 2), CLASSES, jobs=[job("x", 2, function=train), job("g", 0)])


def test_a_score_that_reads_no_token_has_zero_gradients() -> None:
    """The head of a CLS model reads one token, so in its last block the others' second norm moves nothing."""
    vit, batch = model()
    found = run_pass(vit, batch, CLASSES, lambda y: y.detach() + 0 * y, jobs=[job("g gy G bias A", 0, 2)])
    for layer in (0, 2):
        assert all(not found.at(layer)[name].any() for name in ("g", "gy", "G", "bias"))
    last = run_pass(vit, batch, CLASSES, jobs=[job("gy", 2)]).at(2)["gy"]
    assert last[:, 0].any()
    assert not last[:, 1:].any()


def test_trace_hands_over_the_evidence() -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit)
    with pl.trace(vit, batch, target=2) as t:
        row = torch.zeros(3, vit.tokens, dtype=torch.float64)
        row[:, 0] = 1
        for A, G in zip(reversed(t.attention), reversed(t.attention_gradients), strict=True):
            row = row + (row[:, None] @ (A * G).relu().mean(1))[:, 0]
        assert len(t.tokens) == vit.depth + 1
        torch.testing.assert_close(vit.readout(t.tokens[-1]), t.logits)
        directional = (t.tokens[0] * t.gradients[0]).sum(-1)
    expected = pl.explain(vit, batch, ["genatt", "ixg"], target=2)
    torch.testing.assert_close(vit.patches(row).float(), expected["genatt"].scores)
    torch.testing.assert_close(vit.patches(directional).float(), expected["ixg"].scores)
    assert not t.attention, "the evidence outlives the with"
    with pytest.raises(pl.PatchlightError, match="no backward rule"), pl.trace(vit, batch, rule="libre"):
        pass
    with (
        pytest.raises(pl.PatchlightError, match="one class per image; 2 were given"),
        pl.trace(vit, batch, [[0, 1]] * 3),
    ):
        pass
    with pytest.raises(pl.Unsupported, match="no transformer blocks"), pl.trace(linear(), batch):
        pass


def plain_module() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    return timm.create_model("vit_tiny_patch16_224", **sizes).eval()


@pytest.mark.filterwarnings("ignore::patchlight.AssumedPreprocess")
def test_trace_takes_a_plain_module() -> None:
    module = plain_module()
    batch = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with pl.trace(module, batch, target=1) as t:
        assert [tuple(x.shape) for x in t.tokens] == [(2, 5, 16)] * 3
        assert [tuple(a.shape) for a in t.attention] == [(2, 2, 5, 5)] * 2
        torch.testing.assert_close(t.logits, module(batch).detach())
        assert t.target.tolist() == [[1], [1]]
        with pl.trace(pl.wrap(module), batch, target=1) as other:
            for one, two in zip(t.gradients, other.gradients, strict=True):
                assert torch.equal(one, two)
    assert isinstance(t.vit, Anatomy)
    assert not any((t.tokens, t.gradients, t.attention, t.attention_gradients)), "the evidence outlives the with"


@pytest.mark.parametrize(
    ("device", "depth", "gigabytes", "expected"),
    [("cpu", 12, 0, 16), ("cuda", 0, 80, 16), ("cuda", 12, 11.62, 20), ("cuda", 12, 0.1, 1), ("cuda", 1, 80, 256)],
)
def test_rows_of_a_pass_come_from_free_memory(
    device: str, depth: int, gigabytes: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """290.5 MB each for ViT-B/16 in float32; what torch holds but does not use is free too."""
    vit: Any = SimpleNamespace(
        device=torch.device(device), depth=depth, heads=12, tokens=197, width=768, dtype=torch.float32
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda of: (int(gigabytes * 1e9) - 500, int(140e9)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda of: 1500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda of: 1000)
    assert rows_at_once(vit) == expected


def test_the_batch_of_methods_that_run_passes_comes_from_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """ViT-B/16 with 10 GB free: 145 MB an image in half precision, 291 in full, and 45 for matrices; powers of two."""
    shape = {"depth": 12, "heads": 12, "tokens": 197, "width": 768, "dtype": torch.float32, "overflows": False}
    vit: Any = SimpleNamespace(device=torch.device("cuda"), **shape)
    monkeypatch.setattr(passes, "free_memory", lambda device: int(10e9))
    asked = {"genatt": {}, "ixg": {"precision": "full"}, "rollout": {"precision": "full"}, "tis": {}}
    sizes = {name: default_batch_size(vit, [resolve(name, settings)]) for name, settings in asked.items()}
    assert sizes == {"genatt": 32, "ixg": 16, "rollout": 8, "tis": 32}
    assert [fitting(vit, True), fitting(vit), fitting(vit, written=True)] == [34, 17, 14]
    assert default_batch_size(vit) == 32, "what else is done with the images is not known"


@pytest.mark.parametrize("backward", [False, True])
def test_a_pass_stops_between_two_blocks(backward: bool) -> None:
    """Who asks to stop does not wait for the blocks that are left, nor for the backward through them."""
    vit, batch = model()
    done: list[Tensor] = []

    def seen(e: Evidence) -> None:
        done.append(e.g if backward else e.x)

    jobs = [job("g" if backward else "x", *range(vit.depth), function=seen)]
    with watched_by(Watcher(cancelled=lambda: bool(done))), pytest.raises(Cancelled):
        run_pass(vit, batch, CLASSES, jobs=jobs)
    assert len(done) == 1
    done.clear()
    run_pass(vit, batch, CLASSES, jobs=jobs)
    assert len(done) == vit.depth, "and the next pass is whole"
