"""Gradient methods against slow versions in plain torch (float64, 1e-10), and the closed forms of their papers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.methods import gradients as room
from patchlight.methods.base import Ask
from patchlight.methods.requests import resolve
from tests.close import within
from tests.families import images, shared
from tests.literal.plain import Toy, Written, grid, maps, states

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
TARGET = [2, 5]


def model(family: str) -> tuple[Anatomy, Tensor]:
    vit = shared(family, torch.float64)
    return vit, images(vit, 2)


def literal_reduce(values: Tensor, reduce: str) -> Tensor:
    """One token at a time, over its list of channels."""
    flat = values.reshape(-1, values.shape[-1]).tolist()

    def one(row: list[float]) -> float:
        if reduce.startswith("top"):
            return sum(sorted(row, reverse=True)[: max(1, round(len(row) * int(reduce[3:]) / 100))])
        return {
            "l1": sum(abs(v) for v in row),
            "l2": sum(v * v for v in row) ** 0.5,
            "l4": sum(v**4 for v in row) ** 0.25,
            "linf": max(abs(v) for v in row),
            "sum": sum(row),
            "relu-sum": sum(max(v, 0.0) for v in row),
            "neg-relu-sum": sum(max(-v, 0.0) for v in row),
        }[reduce]

    return torch.tensor([one(row) for row in flat], dtype=values.dtype).reshape(values.shape[:-1])


def pixel_gradient(vit: Anatomy, batch: Tensor, target: list[int]) -> Tensor:
    batch = batch.clone().requires_grad_()
    logits = vit.model(batch)
    (g,) = torch.autograd.grad(sum(logits[b, c] for b, c in enumerate(target)), batch)
    return g.movedim(1, -1)


@pytest.mark.parametrize("reduce", ["l2", "l1", "l4", "linf", "relu-sum", "neg-relu-sum", "top25", "top50", "top75"])
def test_grad_reducers(reduce: str) -> None:
    vit, batch = model("vit-wide")
    _, gs = states(vit, batch, TARGET)
    for start in (0, 2):
        expected = grid(vit, literal_reduce(gs[start], reduce))
        torch.testing.assert_close(maps(vit, batch, "grad", TARGET, reduce=reduce, start=start), expected, **CLOSE)
    expected = literal_reduce(pixel_gradient(vit, batch, TARGET), reduce)
    torch.testing.assert_close(maps(vit, batch, "grad", TARGET, reduce=reduce, level="pixel"), expected, **CLOSE)


def test_grad_plus_sums_the_blocks() -> None:
    vit, batch = model("reg4-gap")
    _, gs = states(vit, batch, TARGET)
    expected = grid(vit, sum(g.norm(dim=-1) for g in gs[:-1]))
    torch.testing.assert_close(maps(vit, batch, "grad.plus", TARGET), expected, **CLOSE)


@pytest.mark.parametrize("family", ["vit", "reg4-gap", "eva02", "siglip"])
def test_channel_sum_is_noise_and_says_so(family: str) -> None:
    vit, batch = model(family)
    with pytest.warns(pl.DegenerateMap, match="reduce='l2'"):
        noise = maps(vit, batch, "grad", TARGET, reduce="sum")
    within(float(noise.abs().max() / maps(vit, batch, "grad", TARGET).max()), 1e-12)
    pixel = maps(vit, batch, "grad", TARGET, reduce="sum", level="pixel")
    torch.testing.assert_close(pixel, pixel_gradient(vit, batch, TARGET).sum(-1), **CLOSE)


@pytest.mark.parametrize("family", ["vit", "beit", "siglip"])
def test_ixg(family: str) -> None:
    vit, batch = model(family)
    xs, gs = states(vit, batch, TARGET)
    for start in (0, 1):
        expected = grid(vit, (xs[start] * gs[start]).sum(-1))
        torch.testing.assert_close(maps(vit, batch, "ixg", TARGET, start=start), expected, **CLOSE)
    expected = (pixel_gradient(vit, batch, TARGET) * batch.movedim(1, -1)).sum(-1)
    torch.testing.assert_close(maps(vit, batch, "ixg", TARGET, level="pixel"), expected, **CLOSE)


def test_ixg_is_the_directional_derivative() -> None:
    vit, batch = model("vit")
    xs, gs = states(vit, batch, TARGET)
    step = 1e-5
    with torch.no_grad():
        up, down = (vit.readout(vit.run(xs[1] * (1 + s), 1)) for s in (step, -step))
    slope = torch.stack([(up - down)[b, c] for b, c in enumerate(TARGET)]) / (2 * step)
    torch.testing.assert_close((xs[1] * gs[1]).sum((1, 2)), slope, rtol=1e-6, atol=1e-8)
    prefix = (xs[1] * gs[1]).sum(-1)[:, : vit.prefix].sum(1)
    total = maps(vit, batch, "ixg", TARGET, start=1).sum((1, 2)) + prefix
    torch.testing.assert_close(total, slope, rtol=1e-6, atol=1e-8)


def test_plain_ixg_at_the_last_block_warns() -> None:
    vit, batch = model("vit")
    with pytest.warns(pl.DegenerateMap, match="epsilon"):
        tiny = maps(vit, batch, "ixg", TARGET, start=-1)
    within(float(tiny.abs().max() / maps(vit, batch, "ixg.libra", TARGET, start=-1).abs().max()), 1e-3)


def literal_smoothgrad(
    vit: Anatomy, batch: Tensor, samples: int, sigma: float, relative: bool, base: str, level: str, seed: int
) -> Tensor:
    """One image and one sample at a time; every image meets the same noise."""
    out = []
    for b, c in enumerate(TARGET):
        image = batch[b : b + 1]
        x = image if level == "pixel" else vit.embed(image).detach()
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros_like(x)
        for _ in range(samples):
            noise = torch.randn(x.shape[1:], generator=generator).double()
            noisy = (x + sigma * ((x.max() - x.min()) if relative else 1.0) * noise).detach().requires_grad_()
            logits = vit.model(noisy) if level == "pixel" else vit.readout(vit.run(noisy))
            (g,) = torch.autograd.grad(logits[0, c], noisy)
            total = total + {"signed": g, "abs": g.abs(), "ixg": noisy.detach() * g}[base]
        out.append(total / samples)
    mean = torch.cat(out)
    return mean.movedim(1, -1) if level == "pixel" else mean


@pytest.mark.parametrize(
    ("level", "relative", "base", "reduce"),
    [
        ("pixel", True, "signed", "l1"),
        ("pixel", False, "signed", "sum"),
        ("pixel", False, "abs", "sum"),
        ("token", False, "abs", "sum"),
        ("token", True, "ixg", "sum"),
    ],
)
def test_smoothgrad(level: str, relative: bool, base: str, reduce: str) -> None:
    vit, batch = model("vit-wide")
    settings: dict[str, Any] = {"samples": 3, "sigma": 0.2, "relative": relative, "base": base, "level": level}
    mean = literal_smoothgrad(vit, batch, seed=11, **settings)
    expected = literal_reduce(mean, reduce)
    expected = expected if level == "pixel" else grid(vit, expected)
    torch.testing.assert_close(maps(vit, batch, "smoothgrad", TARGET, 11, reduce=reduce, **settings), expected, **CLOSE)


@pytest.mark.parametrize("level", ["pixel", "token"])
@pytest.mark.parametrize(("name", "settings"), [("ig", {"steps": 7}), ("smoothgrad", {"samples": 7})])
def test_rows_a_pass_change_only_rounding(
    level: str, name: str, settings: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven variants of two images: one a pass, three a pass, or all in one."""
    vit, batch = model("vit-wide")
    expected = maps(vit, batch, name, TARGET, 11, level=level, **settings)
    done: list[int] = []
    run = Ask.run
    monkeypatch.setattr(Ask, "run", lambda ask, jobs, *args, **kw: done.append(1) or run(ask, jobs, *args, **kw))
    for rows, passes in ((1, 7), (7, 3), (256, 1)):
        done.clear()
        monkeypatch.setattr(room, "rows_at_once", lambda vit, rows=rows: rows)
        torch.testing.assert_close(maps(vit, batch, name, TARGET, 11, level=level, **settings), expected, **CLOSE)
        assert len(done) == passes


