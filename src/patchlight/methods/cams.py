"""The CAM family on tokens: channel weights from gradients, applied to the activations of one layer.

All maps are signed and unscaled. The default place is the output of the last block's first norm, prefix tokens left
out of every mean (the grad-cam library's recommendation); preset `skipplus` and the compositions read block inputs and
count all tokens, as the SkipPLUS and LibraGrad code does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.anatomy.base import Anatomy
from patchlight.engine import finish, job
from patchlight.errors import PatchlightError
from patchlight.evidence.passes import FEATURES, LayerJob
from patchlight.evidence.record import Evidence
from patchlight.methods.base import Ask, Composition, LayerMaps, Needs, register_method
from patchlight.methods.compositions import block_index
from patchlight.methods.gradients import input_times_gradient, token_ixg
from patchlight.methods.requests import resolve
from patchlight.registry import Settings

Prefix = Literal["exclude", "include"]
_PLACE = re.compile(r"(?:blocks\[(-?\d+)\])?\.?(norm1|input)?")
NORM1 = "blocks[-1].norm1"
_AT_INPUT: Mapping[str, Any] = {"layer": "input"}
_COMPOSED: Mapping[str, Any] = {**_AT_INPUT, "prefix": "include"}
_PLACES: Mapping[str, Mapping[str, Any]] = {"jacobgil": {}, "skipplus": {"layer": "blocks[-1].input"}}
_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "jacobgil": {},
    "skipplus": {"layer": "blocks[-1].input", "prefix": "include"},
}


def place(layer: int | str) -> tuple[int, Literal["norm1", "input"]]:
    """Read a `layer` setting: a block index (its input), "blocks[-1].norm1", "blocks[3].input", "norm1" or "input"."""
    if isinstance(layer, int):
        return layer, "input"
    found = _PLACE.fullmatch(layer)
    if not layer or found is None:
        raise PatchlightError(f"layer '{layer}' is not a place; try 'blocks[-1].norm1', 'blocks[3].input' or a number")
    return int(found[1] or -1), "norm1" if found[2] == "norm1" else "input"


def cam_needs(settings: Settings) -> frozenset[str]:
    return frozenset({"x", "g", "n", "gn"} if place(settings["layer"])[1] == "norm1" else {"x", "g"})


def _forward_needs(settings: Settings) -> frozenset[str]:
    return cam_needs(settings) - {"g", "gn"}


def _index(layer: int | str, vit: Anatomy) -> int:
    """The block that `layer` names; of a hierarchical model, its feature map."""
    return FEATURES if vit.hierarchical else block_index(place(layer)[0], vit.depth)


def _at_layer(maps: LayerMaps, layer: int | str = NORM1) -> Tensor:
    return maps.vector(_index(layer, maps.vit))


AT_LAYER = Composition(_at_layer, lambda depth, s: (block_index(place(s["layer"])[0], depth),))


class _Shared(TypedDict):
    needs: Needs
    combine: Composition
    features: bool
    composed: Settings
    presets: Mapping[str, Settings]


_CAM = _Shared(needs=cam_needs, combine=AT_LAYER, features=True, composed=_COMPOSED, presets=_PRESETS)
_WITHOUT_MEANS = _Shared(needs=cam_needs, combine=AT_LAYER, features=True, composed=_AT_INPUT, presets=_PLACES)


def activations(b: Evidence, layer: int | str) -> tuple[Tensor, Tensor]:
    """Activations and gradients [B,N,D] at the place that `layer` names."""
    return (b.n, b.gn) if _at_norm(b, layer) else (b.x, b.g)


def _at_norm(b: Evidence, layer: int | str) -> bool:
    """Whether a block's first norm is meant; a hierarchical model's feature map has none."""
    return place(layer)[1] == "norm1" and b.depth > 0


def product(b: Evidence, layer: int | str) -> Tensor:
    """a * g at that place; the methods of one pass share it."""
    return b.once("ngn", lambda: b.n * b.gn) if _at_norm(b, layer) else input_times_gradient(b)


def feature_maps(ask: Ask, layer: int | str = NORM1) -> tuple[Tensor, Tensor]:
    """The channels at a place on the patch grid [B,D,h,w], and the images' scores [B,T]: 1 forward.

    By default the output of the last block's first norm; of a hierarchical model, that of the stage it is opened at.
    """
    vit = ask.vit
    index, norm = _index(layer, vit), place(layer)[1] == "norm1" and not vit.hierarchical
    seen = ask.run([LayerJob(lambda b: b.n if norm else b.x, frozenset({"n" if norm else "x"}), (index,))])
    tokens: Tensor = seen.at(index)
    return tokens[:, vit.prefix :].mT.contiguous().unflatten(-1, vit.grid), seen.scores


def counted(values: Tensor, b: Evidence, prefix: Prefix) -> Tensor:
    """The tokens that enter a channel's mean: patches, or all."""
    return values if prefix == "include" else values[:, b.prefix :]


