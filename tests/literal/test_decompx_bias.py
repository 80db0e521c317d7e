"""`decompx-bias` against a decomposition written out with loops over targets and sources."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import patchlight as pl
from tests.close import close
from tests.families import images, shared


def wide(family: str = "vit", seed: int = 0) -> tuple[pl.Anatomy, Tensor]:
    """A model whose biases are not zero, in float64."""
    vit = shared(family)
    model = copy.deepcopy(vit.model).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                value.copy_(0.1 * torch.randn(value.shape, generator=generator))
    return pl.wrap(model, preprocess=vit.preprocess), images(vit, 2).double()


def with_bias(vectors: list[Tensor], bias: Tensor) -> list[Tensor]:
    """A bias shared by |<vector, bias>|."""
    weights = [float((v * bias).sum().abs()) for v in vectors]
    return [v + w / sum(weights) * bias for v, w in zip(vectors, weights, strict=True)]


def normed(norm: Any, vectors: list[Tensor], token: Tensor) -> list[Tensor]:
    deviation = (token.var(unbiased=False) + norm.eps).sqrt()
    return with_bias([(v - v.mean()) / deviation * norm.weight for v in vectors], norm.bias)


def mapped(layer: Any, vectors: list[Tensor]) -> list[Tensor]:
    return with_bias([layer.weight @ v for v in vectors], layer.bias)


def written_out(vit: pl.Anatomy, image: Tensor, target: int, start: int) -> Tensor:
    """The part of the logit [N] of each source."""
    model: Any = vit.model
    x = vit.run(vit.embed(image[None]), stop=start)[0]
    count, heads = len(x), model.blocks[0].attn.num_heads
    parts = [[x[i] if i == j else torch.zeros_like(x[i]) for j in range(count)] for i in range(count)]
    for block in list(model.blocks)[start:]:
        attn, n = block.attn, block.norm1(x)
        q, k, _ = attn.qkv(n).chunk(3, -1)
        size = len(q[0]) // heads
        value: Any = torch.nn.Linear(1, 1)
        value.weight.data, value.bias.data = attn.qkv.weight.chunk(3)[2], attn.qkv.bias.chunk(3)[2]
        values = [mapped(value, normed(block.norm1, parts[s], x[s])) for s in range(count)]
        mixed = [[torch.zeros_like(x[0]) for _ in range(count)] for _ in range(count)]
        for h in range(heads):
            own = slice(h * size, (h + 1) * size)
            A = (q[:, own] @ k[:, own].T / size**0.5).softmax(-1)
            for i in range(count):
                for j in range(count):
                    mixed[i][j][own] = sum(A[i, s] * values[s][j][own] for s in range(count))
        x = x + attn(n[None])[0]
        parts = [[p + m for p, m in zip(parts[i], mapped(attn.proj, mixed[i]), strict=True)] for i in range(count)]
        h_all = block.mlp.fc1(block.norm2(x))
        ratio = block.mlp.act(h_all) / h_all
        for i in range(count):
            hidden = mapped(block.mlp.fc1, normed(block.norm2, parts[i], x[i]))
            added = mapped(block.mlp.fc2, [v * ratio[i] for v in hidden])
            parts[i] = [p + a for p, a in zip(parts[i], added, strict=True)]
        x = x + block.mlp(block.norm2(x))
    final = normed(model.norm, parts[0], x[0])
    each = torch.stack([(v * model.head.weight[target]).sum() for v in final])
    return each + each.abs() / each.abs().sum() * model.head.bias[target]


@pytest.mark.parametrize("start", [1, -1])
def test_the_method_is_its_loops_written_out(start: int) -> None:
    vit, batch = wide()
    found = pl.explain(vit, batch[:1], "decompx-bias", target=2, start=start).scores
    with torch.no_grad():
        expected = written_out(vit, batch[0], 2, start % vit.depth)
    close(found.flatten().double(), expected[1:], 1e-6)
    assert float(expected.sum()) == pytest.approx(float(vit.logits(batch)[0, 2]))


@pytest.mark.parametrize("bias", ["absdot", "norm", "equal", "cls"])
def test_all_tokens_sum_to_the_logit(bias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vit, batch = wide()
    totals: list[Tensor] = []
    original = type(vit).patches
    monkeypatch.setattr(
        type(vit), "patches", lambda self, values: totals.append(values.sum(1)) or original(self, values)
    )
    pl.explain(vit, batch, "decompx-bias", target=[[0, 1], [2, 3]], bias=bias)
    logits = vit.logits(batch)
    close(torch.stack(totals), torch.stack([logits[0, :2], logits[1, 2:4]]), 1e-10)


@pytest.mark.parametrize("family", ["vit", "deit3"])
@pytest.mark.parametrize("start", [0, 1])
def test_without_biases_it_is_decompx(family: str, start: int) -> None:
    vit, batch = wide(family)
    one = pl.explain(vit, batch, "decompx-bias", target=[1, 2], bias="none", start=start).scores
    close(one, pl.explain(vit, batch, "decompx", target=[1, 2], start=start).scores, 1e-5)


def test_one_class_against_another_is_their_difference() -> None:
    vit, batch = wide()
    pair = pl.explain(vit, batch, "decompx-bias", target=1, against=2, bias="none").scores
    one, other = (pl.explain(vit, batch, "decompx-bias", target=t, bias="none").scores for t in (1, 2))
    close(pair, one - other, 1e-5)


def test_models_without_a_class_token_are_refused() -> None:
    vit = shared("reg4-gap")
    with pytest.raises(pl.Unsupported, match="CLS"):
        pl.explain(vit, images(vit, 1), "decompx-bias")