def test_smoothgrad_presets_are_the_sources() -> None:
    found = {p: resolve("smoothgrad", {"preset": p}).settings for p in ("idiap", "tis", "skipplus", "bt")}
    assert [(s["samples"], s["sigma"], s["relative"]) for s in found.values()] == [
        (100, 0.15, True),
        (50, 1.0, False),
        (50, 1.0, False),
        (20, 0.3859, False),
    ]
    assert [(s["base"], s["reduce"], s["level"]) for s in found.values()] == [
        ("signed", "l1", "pixel"),
        ("abs", "sum", "pixel"),
        ("abs", "sum", "token"),
        ("signed", "sum", "pixel"),
    ]


def test_smoothgrad_without_noise_is_the_gradient() -> None:
    vit, batch = model("vit")
    for level in ("pixel", "token"):
        smooth = maps(vit, batch, "smoothgrad", TARGET, samples=3, sigma=0, level=level)
        torch.testing.assert_close(smooth, maps(vit, batch, "grad", TARGET, reduce="l1", level=level), **CLOSE)
    with pytest.warns(pl.DegenerateMap, match="rounding noise"):
        maps(vit, batch, "smoothgrad", TARGET, samples=1, reduce="sum", level="token")


def test_linear_model() -> None:
    """y = <w, x_0> + b: the gradient is w, whatever the noise; integrated gradients are exact with one step."""
    vit = Toy((2, 3))
    batch, target = vit.images(), [0, 2]
    w = vit.model["head"].weight.detach()[target].reshape(2, 2, 3, 4)  # type: ignore[index]
    x = batch.movedim(1, -1)
    for level in ("token", "pixel"):
        torch.testing.assert_close(maps(vit, batch, "grad", target, level=level), w.norm(dim=-1), **CLOSE)
        smooth = maps(vit, batch, "smoothgrad", target, samples=2, sigma=3.0, level=level)
        torch.testing.assert_close(smooth, w.abs().sum(-1), **CLOSE)
        for rule in ("gausslegendre", "right"):
            exact = maps(vit, batch, "ig", target, steps=1, quadrature=rule, level=level)
            torch.testing.assert_close(exact, (w * x).sum(-1), **CLOSE)
        shifted = maps(vit, batch, "ig", target, steps=1, baseline=0.5, level=level)
        torch.testing.assert_close(shifted, (w * (x - 0.5)).sum(-1), **CLOSE)