def principal(weighted: Tensor, b: Evidence) -> Tensor:
    """Eigen smoothing: the patches' weighted activations [B,N,D], centred, on their first principal axis: [B,N].

    The sign of an axis is free; here the map leans the way of the unsmoothed one. Prefix tokens get 0.
    """
    z = weighted[:, b.prefix :]
    z = z - z.mean(1, keepdim=True)
    axis = torch.linalg.svd(z, full_matrices=False).Vh[:, 0, :, None]
    scores = (z @ axis)[..., 0]
    opposed = (scores * z.sum(-1)).sum(1, keepdim=True) < 0
    return F.pad(torch.where(opposed, -scores, scores), (b.prefix, 0))


def apply_weights(a: Tensor, weights: Tensor, b: Evidence, eigen: bool) -> Tensor:
    """map_i = sum_k w_k a_ik [B,N] from activations [B,N,D] and channel weights [B,D]; or its eigen smoothing."""
    if eigen:
        return principal(a * weights[:, None], b)
    return (a @ weights[..., None])[..., 0]


def degenerate_hirescam(settings: Settings, vit: Anatomy) -> str | None:
    """HiResCAM at a block's input is IxG there: nothing but rounding at the last block of a CLS-pooled model."""
    if "start" in settings or vit.hierarchical:
        return None
    index, kind = place(settings["layer"])
    at_last = kind == "input" and block_index(index, vit.depth) == vit.depth - 1
    if at_last and settings.get("rule") == "plain" and vit.pooling == "cls" and not settings["eigen"]:
        return (
            "plain HiResCAM at the input of the last block is zero up to the layer norm's epsilon; use '.libra', "
            "layer='blocks[-1].norm1' or an earlier block"
        )
    return None


@register_method(
    "gradcam",
    paper="Selvaraju et al., ICCV 2017, on tokens",
    aliases=("grad-cam",),
    needs=cam_needs,
    combine=AT_LAYER,
    features=True,
    composed=_COMPOSED,
    presets={**_PRESETS, "diffmask": {"eigen": True}},
)
def gradcam(b: Evidence, layer: int | str = NORM1, prefix: Prefix = "exclude", eigen: bool = False) -> Tensor:
    """Grad-CAM on tokens: w_k = mean_i g_ik, map_i = sum_k w_k a_ik. Signed, no ReLU.

    `layer` is the output of the last block's first norm by default, where `prefix="exclude"` leaves CLS out of the
    mean. `eigen` replaces the sum over channels by the first principal component of w_k a_ik. Presets: `skipplus`
    (input of the last block, CLS in the mean), `diffmask` (eigen; `gradcam-aug` adds its augmentations).
    """
    a, g = activations(b, layer)
    return apply_weights(a, counted(g, b, prefix).mean(1), b, eigen)


@register_method(
    "gradcam++",
    paper="Chattopadhay et al., WACV 2018, on tokens",
    precision="full",
    aliases=("gradcampp", "grad-cam++"),
    exact=False,
    needs=cam_needs,
    combine=AT_LAYER,
    features=True,
    composed={**_COMPOSED, "eps": 1e-7},
    presets={**_PRESETS, "skipplus": {**_PRESETS["skipplus"], "eps": 1e-7}},
)
def gradcam_pp(
    b: Evidence,
    layer: int | str = NORM1,
    prefix: Prefix = "exclude",
    sign: Literal["relu", "signed"] = "relu",
    eps: float = 1e-6,
    eigen: bool = False,
) -> Tensor:
    """Grad-CAM++: alpha_ik = g^2 / (2 g^2 + (sum_j a_jk) g^3 + eps), w_k = sum_i alpha_ik ReLU(g_ik).

    map_i = sum_k w_k a_ik. `sign="signed"` weighs with the gradient as it is. alpha is 0 where g is, and has a
    pole at g = -2 / sum_j a_jk: a channel near it amplifies rounding (to 1 % of the map in float32).
    """
    a, g = activations(b, layer)
    c, d = counted(a, b, prefix), counted(g, b, prefix)
    square = d * d
    alpha = square / (2 * square + c.sum(1, keepdim=True) * square * d + eps)
    alpha = torch.where(d == 0, 0, alpha)
    return apply_weights(a, (alpha * (d.relu() if sign == "relu" else d)).sum(1), b, eigen)


