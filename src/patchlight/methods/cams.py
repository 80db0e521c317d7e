"""The CAM family on tokens: channels of one layer, weighted by gradients or by scores of masked images.

Maps are not scaled. The default place is the output of the last block's first norm, without prefix tokens in any mean,
as the grad-cam library recommends. Preset `skipplus` and the compositions read block inputs and include all tokens, as
in the code of SkipPLUS and LibraGrad.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.registry import Settings
from patchlight.core.resize import to_pixels
from patchlight.evidence.fills import Fill, fill_images
from patchlight.evidence.record import BACKWARD, Evidence
from patchlight.evidence.runner import FEATURES
from patchlight.methods.base import Ask, Composition, LayerMaps, Reads, ablates, layer_map, own_passes
from patchlight.methods.compositions import block_index
from patchlight.methods.gradients import input_times_gradient, token_ixg
from patchlight.methods.maps import finish, job
from patchlight.methods.masking import MadeMasks, owners
from patchlight.methods.requests import resolve, unavailable

Prefix = Annotated[
    Literal["exclude", "include"],
    Field(description="Whether means and sums over tokens include CLS and other prefix tokens."),
]
Layer = Annotated[
    int | str,
    Field(
        description='A place in a block: "blocks[3].norm1" (output of the first norm), ".input", ".attention" (output '
        'of the attention module, before layer scale and skip) or ".output"; a number is the input of that block. A '
        "hierarchical model has one feature map, that of the stage it is opened at."
    ),
]
Eigen = Annotated[
    bool,
    Field(description="Whether the first principal component of the weighted channels is used instead of their sum."),
]
Eps = Annotated[float, Field(description="Added to the denominator.")]
Place = Literal["input", "norm1", "attention", "output"]
"""A place in a block: the tokens that enter it, the output of its first norm, the output of its attention module (after
the output projection, before layer scale and skip), or the tokens that leave it."""
_READS: Mapping[Place, tuple[str, str]] = {
    "input": ("x", "g"),
    "norm1": ("n", "gn"),
    "attention": ("o", "go"),
    "output": ("y", "gy"),
}
"""The letters of activations and gradients in `Evidence`, by place."""
_PLACE = re.compile(rf"(?:blocks\[(-?\d+)\])?\.?({'|'.join(_READS)})?")
NORM1 = "blocks[-1].norm1"
ATTENTION = "blocks[-1].attention"
_AT_INPUT: Mapping[str, Any] = {"layer": "input"}
_COMPOSED: Mapping[str, Any] = {**_AT_INPUT, "prefix": "include"}
_PLACES: Mapping[str, Mapping[str, Any]] = {"jacobgil": {}, "skipplus": {"layer": "blocks[-1].input"}}
_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "jacobgil": {},
    "skipplus": {"layer": "blocks[-1].input", "prefix": "include"},
}


def place(layer: int | str) -> tuple[int, Place]:
    """Parse a setting `layer`: a block's index (its input), "blocks[3].output", or a `Place` in the last block."""
    if isinstance(layer, int):
        return layer, "input"
    match = _PLACE.fullmatch(layer)
    if not layer or match is None:
        raise PatchlightError(
            f"layer '{layer}' is not a place; give a block's number, or 'blocks[-1].norm1' with one of "
            f"{', '.join(_READS)} after the dot"
        )
    return int(match[1] or -1), cast(Place, match[2] or "input")


def cam_needs(settings: Settings) -> frozenset[str]:
    return frozenset({"x", "g", *_READS[place(settings["layer"])[1]]})


def no_place(layer: int | str, vit: Anatomy) -> str | None:
    """Why a model does not have the place that `layer` names; None if it has, or is hierarchical."""
    reason = None if vit.hierarchical else unavailable(frozenset(_READS[place(layer)[1]]), vit)
    return None if reason is None else f"{reason}; layer='input' works"


def _index(layer: int | str, vit: Anatomy) -> int:
    """The block that `layer` names; of a hierarchical model, the feature map."""
    return FEATURES if vit.hierarchical else block_index(place(layer)[0], vit.depth)