def literal_nodes(steps: int, quadrature: str) -> list[tuple[float, float]]:
    if quadrature == "right":
        return [(k / steps, 1 / steps) for k in range(1, steps + 1)]
    if quadrature == "linspace":
        return [(k / (steps - 1), 1 / steps) for k in range(steps)]
    roots = np.real(np.polynomial.legendre.Legendre.basis(steps).roots())  # some versions of NumPy say complex
    slope = np.polynomial.legendre.Legendre.basis(steps).deriv()
    return [((1 + r) / 2, 1 / ((1 - r**2) * slope(r) ** 2)) for r in roots]


@pytest.mark.parametrize("quadrature", ["gausslegendre", "right", "linspace"])
@pytest.mark.parametrize("level", ["token", "pixel"])
def test_integrated_gradients(level: str, quadrature: str) -> None:
    vit, batch = model("vit-wide")
    x = batch if level == "pixel" else vit.embed(batch).detach()
    total = torch.zeros_like(x)
    for a, weight in literal_nodes(6, quadrature):
        point = (a * x).requires_grad_()
        logits = vit.model(point) if level == "pixel" else vit.readout(vit.run(point))
        (g,) = torch.autograd.grad(logits[0, TARGET[0]] + logits[1, TARGET[1]], point)
        total = total + weight * g
    expected = (x * total).sum(1) if level == "pixel" else grid(vit, (x * total).sum(-1))
    found = maps(vit, batch, "ig", TARGET, steps=6, quadrature=quadrature, level=level)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(("family", "level", "steps"), [("vit", "pixel", 64), ("siglip", "token", 512)])
def test_integrated_gradients_become_complete(family: str, level: str, steps: int) -> None:
    """The map sums to s(x) - s(0), the better the more steps (no prefix tokens where tokens vary).

    Tokens near 0 meet the epsilon of the first layer norm, where s changes quickly: their path needs more steps.
    """
    vit, batch = model(family)
    x = batch if level == "pixel" else vit.embed(batch).detach()
    with torch.no_grad():
        whole = [vit.model(v) if level == "pixel" else vit.readout(vit.run(v)) for v in (x, 0 * x)]
    rise = torch.stack([(whole[0] - whole[1])[b, c] for b, c in enumerate(TARGET)])

    def error(k: int) -> float:
        total = maps(vit, batch, "ig", TARGET, steps=k, level=level).sum((1, 2))
        return float(((total - rise) / rise).abs().max())

    few, many = error(4), error(steps)
    within(many, 0.03)
    assert many < few / 5, (few, many)


def test_integrated_gradients_of_the_baseline_are_zero() -> None:
    vit, batch = model("vit")
    with pytest.warns(pl.DegenerateMap, match="constant"):
        zero = maps(vit, torch.full_like(batch, 0.3), "ig", TARGET, steps=3, baseline=0.3, level="pixel")
    assert float(zero.abs().max()) == 0


