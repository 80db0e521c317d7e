"""DecompX: without biases from one backward pass; with biases as a forward decomposition into N x N x D vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.anatomy.contract import linear
from patchlight.core.targets import target_scores
from patchlight.evidence.record import Evidence
from patchlight.methods.base import Ask, layer_map, own_passes
from patchlight.methods.compositions import FIRST, Start, block_index
from patchlight.methods.gradients import token_ixg
from patchlight.methods.relevance import refuse_blocks

Bias = Literal["absdot", "norm", "equal", "cls", "none"]
_CHUNK = 64_000_000
"""Numbers of the hidden vectors of an MLP in memory at once."""
_SMALL = 1e-6
"""The smallest |h| in the ratio act(h) / h."""


@layer_map(
    "decompx",
    paper="Modarressi et al., ACL 2023; on ViTs SkipPLUS, CVPR-W 2024",
    needs={"x", "g"},
    combine=FIRST,
    rule="libra",
)
def decompx(b: Evidence) -> Tensor:
    """Contribution of each patch to the logit of the locally linear network.

        logit = sum_j a_j + const,   a_j = <J[j], x[j]>

    x are the tokens that enter block `start`; the map is a, without biases. Attention, the deviations of the norms and
    the ratios GELU(h)/h are constant, so J is the gradient under the `libra` rule: one backward pass replaces N forward
    passes per start. `.plus` and `.skipplus` sum over starts. In a gated MLP (SwiGLU), each factor gets half of the
    product.
    """
    return token_ixg(b)


def share_bias(parts: Tensor, bias: Tensor | None, how: Bias) -> Tensor:
    """Add a bias [E] to the parts [n,J,E] of n vectors, distributed over the J sources.

    The shares are proportional to |<part, bias>| ("absdot") or to the norms of the parts, equal, or all for source 0.
    """
    if bias is None or how == "none":
        return parts
    if how == "absdot":
        weight = (parts @ bias).abs()
    elif how == "norm":
        weight = parts.norm(dim=-1)
    else:
        weight = torch.ones_like(parts[..., 0])
        weight[:, 1:] *= how == "equal"
    total = weight.sum(1, keepdim=True)
    shares = torch.where(total > 0, weight / total, 1 / parts.shape[1])
    return parts + shares[..., None] * bias


def _ratio(activation: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    """act(h) / h."""
    h = torch.where(h.abs() < _SMALL, _SMALL, h)
    return activation(h) / h


class _Decomposition:
    """The tokens of one image after a block, as sums of parts [N,J,D] that come from the tokens at the first block."""

    def __init__(self, tokens: Tensor, how: Bias) -> None:
        self.how = how
        self.parts = torch.diag_embed(tokens.mT).permute(1, 2, 0)

    def norm(self, norm: Any, parts: Tensor, tokens: Tensor) -> Tensor:
        """Apply a layer norm to parts, with the deviation of the tokens [N,D]."""
        deviation = (tokens.var(-1, unbiased=False) + norm.eps).rsqrt()
        scaled = (parts - parts.mean(-1, keepdim=True)) * deviation[:, None, None]
        return share_bias(scaled if norm.weight is None else scaled * norm.weight, norm.bias, self.how)

    def linear(self, layer: Any, parts: Tensor) -> Tensor:
        """Apply a linear map to parts."""
        weights = linear(layer)
        return share_bias(F.linear(parts, weights.weight), weights.bias, self.how)

    def block(self, parts: Any, tokens: Tensor, heads: int) -> Tensor:
        """Apply a block, and return the tokens [N,D] after it."""
        normed = parts.norm1(tokens)
        weight, bias = parts.qkv()
        q, k, v = F.linear(normed, weight, bias).unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3)
        A = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)  # [H,N,N]
        w_v, b_v = weight.chunk(3)[2], None if bias is None else bias.chunk(3)[2]
        values = share_bias(F.linear(self.norm(parts.norm1, self.parts, tokens), w_v), b_v, self.how)
        mixed = torch.einsum("his,sjhd->ijhd", A, values.unflatten(-1, (heads, -1))).flatten(2)
        scale1, scale2 = (1.0 if scale is None else scale for scale in (parts.scale1, parts.scale2))
        self.parts = self.parts + self.linear(parts.out, mixed) * scale1
        tokens = tokens + parts.out((A @ v).permute(1, 0, 2).flatten(1)) * scale1
        h = parts.fc1(parts.norm2(tokens))
        size = max(1, _CHUNK // (len(tokens) * h.shape[1]))
        for rows in torch.arange(len(tokens), device=tokens.device).split(size):
            hidden = self.linear(parts.fc1, self.norm(parts.norm2, self.parts[rows], tokens[rows]))
            hidden = hidden * _ratio(parts.activation, h[rows])[:, None]
            self.parts[rows] += self.linear(parts.fc2, hidden) * scale2
        out: Tensor = tokens + parts.fc2(parts.activation(h)) * scale2
        return out


def logit_gradients(ask: Ask, logits: Tensor) -> Tensor:
    """The gradient [B,T,C] of each explained score with respect to the logits [B,C]."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        scores = target_scores(leaf, ask.targets, ask.score, ask.vit.outputs)
        each = [torch.autograd.grad(scores[:, t].sum(), leaf, retain_graph=True)[0] for t in range(scores.shape[1])]
    return torch.stack(each, 1)


@own_passes(
    "decompx-bias",
    paper="Modarressi et al., ACL 2023",
    ruled=False,
    every_class=True,
    refuses=refuse_blocks,
    cost="about one forward for each token and block, for all classes together",
)
def decompx_bias(ask: Ask, bias: Bias = "absdot", start: Start = 0) -> Tensor:
    """Contribution of each patch to the logit, with all biases distributed over the tokens.

        logit = sum_j a_j,   V[i,j] <- V[i,j] + w_ij b,   w_ij = |<V[i,j], b>| / sum_k |<V[i,k], b>|

    V[i,j] is the part of token i that comes from token j at block `start`; attention, the deviations of the norms and
    the ratios GELU(h)/h are constant, as in `decompx`. Every bias b of the network is distributed over the sources with
    weights w, so the values of all tokens, including CLS, sum to the logit.

    Args:
        bias: The weights w: "absdot" is the formula, "norm" is proportional to ||V[i,j]||, "equal" is uniform, "cls"
            selects the first token, and "none" leaves biases out, which equals `decompx`.
    """
    vit, ends = ask.vit, ask.vit.ends()
    assert ends is not None  # refuse_blocks
    first = block_index(start, vit.depth)
    maps = []
    with torch.no_grad(), vit.steady():
        tokens = vit.run(vit.embed(ask.images), stop=first)
        logits = vit.readout(vit.run(tokens, start=first))
        weights = logit_gradients(ask, logits)  # [B,T,C]
        head = linear(ends.head)
        for image, image_weights in zip(tokens, weights, strict=True):
            decomposition = _Decomposition(image, bias)
            for index in range(first, vit.depth):
                image = decomposition.block(vit.parts(index), image, vit.heads)
            parts = decomposition.norm(ends.norm, decomposition.parts[:1], image[:1])[0]  # [J,D]
            values = (parts @ (image_weights @ head.weight).T).T[..., None]  # [T,J,1]
            constants = [None] * len(values) if head.bias is None else (image_weights @ head.bias)[:, None]
            shared = [share_bias(v[None], c, bias)[0, :, 0] for v, c in zip(values, constants, strict=True)]
            maps.append(vit.patches(torch.stack(shared)))
    return torch.stack(maps)
