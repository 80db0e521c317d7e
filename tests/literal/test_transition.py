"""TAM, BT-H and BT-T as their papers write them, one image and one step at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.evidence.passes import run_pass
from patchlight.evidence.record import Evidence
from patchlight.evidence.runner import LayerJob
from patchlight.methods.base import Ask
from patchlight.methods.transition import head_importance, value_ratio
from tests.families import images, shared
from tests.literal.rows import TARGETS, maps, read_rows

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
READOUTS = ("vit", "deit-distilled", "reg4-gap")
STEPS = 4


def _feedback(vit: Anatomy, image: Tensor, target: int, steps: int | None) -> Tensor:
    total = torch.zeros(vit.heads, vit.tokens, vit.tokens, dtype=torch.float64)
    alphas = [1.0] if steps is None else [k / max(steps - 1, 1) for k in range(steps)]
    for alpha in alphas:
        with pl.trace(vit, alpha * image, target=target) as t:
            total += t.attention_gradients[-1][0]
    return (total / len(alphas)).clamp(min=0).mean(0)


def _tam(vit: Anatomy, image: Tensor, target: int, start: int, steps: int | None) -> Tensor:
    with pl.trace(vit, image, target=target) as t:
        A = [a[0].mean(0) for a in t.attention]
    state = A[-1]
    for layer in range(vit.depth - 2, start - 1, -1):
        state = state + state @ A[layer]
    return read_rows(vit, state * _feedback(vit, image, target, steps))


def _bt_h(vit: Anatomy, image: Tensor, target: int, start: int, steps: int | None) -> Tensor:
    r = torch.eye(vit.tokens, dtype=torch.float64)
    with pl.trace(vit, image, target=target) as t:
        for layer in range(start, vit.depth):
            A, G = t.attention[layer][0], t.attention_gradients[layer][0]
            importance = torch.stack([(A[h].T @ G[h]).abs().mean() for h in range(vit.heads)])
            importance = importance / importance.sum()
            r = r + sum(importance[h] * A[h] for h in range(vit.heads)) @ r
    return read_rows(vit, _feedback(vit, image, target, steps) * r)


def _bt_t(vit: Anatomy, image: Tensor, target: int, start: int, steps: int | None) -> Tensor:
    r = torch.eye(vit.tokens, dtype=torch.float64)
    with pl.trace(vit, image, target=target) as t, torch.no_grad():
        for layer in range(start, vit.depth):
            block: Any = vit.blocks[layer]
            x = t.tokens[layer][0]
            values = block.attn.qkv(block.norm1(x))[:, 2 * x.shape[1] :]
            nu = (values @ block.attn.proj.weight.T).norm(dim=-1) / x.norm(dim=-1)
            r = r + t.attention[layer][0].mean(0) @ torch.diag(nu) @ r
    return read_rows(vit, _feedback(vit, image, target, steps) * r.abs())


METHODS = {"tam": _tam, "bt-h": _bt_h, "bt-t": _bt_t}


@pytest.mark.parametrize("family", READOUTS)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("start", [0, 1])
def test_literal(name: str, family: str, start: int) -> None:
    vit = shared(family, torch.float64)
    batch = images(vit, 2)
    literal: Callable[..., Tensor] = METHODS[name]
    ours = maps(vit, batch, name, start=start, steps=STEPS)
    alone = maps(vit, batch, name, start=start, with_integral=False)
    for i in range(2):
        torch.testing.assert_close(ours[i], literal(vit, batch[i : i + 1], TARGETS[i], start, STEPS), **CLOSE)
        torch.testing.assert_close(alone[i], literal(vit, batch[i : i + 1], TARGETS[i], start, None), **CLOSE)


@pytest.mark.parametrize("name", METHODS)
def test_one_step_is_the_blank_image(name: str) -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit, 1)
    blank = METHODS[name](vit, batch, TARGETS[0], 0, 1)
    torch.testing.assert_close(maps(vit, batch, name, start=0, steps=1)[0], blank, **CLOSE)


@pytest.mark.parametrize("name", METHODS)
def test_starts(name: str) -> None:
    """The usual start is clamped to a shallow model's last block; one that was given is refused."""
    vit = shared("vit", torch.float64)
    batch = images(vit, 1)
    assert torch.equal(maps(vit, batch, name, steps=2), maps(vit, batch, name, steps=2, start=vit.depth - 1))
    assert torch.equal(maps(vit, batch, name, steps=2, preset="tis"), maps(vit, batch, name, steps=2, start=0))
    with pytest.raises(PatchlightError, match="block 4 does not exist; this model has blocks 0 to 2"):
        maps(vit, batch, name, start=4)
    with pytest.raises(PatchlightError, match="steps=0"):
        maps(vit, batch, name, steps=0)


