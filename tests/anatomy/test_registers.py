"""Register neurons: moved as written out by hand, found where they are planted, and found in real weights."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy.registers import Registers, _Move
from patchlight.core.errors import ChangedModel
from patchlight.testing import check_method
from tests.close import close
from tests.families import images, shared
from tests.reference import deit_tiny, inputs, shared_dir

NEURONS = {0: [3, 7], 2: [5]}


def wide(family: str) -> tuple[pl.Anatomy, Tensor]:
    vit = shared(family)
    return pl.wrap(copy.deepcopy(vit.model).double(), preprocess=vit.preprocess), images(vit, 3).double()


def written_out(model: Any, batch: Tensor, prefix: int, neurons: dict[int, list[int]]) -> Tensor:
    """Logits of a timm model, one image after another, with one more token to which the neurons write."""
    rows = []
    with torch.no_grad():
        for image in batch:
            x = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))
            x = torch.cat([x, torch.zeros_like(x[:, :1])], 1)
            for index, block in enumerate(model.blocks):
                x = x + block.ls1(block.attn(block.norm1(x)))
                hidden = block.mlp.act(block.mlp.fc1(block.norm2(x)))
                for neuron in neurons.get(index, []):
                    column = hidden[0, :, neuron].tolist()
                    hidden[0, -1, neuron] = max(column, key=abs)
                    hidden[0, prefix:-1, neuron] = 0
                x = x + block.ls2(block.mlp.fc2(hidden))
            rows.append(model.forward_head(model.norm(x[:, :-1])))
    return torch.cat(rows)


@pytest.mark.parametrize("family", ["vit", "reg4-gap"])
@pytest.mark.parametrize("neurons", [NEURONS, {1: [0]}])
def test_moving_is_what_its_definition_says(family: str, neurons: dict[int, list[int]]) -> None:
    vit, batch = wide(family)
    moved = pl.wrap(vit, registers=neurons)
    expected = written_out(vit.model, batch, vit.prefix, neurons)
    close(moved.logits(batch), expected, 1e-10)
    assert float((expected - vit.logits(batch)).abs().max()) > 1e-4
    close(torch.cat([moved.logits(one[None]) for one in batch]), expected, 1e-10)


def test_the_largest_entry_is_the_one_of_largest_size() -> None:
    hidden = torch.tensor([[[3.0, 1], [-5, 2], [1, 3], [0, 4]]])
    (found,) = _Move(1, torch.tensor([0]))(torch.nn.Identity(), (hidden,)) or (None,)
    assert found is not None
    assert found.tolist() == [[[3, 1], [0, 2], [0, 3], [-5, 4]]]


def test_without_neurons_the_model_is_the_same() -> None:
    vit, batch = wide("vit")
    assert pl.wrap(vit, registers={}) is vit
    assert pl.wrap(vit, registers={1: []}) is vit
    before = vit.logits(batch)
    hooks = [len(m._forward_pre_hooks) for m in vit.model.modules()]
    pl.wrap(vit, registers=NEURONS).logits(batch)
    assert torch.equal(vit.logits(batch), before)
    assert [len(m._forward_pre_hooks) for m in vit.model.modules()] == hooks


@pytest.mark.parametrize("method", ["genatt", "ixg.libra", "tis"])
def test_methods_keep_their_contract(method: str) -> None:
    vit = shared("vit")
    check_method(method, pl.wrap(vit, registers=NEURONS), images(vit, 2))


def test_methods_explain_the_changed_model() -> None:
    """The gradient of an image's logit is that of the forward with the extra token, and is labelled so."""
    vit, batch = wide("vit")
    moved = pl.wrap(vit, registers=NEURONS)
    found = pl.explain(moved, batch, "ixg", target=1, level="pixel")
    image = batch.clone().requires_grad_()
    tokens = moved.embed(image)
    moved.readout(moved.run(tokens))[:, 1].sum().backward()  # type: ignore[no-untyped-call]
    assert image.grad is not None
    close(found.scores.double(), (image * image.grad).sum(1).detach(), 1e-5)
    plain = pl.explain(vit, batch, "ixg", target=1, level="pixel")
    assert found.weights != plain.weights
    assert "moved neurons" in found.model


@pytest.mark.parametrize("family", ["swin", "eva02", "beit"])
def test_models_that_cannot_take_a_token_are_refused(family: str) -> None:
    vit = shared(family)
    with pytest.raises(pl.Unsupported, match="register neurons"):
        pl.wrap(vit, registers={0: [1]})
    with pytest.raises(pl.Unsupported, match="register neurons"):
        pl.find_registers(vit, images(vit, 1))