def _at_layer(maps: LayerMaps, layer: Layer = NORM1) -> Tensor:
    """The map at one place of one block."""
    return maps.vector(_index(layer, maps.vit))


AT_LAYER = Composition(_at_layer, lambda depth, s: (block_index(place(s["layer"])[0], depth),))


def degenerate_cam(settings: Settings, vit: Anatomy) -> str | None:
    """Why the gradient of the patches at a place is zero, as after the last attention with CLS pooling; else None."""
    if "start" in settings or vit.hierarchical or settings.get("prefix") == "include":
        return None
    index, kind = place(settings["layer"])
    at_last = kind in ("attention", "output") and block_index(index, vit.depth) == vit.depth - 1
    if at_last and vit.pooling in ("cls", "cls+dist"):
        return (
            f"no gradient reaches the patches at '{settings['layer']}', because {vit.name} classifies by prefix "
            "tokens; use layer='blocks[-1].norm1' or an earlier block"
        )
    return None


_cam = partial(layer_map, needs=cam_needs, combine=AT_LAYER, features=True)
"""The decorator of layer maps that read one place."""


def activations(b: Evidence, layer: int | str) -> tuple[Tensor, Tensor]:
    """Activations and gradients [B,N,D] at the place that `layer` names."""
    values, gradients = _READS[_kind(b, layer)]
    return b.read(values), b.read(gradients)


def _kind(b: Evidence, layer: int | str) -> Place:
    """The place in a block; the feature map of a hierarchical model is the input of a block."""
    return place(layer)[1] if b.depth > 0 else "input"


def product(b: Evidence, layer: int | str) -> Tensor:
    """a * g at that place; shared by the methods of a pass."""
    kind = _kind(b, layer)
    values, gradients = _READS[kind]
    return input_times_gradient(b) if kind == "input" else b.once(kind, lambda: b.read(values) * b.read(gradients))


def channel_reads(settings: Settings, vit: Anatomy) -> Reads:
    """The evidence that `feature_maps` reads with these settings."""
    layer = settings["layer"]
    return Reads({("x" if vit.hierarchical else _READS[place(layer)[1]][0], _index(layer, vit))})


def feature_maps(ask: Ask, layer: Layer = NORM1) -> tuple[Tensor, Tensor]:
    """The channels at a place on the patch grid [B,D,h,w], and the scores of the images [B,T], from one forward."""
    reads = channel_reads({"layer": layer}, ask.vit)
    values, scores = ask.forward(reads)
    tokens = values[next(iter(reads))]
    return ask.vit.layout.of_cells(tokens).mT.contiguous().unflatten(-1, ask.vit.grid), scores


def averaged_tokens(values: Tensor, b: Evidence, prefix: Prefix) -> Tensor:
    """The tokens in the mean of a channel: the patches, or all."""
    return values if prefix == "include" else values[:, b.cells]


def principal(weighted: Tensor, b: Evidence) -> Tensor:
    """Eigen smoothing: the first principal component [B,N] of the weighted activations [B,N,D] of the patches.

    The sign is chosen to agree with the sum over the channels. Prefix tokens get 0.
    """
    z = weighted[:, b.cells]
    z = z - z.mean(1, keepdim=True)
    axis = torch.linalg.svd(z, full_matrices=False).Vh[:, 0, :, None]
    scores = (z @ axis)[..., 0]
    opposed = (scores * z.sum(-1)).sum(1, keepdim=True) < 0
    return F.pad(torch.where(opposed, -scores, scores), (b.prefix, b.tokens - b.cells.stop))


def apply_weights(a: Tensor, weights: Tensor, b: Evidence, eigen: Eigen) -> Tensor:
    """map_i = sum_k w_k a_ik [B,N] from activations [B,N,D] and channel weights [B,D], or its eigen smoothing."""
    if eigen:
        return principal(a * weights[:, None], b)
    return (a @ weights[..., None])[..., 0]


