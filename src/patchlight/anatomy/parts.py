"""The parts of a block, found by the names that libraries give them."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from patchlight.anatomy.contract import Parts, linear, stacked

_NAMES = {
    "norm1": ("norm1", "ln_1", "layernorm_before", "layer_norm1"),
    "norm2": ("norm2", "ln_2", "layernorm_after", "layer_norm2"),
    "out": (
        *("attn.proj", "attn.out_proj", "self_attention.out_proj", "attention.o_proj", "attention.output.dense"),
        *("self_attn.out_proj", "attention.out_proj"),
    ),
    "fc1": ("mlp.fc1", "mlp.c_fc", "mlp.0", "intermediate.dense"),
    "fc2": ("mlp.fc2", "mlp.c_proj", "mlp.3", "output.dense"),
    "activation": (
        *("mlp.act", "mlp.gelu", "mlp.1", "mlp.activation_fn", "mlp.activation", "mlp.act_fn"),
        "intermediate.intermediate_act_fn",
    ),
    "scale1": ("ls1.gamma", "gamma_1", "ls_1.gamma", "layer_scale1.lambda1", "lambda_1"),
    "scale2": ("ls2.gamma", "gamma_2", "ls_2.gamma", "layer_scale2.lambda1", "lambda_2"),
}
"""The paths of each part of a block, in the order in which they are tried."""
_ATTENTIONS = ("attn", "self_attention", "attention.attention", "attention", "self_attn")


def find(module: Any, *paths: str) -> Any:
    """The first of these paths that leads to something."""
    for path in paths:
        try:
            found = attrgetter(path)(module)
        except AttributeError:
            continue
        if found is not None:
            return found
    return None


def named_parts(block: nn.Module) -> Parts:
    """The parts of a block with these names; None for the others."""
    parts = {part: find(block, *paths) for part, paths in _NAMES.items()}
    if find(block, "mlp.gate_proj") is None:
        parts["fc1"] = parts["fc1"] or find(block, "mlp.up_proj")
        parts["fc2"] = parts["fc2"] or find(block, "mlp.down_proj")
    attentions = (_maps(find(block, path)) for path in _ATTENTIONS)
    value, qkv = next((maps for maps in attentions if maps[0] is not None), (None, None))
    return Parts(**parts, value=value, qkv=qkv)


def parts_of_timm(block: nn.Module) -> Parts:
    """The norms and the output projection of a block that a user wrote, if they have timm's names."""
    return Parts(find(block, "norm1"), find(block, "norm2"), find(block, "attn.proj"))


def _maps(attention: Any) -> tuple[Any, Any]:
    """`Parts.value` and `Parts.qkv` of an attention module."""
    fused, both = find(attention, "qkv"), find(attention, "in_proj_weight")
    if fused is not None:
        return lambda: linear(fused).weight.chunk(3)[2], lambda: _fused(attention)
    if both is not None:
        return lambda: both.chunk(3)[2], lambda: (both, attention.in_proj_bias)
    query, key, value = (find(attention, f"{name[0]}_proj", name) for name in ("query", "key", "value"))
    if value is None:
        return None, None
    separate = None if query is None or key is None else lambda: stacked(query, key, value)
    return lambda: linear(value).weight, separate


def _fused(attention: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of queries, keys and values; some models have three biases beside one weight."""
    separate, whole = getattr(attention, "q_bias", None), linear(attention.qkv)
    bias = whole.bias if separate is None else torch.cat([separate, attention.k_bias, attention.v_bias])
    return whole.weight, bias