def test_first_state_is_the_last_block_alone() -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit, 1)
    first = maps(vit, batch, "tam", steps=2, start=0, first_state=True)
    assert torch.equal(first, maps(vit, batch, "tam", steps=2, start=vit.depth - 1))


def test_the_state_of_tam_doubles_with_each_block() -> None:
    """Rows of attention sum to one, so r sums to 2^(L-1-s); with the true W this is what the map divides into."""
    vit = shared("vit", torch.float64)
    with pl.trace(vit, images(vit, 1)) as t:
        state = t.attention[-1][0].mean(0)
        for layer in range(vit.depth - 2, -1, -1):
            state = state + state @ t.attention[layer][0].mean(0)
    torch.testing.assert_close(state.sum(-1), torch.full((vit.tokens,), 2.0 ** (vit.depth - 1), dtype=state.dtype))


def test_head_importance() -> None:
    """The heads of each image sum to one, by themselves; a single head counts fully; no gradient counts all alike."""
    generator = torch.Generator().manual_seed(0)
    A, G = (torch.randn(2, 3, 5, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    x = torch.zeros(2, 5, 4)
    both = head_importance(Evidence.of(x, A=A, G=G))
    torch.testing.assert_close(both.sum(1), torch.ones(2, dtype=torch.float64), **CLOSE)
    torch.testing.assert_close(both[1:], head_importance(Evidence.of(x, A=A[1:], G=1e3 * G[1:])), **CLOSE)
    assert (head_importance(Evidence.of(x, A=A[:, :1], G=G[:, :1])) == 1).all()
    assert (head_importance(Evidence.of(x, A=A, G=0 * G)) == 1 / 3).all()


def test_value_ratio_ignores_a_common_scale() -> None:
    vit = shared("vit", torch.float64)
    job = LayerJob(
        lambda b: (value_ratio(b), value_ratio(Evidence.of(7 * b.x, v=7 * b.v, parts=b.parts))),
        frozenset("xAv"),
        (0,),
    )
    plain, scaled = run_pass(vit, images(vit), jobs=[job]).at(0)
    torch.testing.assert_close(plain, scaled, **CLOSE)
    assert (plain > 0).all()


def test_probability_and_pairs() -> None:
    """The score reaches every step: a probability's gradient differs from a logit's, a pair's from a class's."""
    vit = shared("vit", torch.float64)
    batch = images(vit, 1)
    logit, probability = (
        pl.explain(vit, batch, "tam", target=1, steps=2, score=s).scores for s in ("logit", "probability")
    )
    assert not torch.allclose(logit, probability)
    assert torch.equal(pl.explain(vit, batch, "tam", target=1, steps=2, preset="interpretdl").scores, probability)
    assert not torch.allclose(pl.explain(vit, batch, "tam", target=(1, 2), steps=2).scores, logit)


def _passes_of_variants(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which every pass over scaled images adds their number."""
    counted: list[int] = []
    run = Ask.run

    def counts(ask: Ask, jobs: Any, images: Tensor | None = None, tokens: Tensor | None = None) -> Any:
        if images is not None:
            counted.append(len(images))
        return run(ask, jobs, images, tokens)

    monkeypatch.setattr(Ask, "run", counts)
    return counted


@pytest.mark.parametrize("family", READOUTS)
def test_together_they_share_the_feedback(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each map is the one it has alone, to the bit, and the scaled images are run once for each class."""
    vit = shared(family, torch.float64)
    batch, classes = images(vit, 2), [[3, 1], [1, 5]]
    alone = {name: pl.explain(vit, batch, name, target=classes, steps=STEPS).scores for name in METHODS}
    scaled = _passes_of_variants(monkeypatch)
    together = pl.explain(vit, batch, list(METHODS), target=classes, steps=STEPS)
    assert sum(scaled) == STEPS * len(batch) * 2
    for name, expected in alone.items():
        assert torch.equal(together[name].scores, expected)
        assert not torch.equal(expected[:, 0], expected[:, 1])


@pytest.mark.parametrize(
    "other",
    [
        {"steps": 3},
        {"with_integral": False},
        {"score": "probability"},
        {"readout": "tokens"},
        {"method": "tam.libra"},
        {"precision": "bf16"},
    ],
)
def test_feedback_of_other_settings_is_not_shared(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    vit = shared("vit", torch.float32)
    batch = images(vit, 2)
    usual: dict[str, Any] = {"method": "tam", "steps": STEPS, "start": 0}
    asked = {"usual": usual, "other": {**usual, **other}}
    alone = {label: pl.explain(vit, batch, target=1, **own).scores for label, own in asked.items()}
    scaled = _passes_of_variants(monkeypatch)
    together = pl.explain(vit, batch, asked, target=1)
    assert len(scaled) == 2
    assert all(torch.equal(together[label].scores, alone[label]) for label in asked)
    assert not torch.equal(alone["usual"], alone["other"])