def degenerate_hirescam(settings: Settings, vit: Anatomy) -> str | None:
    """Why HiResCAM is zero: at the input of a block it is IxG; None if it is not."""
    if "start" in settings or vit.hierarchical:
        return None
    index, kind = place(settings["layer"])
    at_last = kind == "input" and block_index(index, vit.depth) == vit.depth - 1
    if at_last and settings.get("rule") == "plain" and vit.pooling == "cls" and not settings["eigen"]:
        return (
            "plain HiResCAM at the input of the last block is zero up to the layer norm's epsilon; use '.libra', "
            "layer='blocks[-1].norm1' or an earlier block"
        )
    return degenerate_cam(settings, vit)


@_cam(
    "gradcam",
    paper="Selvaraju et al., ICCV 2017, on tokens",
    aliases=("grad-cam",),
    composed=_COMPOSED,
    presets={**_PRESETS, "diffmask": {"eigen": True}},
    advice=degenerate_cam,
)
def gradcam(b: Evidence, layer: Layer = NORM1, prefix: Prefix = "exclude", eigen: Eigen = False) -> Tensor:
    """Grad-CAM: the channels of one block, weighted by their mean gradients.

        R_i = sum_k w_k a_ik,   w_k = mean_i g_ik

    The map is signed; there is no ReLU. Presets: `skipplus` (input of the last block, mean including CLS), `diffmask`
    (eigen; `gradcam-aug` adds its augmentations).
    """
    a, g = activations(b, layer)
    return apply_weights(a, averaged_tokens(g, b, prefix).mean(1), b, eigen)


@_cam(
    "gradcam++",
    paper="Chattopadhay et al., WACV 2018, on tokens",
    precision="full",
    aliases=("gradcampp", "grad-cam++"),
    exact=False,
    composed={**_COMPOSED, "eps": 1e-7},
    presets={**_PRESETS, "skipplus": {**_PRESETS["skipplus"], "eps": 1e-7}},
    advice=degenerate_cam,
)
def gradcam_pp(
    b: Evidence,
    layer: Layer = NORM1,
    prefix: Prefix = "exclude",
    sign: Literal["relu", "signed"] = "relu",
    eps: Eps = 1e-6,
    eigen: Eigen = False,
) -> Tensor:
    """Grad-CAM++: Grad-CAM with larger weights for channels with large positive gradients.

        R_i = sum_k w_k a_ik,   w_k = sum_i alpha_ik ReLU(g_ik),   alpha_ik = g^2 / (2 g^2 + (sum_j a_jk) g^3 + eps)

    alpha is 0 if g is 0. It has a pole at g = -2 / sum_j a_jk, and channels close to it amplify rounding: in float32,
    maps of an image alone and in a batch may differ by several per cent.

    Args:
        sign: "relu" weights by the positive part of the gradient, "signed" by the gradient itself.
    """
    a, g = activations(b, layer)
    c, d = averaged_tokens(a, b, prefix), averaged_tokens(g, b, prefix)
    square = d * d
    alpha = square / (2 * square + c.sum(1, keepdim=True) * square * d + eps)
    alpha = torch.where(d == 0, 0, alpha)
    return apply_weights(a, (alpha * (d.relu() if sign == "relu" else d)).sum(1), b, eigen)


@_cam(
    "xgradcam",
    paper="Fu et al., BMVC 2020, on tokens",
    precision="full",
    exact=False,
    composed=_COMPOSED,
    presets=_PRESETS,
    advice=degenerate_cam,
)
def xgradcam(
    b: Evidence, layer: Layer = NORM1, prefix: Prefix = "exclude", eps: Eps = 1e-7, eigen: Eigen = False
) -> Tensor:
    """XGradCAM: the channels of one block, weighted by their normalised activation times gradient.

        R_i = sum_k w_k a_ik,   w_k = sum_i g_ik a_ik / (sum_j a_jk + eps)

    The map is signed. A channel of a ViT may sum to nearly zero, so that w_k explodes; `xgradcam+` avoids this.
    """
    a, _ = activations(b, layer)
    products = averaged_tokens(product(b, layer), b, prefix)
    return apply_weights(a, products.sum(1) / (averaged_tokens(a, b, prefix).sum(1) + eps), b, eigen)