@pytest.mark.parametrize(("neurons", "words"), [({7: [0]}, "block 7"), ({0: [10_000]}, "neuron 10000")])
def test_neurons_that_do_not_exist_are_refused(neurons: dict[int, list[int]], words: str) -> None:
    with pytest.raises(pl.PatchlightError, match=words):
        pl.wrap(shared("vit"), registers=neurons)


def planted(vit: pl.Anatomy, batch: Tensor, block: int, neuron: int, places: list[int]) -> None:
    """Change a model so that one neuron makes the tokens at some places of every image huge."""
    model: Any = vit.model
    seen: list[Tensor] = []
    hook = model.blocks[block].norm2.register_forward_hook(lambda *given: seen.append(given[2]))
    with torch.no_grad():
        model(batch)
        hook.remove()
        patches = seen[0][:, vit.prefix :]
        there = torch.zeros(patches.shape[1], dtype=torch.bool)
        there[places] = True
        rows = torch.cat([patches[:, there].flatten(0, 1), patches[:, ~there].flatten(0, 1)])
        rows = torch.cat([rows, torch.ones(len(rows), 1).to(rows)], 1)
        wanted = torch.full((len(rows),), -3.0).to(rows)
        wanted[: len(batch) * len(places)] = 100.0
        weight = torch.linalg.lstsq(rows, wanted[:, None], driver="gelsd").solution[:, 0]
        mlp = model.blocks[block].mlp
        mlp.fc1.weight[neuron], mlp.fc1.bias[neuron] = weight[:-1], weight[-1]
        mlp.fc2.weight[:, neuron] = 2 * torch.randn(len(mlp.fc2.weight), generator=torch.Generator().manual_seed(0))


def test_a_planted_neuron_is_found_and_moved() -> None:
    vit = shared("vit")
    vit = pl.wrap(copy.deepcopy(vit.model).double(), preprocess=vit.preprocess)
    batch = images(vit, 2)
    planted(vit, batch, 1, 11, [0, 15])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ChangedModel)
        found = pl.find_registers(vit, batch)
    assert found.neurons == {1: (11,)}
    assert found.outliers.flatten(1).nonzero().tolist() == [[0, 0], [0, 15], [1, 0], [1, 15]]
    assert found.ratios[0] < 5 < found.ratios[1]
    assert "neuron 11 of block 1" in str(found)
    moved = pl.wrap(vit, registers=found)
    with torch.no_grad():
        norms = vit.layout.of_cells(moved.run(moved.embed(batch))[:, :-1]).norm(dim=-1)
    assert float((norms.amax(1) / norms.median(1).values).max()) < 2.5
    change = moved.logits(batch).softmax(1) - vit.logits(batch).softmax(1)
    top = vit.logits(batch).argmax(1, keepdim=True)
    close(found.changes.double(), change.gather(1, top)[:, 0], 1e-5)


def test_outliers_are_marked_in_figures() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    outliers = torch.zeros(1, 4, 4, dtype=torch.bool)
    outliers[0, 1, 3] = True
    found = Registers({}, (), (1.0,), outliers, torch.zeros(1))
    figure, axes = plt.subplots()
    axes.imshow(torch.zeros(32, 32))
    found.mark(axes)
    (circles,) = axes.collections
    assert circles.get_offsets().tolist() == [[27.5, 11.5]]
    plt.close(figure)


def test_the_corners_of_vit_tiny() -> None:
    """Card 32: outliers are the four corners, from block 7 on, and neuron 417 of that block makes them."""
    name = "vit_tiny_patch16_224"
    vit = pl.load(name, weights=shared_dir() / "data" / "weights" / f"{name}_imagenet1k.safetensors")
    mean, std = (torch.tensor(v)[:, None, None] for v in (deit_tiny().preprocess.mean, deit_tiny().preprocess.std))
    batch = (inputs() * std + mean - 0.5) / 0.5
    with pytest.warns(ChangedModel, match=r"0\.34"):
        found = pl.find_registers(vit, batch)
    assert found.outliers.flatten(1).nonzero().tolist() == [[i, k] for i in range(4) for k in (0, 13, 182, 195)]
    assert found.neurons == {7: (417,)}
    assert [round(r) for r in found.ratios[7:]] == [46, 38, 34, 32, 30]
    assert found.scores[0][2] == pytest.approx(190, rel=0.01)
    moved = pl.wrap(vit, registers={7: [417], 6: [189]})
    shown = vit.logits(batch).argmax(1, keepdim=True)
    close(moved.logits(batch).softmax(1).gather(1, shown)[:, 0], torch.tensor([0.998, 1.000, 0.494, 0.998]), 1e-3)
    assert pl.find_registers(deit_tiny(), inputs()).neurons == {}
