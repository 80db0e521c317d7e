"""The CAM family against loops over tokens and channels (float64, 1e-10), and the identities of its papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from tests.close import within
from tests.families import images, shared
from tests.literal.plain import Toy, grid, maps, states

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
TARGET = [2, 5]
NAMES = ["gradcam", "gradcam++", "xgradcam", "xgradcam+", "hirescam", "gradcam-elementwise", "layercam"]


def model(family: str) -> tuple[Anatomy, Tensor]:
    vit = shared(family, torch.float64)
    return vit, images(vit, 2)


def at_norm(vit: Anatomy, batch: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Output of a block's first norm and its gradient, by a module hook."""
    seen: list[Tensor] = []
    norm = vit.model.blocks[layer].norm1  # type: ignore[index, union-attr]
    handle = norm.register_forward_hook(lambda module, args, out: seen.append(out))
    logits = vit.model(batch)
    logits = getattr(logits, "logits", logits)
    handle.remove()
    (g,) = torch.autograd.grad(logits[0, TARGET[0]] + logits[1, TARGET[1]], seen)
    return seen[0].detach(), g


def literal(name: str, a: Tensor, g: Tensor, skip: int, relu: bool = True, eps: float | None = None) -> Tensor:
    """One image and one channel at a time; the first `skip` tokens do not enter a channel's weight."""
    out = torch.zeros(a.shape[:2], dtype=a.dtype)
    for b in range(a.shape[0]):
        for k in range(a.shape[2]):
            act, der = a[b, :, k], g[b, :, k]
            inner, slope = act[skip:], der[skip:]
            if name == "gradcam":
                out[b] += slope.mean() * act
            elif name == "gradcam++":
                alpha = slope**2 / (2 * slope**2 + inner.sum() * slope**3 + (1e-6 if eps is None else eps))
                out[b] += (alpha * (slope.clamp_min(0) if relu else slope)).sum() * act
            elif name == "xgradcam":
                out[b] += (slope * inner).sum() / (inner.sum() + 1e-7) * act
            elif name == "xgradcam+":
                out[b] += (slope * inner.abs()).sum() / (inner.abs().sum() + 1e-7) * act
            elif name == "hirescam":
                out[b] += der * act
            elif name == "gradcam-elementwise":
                out[b] += (der * act).clamp_min(0)
            else:
                out[b] += der.clamp_min(0) * act
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["vit", "vit-wide", "reg4-gap"])
def test_default_place(name: str, family: str) -> None:
    """Output of the last block's first norm, prefix tokens left out of the weights."""
    vit, batch = model(family)
    a, g = at_norm(vit, batch, vit.depth - 1)
    expected = grid(vit, literal(name, a, g, vit.prefix))
    torch.testing.assert_close(maps(vit, batch, name, TARGET), expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(maps(vit, batch, name, TARGET, preset="jacobgil"), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_block_inputs_and_their_sums(name: str) -> None:
    vit, batch = model("reg4-gap")
    xs, gs = states(vit, batch, TARGET)
    eps = 1e-7 if name == "gradcam++" else None
    each = [literal(name, x, g, 0, eps=eps) for x, g in zip(xs[:-1], gs[:-1], strict=True)]
    close: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-9} if name in ("gradcam++", "xgradcam") else CLOSE
    torch.testing.assert_close(maps(vit, batch, name, TARGET, preset="skipplus"), grid(vit, each[-1]), **close)
    torch.testing.assert_close(maps(vit, batch, f"{name}.plus", TARGET), grid(vit, sum(each)), **close)
    torch.testing.assert_close(maps(vit, batch, f"{name}.skipplus", TARGET, start=1), grid(vit, sum(each[1:])), **close)
    if name in ("gradcam", "xgradcam+"):
        excluded = literal(name, xs[1], gs[1], vit.prefix)
        found = maps(vit, batch, name, TARGET, layer=1, prefix="exclude")
        torch.testing.assert_close(found, grid(vit, excluded), **CLOSE)


def test_gradcam_pp_without_relu_and_aliases() -> None:
    vit, batch = model("vit")
    a, g = at_norm(vit, batch, 1)
    expected = grid(vit, literal("gradcam++", a, g, 1, relu=False, eps=1e-3))
    settings: dict[str, Any] = {"layer": "blocks[1].norm1", "sign": "signed", "eps": 1e-3}
    torch.testing.assert_close(maps(vit, batch, "gradcampp", TARGET, **settings), expected, **CLOSE)
    assert pl.explain(vit, batch, "xgradcam-abs.plus.libra", TARGET).method == "xgradcam+.plus.libra"


@pytest.mark.parametrize("family", ["vit", "siglip", "hf-clip"])
def test_hirescam_at_a_block_input_is_ixg(family: str) -> None:
    vit, batch = model(family)
    for layer in range(vit.depth - 1):
        hires, ixg = maps(vit, batch, "hirescam", TARGET, layer=layer), maps(vit, batch, "ixg", TARGET, start=layer)
        assert torch.equal(hires, ixg)
    assert torch.equal(maps(vit, batch, "hirescam.plus.libra", TARGET), maps(vit, batch, "ixg.plus.libra", TARGET))


def test_hirescam_warns_where_it_is_noise() -> None:
    vit, batch = model("vit")
    with pytest.warns(pl.DegenerateMap, match="epsilon"):
        tiny = maps(vit, batch, "hirescam", TARGET, preset="skipplus")
    sound = maps(vit, batch, "hirescam.libra", TARGET, preset="skipplus")
    within(float(tiny.abs().max() / sound.abs().max()), 1e-3)
    vit, batch = model("reg4-gap")
    maps(vit, batch, "hirescam", TARGET, preset="skipplus")


@pytest.mark.parametrize("place", ["blocks[-1].norm1", "blocks[1].input"])
def test_xgradcam_and_hirescam_have_one_sum(place: str) -> None:
    """The sensitivity axiom: sum_i (g - w)_ik a_ik = 0 for each channel (eps apart)."""
    vit, batch = model("siglip")
    sums = [maps(vit, batch, n, TARGET, layer=place).sum((1, 2)) for n in ("xgradcam", "hirescam")]
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=1e-5)
    exact = maps(vit, batch, "xgradcam", TARGET, layer=place, eps=0.0).sum((1, 2))
    torch.testing.assert_close(exact, sums[1], **CLOSE)


