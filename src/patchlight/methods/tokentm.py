"""TokenTM: attention and feed-forward updates weighted by how they change each token's length and direction."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from patchlight.anatomy.base import Anatomy, linear
from patchlight.evidence.record import Evidence
from patchlight.evidence.rows import Entry, Matrix, lengths, times, written
from patchlight.methods.base import Composition, LayerMaps, register_method
from patchlight.methods.compositions import Readout
from patchlight.registry import Settings

_GUARD = 1e-8
Update = tuple[Matrix, Tensor | None, Tensor]
_ENTRY: dict[str | None, Entry] = {"relu": "relu(AG)", "signed": "AG", None: "A"}


def _updates(maps: LayerMaps, init: Literal["length", "identity"] = "length", readout: Readout = "pooling") -> Tensor:
    """r <- (r * (1 + w_FFN)) (I + M_l) from the last block to the first, then times the length of each x_0 token."""
    row = maps.start_row(readout)
    length = row
    for layer in reversed(range(maps.vit.depth)):
        matrix, feed_forward, length = maps.values[layer]
        row = maps.merged(row, layer + 1)
        row = row if feed_forward is None else row * (1 + feed_forward)
        row = row + times(row, matrix)
    return row * length if init == "length" else row


UPDATES = Composition(_updates, lambda depth, settings: range(depth), staged=True)


def _needs(settings: Settings) -> frozenset[str]:
    needs = {"x", "A"} | ({"G"} if settings["gradient"] else set())
    needs |= {"u", "y"} if settings["include_ffn"] else set()
    if settings["where"] == "residual":
        needs |= {"u"}
    elif settings["ov_input"] == "ln1":
        needs |= {"n"}
    return frozenset(needs)


def no_linear_values(settings: Settings, vit: Anatomy) -> str | None:
    """Why the value and output projections of a model cannot be read as one linear map per head."""
    return vit.no_linear_values() if settings.get("where", "ov") == "ov" else None


def necc(cosine: Tensor) -> Tensor:
    """NECC_i = exp(cos_i) / sum_k exp(cos_k) over the tokens, the last axis."""
    return cosine.softmax(-1)


def transformation_weight(
    before: Tensor, after: Tensor, dot: Tensor, use_length: bool, use_necc: bool, scale: float
) -> Tensor:
    """w_i = L(after_i)/L(before_i) * NECC_i, from the lengths of both and their inner product, tokens last."""
    ratio = after / before.clamp(min=_GUARD)
    weight = ratio if use_length else ratio.new_ones(ratio.shape)
    return weight * necc(dot / (before * after).clamp(min=_GUARD)) * scale if use_necc else weight


def _ov_image(b: Evidence, source: Tensor) -> tuple[Tensor, Tensor]:
    """Length of source W_V^h W_O^h and its inner product with x, [B,H,N] each, the D-wide images never formed."""
    heads = b.heads
    projection = linear(b.parts.out).weight
    out = projection.unflatten(1, (heads, -1))
    value = b.product(source, b.parts.value().T).unflatten(-1, (heads, -1)).transpose(1, 2)
    pulled = b.product(b.x, projection).unflatten(-1, (heads, -1)).transpose(1, 2)
    per_head = out.permute(1, 2, 0)
    gram = per_head @ per_head.transpose(1, 2)
    return ((value @ gram) * value).sum(-1).clamp(min=0).sqrt(), (value * pulled).sum(-1)


@register_method(
    "tokentm",
    paper="Wu et al., CVPR 2024",
    needs=_needs,
    combine=UPDATES,
    composable="each block is a matrix and a diagonal update, and its own product chains them from the token lengths",
    refuses=no_linear_values,
    presets={"libragrad": {"where": "residual", "ffn_where": "residual", "head_fusion": "mean_first"}},
)
def tokentm(
    b: Evidence,
    where: Literal["ov", "residual"] = "ov",
    ov_input: Literal["x", "ln1"] = "x",
    ffn_where: Literal["branch", "residual"] = "branch",
    head_fusion: Literal["per_head", "mean_first"] = "per_head",
    use_necc: bool = True,
    necc_scale: Literal["N"] | float = 1.0,
    use_length: bool = True,
    gradient: bool = True,
    sign: Literal["relu", "signed"] = "relu",
    include_ffn: bool = True,
) -> Update:
    """Token transformation: the CLS row of prod_l (I + W_FFN)(I + mean_h ReLU(G_l) * (A_l W_l)) diag(L(x_0)).

    W is diagonal: w_i = L(E~_i)/L(E_i) * NECC_i, with NECC the softmax over tokens of cos(E, E~) times `necc_scale`
    (a number, or "N" for the number of tokens). E is the block's input. Attention: E~ is the OV image E W_V^h W_O^h of
    each head, without biases (`where="residual"`: the tokens after attention and its skip); `ov_input="ln1"` feeds it
    the normed tokens. Feed-forward: from its input to its branch output, layer scale included (`ffn_where="residual"`:
    to the block's output). `head_fusion="mean_first"` averages A, ReLU(G) and W over heads before the product.
    `sign="signed"` leaves G as it is, `gradient=False` leaves it out; `init="identity"` starts without the lengths of
    x_0. Without NECC, lengths and feed-forward, from the identity, this is `genatt`. Preset `libragrad` is that code's
    reading. One forward, one backward, and two extra projections per block.
    """
    length = b.x.norm(dim=-1)
    scale = float(b.x.shape[1]) if necc_scale == "N" else float(necc_scale)
    options = (use_length, use_necc, scale)

    def change(before: Tensor, after: Tensor) -> Tensor:
        return transformation_weight(*lengths(before, after), *options)

    if where == "residual":
        weight = change(b.x, b.u)[:, None]
    else:
        image, dot = _ov_image(b, b.n if ov_input == "ln1" else b.x)
        weight = transformation_weight(length[:, None], image, dot, *options)
    matrix = _attention_update(b, weight, head_fusion, sign if gradient else None)
    if not include_ffn:
        return matrix, None, length
    return matrix, change(b.u, b.y if ffn_where == "residual" else b.y - b.u), length


def _attention_update(b: Evidence, weight: Tensor, head_fusion: str, sign: str | None) -> Matrix:
    """mean_h [sign(G)_h * A_h diag(w_h)] [B,N,N], or the same of the means; weight [B,H,N] or [B,1,N] for all heads."""
    if head_fusion == "mean_first":
        mean = b.heads_mean * weight.mean(1)[:, None]
        return mean if sign is None else mean.mul_(written(b.matrix("relu(G)" if sign == "relu" else "G")))
    return b.matrix(_ENTRY[sign], columns=weight)