@register_method(
    "xgradcam",
    paper="Fu et al., BMVC 2020, on tokens",
    precision="full",
    exact=False,
    **_CAM,
)
def xgradcam(
    b: Evidence, layer: int | str = NORM1, prefix: Prefix = "exclude", eps: float = 1e-7, eigen: bool = False
) -> Tensor:
    """XGradCAM: w_k = sum_i g_ik a_ik / (sum_j a_jk + eps), map_i = sum_k w_k a_ik. Signed.

    A ViT's channels may sum to nearly zero, where w_k explodes: see `xgradcam+`.
    """
    a, _ = activations(b, layer)
    weights = counted(product(b, layer), b, prefix).sum(1) / (counted(a, b, prefix).sum(1) + eps)
    return apply_weights(a, weights, b, eigen)


@register_method(
    "xgradcam+",
    paper="SkipPLUS, CVPR-W 2024",
    aliases=("xgradcam-abs",),
    **_CAM,
)
def xgradcam_abs(
    b: Evidence, layer: int | str = NORM1, prefix: Prefix = "exclude", eps: float = 1e-7, eigen: bool = False
) -> Tensor:
    """XGradCAM+: w_k = sum_i g_ik |a_ik| / (sum_j |a_jk| + eps), map_i = sum_k w_k a_ik. Signed."""
    a, g = activations(b, layer)
    size = counted(a, b, prefix).abs()
    weights = (counted(g, b, prefix) * size).sum(1) / (size.sum(1) + eps)
    return apply_weights(a, weights, b, eigen)


@register_method(
    "hirescam",
    paper="Draelos & Carin, 2020, on tokens",
    **_WITHOUT_MEANS,
    advice=degenerate_hirescam,
)
def hirescam(b: Evidence, layer: int | str = NORM1, eigen: bool = False) -> Tensor:
    """HiResCAM: map_i = sum_k g_ik a_ik, which at a block's input is IxG. Signed. `eigen=True` is EigenGradCAM."""
    if eigen:
        return principal(product(b, layer), b)
    return product(b, layer).sum(-1) if _at_norm(b, layer) else token_ixg(b)


@register_method(
    "gradcam-elementwise",
    paper="the grad-cam library, on tokens",
    aliases=("gradcamelementwise",),
    **_WITHOUT_MEANS,
)
def gradcam_elementwise(b: Evidence, layer: int | str = NORM1, eigen: bool = False) -> Tensor:
    """Element-wise Grad-CAM: map_i = sum_k ReLU(g_ik a_ik). Not negative, unless `eigen`."""
    weighted = product(b, layer).relu()
    return principal(weighted, b) if eigen else weighted.sum(-1)


@register_method(
    "layercam",
    paper="Jiang et al., TIP 2021, on tokens",
    **_WITHOUT_MEANS,
)
def layercam(
    b: Evidence,
    layer: int | str = NORM1,
    eigen: bool = False,
    layer_norm: Literal["none", "max", "tanh"] = "none",
) -> Tensor:
    """LayerCAM: map_i = sum_k ReLU(g_ik) a_ik. Signed, since a ViT's activations are.

    `layer_norm` is for sums over blocks: `max` divides a block's map by its largest magnitude on patches, `tanh` takes
    tanh(2 map / max) as the paper does for early layers. The default does neither: noisy early blocks would weigh as
    much as late ones.
    """
    a, g = activations(b, layer)
    cam = principal(g.relu() * a, b) if eigen else (g.relu() * a).sum(-1)
    if layer_norm == "none":
        return cam
    scaled = cam / cam[:, b.prefix :].abs().amax(1, keepdim=True).clamp_min(torch.finfo(cam.dtype).tiny)
    return scaled if layer_norm == "max" else torch.tanh(2 * scaled)


@register_method(
    "eigencam",
    paper="Muhammad & Yeasin, IJCNN 2020, on tokens",
    exact=False,
    needs=_forward_needs,
    combine=AT_LAYER,
    features=True,
    composed=_AT_INPUT,
    presets=_PLACES,
    cost="1 forward",
)
def eigencam(b: Evidence, layer: int | str = NORM1) -> Tensor:
    """EigenCAM: the patches' activations on their first principal axis. Class-agnostic; the sign is a convention."""
    return principal(b.n if _at_norm(b, layer) else b.x, b)


@register_method(
    "gradcam-aug",
    paper="the grad-cam library's aug_smooth",
    features=True,
    cost="6 forwards + 6 backwards",
    presets={"diffmask": {"eigen": True, "stretch": True}},
)
def gradcam_aug(
    ask: Ask, layer: int | str = NORM1, prefix: Prefix = "exclude", eigen: bool = False, stretch: bool = False
) -> Tensor:
    """Grad-CAM averaged over six augmentations: the image and its mirror image, each times 0.9, 1 and 1.1.

    `stretch` first takes each map's positive part and stretches it to [0, 1], as the grad-cam library does. Preset
    `diffmask`: stretched, with eigen smoothing, VISION DIFFMASK's baseline.
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
