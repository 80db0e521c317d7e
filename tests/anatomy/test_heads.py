"""Heads against literal versions of them in float64, what they leave alone, what they follow, and what they refuse."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy import heads
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.core.fingerprints import hash_images, identity
from patchlight.core.targets import Outputs
from tests.families import FAMILIES, build, images, randomise, shared

DOUBLE = torch.float64
POOLS = ("avg", "cls", "max")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def plain_tokens(model: Any, batch: Tensor, blocks: int) -> Tensor:
    """The tokens behind so many blocks of a timm ViT, by its modules."""
    with torch.no_grad():
        x = model.norm_pre(model._pos_embed(model.patch_embed(batch)))
        for block in list(model.blocks)[:blocks]:
            x = block(x)
    return x


def plain_features(model: Any, batch: Tensor) -> Tensor:
    """The normed CLS token of a timm ViT."""
    with torch.no_grad():
        return model.norm(plain_tokens(model, batch, len(model.blocks)))[:, 0]


def cosine(a: Tensor, b: Tensor) -> float:
    dot = sum(float(p) * float(q) for p, q in zip(a, b, strict=True))
    return dot / math.sqrt(sum(float(p) ** 2 for p in a) * sum(float(q) ** 2 for q in b))


def same(found: Tensor, expected: Any, tolerance: float = 1e-11) -> None:
    expected = torch.as_tensor(expected, dtype=DOUBLE)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


@pytest.fixture(scope="module")
def vit() -> Anatomy:
    return shared("vit", DOUBLE)


@pytest.fixture(scope="module")
def batch(vit: Anatomy) -> Tensor:
    return images(vit, 3)


# Each head, written out


def test_features_are_the_normed_first_token(vit: Anatomy, batch: Tensor) -> None:
    same(vit.features_of(batch), plain_features(vit.model, batch))


def test_linear(vit: Anatomy, batch: Tensor) -> None:
    weight, bias = drawn(4, 48), drawn(4, seed=1)
    asked = vit.ask(heads.Linear(weight, bias, ["a", "b", "c", "d"]))
    u = plain_features(vit.model, batch)
    expected = [[sum(float(w * v) for w, v in zip(weight[c], u[i], strict=True)) + float(bias[c]) for c in range(4)]
                for i in range(3)]  # fmt: skip
    same(asked.logits(batch), expected)
    assert (asked.classes, asked.labels, asked.outputs) == (4, ["a", "b", "c", "d"], Outputs("softmax"))
    p = torch.tensor([[math.exp(v) / sum(map(math.exp, row)) for v in row] for row in expected], dtype=DOUBLE)
    same(asked.probabilities(asked.logits(batch)), p)


def test_the_model_s_own_weights_as_a_head_give_the_same_maps(vit: Anatomy, batch: Tensor) -> None:
    own: Any = vit.model.head  # type: ignore[union-attr]
    asked = vit.ask(heads.Linear(own.weight, own.bias))
    same(asked.logits(batch), vit.logits(batch))
    names = ["genatt", "ixg.libra", "tokentm", "decompx", "lrp", "rollout"]
    maps, expected = pl.explain(asked, batch, names), pl.explain(vit, batch, names)
    for name in names:
        same(maps[name].scores.double(), expected[name].scores, 1e-6)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_texts_given_as_embeddings(vit: Anatomy, batch: Tensor, scale: float) -> None:
    rows = scale * drawn(3, 48)
    asked = vit.ask(heads.Texts(rows, ["a cat", "a dog", "a hat"]))
    u = plain_features(vit.model, batch)
    expected = [[cosine(u[i], rows[t]) for t in range(3)] for i in range(3)]
    same(asked.logits(batch), expected)
    same(asked.probabilities(asked.logits(batch)), [[(1 + c) / 2 for c in row] for row in expected])
    assert asked.labels == ["a cat", "a dog", "a hat"]
    att = pl.explain(asked, batch, target="a dog")
    assert att.labels == ("a dog",) * 3


def test_similar(vit: Anatomy, batch: Tensor) -> None:
    references = images(vit, 2, seed=5)
    asked = vit.ask(heads.Similar(references, ["this", "that"]))
    u, t = plain_features(vit.model, batch), plain_features(vit.model, references)
    same(asked.logits(batch), [[cosine(u[i], t[j]) for j in range(2)] for i in range(3)])
    same(asked.logits(references).diagonal(), [1.0, 1.0])


def test_similar_names_files_by_their_stem(tmp_path: Path) -> None:
    from patchlight.zoo import pocket

    asked = pl.load("pocket", head=heads.Similar([pocket.PHOTOS / "cat.jpg", str(pocket.PHOTOS / "dog.jpg")]))
    assert asked.labels == ["cat", "dog"]
    alone = pl.load("pocket", head=heads.Similar(pocket.PHOTOS / "cat.jpg"))
    assert alone.labels == ["cat"]
    assert pl.explain(alone, pocket.PHOTOS / "kitten.jpg").labels == ("cat",)


def test_prototypes_are_means_of_normalised_features(vit: Anatomy, batch: Tensor) -> None:
    features, labels = drawn(5, 48), ["b", "a", "b", "a", "b"]
    features[1] *= 7
    asked = vit.ask(heads.Prototypes(features, labels))
    assert asked.labels == ["b", "a"]
    means = []
    for name in asked.labels:
        total = torch.zeros(48, dtype=DOUBLE)
        for row, label in zip(features, labels, strict=True):
            if label == name:
                total += row / math.sqrt(float((row**2).sum()))
        means.append(total / labels.count(name))
    u = plain_features(vit.model, batch)
    same(asked.logits(batch), [[cosine(u[i], mean) for mean in means] for i in range(3)])


@pytest.mark.parametrize("neighbours", [1, 2, 9])
def test_prototypes_of_nearest_neighbours(vit: Anatomy, batch: Tensor, neighbours: int) -> None:
    features, labels = drawn(5, 48), torch.tensor([1, 0, 1, 0, 1])
    asked = vit.ask(heads.Prototypes(features, labels, neighbours=neighbours))
    assert asked.labels == ["1", "0"]
    u = plain_features(vit.model, batch)
    expected = []
    for i in range(3):
        row = []
        for name in (1, 0):
            each = sorted((cosine(u[i], f) for f, own in zip(features, labels.tolist(), strict=True) if own == name))
            nearest = each[-neighbours:]
            row.append(sum(nearest) / len(nearest))
        expected.append(row)
    same(asked.logits(batch), expected)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("block", [1, 2, 3])
@pytest.mark.parametrize("kind", ["channels", "directions"])
def test_neurons(vit: Anatomy, batch: Tensor, block: int, pool: Any, kind: str) -> None:
    channels, center, bias = [3, 17], drawn(48, seed=2), drawn(2, seed=3)
    directions = torch.eye(48, dtype=DOUBLE)[channels] if kind == "channels" else drawn(2, 48, seed=4)
    given: dict[str, Any] = {"channels": channels} if kind == "channels" else {"directions": directions}
    asked = vit.ask(heads.Neurons(block, **given, pool=pool, center=center, bias=bias))
    x = plain_tokens(vit.model, batch, block)
    expected = []
    for i in range(3):
        row = []
        for f in range(2):
            fires = [sum(float(w * (v - c)) for w, v, c in zip(directions[f], token, center, strict=True))
                     for token in x[i]]  # fmt: skip
            patches = fires[1:]
            pooled = {"avg": sum(patches) / len(patches), "cls": fires[0], "max": max(patches)}[pool]
            row.append(pooled + float(bias[f]))
        expected.append(row)
    same(asked.logits(batch), expected)
    assert asked.outputs.kind == "none"
    assert asked.depth == block


@pytest.mark.parametrize("family", ["reg4-gap", "siglip"])
@pytest.mark.parametrize("pool", ["avg", "max"])
def test_neurons_read_the_patches_and_no_prefix(family: str, pool: Any) -> None:
    vit = shared(family, DOUBLE)
    batch = images(vit, 2)
    asked = vit.ask(heads.Neurons(2, [5], pool=pool))
    x = plain_tokens(vit.model, batch, 2)[:, vit.prefix :, 5]
    same(asked.logits(batch)[:, 0], [max(row) if pool == "max" else sum(row) / len(row) for row in x.tolist()])


@pytest.mark.parametrize("pool", POOLS)
def test_the_row_of_a_neuron_is_what_it_reads(vit: Anatomy, batch: Tensor, pool: Any) -> None:
    """s = sum_i r_i <w, x_i - center> + bias with the row r that methods begin with."""
    center, bias, w = drawn(48, seed=2), drawn(3, seed=3), drawn(3, 48, seed=4)
    head = heads.Neurons(2, directions=w, pool=pool, center=center, bias=bias).bound(vit)
    x = plain_tokens(vit.model, batch, 2)
    for f in range(3):
        row = head.read_row(x, torch.full((3,), f))
        same(row.sum(1), torch.ones(3))
        fires = ((x - center) * w[f]).sum(-1)
        same((row * fires).sum(1) + bias[f], head(x)[:, f])


# A neuron's model ends at its block


def test_a_neuron_does_not_see_later_blocks(batch: Tensor) -> None:
    vit = build("vit", DOUBLE)
    asked = vit.ask(heads.Neurons(2, [3, 17], pool="max"))
    names = ["genatt", "rollout", "ixg.libra", "gradcam.plus", "tokentm"]
    before, logits = pl.explain(asked, batch, names), asked.logits(batch)
    later: Any = vit.model.blocks[2]  # type: ignore[index,union-attr]
    with torch.no_grad():
        for p in later.parameters():
            p.mul_(-3).add_(0.5)
        vit.model.head.weight.mul_(2)  # type: ignore[union-attr,operator]
    after = pl.explain(asked, batch, names)
    same(asked.logits(batch), logits, 0)
    for name in names:
        assert torch.equal(after[name].scores, before[name].scores), name
    with torch.no_grad():
        vit.model.blocks[1].mlp.fc2.bias.add_(1)  # type: ignore[index,union-attr]
    assert not torch.equal(asked.logits(batch), logits)


def test_the_evidence_of_a_neuron_is_of_its_blocks(vit: Anatomy, batch: Tensor) -> None:
    """As many attention matrices as blocks before it, and the gradients of an ordinary backward."""
    asked = vit.ask(heads.Neurons(2, [3], pool="avg"))
    x = [plain_tokens(vit.model, batch, k) for k in range(3)]
    begin = x[0].clone().requires_grad_()
    end: Any = begin
    for block in list(vit.model.blocks)[:2]:  # type: ignore[arg-type]
        end = block(end)
    (gradient,) = torch.autograd.grad(end[:, 1:, 3].mean(1).sum(), begin)
    with pl.trace(asked, batch, target=0) as seen:
        assert (len(seen.attention), len(seen.gradients), len(seen.tokens)) == (2, 2, 3)
        same(seen.gradients[0], gradient)
        for found, expected in zip(seen.tokens, x, strict=True):
            same(found, expected)


def test_a_max_pooled_neuron_is_explained_from_its_own_token(vit: Anatomy, batch: Tensor) -> None:
    """The raw attention of one block is the row of the patch that fires most."""
    asked = vit.ask(heads.Neurons(1, [3], pool="max"))
    with pl.trace(asked, batch, target=0) as seen:
        attention = seen.attention[0].mean(1)
    fired = plain_tokens(vit.model, batch, 1)[:, 1:, 3].argmax(1) + 1
    expected = torch.stack([attention[i, fired[i], 1:] for i in range(3)])
    same(pl.explain(asked, batch, "rawatt", target=0).scores.double().flatten(1), expected, 1e-6)


# What a head leaves alone, and what it follows


def test_asking_touches_neither_the_model_nor_the_first_anatomy(batch: Tensor) -> None:
    vit = build("vit", DOUBLE)
    state = copy.deepcopy(vit.model.state_dict())
    labels, logits, maps = vit.labels, vit.logits(batch), pl.explain(vit, batch).scores
    one = vit.ask(heads.Linear(drawn(2, 48), labels=["x", "y"]))
    two = vit.ask(heads.Neurons(2, [3, 4]))
    expected = one.logits(batch), two.logits(batch), pl.explain(one, batch).scores, pl.explain(two, batch).scores
    for _ in range(2):  # in turn
        assert torch.equal(one.logits(batch), expected[0])
        assert torch.equal(two.logits(batch), expected[1])
        assert torch.equal(pl.explain(one, batch).scores, expected[2])
        assert torch.equal(vit.logits(batch), logits)
        assert torch.equal(pl.explain(two, batch).scores, expected[3])
        assert torch.equal(pl.explain(vit, batch).scores, maps)
    assert (vit.labels, vit.head, vit.depth, vit.classes) == (labels, None, 3, 7)
    assert all(torch.equal(state[key], value) for key, value in vit.model.state_dict().items())
    assert one.model is two.model is vit.model


def test_a_head_can_be_exchanged(vit: Anatomy, batch: Tensor) -> None:
    one = vit.ask(heads.Neurons(2, [3]))
    two = one.ask(heads.Linear(drawn(2, 48)))
    assert (two.depth, two.bare) == (3, vit)
    same(two.logits(batch), vit.ask(heads.Linear(drawn(2, 48))).logits(batch))
    assert torch.equal(
        pl.wrap(one, head=heads.Neurons(1, [2])).logits(batch), vit.ask(heads.Neurons(1, [2])).logits(batch)
    )


def test_a_headed_anatomy_follows_its_model(batch: Tensor) -> None:
    vit = build("vit", DOUBLE)
    asked = vit.ask(heads.Linear(drawn(2, 48)))
    reference = vit.ask(heads.Similar(batch[:1]))
    before = asked.logits(batch), reference.logits(batch)
    randomise(vit.model, seed=9)
    u = plain_features(vit.model, batch)
    same(asked.logits(batch), u @ drawn(2, 48).mT)
    assert not torch.allclose(before[0], asked.logits(batch))
    assert not torch.allclose(before[1], reference.logits(batch))  # of the reference as it was seen when asked
    vit.model.float()
    assert torch.allclose(asked.logits(batch.float()).double(), u @ drawn(2, 48).mT, atol=1e-4)
    assert asked.dtype == torch.float32
    assert pl.explain(asked, batch.float()).scores.isfinite().all()


@pytest.mark.parametrize("copied", [lambda v: pickle.loads(pickle.dumps(v)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_copies_are_whole_and_their_own(copied: Any, batch: Tensor) -> None:
    vit = build("vit", DOUBLE)
    made = (
        heads.Similar(images(vit, 2, seed=7)),
        heads.Neurons(2, [3, 4], pool="max"),
        heads.Linear(drawn(2, 48)),
        heads.Prototypes(drawn(4, 48), [0, 1, 0, 1], neighbours=1),
    )
    for head in made:
        asked = vit.ask(head)
        other = copied(asked)
        assert torch.equal(other.logits(batch), asked.logits(batch))
        assert torch.equal(pl.explain(other, batch, target=1).scores, pl.explain(asked, batch, target=1).scores)
        assert other.bare.model is other.model
        assert other.model is not asked.model
        with torch.no_grad():
            other.model.blocks[0].mlp.fc2.bias.add_(1)
        assert not torch.equal(other.logits(batch), asked.logits(batch))


def test_what_a_head_was_made_of_is_saved(vit: Anatomy, batch: Tensor, tmp_path: Path) -> None:
    asked = {
        "linear": vit.ask(heads.Linear(drawn(2, 48), labels=["x", "y"])),
        "other weights": vit.ask(heads.Linear(drawn(2, 48, seed=1), labels=["x", "y"])),
        "texts": vit.ask(heads.Texts(drawn(2, 48), ["x", "y"])),
        "similar": vit.ask(heads.Similar(batch[:2])),
        "prototypes": vit.ask(heads.Prototypes(drawn(2, 48), ["x", "y"])),
        "neurons": vit.ask(heads.Neurons(2, [3, 4])),
        "a bias": vit.ask(heads.Neurons(2, [3, 4], bias=[1.0, 2.0])),
    }
    made = {name: pl.explain(one, images(vit, 1, seed=8), target=0) for name, one in asked.items()}
    for name, att in made.items():
        back = pl.Attribution.load(att.save(tmp_path / name))
        assert back.head == att.head == asked[name].head.about()  # type: ignore[union-attr]
        assert att.weights == identity(asked[name])
    assert made["similar"].head["images"] == list(hash_images(batch[:2]))
    assert made["linear"].head["labels"] == ["x", "y"]
    assert made["neurons"].head["channels"] == [3, 4]
    assert len({att.weights for att in made.values()} | {identity(vit)}) == len(made) + 1
    assert pl.explain(vit, batch).head == {}


def test_maps_of_one_head_are_not_measured_on_another(vit: Anatomy, batch: Tensor) -> None:
    one, two = (vit.ask(heads.Linear(drawn(2, 48, seed=s))) for s in (0, 1))
    att = pl.explain(one, batch)
    assert pl.evaluate(one, batch, att, "deletion", steps=2).values.isfinite().all()
    with pytest.raises(PatchlightError, match="another head"):
        pl.evaluate(two, batch, att, "deletion", steps=2)


# Backbones without a classifier


@pytest.mark.parametrize("family", ["vit", "dinov2-reg"])
def test_a_backbone_needs_a_head(family: str) -> None:
    model = randomise(FAMILIES[family]())
    model.reset_classifier(0)  # type: ignore[operator]
    with pytest.raises(PatchlightError, match=r"no classifier.*Similar.*Prototypes.*Linear.*Neurons"):
        pl.wrap(model)
    vit = pl.wrap(model, head=heads.Linear(torch.ones(2, 48)))
    assert vit.classes == 2
    assert vit.logits(images(vit, 2)).shape == (2, 2)
    assert pl.explain(vit, images(vit, 2)).scores.shape == (2, 4, 4)


# What is refused


def test_bad_heads_are_one_sentence(vit: Anatomy, tmp_path: Path) -> None:
    torn = tmp_path / "torn.jpg"
    torn.write_bytes(b"no picture")
    nan = drawn(2, 48)
    nan[1, 3] = torch.nan
    small = drawn(2, 48)
    complaints: list[tuple[str, Any]] = [
        ("text 1 is empty", lambda: heads.Texts(["a cat", " "])),
        ("no sentences", lambda: heads.Texts([])),
        ("two classes are called", lambda: heads.Texts(["a cat", "a cat"])),
        ("no placeholder for the text", lambda: heads.Texts(["a cat"], template="a photo")),
        ("no placeholder for the text", lambda: heads.Texts(["a cat"], template=[])),
        ("texts is a dict", lambda: heads.Texts({"a": 1})),
        ("no text encoder", lambda: vit.ask(heads.Texts(["a cat"]))),
        ("no reference images", lambda: heads.Similar([])),
        ("torn.jpg", lambda: vit.ask(heads.Similar([torn]))),
        ("nowhere.jpg", lambda: vit.ask(heads.Similar(["nowhere.jpg"]))),
        ("given as int", lambda: vit.ask(heads.Similar(3))),
        ("width 47.*48 wide", lambda: vit.ask(heads.Linear(drawn(2, 47)))),
        ("width 47.*48 wide", lambda: vit.ask(heads.Texts(drawn(2, 47)))),
        ("width 47.*48 wide", lambda: vit.ask(heads.Prototypes(drawn(2, 47), [0, 1]))),
        ("weight has shape", lambda: heads.Linear(drawn(48))),
        ("weight is a str", lambda: heads.Linear("weights")),
        ("bias has shape \\[3\\].*\\[2\\]", lambda: heads.Linear(small, drawn(3))),
        ("bias is a str", lambda: heads.Linear(small, "bias")),
        ("NaN or infinity", lambda: heads.Linear(small, [1.0, math.nan])),
        ("weight contains NaN", lambda: heads.Linear(nan)),
        ("texts contains NaN", lambda: heads.Texts(nan)),
        ("features contains NaN", lambda: heads.Prototypes(nan, [0, 1])),
        ("directions contains NaN", lambda: heads.Neurons(1, directions=nan)),
        ("center contains NaN", lambda: heads.Neurons(1, [3], center=nan[1])),
        ("bias contains NaN", lambda: heads.Neurons(1, [3], bias=[math.nan])),
        ("sigmoid.*regression", lambda: heads.Linear(small, sigmoid=True, regression=True)),
        ("no direction", lambda: heads.Texts(torch.zeros(2, 48))),
        ("no direction", lambda: heads.Prototypes(torch.zeros(2, 48), [0, 1])),
        ("3 labels.*2", lambda: heads.Linear(small, labels=["a", "b", "c"])),
        ("labels.*a str", lambda: heads.Linear(small, labels="ab")),
        ("3 labels.*2", lambda: heads.Texts(small, ["a", "b", "c"])),
        ("3 labels.*2", lambda: heads.Prototypes(small, [0, 1, 1])),
        ("1 labels.*2", lambda: heads.Similar(images(vit, 2), ["a"])),
        ("neighbours.*0", lambda: heads.Prototypes(small, [0, 1], neighbours=0)),
        ("no channel 48.*0 to 47", lambda: vit.ask(heads.Neurons(1, [48]))),
        ("channel.*-1", lambda: heads.Neurons(1, [-1])),
        ("no channels", lambda: heads.Neurons(1, [])),
        ("channel .a. is a str", lambda: heads.Neurons(1, ["a"])),  # type: ignore[list-item]
        ("block.*0", lambda: heads.Neurons(0, [1])),
        ("1 to 3", lambda: vit.ask(heads.Neurons(4, [1]))),
        ("block 1.5", lambda: heads.Neurons(1.5, [1])),  # type: ignore[arg-type]
        ("one of the two", lambda: heads.Neurons(1)),
        ("one of the two", lambda: heads.Neurons(1, [1], directions=small)),
        ("pool is 'sum'", lambda: heads.Neurons(1, [1], pool="sum")),  # type: ignore[arg-type]
        ("width 47", lambda: vit.ask(heads.Neurons(1, directions=drawn(2, 47)))),
        ("center has width 47", lambda: vit.ask(heads.Neurons(1, [1], center=drawn(47)))),
        ("bias has shape \\[3\\].*\\[2\\]", lambda: heads.Neurons(1, [1, 2], bias=drawn(3))),
        ("no CLS token", lambda: shared("siglip").ask(heads.Neurons(1, [1], pool="cls"))),
        ("head is a str", lambda: pl.wrap(vit, head="similar")),  # type: ignore[arg-type]
        ("head or texts, not both", lambda: pl.wrap(vit, head=heads.Linear(small), texts=["a"])),
        ("head or texts, not both", lambda: pl.load("pocket", head=heads.Linear(small), texts=["a"])),
        ("labels cannot be given", lambda: pl.wrap(vit, labels=["a", "b"], head=heads.Linear(small))),
        ("no text encoder", lambda: pl.wrap(vit, texts=["a cat", "a dog"])),
    ]  # fmt: skip
    for words, action in complaints:
        with pytest.raises(PatchlightError, match=words) as told:
            action()
        assert "\n" not in str(told.value), str(told.value)


def test_heads_asked_in_inference_mode_have_gradients(batch: Tensor) -> None:
    vit = shared("vit")
    with torch.inference_mode():
        asked = [vit.ask(head) for head in (heads.Linear(drawn(2, 48)), heads.Neurons(2, directions=drawn(2, 48)))]
        for one in asked:
            one.logits(batch.float())
    for one in asked:
        assert pl.explain(one, batch.float(), "genatt").scores.isfinite().all()


def test_references_of_one_name_have_different_labels() -> None:
    assert heads.Similar(["a/cat.jpg", "b/cat.jpg", "dog.png"]).labels == ["a/cat.jpg", "b/cat.jpg", "dog"]


def test_hierarchical_models_are_asked_too() -> None:
    vit = shared("swin")
    asked = vit.ask(heads.Similar(images(vit, 1, seed=4)))
    assert pl.explain(asked, images(vit, 2), "gradcam").scores.isfinite().all()


def test_scores_that_a_head_has_not_are_refused(vit: Anatomy, batch: Tensor) -> None:
    neuron = vit.ask(heads.Neurons(2, [3, 4]))
    with pytest.raises(Unsupported, match=r"no probabilities.*score='logit'"):
        pl.explain(neuron, batch, score="probability")
    with pytest.raises(Unsupported, match="not computed from cosines"):
        pl.explain(neuron, batch, score="cosine")
    assert pl.explain(neuron, batch, "tis").score == "logit"
    similar = vit.ask(heads.Similar(images(vit, 2, seed=4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        half = pl.explain(similar, batch, "ixg", score="probability").scores  # (1 + cos) / 2
        assert torch.allclose(2 * half, pl.explain(similar, batch, "ixg", score="cosine").scores, rtol=1e-5)


def test_a_head_is_bound_again_to_another_model(vit: Anatomy, batch: Tensor) -> None:
    """References are read by the model that is asked, whoever was asked before."""
    asked = vit.ask(heads.Similar(batch[:1]))
    other = pl.wrap(randomise(copy.deepcopy(vit.model), seed=7), name="other", head=asked.head)
    torch.testing.assert_close(other.logits(batch[:1]), torch.ones(1, 1, dtype=batch.dtype))
    again = other.ask(other.head)
    torch.testing.assert_close(again.logits(batch), other.logits(batch))


def test_identity_does_not_hang_on_rounding(vit: Anatomy, batch: Tensor) -> None:
    asked = vit.ask(heads.Similar(batch[:1]))
    rounded = copy.deepcopy(asked)
    rounded.head._rows.values.mul_(1 + 1e-12)
    assert identity(rounded) == identity(asked)
    assert identity(vit.ask(heads.Similar(batch[1:2]))) != identity(asked)


def test_a_comma_in_a_sentence_is_no_synonym(vit: Anatomy, batch: Tensor) -> None:
    width = vit.features_of(batch).shape[1]
    asked = vit.ask(heads.Texts(drawn(2, width), ["a cat, the dog", "a road"]))
    assert pl.explain(asked, batch, target="a cat, the dog").target.tolist() == [0] * len(batch)
    with pytest.raises(PatchlightError, match="no class is called 'the dog'"):
        pl.explain(asked, batch, target="the dog")


def test_a_lone_row_is_a_yes_or_no(vit: Anatomy, batch: Tensor) -> None:
    width = vit.features_of(batch).shape[1]
    asked = vit.ask(heads.Linear(drawn(1, width), labels=["yes"]))
    logits = asked.logits(batch)
    torch.testing.assert_close(asked.probabilities(logits), logits.sigmoid())
    assert asked.predict(batch)[0][0][0] == "yes"


def test_what_is_about_the_own_classifier_is_refused_beside_a_head(vit: Anatomy) -> None:
    width = vit.features_of(images(vit, 1)).shape[1]
    for own in ({"sigmoid": True}, {"regression": True}, {"labels": list("abcdefg")}):
        with pytest.raises(PatchlightError, match=f"give {next(iter(own))} to the head"):
            pl.wrap(vit.model, head=heads.Linear(drawn(2, width)), **own)
    with pytest.raises(PatchlightError, match="template applies to sentences"):
        pl.wrap(vit.model, template="a {}")
    with pytest.raises(PatchlightError, match="template applies to sentences"):
        heads.Texts(drawn(2, width), template="a {}")


def test_one_tensor_is_one_reference(vit: Anatomy, batch: Tensor) -> None:
    assert vit.ask(heads.Similar(batch[0])).classes == 1


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (heads.Box, {"box": "1234"}),
        (heads.Box, {"box": 5}),
        (heads.Box, {"box": ("left", 2, 3, 4)}),
        (heads.Box, {"box": [None] * 4}),
        (heads.Box, {"label": 1.5}),
        (heads.Boxes, {"threshold": "sure"}),
        (heads.Boxes, {"score": []}),
        (heads.Region, {"box": "1234"}),
        (heads.Region, {"point": "xy"}),
        (heads.Region, {"label": []}),
        (heads.Mask, {"points": [1, 2, 3]}),
        (heads.Mask, {"points": "xy"}),
        (heads.Answer, {"prompt": 5}),
        (heads.Answer, {"prompt": ["what"]}),
        (heads.Answer, {"prompt": "what", "words": [5]}),
        (heads.Answer, {"prompt": "what", "choices": "no"}),
        (heads.Answer, {"prompt": "what", "without": "looking"}),
    ],
)
def test_arguments_of_questions_have_their_types(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(PatchlightError, match=f"^setting {list(settings)[-1]}=.* of '{kind.__name__}' is not valid: "):
        kind(**settings)


def test_arrays_stand_for_numbers() -> None:
    assert heads.Box(box=torch.tensor([1, 2, 3, 4]).numpy()).box == (1, 2, 3, 4)
    assert heads.Mask(torch.tensor([[1.0, 2.0]])).points == [[1, 2]]


def test_pocket_may_be_random() -> None:
    trained, random = pl.load("pocket"), pl.load("pocket", pretrained=False)
    assert identity(trained) != identity(random)