def test_a_constant_gradient_makes_cams_agree() -> None:
    vit = Toy((2, 3), pooled=True)
    batch, target = vit.images(), [0, 2]
    found = [maps(vit, batch, n, target, layer=1, eps=0.0) for n in ("xgradcam", "xgradcam+")]
    found += [maps(vit, batch, n, target, layer=1) for n in ("gradcam", "hirescam")]
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, **CLOSE)


def test_one_token_makes_gradcam_hirescam() -> None:
    vit = Toy((1, 1), relu=True)
    batch, target = vit.images(), [0, 2]
    found = [maps(vit, batch, n, target, layer=0) for n in ("gradcam", "hirescam")]
    torch.testing.assert_close(found[0], found[1], **CLOSE)


def test_positive_activations_make_variants_agree() -> None:
    vit = Toy((2, 3), relu=True)
    batch, target = vit.images().abs(), [0, 2]
    for one, other in (("xgradcam", "xgradcam+"), ("layercam", "gradcam-elementwise")):
        found = [maps(vit, batch, n, target, layer=0) for n in (one, other)]
        torch.testing.assert_close(found[0], found[1], **CLOSE)
    signed = [maps(vit, vit.images(), n, target, layer=0) for n in ("layercam", "gradcam-elementwise")]
    assert not torch.allclose(signed[0], signed[1])


