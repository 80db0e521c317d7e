"""The ablation engine: variants are what they stand for, whatever the chunks; running out of memory loses nothing."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial

import pytest
import timm
import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import Cancelled
from patchlight.core.progress import Watcher, watch
from patchlight.core.targets import Targets
from patchlight.evidence.ablation import Ablation, PixelMasks, RankRanges, Rendered, TokenSubsets, Variants
from patchlight.evidence.fills import fill_images
from patchlight.evidence.precision import Precision
from tests.families import PLAIN, build, images, shared


def subsets(vit: Anatomy, count: int, keep: int, owners: int = 3) -> TokenSubsets:
    generator = torch.Generator().manual_seed(0)
    patches = vit.grid[0] * vit.grid[1]
    rows = [torch.randperm(patches, generator=generator)[:keep] for _ in range(count)]
    return TokenSubsets(torch.arange(count) % owners, torch.stack(rows))


@pytest.mark.parametrize("family", PLAIN)
def test_token_subsets_are_dropped_tokens(family: str) -> None:
    vit = shared(family, torch.float64)
    batch = images(vit)
    variants = subsets(vit, 7, 5)
    found = Ablation(vit, batch, chunk=3).logits(variants)
    with torch.no_grad():
        tokens = vit.embed(batch)
        each = [
            vit.readout(vit.run(tokens[o : o + 1], keep=k[None]))
            for o, k in zip(variants.owner, variants.keep, strict=True)
        ]
    torch.testing.assert_close(found, torch.cat(each), atol=1e-6 if "eager" in family else 1e-10, rtol=0)


def test_all_tokens_give_the_clean_logits_and_lists_may_differ_in_length() -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit)
    whole = TokenSubsets(torch.arange(3), torch.arange(16).expand(3, -1))
    some = subsets(vit, 4, 3)
    together = Ablation(vit, batch).logits([some, whole])
    torch.testing.assert_close(together[4:], vit.logits(batch), atol=1e-12, rtol=0)
    torch.testing.assert_close(together[:4], Ablation(vit, batch).logits(some), atol=1e-12, rtol=0)


def test_pixel_masks_and_ranks_are_masked_images() -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit)
    fill = fill_images("channel-mean", batch, vit)
    masks = (torch.rand(5, 4, 4, generator=torch.Generator().manual_seed(1)) > 0.5).double()
    owner = torch.tensor([0, 2, 1, 1, 0])
    upsampled = masks.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, None]
    expected = vit.logits(batch[owner] * upsampled + fill[owner] * (1 - upsampled))
    for given in (masks, upsampled[:, 0]):
        found = Ablation(vit, batch, chunk=2).logits(PixelMasks(owner, given, fill))
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    rendered = Rendered(owner, lambda part: (batch[owner] * upsampled + fill[owner] * (1 - upsampled))[part])
    torch.testing.assert_close(Ablation(vit, batch, chunk=2).logits(rendered), expected, atol=1e-10, rtol=0)
    ranks = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(2)).flatten(1).argsort(1).argsort(1)
    ranks = ranks.view(3, 64, 64)
    steps = torch.tensor([0, 100, 64 * 64, 2000, 7])
    shown = (ranks[owner] < steps[:, None, None])[:, None]
    for inverted in (False, True):
        begin, end = (torch.zeros_like(steps), steps) if inverted else (steps, torch.full_like(steps, 64 * 64))
        variants = RankRanges(owner, begin, end, ranks, fill)
        masked = torch.where(shown != inverted, batch[owner], fill[owner])
        torch.testing.assert_close(Ablation(vit, batch).logits(variants), vit.logits(masked), atol=1e-10, rtol=0)


def test_several_classes_cost_no_further_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = build("vit", torch.float64)
    batch = images(vit)
    variants = subsets(vit, 6, 5)
    logits = Ablation(vit, batch).logits(variants)
    calls = []
    block = vit.block
    monkeypatch.setattr(vit, "block", lambda i, *a: (calls.append(len(a[0])), block(i, *a))[1])
    targets = Targets(torch.tensor([[0, 1], [2, 3], [4, 5]]), several=True)
    scores = Ablation(vit, batch).scores(variants, targets, "probability")
    assert sum(calls) == 6 * vit.depth
    expected = logits.softmax(1).gather(1, targets.index[variants.owner])
    torch.testing.assert_close(scores, expected)


def test_out_of_memory_halves_the_chunk_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = build("vit")
    batch = images(vit)
    variants = subsets(vit, 23, 5)
    expected = Ablation(vit, batch, chunk=1).logits(variants)
    tried: list[int] = []
    block = vit.block

    def limited(index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if index == 1:
            tried.append(len(tokens))
            if len(tokens) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return block(index, tokens, positions)

    monkeypatch.setattr(vit, "block", limited)
    found = Ablation(vit, batch, chunk=16).logits(variants)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert tried == [16, 8, 4, 4, 4, 4, 4, 3]
    monkeypatch.setattr(vit, "block", lambda *a: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
    with pytest.raises(pl.PatchlightError, match="not even one variant fits"):
        Ablation(vit, batch, chunk=16).logits(variants)


def test_progress_and_cancellation() -> None:
    vit = build("vit")
    model = vit.model.train()
    batch = images(vit)
    seen: list[tuple[int, int]] = []
    ablation = Ablation(vit, batch, chunk=4)
    with watch(Watcher(lambda done, total: seen.append((done, total)))):
        ablation.logits(subsets(vit, 10, 5))
        assert seen == [(4, 10), (8, 10), (10, 10)]
        ablation.logits(subsets(vit, 2, 5))
        assert seen[3:] == [(12, 12)], "another list of variants adds to what is done"
    with (
        watch(Watcher(lambda done, total: seen.append((done, total)), lambda: len(seen) > 4)),
        pytest.raises(Cancelled, match="stopped after 4 of 10"),
    ):
        ablation.logits(subsets(vit, 10, 5))
    ablation.logits(subsets(vit, 2, 5))
    assert len(seen) == 5, "nobody watches any more"
    assert model.training, "the model was left in another mode"


@pytest.mark.parametrize("castable", [True, False])
@pytest.mark.parametrize("family", ["vit", "eva02", "swin"])
def test_half_precision_is_close_and_leaves_the_model_whole(
    family: str, castable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that cannot be cast multiplies in bfloat16."""
    vit = build(family)
    monkeypatch.setattr(type(vit), "castable", castable)
    batch = images(vit)
    before = {k: v.clone() for k, v in vit.model.state_dict().items()}
    masks = (torch.rand(6, *vit.grid, generator=torch.Generator().manual_seed(1)) > 0.5).float()
    variants = PixelMasks(torch.arange(6) % 3, masks, fill_images("zero", batch, vit))
    full = Ablation(vit, batch).logits(variants)
    half = Ablation(vit, batch, chunk=2, precision="bf16").logits(variants)
    assert half.dtype == torch.float32
    assert 0 < float((full - half).abs().max() / full.abs().max()) < 0.05
    after = vit.model.state_dict()
    assert all(v.dtype == after[k].dtype and torch.equal(v, after[k]) for k, v in before.items())
    assert torch.equal(Ablation(vit, batch).logits(variants), full)
    assert torch.equal(Ablation(vit, batch, precision="tf32").logits(variants), full), "on a CPU there is no TF32"
    assert not any("forward" in vars(m) for m in vit.model.modules()), "a convolution was left replaced"


