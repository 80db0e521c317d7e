"""Bags of tiles: exact statements about attention pooling, removal and order, and how bags are read."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import patchlight as pl
from patchlight.anatomy.bags import BagAnatomy
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.evidence.ablation import Ablation, TokenSubsets
from patchlight.evidence.coalitions import Unseen
from tests.families import shared
from tests.helpers import refuses

E = 8


class Pooling(nn.Module):
    """Gated attention pooling (ABMIL); with `branches`, one attention per class (CLAM)."""

    def __init__(self, classes: int = 3, branches: int = 1, width: int = 6) -> None:
        super().__init__()
        self.V, self.U, self.w = nn.Linear(E, width), nn.Linear(E, width), nn.Linear(width, branches)
        self.classifier = nn.Linear(E, classes)

    def scores(self, h: Tensor) -> Tensor:
        scores: Tensor = self.w(torch.tanh(self.V(h)) * torch.sigmoid(self.U(h)))
        return scores

    def forward(self, h: Tensor) -> Tensor:
        attention = torch.softmax(self.scores(h), 1).mT  # [B,K,n]
        pooled = attention @ h
        if attention.shape[1] == 1:
            logits: Tensor = self.classifier(pooled[:, 0])
            return logits
        return (pooled * self.classifier.weight).sum(-1) + self.classifier.bias


class OneBag(Pooling):
    """The same for one bag [n,E], with further outputs, as published heads have them."""

    def forward(self, h: Tensor) -> Any:
        attention = torch.softmax(self.scores(h), 0)
        logits = self.classifier(attention.mT @ h)
        return logits, logits.softmax(1), attention


class Transformer(nn.Module):
    """Two transformer blocks without positions over embedded tiles, then a CLS token."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.cls = nn.Linear(E, 16), nn.Parameter(torch.randn(1, 1, 16))
        layer = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(2))  # type: ignore[arg-type]
        self.norm, self.classifier = nn.LayerNorm(16), nn.Linear(16, 3)

    def embed(self, h: Tensor) -> Tensor:
        return torch.cat([self.cls.expand(len(h), -1, -1), self.project(h)], 1)

    def readout(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.norm(x)[:, 0])
        return logits

    def forward(self, h: Tensor) -> Tensor:
        x = self.embed(h)
        for layer in self.layers:
            x = layer(x)
        return self.readout(x)


