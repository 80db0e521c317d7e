"""Gradient methods and CAMs against captum and grad-cam, the libraries people use for them (float64, tiny models)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from tests.close import close
from tests.families import images, shared
from tests.literal.plain import grid, maps

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
TARGET = [2, 5]


def model(family: str) -> tuple[Anatomy, Tensor]:
    vit = shared(family, torch.float64)
    return vit, images(vit, 2)


@pytest.mark.parametrize("family", ["vit-wide", "reg4-gap"])
def test_captum_one_pass(family: str) -> None:
    attr = pytest.importorskip("captum.attr")
    vit, batch = model(family)
    batch.requires_grad_()
    target = torch.tensor(TARGET)
    signed = attr.Saliency(vit.model).attribute(batch, target=target, abs=False).detach()
    ixg = attr.InputXGradient(vit.model).attribute(batch, target=target).detach().sum(1)
    batch = batch.detach()
    for reduce, expected in (("sum", signed.sum(1)), ("l1", signed.abs().sum(1)), ("linf", signed.abs().amax(1))):
        torch.testing.assert_close(maps(vit, batch, "grad", TARGET, reduce=reduce, level="pixel"), expected, **CLOSE)
    torch.testing.assert_close(maps(vit, batch, "ixg", TARGET, level="pixel"), ixg, **CLOSE)


@pytest.mark.parametrize(("ours", "theirs"), [("gausslegendre", "gausslegendre"), ("right", "riemann_right")])
def test_captum_integrated_gradients(ours: str, theirs: str) -> None:
    """captum's weights are float32, hence 1e-6."""
    attr = pytest.importorskip("captum.attr")
    vit, batch = model("vit-wide")
    options: dict[str, Any] = {"target": torch.tensor(TARGET), "n_steps": 7, "method": theirs}
    pixel = attr.IntegratedGradients(vit.model).attribute(batch, **options).detach().sum(1)
    found = maps(vit, batch, "ig", TARGET, steps=7, quadrature=ours, level="pixel")
    close(found, pixel, 1e-6)
    tokens = vit.embed(batch).detach()
    path = attr.IntegratedGradients(lambda x: vit.readout(vit.run(x))).attribute(tokens, **options)
    found = maps(vit, batch, "ig", TARGET, steps=7, quadrature=ours)
    close(found, grid(vit, path.detach().sum(-1)), 1e-6)


@pytest.mark.parametrize("base", ["abs", "signed", "ixg"])
def test_captum_noise_tunnel(base: str) -> None:
    """One image: captum's noise after torch.manual_seed(s) is ours of seed s (it multiplies by sigma in float32)."""
    attr = pytest.importorskip("captum.attr")
    vit, batch = model("vit-wide")
    image, target = batch[:1], TARGET[:1]
    explainer = attr.InputXGradient(vit.model) if base == "ixg" else attr.Saliency(vit.model)
    extra = {} if base == "ixg" else {"abs": base == "abs"}
    with torch.random.fork_rng():
        torch.manual_seed(41)
        found = attr.NoiseTunnel(explainer).attribute(image, nt_samples=5, stdevs=0.4, target=target[0], **extra)
    settings: dict[str, Any] = {"samples": 5, "sigma": 0.4, "relative": False, "base": base, "reduce": "sum"}
    ours, theirs = maps(vit, image, "smoothgrad", target, 41, **settings), found.detach().sum(1)
    close(ours, theirs, 1e-6)


CAMS = {
    "GradCAM": ("gradcam", {}),
    "GradCAMPlusPlus": ("gradcam++", {}),
    "XGradCAM": ("xgradcam", {}),
    "HiResCAM": ("hirescam", {}),
    "GradCAMElementWise": ("gradcam-elementwise", {}),
    "LayerCAM": ("layercam", {}),
    "EigenCAM": ("eigencam", {}),
    "EigenGradCAM": ("hirescam", {"eigen": True}),
    "GradCAM, eigen_smooth": ("gradcam", {"preset": "diffmask"}),
}


def library_cam(
    peer: Any, vit: Anatomy, batch: Tensor, name: str, target: list[int] = TARGET, **options: Any
) -> tuple[Tensor, Tensor]:
    """The library's final map, left on the patch grid, and the raw map before its ReLU and scaling."""
    network = copy.deepcopy(vit.model).requires_grad_(True)
    raw: list[Tensor] = []

    def to_grid(t: Tensor) -> Tensor:
        return t[:, vit.prefix :].reshape(len(t), *vit.grid, -1).permute(0, 3, 1, 2)

    with getattr(peer, name)(network, [network.blocks[-1].norm1], reshape_transform=to_grid) as cam:
        cam.get_target_width_height = lambda batch: (vit.grid[1], vit.grid[0])
        inner = cam.get_cam_image
        cam.get_cam_image = lambda *a, **k: raw.append(inner(*a, **k)) or raw[-1]
        goals = [peer.utils.model_targets.ClassifierOutputTarget(c) for c in target]
        final = cam(batch, goals, **options)
    return torch.as_tensor(final), torch.as_tensor(raw[0])


@pytest.mark.parametrize("family", ["vit", "vit-wide", "reg4-gap"])
@pytest.mark.parametrize("theirs", CAMS)
def test_gradcam_library(theirs: str, family: str) -> None:
    peer = pytest.importorskip("pytorch_grad_cam")
    vit, batch = model(family)
    name, settings = CAMS[theirs]
    kind, _, smooth = theirs.partition(", ")
    _, raw = library_cam(peer, vit, batch, kind, **({smooth: True} if smooth else {}))
    ours = maps(vit, batch, name, TARGET, **settings)
    if "igen" in theirs:
        ours = ours * torch.sign((ours * raw).sum((1, 2), keepdim=True))
        torch.testing.assert_close(ours, raw.double(), rtol=1e-5, atol=1e-6)
    else:
        torch.testing.assert_close(ours, raw, rtol=1e-9, atol=1e-10)


def test_gradcam_library_augmented() -> None:
    peer = pytest.importorskip("pytorch_grad_cam")
    for family in ("reg4-gap", "vit-wide"):
        vit, batch = model(family)
        final, _ = library_cam(peer, vit, batch, "GradCAM", aug_smooth=True)
        ours = maps(vit, batch, "gradcam-aug", TARGET, stretch=True)
        torch.testing.assert_close(ours, final.double(), rtol=0, atol=1e-5)