def test_gradcam_pp_of_channels_that_sum_to_zero() -> None:
    """alpha = 1/2, so w_k = 1/2 sum_i ReLU(g_ik)."""
    vit = Toy((2, 3), relu=True)
    batch, target = vit.images(), [0, 2]
    batch = batch - batch.mean((2, 3), keepdim=True)
    xs, gs = states(vit, batch, target)
    weights = gs[0].clamp_min(0).sum(1, keepdim=True) / 2
    expected = (weights * xs[0]).sum(-1).reshape(2, 2, 3)
    torch.testing.assert_close(maps(vit, batch, "gradcam++", target, layer=0, eps=0.0), expected, **CLOSE)


@pytest.mark.parametrize("name", ["gradcam", "hirescam", "gradcam-elementwise", "layercam", "xgradcam+", "eigencam"])
def test_eigen_smoothing(name: str) -> None:
    """Centred over patches, projected on the axis of largest variance, leaning as the plain map does."""
    vit, batch = model("vit")
    a, g = (t[:, vit.prefix :] for t in at_norm(vit, batch, vit.depth - 1))
    weighted = {
        "gradcam": a * g.mean(1, keepdim=True),
        "hirescam": a * g,
        "gradcam-elementwise": (a * g).clamp_min(0),
        "layercam": a * g.clamp_min(0),
        "xgradcam+": a * ((g * a.abs()).sum(1, keepdim=True) / (a.abs().sum(1, keepdim=True) + 1e-7)),
        "eigencam": a,
    }[name]
    settings = {} if name == "eigencam" else {"eigen": True}
    found = maps(vit, batch, name, TARGET, **settings).flatten(1)
    for b in range(2):
        z = weighted[b] - weighted[b].mean(0)
        values, axes = torch.linalg.eigh(z.T @ z)
        projected = z @ axes[:, -1]
        assert values[-1] > 1.0001 * values[-2]
        projected = projected * torch.sign(projected @ z.sum(1))
        torch.testing.assert_close(found[b], projected, rtol=1e-8, atol=1e-10)
        assert float(found[b] @ weighted[b].sum(1)) > 0


def test_layercam_scaling_of_each_block() -> None:
    vit, batch = model("vit")
    xs, gs = states(vit, batch, TARGET)
    raw = [(g.clamp_min(0) * x).sum(-1)[:, vit.prefix :] for x, g in zip(xs[:-1], gs[:-1], strict=True)]
    unit = [m / m.abs().max(1, keepdim=True).values for m in raw]
    for kind, parts in (("max", unit), ("tanh", [torch.tanh(2 * m) for m in unit])):
        found = maps(vit, batch, "layercam.plus", TARGET, layer_norm=kind)
        torch.testing.assert_close(found.flatten(1), sum(parts), **CLOSE)


@pytest.mark.parametrize("stretch", [False, True])
def test_augmented_gradcam(stretch: bool) -> None:
    vit, batch = model("vit-wide")
    total = torch.zeros(2, *vit.grid, dtype=torch.float64)
    for factor in (0.9, 1.0, 1.1):
        for mirrored in (False, True):
            a, g = at_norm(vit, factor * (batch.flip(-1) if mirrored else batch), vit.depth - 1)
            cam = grid(vit, literal("gradcam", a, g, vit.prefix))
            if stretch:
                cam = cam.clamp_min(0)
                for b in range(2):
                    cam[b] = (cam[b] - cam[b].min()) / ((cam[b] - cam[b].min()).max() + 1e-7)
            total += (cam.flip(-1) if mirrored else cam) / 6
    torch.testing.assert_close(maps(vit, batch, "gradcam-aug", TARGET, stretch=stretch), total, **CLOSE)


def test_places() -> None:
    vit, batch = model("vit")
    with pytest.raises(pl.PatchlightError, match="not a place"):
        maps(vit, batch, "gradcam", layer="blocks[0].mlp")
    with pytest.raises(pl.PatchlightError, match="blocks 0 to 2"):
        maps(vit, batch, "gradcam", layer=3)
    with pytest.raises(pl.Unsupported, match="no first norm"):
        pl.explain(Toy((2, 3)), Toy((2, 3)).images(), "gradcam")