def _in_context(vit: Anatomy) -> Rendered:
    """Variants whose forward runs in a context of theirs."""

    @dataclass(frozen=True)
    class Around(Rendered):
        def around(self, part: slice) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    batch = images(vit)
    return Around(torch.arange(3), lambda part: batch[part])


@pytest.mark.parametrize("fine", [False, True])
def test_in_bfloat16_the_last_block_is_computed_where_it_is_read(fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are those of whole blocks to rounding; in full precision, or in a context, the blocks run whole."""
    vit = build("vit")
    batch = images(vit)
    whole: list[int] = []
    block = type(vit).block

    def counted(vit: Anatomy, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        whole.append(index)
        return block(vit, index, tokens, positions)

    monkeypatch.setattr(type(vit), "block", counted)

    def run(variants: Variants, precision: Precision) -> tuple[Tensor, list[int]]:
        whole.clear()
        return Ablation(vit, batch, precision=precision, fine=fine).logits(variants), list(whole)

    variants = subsets(vit, 7, 5)
    row, blocks = run(variants, "bf16")
    assert blocks == [0, 1]
    assert run(variants, "full")[1] == run(_in_context(vit), "bf16")[1] == [0, 1, 2]
    monkeypatch.setattr(vit, "reads_first", False)
    all_rows, blocks = run(variants, "bf16")
    assert blocks == [0, 1, 2]
    torch.testing.assert_close(row, all_rows, atol=0.02 * float(all_rows.abs().max()), rtol=0)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_compiled_blocks_give_the_same_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward around the blocks is intercepted, which a compiled function would not be."""
    sizes: dict[str, dict[str, object]] = {
        "vit_tiny_patch16_224": {"embed_dim": 32, "depth": 2, "num_heads": 2},
        "swin_tiny_patch4_window7_224": {"embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2), "window_size": 2},
    }
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.manual_seed(0)
    vit = pl.wrap(timm.create_model(name, num_classes=5, img_size=64, **sizes[name]).eval())
    image = torch.randn(1, 3, 64, 64)
    plain, compiled = (pl.explain(vit, image, "rise", samples=16, compile=value).scores for value in (False, True))
    torch.testing.assert_close(compiled, plain, atol=1e-6, rtol=1e-5)
