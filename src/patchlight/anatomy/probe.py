"""The probe: one random image through a model, whole and in parts, to check what was read from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchlight.anatomy.watching import AttentionTap
from patchlight.core.errors import PatchlightError, Unsupported, first_line

if TYPE_CHECKING:
    from patchlight.anatomy.opened import Anatomy

BY_HAND = (
    "describe it by hand: wrap(model, embed=…, blocks=…, readout=…, grid=(h, w), prefix=1, pooling='cls', heads=…, "
    "classes=…, preprocess=…), where readout(blocks(embed(images))) gives its logits"
)


def probe(vit: Anatomy) -> None:
    """Refuse a model whose parts do not give its logits; read classes, width and whether attention can be read."""
    with torch.inference_mode(False), torch.no_grad(), vit.steady():
        image = random_image(vit)
        expected = _forward_logits(vit, image)
        tokens = vit.embed(image)
        _read_tokens(vit, tokens)
        logits = vit.classified(vit.run(tokens))
        seen = _attention(vit, tokens)
        vit.attention = vit.can_attend or seen
        vit.gradient = _gradient(vit)
        vit.reads_first = _reads_first(vit, tokens, logits)
    _compare(vit, expected, logits)
    _read_classes(vit, logits)


def probe_head(vit: Anatomy, bare: Anatomy) -> None:
    """Probe the model itself, and refuse a head whose logits for one image are not one number per class."""
    bare.check()
    vit.width, vit.heads, vit.attention, vit.gradient = bare.width, bare.heads, bare.attention, bare.gradient
    with torch.inference_mode(False), torch.no_grad(), vit.steady():
        logits = vit.readout(vit.run(vit.embed(random_image(vit))))
    if logits.shape != (1, vit.classes):
        raise PatchlightError(
            f"the head gives {list(logits.shape)} for one image, and its labels name {vit.classes} classes"
        )
    vit.reads_first = bare.reads_first and vit.depth == bare.depth and vit.pooling == bare.pooling


def refused_input(name: str, shape: Sequence[int], error: Exception) -> PatchlightError:
    """The error of a model that cannot be run on an image of this shape."""
    return PatchlightError(
        f"{name} does not take an image of shape {list(shape)}: {first_line(error).rstrip('.')}; give a "
        f"preprocessing of the size it takes (and channels=, if not 3); if its input is not an image, {BY_HAND}"
    )


def _forward_logits(vit: Anatomy, image: Tensor) -> Tensor:
    """The logits of the whole model."""
    try:
        out: Any = vit.model_output(image)
    except Exception as error:
        raise refused_input(vit.name, image.shape, error) from error
    out = getattr(out, "logits", out)
    out = out[0] if isinstance(out, tuple | list) and out else out
    if not isinstance(out, Tensor) or out.ndim != 2 or out.shape[0] != 1:
        shape = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise PatchlightError(f"{vit.name} gives {shape} for one image, not logits [1,C]; {BY_HAND}")
    if out.shape[1] == 0:
        raise PatchlightError(f"{vit.name} has no classifier; nothing to explain")
    return out


def _read_tokens(vit: Anatomy, tokens: Tensor) -> None:
    if tokens.ndim != 3 or tokens.shape[1] != vit.tokens:
        raise PatchlightError(
            f"{vit.name} makes tokens {list(tokens.shape)} of one image, but {vit.prefix} prefix tokens and a grid of "
            f"{' x '.join(map(str, vit.grid))} patches{f' and {vit.suffix} suffix tokens' if vit.suffix else ''} make "
            f"{vit.tokens}; its patches cannot be located"
        )
    vit.width = tokens.shape[2]


def _compare(vit: Anatomy, expected: Tensor, logits: Tensor) -> None:
    """Refuse parts whose logits differ from those of the whole by more than rounding."""
    if expected.shape != logits.shape:
        raise PatchlightError(
            f"{vit.name} gives logits {list(expected.shape)}, its parts {list(logits.shape)}: its forward does more "
            f"than embed, blocks and readout; {BY_HAND}"
        )
    if not alike(expected, logits):
        raise PatchlightError(
            f"{vit.name} gives other logits than its embedding, blocks and head put together (they differ by "
            f"{distance(expected, logits):.2g}, the largest is {float(expected.abs().max()):.2g}): its forward, or a "
            f"hook, does more; {BY_HAND}"
        )


def _read_classes(vit: Anatomy, logits: Tensor) -> None:
    if vit.classes == 0:  # these are features
        return
    classes = logits.shape[1]
    if vit.classes != classes:
        vit.classes, vit.labels = classes, None if vit.assumed_labels else vit.labels
        vit.outputs = vit.own_outputs(classes)
    if vit.labels is not None and len(vit.labels) != vit.outcomes:
        raise PatchlightError(f"{len(vit.labels)} labels were given for a model with {classes} classes")


def _reads_first(vit: Anatomy, tokens: Tensor, logits: Tensor) -> bool:
    """Whether the first token of the last block, computed from the block's parts, is correct and gives the logits."""
    if vit.depth == 0 or vit.pooling != "cls" or vit.ends() is None:
        return False
    parts = vit.parts(vit.depth - 1)
    named = (parts.norm1, parts.norm2, parts.out, parts.fc1, parts.activation, parts.fc2)
    if parts.beyond or parts.qkv is None or any(part is None for part in named):
        return False
    try:
        weight = parts.qkv()[0]
    except Unsupported:
        return False
    if not any(weight is own for own in vit.blocks[-1].parameters()):  # computed again in every forward
        return False
    if _hooked(vit):
        return False
    before = vit.run(tokens, stop=vit.depth - 1)
    row = vit.first_row(before)
    same = alike(vit.block(vit.depth - 1, before)[:, :1], row, 1e-4)
    return same and bool(logits.isfinite().all()) and alike(logits, vit.classified(row), 1e-4)


