"""The places in a block that CAM methods and ViT-CX read, against hooks on the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.core.targets import Targets
from patchlight.evidence.passes import run_pass
from patchlight.evidence.rules import RULES
from patchlight.evidence.runner import LayerJob
from patchlight.methods.base import Ask
from patchlight.methods.cams import feature_maps, place
from patchlight.methods.requests import refusal, resolve
from tests.families import PLAIN, images, shared

TARGET = [2, 5]
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
ATTENTION_MODULES = ("attn", "self_attention", "self_attn", "attention")
"""What libraries call the attention module of a block."""


def plain_blocks(vit: Anatomy) -> Any:
    """The blocks of the user's own model, where no tap is."""
    paths = {id(module): name for name, module in vit.net.named_modules()}
    return [vit.model.get_submodule(paths[id(block)]) for block in vit.blocks]


def hooked(vit: Anatomy, batch: Tensor, layer: int) -> dict[str, tuple[Tensor, Tensor]]:
    """By place, activations and gradients of the sum of the explained logits, by forward hooks on the plain model."""
    block = plain_blocks(vit)[layer]
    attention = next(getattr(block, name) for name in ATTENTION_MODULES if hasattr(block, name))
    seen: dict[str, Tensor] = {}

    def keep(where: str) -> Any:
        def hook(module: Any, given: Any, out: Any) -> None:
            seen[where] = out[0] if isinstance(out, tuple) else out

        return hook

    handles = [attention.register_forward_hook(keep("attention")), block.register_forward_hook(keep("output"))]
    out = vit.model(batch.clone().requires_grad_())
    for handle in handles:
        handle.remove()
    logits = getattr(out, "logits", out)
    score = logits[0, TARGET[0]] + logits[1, TARGET[1]]
    gradients = torch.autograd.grad(score, list(seen.values()), allow_unused=True)
    return {
        where: (value.detach(), torch.zeros_like(value) if g is None else g)
        for (where, value), g in zip(seen.items(), gradients, strict=True)
    }


@pytest.mark.parametrize("family", PLAIN)
def test_attention_and_block_outputs_are_those_of_the_plain_model(family: str) -> None:
    """Values and gradients, at a middle block and at the last; the model has layer scales, registers, a bias, …"""
    if family == "vit-binary":
        pytest.skip("one output, so the two classes of this test do not exist")
    vit = shared(family, torch.float64)
    batch, targets = images(vit, 2), Targets(torch.tensor(TARGET)[:, None])
    for layer in (1, vit.depth - 1):
        job = LayerJob(lambda b: (b.o, b.go, b.y, b.gy), frozenset({"o", "go", "y", "gy"}), (layer,))
        o, go, y, gy = run_pass(vit, batch, targets, jobs=[job]).at(layer)
        expected = hooked(vit, batch, layer)
        for found, wanted in zip((o, go, y, gy), (*expected["attention"], *expected["output"]), strict=True):
            torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("family", ["vit", "deit3", "deit-distilled", "hf-vit", "hf-dinov2", "torchvision"])
@pytest.mark.parametrize("where", ["attention", "output"])
def test_vit_cx_reads_the_place_it_names(family: str, where: str) -> None:
    """The channels that masks are made of, prefix tokens left out; of deit3 and dinov2 before the layer scale."""
    vit = shared(family, torch.float64)
    batch = images(vit, 2)
    ask = Ask(vit, batch, Targets(torch.tensor(TARGET)[:, None]), "probability", 0, RULES["plain"])
    for layer in (0, vit.depth - 1):
        maps, _ = feature_maps(ask, f"blocks[{layer}].{where}")
        expected = hooked(vit, batch, layer)[where][0][:, vit.prefix :]
        torch.testing.assert_close(maps.flatten(2).mT, expected, **CLOSE)


@pytest.mark.parametrize("where", ["attention", "output"])
def test_cams_at_these_places(where: str) -> None:
    vit = shared("reg4-gap", torch.float64)
    batch = images(vit, 2)
    a, g = hooked(vit, batch, 1)[where]
    asked = {name: {"layer": f"blocks[1].{where}"} for name in ("gradcam", "hirescam", "layercam")}
    found = pl.explain(vit, batch, asked, TARGET)
    weights = g[:, vit.prefix :].mean(1)
    expected = {
        "gradcam": (a * weights[:, None]).sum(-1),
        "hirescam": (a * g).sum(-1),
        "layercam": (a * g.relu()).sum(-1),
    }
    for name, values in expected.items():
        grid = values[:, vit.prefix :].unflatten(1, vit.grid).float()
        torch.testing.assert_close(found[name].scores, grid, rtol=1e-5, atol=1e-7)


def test_no_gradient_reaches_patches_behind_the_last_attention() -> None:
    vit = shared("vit")
    for where in ("attention", "output"):
        with pytest.warns(pl.DegenerateMap, match="no gradient reaches the patches"):
            pl.explain(vit, images(vit, 1), "gradcam", 1, layer=f"blocks[-1].{where}")
    assert float(pl.explain(vit, images(vit, 1), "gradcam", 1, layer="blocks[1].attention").scores.abs().max()) > 0


def test_a_model_that_hides_its_attention_says_so() -> None:
    for family, reason in (("gemma4", "norms also follow"), ("sam", "within windows"), ("cait", "joins the patches")):
        vit = shared(family)
        for name in ("gradcam", "vit-cx", "score-cam"):
            told = refusal(resolve(name, {"layer": "blocks[-1].attention"}), vit)
            assert told is not None
            assert "output of the attention modules" in told
            assert reason in told
        assert refusal(resolve("vit-cx", {"layer": "blocks[-1].output"}), vit) is None
    swin = shared("swin")
    assert "no blocks to name" in str(refusal(resolve("vit-cx", {"preset": "paper"}), swin))


def test_presets_of_vit_cx() -> None:
    """The text reads the output of the attention module and takes means; the released code norm1, and stretches."""
    assert resolve("vit-cx").settings["layer"] == "blocks[-1].norm1"
    authors, paper = (resolve("vit-cx", {"preset": name}).settings for name in ("authors", "paper"))
    assert (authors["layer"], authors["rescale"]) == ("blocks[-1].norm1", True)
    assert (paper["layer"], paper["rescale"]) == ("blocks[-1].attention", False)


def test_places_are_read() -> None:
    assert place(2) == (2, "input")
    assert place("blocks[3].output") == (3, "output")
    assert place("attention") == (-1, "attention")
    assert place("blocks[-2]") == (-2, "input")
    with pytest.raises(pl.PatchlightError, match="input, norm1, attention, output"):
        place("blocks[1].mlp")
