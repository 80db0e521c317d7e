"""The CAM family on tokens: channel weights from gradients, applied to the activations of one layer.

All maps are signed and unscaled. The default place is the output of the last block's first norm, without prefix tokens
in any mean (the grad-cam library's recommendation); preset `skipplus` and the compositions read block inputs and
include all tokens, as the SkipPLUS and LibraGrad code does. Other places are the outputs of a block's attention module
and of the block itself.
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
from patchlight.evidence.record import BACKWARD, Evidence
from patchlight.evidence.runner import FEATURES
from patchlight.methods.base import Ask, Composition, LayerMaps, Reads, layer_map, own_passes
from patchlight.methods.compositions import block_index
from patchlight.methods.gradients import input_times_gradient, token_ixg
from patchlight.methods.maps import finish, job
from patchlight.methods.requests import resolve, unavailable

Prefix = Annotated[
    Literal["exclude", "include"],
    Field(description="Whether CLS and other prefix tokens are left out of means and sums over tokens."),
]
Layer = Annotated[
    int | str,
    Field(
        description='A place in a block: "blocks[3].norm1" (the first norm\'s output), ".input", ".attention" (the '
        "attention module's output, before layer scale and residual sum) or \".output\"; a number is that block's "
        "input. A hierarchical model has one feature map, that of the stage it is opened at."
    ),
]
Eigen = Annotated[
    bool, Field(description="Replaces the sum over channels by the first principal component of the weighted channels.")
]
Eps = Annotated[float, Field(description="Added to the denominator.")]
Place = Literal["input", "norm1", "attention", "output"]
"""Where in a block: the tokens that enter it, its first norm's output, its attention module's output (behind the output
projection, before layer scale and residual sum), and the tokens that leave it."""
_READS: Mapping[Place, tuple[str, str]] = {
    "input": ("x", "g"),
    "norm1": ("n", "gn"),
    "attention": ("o", "go"),
    "output": ("y", "gy"),
}
"""Letters of activations and gradient in `Evidence`, by place."""
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
    """Read a `layer` setting: a block index (its input), "blocks[3].output" or a `Place` alone, of the last block."""
    if isinstance(layer, int):
        return layer, "input"
    found = _PLACE.fullmatch(layer)
    if not layer or found is None:
        raise PatchlightError(
            f"layer '{layer}' is not a place; give a block's number, or 'blocks[-1].norm1' with one of "
            f"{', '.join(_READS)} behind the dot"
        )
    return int(found[1] or -1), cast(Place, found[2] or "input")


def cam_needs(settings: Settings) -> frozenset[str]:
    return frozenset({"x", "g", *_READS[place(settings["layer"])[1]]})


def _forward_needs(settings: Settings) -> frozenset[str]:
    return cam_needs(settings) - BACKWARD


def no_place(layer: int | str, vit: Anatomy) -> str | None:
    """Why a model that is not hierarchical does not have the place that `layer` names; None if it has."""
    reason = unavailable(frozenset(_READS[place(layer)[1]]), vit)
    return None if reason is None else f"{reason}; layer='input' works"


def _index(layer: int | str, vit: Anatomy) -> int:
    """The block that `layer` names; in a hierarchical model, its feature map."""
    return FEATURES if vit.hierarchical else block_index(place(layer)[0], vit.depth)


def _at_layer(maps: LayerMaps, layer: Layer = NORM1) -> Tensor:
    """The map at one place of one block."""
    return maps.vector(_index(layer, maps.vit))


AT_LAYER = Composition(_at_layer, lambda depth, s: (block_index(place(s["layer"])[0], depth),))


def degenerate_cam(settings: Settings, vit: Anatomy) -> str | None:
    """The gradient of patches is exactly zero after the last attention of a CLS-pooled model."""
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
    """The place in a block; a hierarchical model's feature map counts as the input of one."""
    return place(layer)[1] if b.depth > 0 else "input"


def product(b: Evidence, layer: int | str) -> Tensor:
    """a * g at that place; the methods of one pass share it."""
    kind = _kind(b, layer)
    if kind == "input":
        return input_times_gradient(b)

    def multiplied() -> Tensor:
        a, g = activations(b, layer)
        return a * g

    return b.once(f"product at {kind}", multiplied)


def channel_reads(settings: Settings, vit: Anatomy) -> Reads:
    """What `feature_maps` reads at the place that the setting `layer` names."""
    layer = settings["layer"]
    return Reads({("x" if vit.hierarchical else _READS[place(layer)[1]][0], _index(layer, vit))})


def feature_maps(ask: Ask, layer: Layer = NORM1) -> tuple[Tensor, Tensor]:
    """The channels at a place on the patch grid [B,D,h,w], and the images' scores [B,T]: 1 forward.

    The default is the output of the last block's first norm; in a hierarchical model, that of the stage it is opened
    at.
    """
    reads = channel_reads({"layer": layer}, ask.vit)
    values, scores = ask.forward(reads)
    tokens = values[next(iter(reads))]
    return ask.vit.layout.of_cells(tokens).mT.contiguous().unflatten(-1, ask.vit.grid), scores


def counted(values: Tensor, b: Evidence, prefix: Prefix) -> Tensor:
    """The tokens in a channel's mean: patches, or all."""
    return values if prefix == "include" else values[:, b.cells]


def principal(weighted: Tensor, b: Evidence) -> Tensor:
    """Eigen smoothing: the patches' weighted activations [B,N,D], centred, on their first principal axis: [B,N].

    The sign of an axis is arbitrary; it is chosen to agree with the unsmoothed map. Prefix tokens get 0.
    """
    z = weighted[:, b.cells]
    z = z - z.mean(1, keepdim=True)
    axis = torch.linalg.svd(z, full_matrices=False).Vh[:, 0, :, None]
    scores = (z @ axis)[..., 0]
    opposed = (scores * z.sum(-1)).sum(1, keepdim=True) < 0
    return F.pad(torch.where(opposed, -scores, scores), (b.prefix, b.tokens - b.cells.stop))