def _hooked(vit: Anatomy) -> bool:
    """Whether a user's hook is in the last block; it may act differently at every call."""
    hooks = (h for m in vit.blocks[-1].modules() for t in (m._forward_hooks, m._forward_pre_hooks) for h in t.values())
    return any(not str(getattr(hook, "__module__", "")).startswith("patchlight.") for hook in hooks)


def alike(a: Tensor, b: Tensor, allowed: float = 1e-3) -> bool:
    """Whether two tensors are equal up to rounding; values that are not finite are reported later."""
    size = float(a.double().abs().max())
    allowed = 5e-2 if a.dtype in (torch.float16, torch.bfloat16) else allowed
    return a.shape == b.shape and (not math.isfinite(size) or distance(a, b) <= allowed * size)


def distance(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference."""
    return float((a.double() - b.double()).abs().max()) if a.shape == b.shape else math.inf


def random_image(vit: Anatomy) -> Tensor:
    """The probe image [1,*input_shape], on the model's device."""
    generator = torch.Generator().manual_seed(0)
    return vit.place(torch.randn(1, *vit.input_shape, generator=generator))


def quantised_layer(net: nn.Module) -> str:
    """The class of a quantised layer; "" if there is none."""
    kinds = ("torch.ao.nn.quantized", "torch.nn.quantized")
    return next((type(m).__name__ for m in net.modules() if type(m).__module__.startswith(kinds)), "")


def _gradient(vit: Anatomy) -> str | None:
    """Why no gradient flows through the model; None if it does. Torch would silently return zeros."""
    layer = quantised_layer(vit.net)
    return f"its {layer} layers are quantised and pass no gradient" if layer else None


def _attention(vit: Anatomy, tokens: Tensor) -> str | None:
    """Why the attention of the first block (of every block in a hierarchical model) cannot be read; None if it can."""
    for index in range(vit.depth if vit.hierarchical else min(vit.depth, 1)):
        tokens = vit.merge(index, tokens)
        tap = AttentionTap()
        try:
            with tap:
                after = vit.block(index, tokens)
        except Unsupported as error:
            return str(error)
        if tap.matrix is None:
            return "no softmax over tokens was found in its blocks"
        matrix = tap.matrix.flatten(0, 1) if tap.matrix.ndim == 5 else tap.matrix
        if tap.reach is not None:
            reason = tap.reach.misses(matrix)
        else:
            count = tokens.shape[1]
            whole = matrix.shape[-2:] == (count, count)
            reason = None if whole else f"its attention is {list(matrix.shape)}, not between all {count} tokens"
        if reason is not None:
            return reason
        vit.heads = matrix.shape[1]
        tokens = after
    return None
