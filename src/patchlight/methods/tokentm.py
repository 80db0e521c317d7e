"""TokenTM: updates of attention and MLP, weighted by the changes of length and direction of each token."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from patchlight.anatomy.contract import linear
from patchlight.anatomy.opened import Anatomy
from patchlight.core.registry import Settings
from patchlight.evidence.record import Evidence
from patchlight.evidence.rows import Entry, Matrix, lengths, times, written
from patchlight.methods.base import Composition, LayerMaps, layer_map
from patchlight.methods.compositions import Readout

_GUARD = 1e-8
Update = tuple[Matrix, Tensor | None, Tensor]
_ENTRY: dict[str | None, Entry] = {"relu": "relu(AG)", "signed": "AG", None: "A"}


def _updates(maps: LayerMaps, init: Literal["length", "identity"] = "length", readout: Readout = "pooling") -> Tensor:
    """r <- (r * (1 + w_FFN)) (I + M_l) from the last block to the first, then times the length of each x_0 token.

    Args:
        init: C_0: the "length" of the tokens x_0, or the "identity" matrix.
        readout: The rows of the last C that are read: those of the classifier's "pooling", or others.
    """
    row = maps.start_row(readout)
    length = row
    for layer in reversed(range(maps.vit.depth)):
        matrix, feed_forward, length = maps.values[layer]
        row = maps.arriving(row, layer + 1)
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
    """Why the value and output projections are not one linear map per head; None if they are."""
    return vit.no_linear_values() if settings.get("where", "ov") == "ov" else None


def transformation_weight(
    before: Tensor, after: Tensor, dot: Tensor, use_length: bool, use_necc: bool, scale: float
) -> Tensor:
    """w_i = L(after_i)/L(before_i) * NECC_i from both lengths and their inner product; NECC is a softmax of cosines."""
    ratio = after / before.clamp(min=_GUARD)
    weight = ratio if use_length else ratio.new_ones(ratio.shape)
    return weight * (dot / (before * after).clamp(min=_GUARD)).softmax(-1) * scale if use_necc else weight


def _ov_image(b: Evidence, source: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths of source W_V^h W_O^h and inner products with x, [B,H,N] each, without vectors of width D."""
    heads = b.heads
    projection = linear(b.parts.out).weight
    out = projection.unflatten(1, (heads, -1))
    value = b.product(source, b.parts.value().T).unflatten(-1, (heads, -1)).transpose(1, 2)
    pulled = b.product(b.x, projection).unflatten(-1, (heads, -1)).transpose(1, 2)
    per_head = out.permute(1, 2, 0)
    gram = per_head @ per_head.transpose(1, 2)
    return ((value @ gram) * value).sum(-1).clamp(min=0).sqrt(), (value * pulled).sum(-1)


_THIRD_PARTY: dict[str, object] = {
    "where": "ov",
    "ov_input": "x",
    "ffn_where": "branch",
    "head_fusion": "per_head",
    "necc_scale": 1.0,
}
READINGS: dict[str, dict[str, object]] = {
    "third-party": _THIRD_PARTY,
    "ov-ln1": {**_THIRD_PARTY, "ov_input": "ln1"},
    "attention-residual": {**_THIRD_PARTY, "where": "residual"},
    "ffn-residual": {**_THIRD_PARTY, "ffn_where": "residual"},
    "mean-heads": {**_THIRD_PARTY, "head_fusion": "mean_first"},
    "necc-n": {**_THIRD_PARTY, "necc_scale": "N"},
    "ov-ln1-necc-n": {**_THIRD_PARTY, "ov_input": "ln1", "necc_scale": "N"},
    "libragrad": {**_THIRD_PARTY, "where": "residual", "ffn_where": "residual", "head_fusion": "mean_first"},
}
# Every preset sets all five open choices, so that it does not change with the defaults.


@layer_map(
    "tokentm",
    paper="Wu et al., CVPR 2024",
    needs=_needs,
    combine=UPDATES,
    composable="each block is a matrix and a diagonal update, and its own product starts from the token lengths",
    refuses=no_linear_values,
    presets=READINGS,
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
    """TokenTM (reconstructed): attention weighted by its gradient and by the change of each token.

        C_0     = diag(L(x_0))
        C_{l+1} = (I + diag(w_FFN)) (I + mean_h [ReLU(G_h) * (A_h diag(w_h))]) C_l        for each block l
        w_i     = L(E~_i) / L(E_i) * exp(cos(E_i, E~_i)) / sum_k exp(cos(E_k, E~_k)) * necc_scale

    The map is the CLS row of the last C. L is the Euclidean length of a token; E_i is token i before attention or the
    MLP, and E~_i after it; the softmax over tokens k is called NECC. Without NECC, lengths and MLP, and with
    `init="identity"`, this is `genatt`.

    This is a reconstruction, because the main paper was not available. The formulas come from the paper's supplement,
    from summaries, and from two re-implementations that disagree; C_0, w and the order of the updates are the same in
    both. Five choices are open: where E~ of attention is measured (`where`), the input of the value and output maps
    (`ov_input`), whether E~ of the MLP includes the skip (`ffn_where`), how heads are combined (`head_fusion`), and the
    scale of NECC (`necc_scale`).

    Each preset is one set of choices. `third-party` (the defaults) is a re-implementation that cites the paper's
    equation numbers, `libragrad` the one in the code of LibraGrad. `ov-ln1`, `attention-residual`, `ffn-residual`,
    `mean-heads` and `necc-n` change one choice of `third-party` each, `ov-ln1-necc-n` two. None is best everywhere; the
    results page tokentm-readings compares them.

    Args:
        where: Where E~ of attention is measured. "ov": the product E W_V W_O of each token with the value and output
            maps of each head, without biases. "residual": the token after attention and its skip connection.
        ov_input: The input of the value and output maps with `where="ov"`. "x": the input of the block. "ln1": the
            output of the first norm, as in the model.
        ffn_where: Where E~ of the MLP is measured. "branch": its output before the skip, including layer scale.
            "residual": the output of the block.
        head_fusion: "per_head": the product is computed for each head, then averaged. "mean_first": A, ReLU(G) and w
            are averaged over heads before the product.
        use_necc: Whether w includes NECC.
        necc_scale: Factor of NECC: a number, or "N" for the number of tokens, which makes NECC 1 on average.
        use_length: Whether w includes the ratio of lengths.
        gradient: Whether attention is weighted by its gradient.
        sign: "relu": the positive part of the gradient. "signed": the gradient itself.
        include_ffn: Whether the update of the MLP is included.
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