def test_averaging_along_the_path() -> None:
    """As LibraGrad averages it: maps at a_k x_0, averaged; for IxG that is sum a_k x g(a_k x) / K."""
    vit, batch = model("vit")
    x = vit.embed(batch).detach()
    ixg, skip = torch.zeros(x.shape[:2], dtype=x.dtype), torch.zeros(x.shape[:2], dtype=x.dtype)
    for k in range(1, 6):
        written = Written(vit, x * (k / 5), libra=True)
        cats = written.cat(TARGET)
        ixg, skip = ixg + cats[0] / 5, skip + cats[2] / 5
    settings: dict[str, Any] = {"preset": "libragrad", "steps": 5}
    torch.testing.assert_close(maps(vit, batch, "ig.libra", TARGET, **settings), grid(vit, ixg), **CLOSE)
    found = maps(vit, batch, "ig", TARGET, **settings | {"integrand": "decompx.skipplus"})
    torch.testing.assert_close(found, grid(vit, skip), **CLOSE)
    with pytest.raises(pl.PatchlightError, match="give a layer map of tokens"):
        maps(vit, batch, "ig", TARGET, integrand="smoothgrad")


@pytest.mark.parametrize("rule", ["plain", "libra"])
@pytest.mark.parametrize("family", ["vit", "vit-wide", "deit3", "reg4-gap"])
def test_fullgrad(family: str, rule: str) -> None:
    vit, batch = model(family)
    written = Written(vit, vit.embed(batch), libra=rule == "libra")
    torch.testing.assert_close(written.logits.detach(), vit.logits(batch), **CLOSE)
    cat, (bias, _) = written.cat(TARGET), written.bias_maps(TARGET)
    depth, end, suffix = vit.depth, bias[-1], "" if rule == "plain" else ".libra"

    def full(start: int) -> Tensor:
        return cat[start] + sum(bias[start:depth]) + end

    def check(name: str, expected: Tensor, **settings: Any) -> None:
        torch.testing.assert_close(maps(vit, batch, name + suffix, TARGET, **settings), grid(vit, expected), **CLOSE)

    for start in range(depth):
        check("fullgrad", full(start), start=start)
    check("fullgrad.plus", full(0) + full(1) + full(2))
    check("fullgrad.skipplus", full(2))
    check("fullgrad.skipplus", full(1) + full(2), rounding="floor")
    check("fullgrad-plus", sum(cat) + sum(bias))
    check("fullgrad+.skipplus", cat[2] + bias[2] + end)
    check("fullgrad+.skipplus", cat[1] + cat[2] + bias[1] + bias[2] + end, start=1)
    check("fullgrad+", sum(cat), include_bias=False)
    check("ixg.plus", sum(cat))


def test_fullgrad_plus_in_layer_mode_is_refused() -> None:
    vit, batch = model("vit")
    with pytest.raises(pl.PatchlightError, match="terms='tail'"):
        maps(vit, batch, "fullgrad.plus", TARGET, terms="layer")


FAMILIES = ["vit", "deit-distilled", "deit3", "beit", "eva", "eva02", "dinov3", "clip", "siglip", "reg4-gap", "hf-vit"]


def test_relu_network_is_complete_with_plain_gradients() -> None:
    """Piecewise linear, no norm: FullGrad and the head's bias sum to the logit; from block 1 on as well."""
    vit = Toy((2, 3), relu=True)
    batch, target = vit.images(), [0, 2]
    logits, head = vit.logits(batch), vit.model["head"].bias.detach()  # type: ignore[index]
    for start in (0, 1):
        total = maps(vit, batch, "fullgrad", target, start=start).sum((1, 2)) + head[target]
        torch.testing.assert_close(total, logits[[0, 1], target], rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        for p in (m for block in vit.blocks for m in (block.fc1.bias, block.fc2.bias)):
            p.zero_()
    total = maps(vit, batch, "ixg", target).sum((1, 2)) + head[target]
    torch.testing.assert_close(total, vit.logits(batch)[[0, 1], target], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(maps(vit, batch, "fullgrad+", target), maps(vit, batch, "ixg.plus", target), **CLOSE)


def test_fullgrad_plus_minus_fullgrad_is_the_later_cat() -> None:
    vit, batch = model("deit3")
    later = sum(maps(vit, batch, "ixg.libra", TARGET, start=k) for k in range(1, vit.depth))
    difference = maps(vit, batch, "fullgrad+.libra", TARGET) - maps(vit, batch, "fullgrad.libra", TARGET)
    torch.testing.assert_close(difference, later, **CLOSE)