def apply_weights(a: Tensor, weights: Tensor, b: Evidence, eigen: Eigen) -> Tensor:
    """map_i = sum_k w_k a_ik [B,N] from activations [B,N,D] and channel weights [B,D]; or its eigen smoothing."""
    if eigen:
        return principal(a * weights[:, None], b)
    return (a @ weights[..., None])[..., 0]


def degenerate_hirescam(settings: Settings, vit: Anatomy) -> str | None:
    """HiResCAM at a block's input is IxG there: only rounding at the last block of a CLS-pooled model."""
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

    The map is signed; there is no ReLU. Presets: `skipplus` (input of the last block, CLS in the mean), `diffmask`
    (eigen; `gradcam-aug` adds its augmentations).
    """
    a, g = activations(b, layer)
    return apply_weights(a, counted(g, b, prefix).mean(1), b, eigen)


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
    """Grad-CAM++: Grad-CAM whose weights favour patches with large positive gradients.

        R_i = sum_k w_k a_ik,   w_k = sum_i alpha_ik ReLU(g_ik),   alpha_ik = g^2 / (2 g^2 + (sum_j a_jk) g^3 + eps)

    alpha is 0 where g is, and has a pole at g = -2 / sum_j a_jk: a channel near it amplifies rounding: in
    float32, maps of one image alone and in a batch may differ by several per cent.

    Args:
        sign: "relu" weights by the positive part of the gradient, "signed" by the gradient itself.
    """
    a, g = activations(b, layer)
    c, d = counted(a, b, prefix), counted(g, b, prefix)
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

    The map is signed. The channels of a ViT may sum to nearly zero, where w_k explodes; `xgradcam+` avoids that.
    """
    a, _ = activations(b, layer)
    weights = counted(product(b, layer), b, prefix).sum(1) / (counted(a, b, prefix).sum(1) + eps)
    return apply_weights(a, weights, b, eigen)


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
    """XGradCAM with absolute activations in the weights, so that these stay finite.

        R_i = sum_k w_k a_ik,   w_k = sum_i g_ik |a_ik| / (sum_j |a_jk| + eps)

    The map is signed.
    """
    a, g = activations(b, layer)
    size = counted(a, b, prefix).abs()
    weights = (counted(g, b, prefix) * size).sum(1) / (size.sum(1) + eps)
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

    The map is signed; at a block's input it is `ixg`. `eigen=True` is EigenGradCAM.
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

    The map is not negative, unless `eigen` is set. Preset `odam` is ODAM of a detection (Zhao and Chan, ICLR 2023):
    the same product for the score of one box, at the tokens that enter the last block.
    """
    weighted = product(b, layer).relu()
    return principal(weighted, b) if eigen else weighted.sum(-1)


@_cam("layercam", paper="Jiang et al., TIP 2021, on tokens", composed=_AT_INPUT, presets=_PLACES, advice=degenerate_cam)
def layercam(
    b: Evidence, layer: Layer = NORM1, eigen: Eigen = False, layer_norm: Literal["none", "max", "tanh"] = "none"
) -> Tensor:
    """LayerCAM: activations of one block, weighted by the positive part of their gradients.

        R_i = sum_k ReLU(g_ik) a_ik

    The map is signed, because a ViT's activations are.

    Args:
        layer_norm: How a block's map is scaled before maps are summed over blocks. "max" divides by its largest
            magnitude on patches, "tanh" takes tanh(2 map / max) as the paper does for early layers. With "none", noisy
            early blocks do not weigh as much as late ones.
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
    needs=_forward_needs,
    composed=_AT_INPUT,
    presets=_PLACES,
    cost="1 forward",
)
def eigencam(b: Evidence, layer: Layer = NORM1) -> Tensor:
    """EigenCAM: activations of one block on their first principal axis; ignores the class.

    The sign of the axis is a convention.
    """
    return principal(b.read(_READS[_kind(b, layer)][0]), b)


@own_passes(
    "gradcam-aug",
    paper="the grad-cam library's aug_smooth",
    features=True,
    cost="6 forwards + 6 backwards",
    refuses=lambda settings, vit: None if vit.hierarchical else no_place(settings["layer"], vit),
    presets={"diffmask": {"eigen": True, "stretch": True}},
)
def gradcam_aug(
    ask: Ask, layer: Layer = NORM1, prefix: Prefix = "exclude", eigen: Eigen = False, stretch: bool = False
) -> Tensor:
    """Grad-CAM averaged over six augmented copies of the image.

    The copies are the image and its mirror image, each multiplied by 0.9, 1 and 1.1. Preset `diffmask`, the baseline of
    VISION DIFFMASK, uses `stretch` and `eigen`.

    Args:
        stretch: First takes each map's positive part and stretches it to [0, 1], as the grad-cam library does.
    """
    request = resolve("gradcam", {"layer": layer, "prefix": prefix, "eigen": eigen})
    maps = []
    for mirrored in (False, True):
        for factor in (0.9, 1.0, 1.1):
            images = factor * (ask.images.flip(-1) if mirrored else ask.images)
            seen = ask.run([job(request, ask.vit)], images)
            cam = finish(request, ask.vit, seen)
            if stretch:
                cam = cam.relu()
                cam = cam - cam.amin((1, 2), keepdim=True)
                cam = cam / (cam.amax((1, 2), keepdim=True) + 1e-7)
            maps.append(cam.flip(-1) if mirrored else cam)
    return torch.stack(maps).mean(0)
