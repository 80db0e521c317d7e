"""A readout that reads the tokens of several blocks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import patchlight as pl
from patchlight.anatomy.discovery import Inputs, find_blocks
from patchlight.anatomy.heads import Question
from patchlight.anatomy.tasks import TaskAnatomy
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.evidence.passes import run_pass
from patchlight.evidence.runner import LayerJob

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
SIZES |= {"image_size": 64, "patch_size": 16}


class _Map(TaskAnatomy):
    task = "segmentation"


class _Mean(Question):
    """The mean logit and probability of label 1."""

    tasks = ("segmentation",)

    def prepare(self, vit: Any, image: Tensor, size: tuple[int, int] | None) -> None:
        self.labels = ["label 1"]

    def read(self, output: Any, rows: int) -> tuple[Tensor, Tensor]:
        both = output.logits[:, 1], output.logits.softmax(1)[:, 1]
        return both[0].mean((1, 2))[:, None], both[1].mean((1, 2))[:, None]

    def about(self) -> dict[str, Any]:
        return {"head": "Mean"}


def _dpt() -> nn.Module:
    necks = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16, "is_hybrid": False}
    config = transformers.DPTConfig(**SIZES, **necks, backbone_out_indices=[0, 1, 2, 3])
    model: nn.Module = transformers.DPTForSemanticSegmentation(config)
    return model


def _beit() -> nn.Module:
    model: nn.Module = transformers.BeitForSemanticSegmentation(
        transformers.BeitConfig(**SIZES, out_indices=[1, 2, 3, 4])
    )
    return model


def _segformer() -> nn.Module:
    sizes = {"hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 2, 4, 4], "decoder_hidden_size": 32}
    model: nn.Module = transformers.SegformerForSemanticSegmentation(
        transformers.SegformerConfig(image_size=64, depths=[1, 2, 1, 1], **sizes)
    )
    return model


MODELS = {
    "dpt": (_dpt, "dpt", (1, 2, 3, 4)),
    "beit": (_beit, "beit", (0, 1, 2, 3)),
    "segformer": (_segformer, "segformer", (1, 3, 4, 5)),
}
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def _opened(model: nn.Module, backbone: str) -> pl.Anatomy:
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    found = find_blocks(model, lambda net, images: net.get_submodule(backbone)(images), Inputs((3, 64, 64)), "map")
    vit = _Map(model, name="map", preprocess=pl.Preprocess((64, 64)), **found.located(0))
    vit.check()
    return vit


@pytest.fixture(scope="module")
def opened() -> dict[str, pl.Anatomy]:
    torch.manual_seed(0)
    return {name: _opened(make(), backbone) for name, (make, backbone, _) in MODELS.items()}


@pytest.fixture(params=list(MODELS))
def vit(request: pytest.FixtureRequest, opened: dict[str, pl.Anatomy]) -> pl.Anatomy:
    return opened[request.param]


def test_the_probe_finds_the_states_read(opened: dict[str, pl.Anatomy]) -> None:
    for name, (_, _, reads) in MODELS.items():
        assert opened[name].reads == reads
    assert pl.load("pocket").reads == (pl.load("pocket").depth,)


def test_parts_equal_the_whole(vit: pl.Anatomy) -> None:
    with vit.steady(), torch.no_grad():
        logits = vit.readout(vit.run(vit.embed(IMAGES)))
        torch.testing.assert_close(logits, vit.model_output(IMAGES), atol=1e-6, rtol=1e-5)


def test_each_state_found_changes_the_output_and_no_other_does(vit: pl.Anatomy) -> None:
    with vit.steady(), torch.no_grad():
        _, calls, inputs = vit.record(IMAGES[:1])  # type: ignore[attr-defined]
        states = [
            inputs[0],
            *(vit.flat(call.returned[0] if isinstance(call.returned, tuple) else call.returned) for call in calls),
        ]  # type: ignore[attr-defined]
        given = {i: states[i] for i in vit.reads}
        plain = vit.readout(given)
        for i, tokens in enumerate(states):
            changed = vit.readout(given | {i: tokens + 1})
            assert torch.equal(changed, plain) == (i not in vit.reads), i
        nan = {i: torch.full_like(tokens, torch.nan) for i, tokens in enumerate(states)}
        torch.testing.assert_close(vit.readout(nan | given), plain)


def test_gradients_equal_autograd_through_the_plain_model(vit: pl.Anatomy) -> None:
    leaf = IMAGES.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(vit.model(leaf).logits[:, 1].mean((1, 2)).sum(), leaf)
    att = pl.explain(vit, IMAGES, "grad", head=_Mean(), level="pixel", reduce="sum")
    torch.testing.assert_close(att.scores, gradient.sum(1), atol=1e-7, rtol=1e-4)


def test_half_precision_cuts_every_state(opened: dict[str, pl.Anatomy]) -> None:
    for start in (0, 2):
        full, half = (
            pl.explain(opened["dpt"], IMAGES, "ixg", head=_Mean(), start=start, precision=p).scores
            for p in ("full", "fp16")
        )
        assert float((full - half).abs().max()) < 0.02 * float(full.abs().max())


def test_a_state_that_is_read_directly_has_the_total_gradient(opened: dict[str, pl.Anatomy]) -> None:
    """Sum over l of <g_l, x_l> with the readout linearised is that of autograd, at each state read."""
    vit = opened["dpt"].ask(_Mean()).prepared(IMAGES[:1])
    job = LayerJob(lambda e: (e.x, e.g), frozenset("xg"), tuple(range(vit.depth)))
    seen = run_pass(vit, IMAGES[:1], jobs=[job], targets=None)
    with vit.steady(), torch.enable_grad():
        tokens = [vit.embed(IMAGES[:1]).requires_grad_()]
        for index in range(vit.depth):
            tokens.append(vit.block(index, tokens[-1]))
        gradients = torch.autograd.grad(vit.readout(tokens[-1])[:, 0].sum(), tokens[: vit.depth])
    for layer in range(vit.depth):
        torch.testing.assert_close(seen.at(layer)[1], gradients[layer], atol=1e-7, rtol=1e-4)


def test_rows_sum_to_one_over_all_states(vit: pl.Anatomy) -> None:
    asked = vit.ask(_Mean()).prepared(IMAGES[:1])
    seen = run_pass(asked, IMAGES[:1])
    rows = seen.rows(asked)
    assert set(rows) == {*vit.reads, vit.depth}
    assert sum(float(row.sum()) for row in rows.values()) == pytest.approx(1, abs=1e-5)


def test_methods_that_follow_no_row_do_not_run_the_readout_for_one(
    vit: pl.Anatomy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pl.Anatomy, "state_rows", lambda *_: pytest.fail("a row was computed"))
    pl.explain(vit, IMAGES, "ixg.plus.libra", head=_Mean())


def test_attention_is_followed_from_every_state(opened: dict[str, pl.Anatomy]) -> None:
    """v <- r_L; v <- v (I + M_l) + r_l."""
    vit = opened["dpt"].ask(_Mean()).prepared(IMAGES[:1])
    job = LayerJob(lambda e: (e.A * e.G).relu().mean(1), frozenset("AG"), tuple(range(vit.depth)))
    seen = run_pass(vit, IMAGES[:1], jobs=[job])
    rows = seen.rows(vit)
    row = rows[vit.depth]
    for layer in reversed(range(vit.depth)):
        row = row + (row[:, None] @ seen.at(layer))[:, 0]
        row = row + rows[layer] if layer in rows and layer else row
    got = pl.explain(opened["dpt"], IMAGES[:1], "genatt", head=_Mean()).scores
    torch.testing.assert_close(got.flatten(), row[0, vit.prefix :], atol=1e-7, rtol=1e-4)


def test_variants_and_batches(vit: pl.Anatomy) -> None:
    together = pl.explain(vit, IMAGES, ["rise", "ixg"], head=_Mean(), batch_size=2)
    alone = pl.explain(vit, IMAGES[1:], ["rise", "ixg"], head=_Mean())
    for name, att in together.items():
        torch.testing.assert_close(att.scores[1:], alone[name].scores)


def test_nothing_is_left_of_a_run(opened: dict[str, pl.Anatomy]) -> None:
    vit = opened["dpt"]
    with vit.steady(), torch.no_grad():
        tokens = vit.run(vit.embed(IMAGES))
        logits = vit.readout(tokens)
        with ThreadPoolExecutor(1) as other, pytest.raises(Unsupported, match="inside one `steady`"):
            other.submit(_read, vit, tokens).result()
        vit.run(vit.embed(IMAGES[:1]))
        with pytest.raises(Unsupported, match="not all of these blocks have run on these tokens"):
            vit.readout(tokens)
        vit.run(tokens, start=2)
        with pytest.raises(Unsupported, match="reads the tokens of blocks 0, 1, 2, 3"):
            vit.readout(tokens)
        torch.testing.assert_close(vit.readout(vit.run(vit.embed(IMAGES))), logits)
    with vit.steady(), torch.no_grad(), pytest.raises(Unsupported, match="inside one `steady`"):
        vit.readout(tokens)


def _read(vit: pl.Anatomy, tokens: Tensor) -> Tensor:
    with vit.steady(), torch.no_grad():
        return vit.readout(tokens)


def test_a_shortened_sequence_is_refused(opened: dict[str, pl.Anatomy]) -> None:
    """DPT takes 9 of 16 patches for a grid of 3 x 3."""
    vit = opened["dpt"]
    keep = torch.arange(9)[None]
    with vit.steady(), torch.no_grad():
        tokens = vit.gather(vit.embed(IMAGES[:1]), keep)
        for index in range(vit.depth):
            tokens = vit.block(index, tokens, keep)
        assert vit.readout(tokens).isfinite().all()  # the trap
    assert vit.can_drop is not None
    with pytest.raises(PatchlightError, match="cannot drop tokens"):
        vit.run(vit.embed(IMAGES[:1]), keep=keep)


def test_methods_that_follow_one_state_say_so(opened: dict[str, pl.Anatomy]) -> None:
    for name in ("tam", "legrad", "bt-h"):
        with pytest.raises(Unsupported, match="map reads tokens of 4 blocks, and this method follows attention"):
            pl.explain(opened["dpt"], IMAGES, name, head=_Mean())


def test_a_block_that_nothing_reads_is_dead(opened: dict[str, pl.Anatomy]) -> None:
    """BEiT's last block, as that of LLaVA's tower."""
    *before, last = _gradients(opened["beit"])
    assert last == 0
    assert all(size > 0 for size in before)


def _gradients(vit: pl.Anatomy) -> Iterator[float]:
    asked = vit.ask(_Mean()).prepared(IMAGES[:1])
    job = LayerJob(lambda e: float(e.gy.abs().sum()), frozenset({"x", "g", "gy"}), tuple(range(vit.depth)))
    seen = run_pass(asked, IMAGES[:1], jobs=[job])
    yield from (seen.at(layer) for layer in range(vit.depth))