@_cam(
    "xgradcam+",
    paper="SkipPLUS, CVPR-W 2024",
    aliases=("xgradcam-abs",),
    composed=_COMPOSED,
    presets=_PRESETS,
    advice=degenerate_cam,
)
def xgradcam_abs(
    b: Evidence, layer: Layer = NORM1, prefix: Prefix = "exclude", eps: Eps = 1e-7, eigen: Eigen = False
) -> Tensor:
    """XGradCAM with absolute activations in the weights, so that the weights are bounded.

        R_i = sum_k w_k a_ik,   w_k = sum_i g_ik |a_ik| / (sum_j |a_jk| + eps)

    The map is signed.
    """
    a, g = activations(b, layer)
    size = averaged_tokens(a, b, prefix).abs()
    weights = (averaged_tokens(g, b, prefix) * size).sum(1) / (size.sum(1) + eps)
    return apply_weights(a, weights, b, eigen)


@_cam(
    "hirescam",
    paper="Draelos & Carin, 2020, on tokens",
    composed=_AT_INPUT,
    presets=_PLACES,
    advice=degenerate_hirescam,
)
def hirescam(b: Evidence, layer: Layer = NORM1, eigen: Eigen = False) -> Tensor:
    """HiResCAM: activation times gradient in one block, summed over the channels.

        R_i = sum_k g_ik a_ik

    The map is signed; at the input of a block it is `ixg`. `eigen=True` is EigenGradCAM.
    """
    if eigen:
        return principal(product(b, layer), b)
    return token_ixg(b) if _kind(b, layer) == "input" else product(b, layer).sum(-1)


@_cam(
    "gradcam-elementwise",
    paper="the grad-cam library, on tokens",
    aliases=("gradcamelementwise",),
    composed=_AT_INPUT,
    presets={**_PLACES, "odam": {"layer": "blocks[-1].input"}},
    advice=degenerate_cam,
)
def gradcam_elementwise(b: Evidence, layer: Layer = NORM1, eigen: Eigen = False) -> Tensor:
    """Element-wise Grad-CAM: the positive part of activation times gradient in one block.

        R_i = sum_k ReLU(g_ik a_ik)

    The map is not negative, except with `eigen`. Preset `odam` is ODAM of a detection (Zhao and Chan, ICLR 2023): the
    same product for the score of one box, at the tokens that enter the last block.
    """
    weighted = product(b, layer).relu()
    return principal(weighted, b) if eigen else weighted.sum(-1)


@_cam("layercam", paper="Jiang et al., TIP 2021, on tokens", composed=_AT_INPUT, presets=_PLACES, advice=degenerate_cam)
def layercam(
    b: Evidence, layer: Layer = NORM1, eigen: Eigen = False, layer_norm: Literal["none", "max", "tanh"] = "none"
) -> Tensor:
    """LayerCAM: activations of one block, weighted by the positive part of their gradients.

        R_i = sum_k ReLU(g_ik) a_ik

    The map is signed, because the activations of a ViT are.

    Args:
        layer_norm: How the map of a block is scaled before maps are summed over blocks. "max" divides by its largest
            magnitude on patches; "tanh" is tanh(2 map / max), as in the paper for early layers. With "none", noisy
            early blocks have smaller weights than late ones.
    """
    a, g = activations(b, layer)
    cam = principal(g.relu() * a, b) if eigen else (g.relu() * a).sum(-1)
    if layer_norm == "none":
        return cam
    scaled = cam / cam[:, b.cells].abs().amax(1, keepdim=True).clamp_min(torch.finfo(cam.dtype).tiny)
    return scaled if layer_norm == "max" else torch.tanh(2 * scaled)


@_cam(
    "eigencam",
    paper="Muhammad & Yeasin, IJCNN 2020, on tokens",
    exact=False,
    needs=lambda settings: cam_needs(settings) - BACKWARD,
    composed=_AT_INPUT,
    presets=_PLACES,
    cost="1 forward",
)
def eigencam(b: Evidence, layer: Layer = NORM1) -> Tensor:
    """EigenCAM: the first principal component of the activations of one block; ignores the class.

    The sign is chosen to agree with the sum over the channels.
    """
    return principal(b.read(_READS[_kind(b, layer)][0]), b)