class Square(nn.Module):
    """Tiles laid out as a square that is padded with the first ones, and a convolution, as TransMIL has it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.classifier = nn.Conv2d(E, E, 3, padding=1), nn.Linear(E, 3)

    def forward(self, h: Tensor) -> Tensor:
        side = int(np.ceil(np.sqrt(h.shape[1])))
        square = torch.cat([h, h[:, : side * side - h.shape[1]]], 1).mT.unflatten(2, (side, side))
        logits: Tensor = self.classifier((square + self.convolution(square)).relu().flatten(2).mean(2))
        return logits


def head(kind: type[nn.Module] = Pooling, **settings: Any) -> Any:
    torch.manual_seed(1)
    return kind(**settings).double().eval().requires_grad_(False)


def a_bag(tiles: int = 12, seed: int = 0) -> Tensor:
    return torch.randn(tiles, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scores(vit: pl.Anatomy, bag: Any, method: str, target: Any = 0, **settings: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pl.DegenerateMap)
        return pl.explain(vit, bag, method, target=target, **settings).scores.flatten(1)[0].double()


def test_parts_with_attention_held_sum_to_the_logit() -> None:
    model, bag = head(), a_bag()
    parts = scores(pl.wrap(model, bag=E), bag, "ixg.conservative", target=2)
    attention = torch.softmax(model.scores(bag), 0)[:, 0]
    torch.testing.assert_close(parts, attention * (bag @ model.classifier.weight[2]), atol=1e-6, rtol=1e-5)
    total = float(parts.sum() + model.classifier.bias[2])
    assert total == pytest.approx(float(model(bag[None])[0, 2]), abs=1e-6)


def test_plain_ixg_includes_the_gradient_of_the_attention() -> None:
    model, bag = head(), a_bag()
    leaf = bag.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf[None])[0, 1], leaf)
    found = scores(pl.wrap(model, bag=E), bag, "ixg", target=1)
    torch.testing.assert_close(found, (bag * gradient).sum(-1), atol=1e-6, rtol=1e-5)


def test_rawatt_is_the_attention_of_the_pooling() -> None:
    model, bag = head(), a_bag()
    attention = torch.softmax(model.scores(bag), 0)[:, 0]
    for method in ("rawatt", "rollout"):
        torch.testing.assert_close(scores(pl.wrap(model, bag=E), bag, method), attention, atol=1e-6, rtol=1e-5)


def test_each_class_has_its_own_attention_where_the_head_has_branches() -> None:
    model, bag = head(branches=3), a_bag()
    vit = pl.wrap(model, bag=E)
    attention = torch.softmax(model.scores(bag), 0)
    for target in range(3):
        torch.testing.assert_close(scores(vit, bag, "rawatt", target), attention[:, target], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", [Pooling, Transformer, OneBag])
def test_removing_tiles_is_a_shorter_bag(kind: type[nn.Module]) -> None:
    model, bag, keep = head(kind), a_bag(), [1, 4, 5, 9]
    vit, images = pl.wrap(model, bag=E).fit(bag)
    removed = Ablation(vit, images).logits(TokenSubsets(torch.tensor([0]), torch.tensor([keep])))
    shorter = model(bag[keep])[0] if kind is OneBag else model(bag[None, keep])
    torch.testing.assert_close(removed, shorter, atol=1e-12, rtol=0)


def test_leave_one_out_is_the_loss_of_the_shorter_bag() -> None:
    model, bag = head(), a_bag()
    found = scores(pl.wrap(model, bag=E), bag, "occlusion", 2, preset="leave-one-out", score="logit")
    whole = model(bag[None])[0, 2]
    each = torch.stack([whole - model(torch.cat([bag[:i], bag[i + 1 :]])[None])[0, 2] for i in range(len(bag))])
    torch.testing.assert_close(found, each, atol=1e-6, rtol=1e-5)


def test_a_padded_batch_is_bags_alone_where_padding_is_hidden_from_attention() -> None:
    model, long, short = head(), a_bag(12), a_bag(5, seed=1)
    vit = pl.wrap(model, bag=E).sized(12)  # type: ignore[attr-defined]
    padded = torch.stack([long, torch.cat([short, torch.ones(7, E, dtype=torch.float64)])])
    seen = torch.arange(12) < torch.tensor([[12], [5]])
    with torch.no_grad(), Unseen(seen):
        together = vit.readout(vit.run(padded))
    alone = torch.cat([model(long[None]), model(short[None])])
    torch.testing.assert_close(together, alone, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", [Pooling, Transformer])
@pytest.mark.parametrize("method", ["ixg", "grad", "ixg.conservative", "occlusion"])
def test_permuting_tiles_permutes_the_map(kind: type[nn.Module], method: str) -> None:
    vit, bag = pl.wrap(head(kind), bag=E), a_bag()
    order = torch.randperm(len(bag), generator=torch.Generator().manual_seed(3))
    settings = {"preset": "leave-one-out"} if method == "occlusion" else {}
    plain, permuted = (scores(vit, each, method, **settings) for each in (bag, bag[order]))
    torch.testing.assert_close(permuted, plain[order], atol=1e-6, rtol=1e-5)


def test_copies_of_a_tile_score_alike_and_the_others_keep_their_order() -> None:
    vit, bag = pl.wrap(head(), bag=E), a_bag()
    before, after = (scores(vit, each, "ixg.conservative") for each in (bag, torch.cat([bag, bag[:1]])))
    assert float(after[0]) == pytest.approx(float(after[-1]), abs=1e-7)
    assert before[1:].argsort().tolist() == after[1:-1].argsort().tolist()


def test_a_bag_of_one_tile_has_the_logit_of_its_tile() -> None:
    model, bag = head(), a_bag(1)
    vit = pl.wrap(model, bag=E)
    torch.testing.assert_close(vit.logits(vit.batch(bag)), model.classifier(bag), atol=1e-12, rtol=0)
    part = float(scores(vit, bag, "ixg.conservative", target=1)[0])
    assert part == pytest.approx(float(model.classifier(bag)[0, 1] - model.classifier.bias[1]), abs=1e-6)


def test_a_head_that_lays_tiles_out_as_a_square_refuses_removal() -> None:
    vit, bag = pl.wrap(head(Square), bag=E), a_bag()
    with pytest.raises(Unsupported, match="output depends on the order of the tiles"):
        pl.explain(vit, bag, "occlusion", preset="leave-one-out")
    assert scores(vit, bag, "ixg").isfinite().all()
    assert scores(vit, bag, "occlusion", unit="patch", level="token").isfinite().all()


@pytest.mark.parametrize("mode", ["mean", "max", "att", "att_trans"])
def test_heads_of_monai(mode: str) -> None:
    from monai.networks.nets.milmodel import MILModel

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            options: dict[str, Any] = {"backbone": nn.Identity(), "backbone_num_features": E, "trans_blocks": 2}
            self.mil = MILModel(3, mil_mode=mode, pretrained=False, **options)

        def forward(self, h: Tensor) -> Tensor:
            return self.mil.calc_head(h)

    model, bag = head(Head), a_bag()
    vit = pl.wrap(model, bag=E)
    assert (vit.attention is None) == (mode == "att")
    leaf = bag.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf[None])[0, 1], leaf)
    torch.testing.assert_close(scores(vit, bag, "ixg", 1), (bag * gradient).sum(-1), atol=1e-6, rtol=1e-5)
    loss = scores(vit, bag, "occlusion", 1, preset="leave-one-out", score="logit")
    each = torch.stack([model(torch.cat([bag[:i], bag[i + 1 :]])[None])[0, 1] for i in range(len(bag))])
    torch.testing.assert_close(loss, model(bag[None])[0, 1] - each, atol=1e-6, rtol=1e-5)


def test_the_gradient_of_a_tile_is_a_question_about_its_encoder() -> None:
    """The chain: s' = <ds/dh_i, f(tile)> is a linear head on the encoder, whose value at the tile is the tile's IxG."""
    encoder = pl.load("pocket")
    tiles = torch.randn(6, 3, *encoder.preprocess.size, generator=torch.Generator().manual_seed(0))
    features = encoder.features_of(tiles)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features.shape[1], 4), nn.Tanh())
    leaf = features.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf).mean(0)[1], leaf)
    inside = pl.wrap(encoder, head=pl.heads.Linear(gradient[2:3], regression=True))
    expected = (gradient[2] * features[2]).sum()
    torch.testing.assert_close(inside.logits(inside.batch(tiles[2:3]))[0, 0], expected, atol=1e-5, rtol=1e-4)
    assert pl.explain(inside, tiles[2:3], "ixg.libra").scores.isfinite().all()


def test_blocks_can_be_described() -> None:
    model, bag = head(Transformer), a_bag()
    whole = pl.wrap(model, bag=E)
    assert "embed, blocks and readout" in str(whole.attention)
    vit = pl.wrap(model, bag=E, embed=model.embed, blocks=model.layers, readout=model.readout, prefix=1)
    assert (vit.depth, vit.prefix, vit.pooling, vit.heads, vit.attention) == (2, 1, "cls", 2, None)
    for method in ("genatt", "rollout", "rawatt", "ixg.plus"):
        assert scores(vit, bag, method).isfinite().all()
    loss = {"preset": "leave-one-out", "score": "logit"}
    torch.testing.assert_close(
        scores(vit, bag, "occlusion", **loss), scores(whole, bag, "occlusion", **loss), atol=1e-6, rtol=1e-5
    )


def test_a_head_for_one_bag_is_run_once_per_bag() -> None:
    model, bags = head(OneBag), [a_bag(), a_bag(seed=1)]
    vit = pl.wrap(model, bag=E)
    both = pl.explain(vit, bags, "ixg.conservative", target=0).scores
    for row, bag in zip(both, bags, strict=True):
        torch.testing.assert_close(row.flatten().double(), scores(vit, bag, "ixg.conservative"), atol=1e-6, rtol=1e-5)
    with pytest.raises(Unsupported, match="accepts one bag at a time"):
        pl.explain(vit, bags, "rawatt")


def test_mean_pooling_has_no_attention_and_equal_shares() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(E, 2)

        def forward(self, h: Tensor) -> Tensor:
            logits: Tensor = self.classifier(h.mean(1))
            return logits

    model, bag = head(Mean), a_bag()
    vit = pl.wrap(model, bag=E)
    expected = bag @ model.classifier.weight[0] / len(bag)
    torch.testing.assert_close(scores(vit, bag, "ixg"), expected, atol=1e-6, rtol=1e-5)
    with pytest.raises(Unsupported, match="no single softmax over tiles"):
        pl.explain(vit, bag, "rawatt")


@pytest.mark.parametrize("method", ["auto", "tis", "posterior", "kernel-shap", "random"])
def test_sampling_methods_give_a_score_per_tile(method: str) -> None:
    vit = pl.wrap(head(), bag=E)
    for tiles in (12, 30):
        assert scores(vit, a_bag(tiles), method).shape == (tiles,)


def test_methods_that_need_attention_between_tiles_are_refused() -> None:
    vit = pl.wrap(head(), bag=E)
    for method in ("genatt", "atman", "attnfrom"):
        with pytest.raises(Unsupported, match="not between tiles"):
            pl.explain(vit, a_bag(), method)


def test_what_needs_neighbouring_pixels_is_refused() -> None:
    vit, bag = pl.wrap(head(), bag=E), a_bag()
    for method in ("rise", "hsic", "dave"):
        with pytest.raises(Unsupported, match="the tiles of a bag have no neighbours"):
            pl.explain(vit, bag, method)
    with pytest.raises(Unsupported, match="for tiles use 'channel-mean'"):
        pl.explain(vit, bag, "pami")
    for row in pl.list_methods(vit):
        if row.supported:
            assert scores(vit, bag, row.name, **({"samples": 48} if "samples" in row.settings else {})).shape == (12,)
    assert scores(vit, bag, "rise", unit="token", level="token", samples=64).isfinite().all()
    for fill in ("blur-rise", "road"):
        with pytest.raises(Unsupported, match="for tiles use 'channel-mean'"):
            pl.explain(vit, bag, "occlusion", fill=fill)


def test_the_mean_tile_fills_as_written() -> None:
    model, bag = head(), a_bag()
    found = scores(pl.wrap(model, bag=E), bag, "occlusion", 0, unit="patch", fill="channel-mean", score="logit")
    replaced = bag.expand(len(bag), -1, -1).clone()
    replaced[range(len(bag)), range(len(bag))] = bag.mean(0)
    torch.testing.assert_close(found, model(bag[None])[0, 0] - model(replaced)[:, 0], atol=1e-6, rtol=1e-5)


def test_curves_follow_the_order_of_tiles() -> None:
    model, bag = head(), a_bag(20)
    vit = pl.wrap(model, bag=E)
    att = pl.explain(vit, bag, "occlusion", target=1, preset="leave-one-out", score="logit")
    options: dict[str, Any] = {"fill": "channel-mean", "steps": 10, "score": "logit", "target": 1}
    good, bad = (pl.evaluate(vit, bag, maps, "srg", **options) for maps in (att.scores, -att.scores))
    assert good.mean > 0 > bad.mean


@pytest.mark.parametrize("metric", ["token-deletion", "token-insertion", "ins-del", "aopc", "randomisation", "saco"])
def test_metrics_measure_maps_of_tiles(metric: str) -> None:
    vit, bag = pl.wrap(head(), bag=E), a_bag(20)
    assert np.isfinite(pl.evaluate(vit, bag, "ixg", metric, target=0, progress=False).mean)


def test_tile_labels_are_masks() -> None:
    vit, bag = pl.wrap(head(), bag=E), a_bag(20)
    att = pl.explain(vit, bag, "ixg")
    labels = (att.scores > att.scores.median()).long()
    assert pl.evaluate(vit, bag, att, "ap", masks=labels).mean == 1
    assert pl.evaluate(vit, bag, att, "ap", masks=1 - labels).mean < 0.5


def test_bags_are_read_from_files(tmp_path: Path) -> None:
    vit, bag = pl.wrap(head(), bag=E), a_bag()
    expected = scores(vit, bag, "ixg")
    np.save(tmp_path / "a.npy", bag.numpy())
    np.savez(tmp_path / "a.npz", features=bag.numpy(), coords=np.zeros((12, 2)))
    torch.save(bag, tmp_path / "a.pt")
    for source in (bag.numpy(), *(tmp_path / name for name in ("a.npy", "a.npz", "a.pt"))):
        torch.testing.assert_close(scores(vit, source, "ixg"), expected)
    assert len(vit.predict(bag, k=2)[0]) == 2


@pytest.mark.parametrize(
    ("bag", "words"),
    [
        (torch.empty(0, E), "the bag is empty"),
        (torch.ones(4, 5), r"the bag has shape \[4, 5\], but Pooling takes tiles of 8 features"),
        (torch.full((4, E), torch.nan), "NaN or infinity"),
        (torch.cat([torch.ones(3, E), torch.zeros(1, E)]), "tile 3 contains only zeros"),
        ([torch.ones(3, E), torch.ones(4, E)], "the bags have 3 and 4 tiles"),
        ([], "no bag was given"),
        ("none.npy", "no bag at 'none.npy'"),
        (object(), "a bag of type object cannot be read"),
        ({1: torch.ones(3, E), "b": torch.zeros(3, E)}, "the bag contains the arrays 1, b; name the features"),
    ],
)
def test_bad_bags_get_one_sentence(bag: Any, words: str) -> None:
    with pytest.raises(PatchlightError, match=words):
        pl.explain(pl.wrap(head(), bag=E), bag, "ixg")


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"bag": True}, "number of features of a tile"),
        ({"bag": 5}, r"does not accept bags \[B,n,E\] of tiles with 5 features"),
        ({"bag": E, "stage": 1}, "stage does not apply"),
        ({"bag": E, "blocks": [nn.Identity()]}, "give embed, blocks and readout"),
    ],
)
def test_bad_descriptions_get_one_sentence(about: dict[str, Any], words: str) -> None:
    with pytest.raises(PatchlightError, match=words):
        pl.wrap(head(), **about)


def test_a_bag_is_drawn_at_its_coordinates_or_as_bars(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    bag = a_bag(50)
    att = pl.explain(pl.wrap(head(), bag=E), bag, "ixg")
    places = torch.stack([torch.arange(50) % 7, torch.arange(50) // 7], 1)
    bars = att.plot(Figure().subplots())
    assert len(bars.patches) == 32
    assert bars.get_xticklabels()[0].get_text() == str(int(att.scores.flatten().argmax()))
    drawn = att.plot(Figure().subplots(), coordinates=places).collections[0]
    np.testing.assert_allclose(np.asarray(drawn.get_offsets()), places)
    with pytest.raises(PatchlightError, match=r"coordinates have shape \[49, 2\], and the bag has 50 tiles"):
        att.plot(Figure().subplots(), coordinates=places[1:])


def test_the_model_is_not_changed_and_bags_of_any_length_share_its_copy() -> None:
    model = head().train()
    vit = pl.wrap(model, bag=E)
    assert isinstance(vit, BagAnatomy)
    other = vit.sized(30)
    assert other.running is vit.running
    assert model.training
    assert other.sized(17).grid == vit.grid


@pytest.mark.parametrize(
    "bag",
    [
        a_bag().to_sparse(),
        torch.quantize_per_tensor(a_bag().float(), 0.1, 0, torch.qint8),
        a_bag().to(torch.complex64),
        a_bag().to("meta"),
    ],
)
def test_tensors_without_plain_numbers_are_refused_in_one_sentence(bag: Tensor) -> None:
    refuses("give a dense, real one", pl.explain, pl.wrap(head(), bag=E), bag, "ixg")


def test_paths_that_are_too_long_are_refused_in_one_sentence(tmp_path: Path) -> None:
    """The file system raises an error of its own for them, in place of finding no file."""
    path = str(tmp_path / ("a" * 5000))
    vit, tiles = shared("vit"), pl.wrap(head(), bag=E)
    refuses("no image at", pl.explain, vit, path, "genatt")
    refuses("no bag at", pl.explain, tiles, path, "ixg")
    refuses("no label file at", pl.wrap, vit.model, labels=path)
    refuses("no weights at", pl.load, "pocket", weights=path)
    refuses("no preprocessing at", pl.wrap, vit.model, preprocess=path)
    refuses("no folder at", pl.load, f"hf:{path}")
    refuses("no recipe at", pl.bench.read_recipe, path)
    refuses("does not exist", pl.open_data, "imagenet", path)