@own_passes(
    "gradcam-aug",
    paper="the grad-cam library's aug_smooth",
    features=True,
    cost="6 forwards + 6 backwards",
    refuses=lambda settings, vit: no_place(settings["layer"], vit),
    presets={"diffmask": {"eigen": True, "stretch": True}},
)
def gradcam_aug(
    ask: Ask, layer: Layer = NORM1, prefix: Prefix = "exclude", eigen: Eigen = False, stretch: bool = False
) -> Tensor:
    """Grad-CAM averaged over six augmented copies of the image.

    The copies are the image and its mirror image, each multiplied by 0.9, 1 and 1.1. Preset `diffmask`, the baseline of
    VISION DIFFMASK, uses `stretch` and `eigen`.

    Args:
        stretch: Whether the positive part of each map is scaled to [0, 1] before averaging, as in the grad-cam library.
    """
    request = resolve("gradcam", {"layer": layer, "prefix": prefix, "eigen": eigen})
    maps = []
    for mirrored in (False, True):
        for factor in (0.9, 1.0, 1.1):
            images = factor * (ask.images.flip(-1) if mirrored else ask.images)
            cam = finish(request, ask.vit, ask.run([job(request, ask.vit)], images))
            if stretch:
                cam = cam.relu()
                cam = cam - cam.amin((1, 2), keepdim=True)
                cam = cam / (cam.amax((1, 2), keepdim=True) + 1e-7)
            maps.append(cam.flip(-1) if mirrored else cam)
    return torch.stack(maps).mean(0)


@ablates(
    "score-cam",
    paper="Wang et al., CVPR-W 2020, on tokens",
    aliases=("scorecam",),
    score="logit",
    cost="1 forward per channel + 1 (769 at width 768)",
    refuses=lambda settings, vit: no_place(settings["layer"], vit),
    reads=channel_reads,
    constant="the ReLU of a negative map is zero; use relu=False",
    presets={"paper": {"relu": True}, "jacobgil": {}, "vit-cx": {"weighting": "score", "score": "probability"}},
)
def score_cam(
    ask: Ask,
    layer: Layer = NORM1,
    weighting: Literal["softmax", "score"] = "softmax",
    relu: bool = False,
    fill: Fill = "zero",
) -> Tensor:
    """Score-CAM: the channels of one block, weighted by the score of the image masked by each of them.

        R = sum_k alpha_k A_k,   alpha = softmax_k f(X * H_k),   H_k = minmax(Up(A_k))

    Up is bilinear with corners aligned. A baseline score, the same for all k, would not change the softmax, so it is
    left out. The map is signed. Presets: `paper` (ReLU), `vit-cx` (scores, with probabilities).

    Args:
        weighting: "softmax" is the formula. "score" is sum_k f(X * H_k) H_k, as described by ViT-CX.
        relu: Whether only the positive part of the map is kept; it can be empty, because activations are signed.
    """
    maps, _ = feature_maps(ask, layer)
    flat = maps.flatten(0, 1)
    low, high = flat.new_empty(2, len(flat))
    per_map = [-1, *[1] * len(ask.vit.grid)]

    def scaled_masks(part: slice) -> Tensor:
        up = to_pixels(flat[part], ask.vit.geometry.size, ask.vit.extent, align_corners=True)
        low[part], high[part] = up.flatten(1).amin(1), up.flatten(1).amax(1)
        masks: Tensor = (up - low[part].view(per_map)) / (high[part] - low[part] + 1e-8).view(per_map)
        return masks

    filling = fill_images(fill, ask.images, ask.vit, ask.seed)
    scores = ask.score_variants(MadeMasks(owners(ask, maps.shape[1]), scaled_masks, filling))
    scores = scores.view(*maps.shape[:2], -1)
    if weighting == "softmax":
        weights = scores.softmax(1)
    else:
        maps = ((flat - low.view(per_map)) / (high - low + 1e-8).view(per_map)).view_as(maps)
        weights = scores
    cam: Tensor = torch.einsum("bkt,bkc->btc", weights.to(maps), maps.flatten(2))
    cam = cam.view(*cam.shape[:2], *ask.vit.grid)
    return cam.relu() if relu else cam
