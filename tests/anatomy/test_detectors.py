"""Detectors: parts and whole, queries that are held, removal of cells, and what `detect` returns."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

import patchlight as pl
from patchlight.anatomy.detectors import prepared_by
from patchlight.anatomy.heads.boxes import corners, iou
from patchlight.anatomy.watching import Unseen
from patchlight.core.errors import PatchlightError
from patchlight.data import Batch
from patchlight.methods.requests import resolve
from patchlight.metrics.base import resolve_metric
from patchlight.study.run import study_batch
from patchlight.testing import check_method, contract_names
from patchlight.zoo.shapes import SCENES
from tests import detectors

NAMES = list(detectors.MODELS)


def plain(name: str, images: Tensor) -> Any:
    """The output of the model as its users run it."""
    vit: Any = detectors.opened(name)
    if name not in detectors.TEXTS:
        return vit.model(images)
    ids = {key: value.repeat(len(images), 1) for key, value in vit.ids.items()}
    return vit.model(pixel_values=images, **ids)


def by_text(logits: Tensor) -> Tensor:
    """The logits of the four letters of each of two texts of Grounding DINO."""
    return torch.stack([logits[..., 1:5], logits[..., 6:10]], 2)


@pytest.mark.parametrize("name", NAMES)
def test_parts_make_the_whole(name: str) -> None:
    vit, images = detectors.opened(name), detectors.images(name, 2)
    out = plain(name, images)
    logits = by_text(out.logits).amax(3) if name == "grounding" else out.logits
    whole = torch.cat([logits.flatten(1), out.pred_boxes.flatten(1)], 1)
    torch.testing.assert_close(vit.logits(images), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_autograd(name: str) -> None:
    vit, images = detectors.opened(name), detectors.images(name)
    att = pl.explain(vit, images, "ixg", head=pl.heads.Box(query=2, score="class"), level="pixel")
    leaf = images.clone().requires_grad_()
    out = plain(name, leaf)
    held = int((out.logits[0, 2, :-1] if name in ("yolos", "detr") else out.logits[0, 2]).argmax())
    if name in ("yolos", "detr"):
        p = out.logits[0, 2].softmax(0)[held]
        score = (p / (1 - p)).log()
    elif name == "grounding":
        letters = by_text(out.logits)[0, 2]
        score = letters[letters.amax(1).argmax()].mean()
    else:
        score = out.logits[0, 2, held]
    (gradient,) = torch.autograd.grad(score, leaf)
    torch.testing.assert_close(att.scores, (gradient * leaf).sum(1).detach(), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_match_is_the_probability_where_nothing_is_removed(name: str) -> None:
    vit, images = detectors.opened(name), detectors.images(name)
    found = vit.detect(images, threshold=0)
    number = next(i for i, d in enumerate(found) if (d.box[2] - d.box[0]) * (d.box[3] - d.box[1]) > 4)
    surest = found[number]
    asked = vit.ask(pl.heads.Box(detection=number)).prepared(images)
    assert asked.question.references[0].query == surest.query
    value = float(asked.probabilities(asked.logits(images))[0])
    assert value >= surest.score - 1e-5  # another query may match better, except for the surest
    assert number > 0 or value == pytest.approx(surest.score, abs=1e-5)
    assert asked.labels[0].startswith(f"{surest.label} at ")


@pytest.mark.parametrize("name", ["rf", "lw"])
def test_windows_in_the_batch_axis_are_put_together(name: str) -> None:
    vit: Any = detectors.opened(name)
    assert (vit.grid, vit.windows, vit.states_read) == ((8, 8), 4, (2, 4))
    inside, whole = (4, vit.tokens // 4, vit.tokens // 4), (1, vit.tokens, vit.tokens)
    everywhere = {"rf": (2,), "lw": (1, 3)}[name]
    assert [reach.shape for reach in vit.reaches] == [whole if i in everywhere else inside for i in range(4)]
    numbers = torch.arange(64.0).view(8, 8)
    cells = vit.reaches[0].queries(vit.layout.of_tokens(numbers.view(1, 64)))[0, :, vit.prefix // 4 :]
    assert cells[1].tolist() == numbers[:4, 4:].flatten().tolist()
    images = detectors.images(name)
    changed = images.clone()
    changed[..., 8:16, 40:48] += 1
    with vit.steady(), torch.no_grad():
        before, after = (vit.layout.of_cells(vit.embed(each))[0] for each in (images, changed))
    assert (before != after).any(1).nonzero().flatten().tolist() == [numbers[1, 5]]


class Two(pl.heads.Boxes):
    """Two detections, of which the first is explained by default."""

    def default_target(self) -> int:
        return 0


QUICK = ("ixg", "genatt", "occlusion", "random")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if name in QUICK and kind == "rf" else pytest.mark.slow)
        for kind in ("rf", "rt")
        for name in contract_names()
    ],
)
def test_methods_keep_their_contract(kind: str, name: str) -> None:
    """YOLOS is among the models of test_segmenters.py."""
    check_method(name, detectors.opened(kind).ask(Two(threshold=0, top=2)), detectors.images(kind, 2))


@pytest.mark.parametrize("name", ["rf", "lw", "two-stage"])
def test_a_query_that_is_selected_again_is_refused_on_changed_images(name: str) -> None:
    vit, images = detectors.opened(name), detectors.images(name)
    with pytest.raises(PatchlightError, match=r"chosen anew for every image, .* score='match' works"):
        pl.explain(vit, images, "rise", head=pl.heads.Box(score="class"), samples=8)
    att = pl.explain(vit, images, "rise", head=pl.heads.Box(), samples=8)
    assert att.scores.any()
    assert att.head["held"] == "selection"
    missed = pl.heads.Box(box=vit.detect(images, threshold=0)[0].box, label=0, missed=True)  # read by its match
    assert pl.explain(vit, images, "rise", head=missed, samples=8).scores.any()
    with pytest.raises(PatchlightError):
        pl.explain(vit, images, "occlusion", unit="token")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rt", r"reads the image beside its tokens \(other scales of its backbone\)"),
        ("deformable", "deformable attention looks at points between cells, so it has no rows"),
    ],
)
def test_detectors_that_read_several_maps_are_opened_at_the_first(name: str, words: str) -> None:
    vit, images = detectors.opened(name), detectors.images(name)
    assert vit.grid == (8, 12)
    with pytest.raises(PatchlightError, match=words):
        pl.explain(vit, images, "genatt")
    assert pl.explain(vit, images, "gradcam").scores.any()


def test_a_map_that_is_not_all_that_is_read_is_refused() -> None:
    model, about = detectors.MODELS["rt"](), {"preprocess": pl.Preprocess(detectors.SIZE), "name": "rt"}
    assert pl.wrap(model, stage=-4, **about).grid == (16, 24)
    with pytest.raises(PatchlightError, match="also reads earlier maps of its backbone than that of stage -1; give"):
        pl.wrap(model, stage=-1, **about)


def hidden(name: str, vit: Any, images: Tensor, keep: Tensor) -> Tensor:
    """The scores if the keys of all other cells are hidden, from all attention that reads cells."""
    seen = torch.zeros(1, vit.tokens, dtype=torch.bool)
    seen[0, vit.places(keep)[0]] = True
    tokens = vit.embed(images)
    for index in range(vit.depth):
        tokens = vit.merge(index, tokens)
        with Unseen(seen):
            tokens = vit.block(index, tokens)
    if name == "yolos":
        return vit.readout(tokens)
    if name.startswith("owl"):
        return vit.readout(tokens)

    class Cells(Unseen):
        """Only attention to cells is restricted, not that between queries."""

        def scaled_dot_product_attention(self, func: Any, query: Any, key: Any, *rest: Any, **more: Any) -> Tensor:
            inside = key.shape[-2] == vit.tokens and query.shape[-2] == detectors.QUERIES
            own = super().scaled_dot_product_attention
            return own(func, query, key, *rest, **more) if inside else func(query, key, *rest, **more)

    with Cells(seen):
        return vit.readout(tokens)


@pytest.mark.parametrize("name", ["yolos", "detr", "conditional", "owl"])
def test_dropping_cells_equals_hiding_their_keys(name: str) -> None:
    bare, images = detectors.opened(name), detectors.images(name)
    assert bare.can_drop is None
    vit: Any = bare.ask(pl.heads.Box(score="class")).prepared(images)
    keep = torch.tensor([[0, 2, 5]])
    assert vit.tokens != detectors.QUERIES  # to tell attention to cells from that between queries
    with vit.steady(), torch.no_grad():
        dropped = vit.readout(vit.run(vit.embed(images), keep=keep))
        assert not torch.allclose(dropped, vit.readout(vit.run(vit.embed(images))), atol=1e-5)
        torch.testing.assert_close(dropped, hidden(name, vit, images, keep), atol=1e-5, rtol=1e-4)


def test_the_patch_of_an_owl_query_stays() -> None:
    images = detectors.images("owl")
    vit: Any = detectors.opened("owl").ask(pl.heads.Box(query=7, score="class")).prepared(images)
    keep = torch.tensor([[1, 4, 7], [4, 1, 3]])
    with vit.steady(), torch.no_grad():
        embedded = vit.embed(images)
        both = vit.readout(vit.run(embedded.repeat(2, 1, 1), keep=keep))
        only = vit.readout(vit.run(embedded, keep=torch.tensor([[1, 4]])))
        other = vit.readout(vit.run(embedded, keep=torch.tensor([[7, 3, 4, 1]])))
    torch.testing.assert_close(both[:1], only, atol=1e-5, rtol=1e-4)  # the own patch does not count twice
    torch.testing.assert_close(both[1:], other, atol=1e-5, rtol=1e-4)


def test_a_query_of_yolos_reads_its_own_token() -> None:
    vit: Any = detectors.opened("yolos").ask(pl.heads.Box(query=3)).prepared(detectors.images("yolos"))
    with vit.steady():
        tokens = vit.run(vit.embed(detectors.images("yolos")))
        row = vit.pool_row(vit.readout(tokens), None, tokens, torch.tensor([0]))
    assert row[0, vit.prefix + vit.cells + 3] == pytest.approx(1)


def test_detection_tokens_in_another_order_are_other_queries() -> None:
    torch.manual_seed(0)  # as `opened`
    model, order = detectors.yolos(), torch.tensor([3, 0, 4, 1, 2])
    stem, encoder = model.vit.embeddings, model.vit.encoder
    for table in (stem.detection_tokens, stem.position_embeddings, encoder.interpolation.mid_position_embeddings):
        table.data[..., -len(order) :, :] = table.data[..., -len(order) :, :][..., order, :].clone()
    turned = pl.wrap(model, labels=detectors.LABELS, preprocess=pl.Preprocess(detectors.SIZE, fit="squash"))
    images = detectors.images("yolos")
    for method in ("ixg", "genatt", "tis"):
        maps = [
            pl.explain(vit, images, method, head=pl.heads.Box(query=query)).scores
            for vit, query in ((detectors.opened("yolos"), 4), (turned, 2))
        ]
        torch.testing.assert_close(maps[0], maps[1], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["owl", "owlv2"])
def test_a_query_of_owl_by_hand(name: str) -> None:
    vit: Any = detectors.opened(name)
    images, net = detectors.images(name), vit.net
    with vit.steady(), torch.no_grad():
        tower = net.owlvit if name == "owl" else net.owlv2
        tokens = tower.vision_model.post_layernorm(vit.run(vit.embed(images)))
        features = net.layer_norm(tokens[:, 1:] * tokens[:, :1])
        head = net.class_head
        unit = torch.nn.functional.normalize(head.dense0(features), dim=-1)
        texts = torch.nn.functional.normalize(net.patchlight_texts, dim=-1)
        logits = (unit @ texts.mT + head.logit_shift(features)) * (head.elu(head.logit_scale(features)) + 1)
        boxes = (net.box_head(features) + net.box_bias).sigmoid()
        out = vit.call(images)
    torch.testing.assert_close(out.logits, logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.pred_boxes, boxes, atol=1e-5, rtol=1e-4)


def test_texts_in_another_order_are_other_classes() -> None:
    vit: Any = detectors.opened("owl")
    images = detectors.images("owl")
    turned = vit.with_texts(["cat", "dog"])
    a, b = (each.call(images).logits for each in (vit, turned))
    torch.testing.assert_close(a, b.flip(2))
    assert not torch.allclose(a, b)


def test_detect_gives_boxes_on_the_photograph(tmp_path: Path) -> None:
    vit = detectors.opened("yolos")
    pixels = torch.randint(0, 255, (128, 256, 3), generator=torch.Generator().manual_seed(0)).byte()
    Image.fromarray(pixels.numpy()).save(tmp_path / "a.png")
    found = vit.detect(tmp_path / "a.png", threshold=0)
    assert len(found) == detectors.QUERIES
    assert len(vit.detect(tmp_path / "a.png", threshold=1)) == 0
    assert [d.score for d in found] == sorted((d.score for d in found), reverse=True)
    out = vit.call(vit.batch([tmp_path / "a.png"]))
    expected = corners(out.pred_boxes[0, found[0].query]).clamp(0, 1) * torch.tensor([256, 128, 256, 128])
    torch.testing.assert_close(torch.tensor(found[0].box), expected, atol=1e-3, rtol=1e-4)
    table = str(found).splitlines()
    assert table[0].split() == ["label", "score", "left", "top", "right", "bottom"]
    assert len(table) == 1 + detectors.QUERIES
    att = pl.explain(vit, tmp_path / "a.png", "ixg", head=pl.heads.Box(box=found[0].box, label=found[0].label))
    assert att.labels[0] == f"{found[0].label} at {' '.join(f'{side:.0f}' for side in found[0].box)}"


def test_a_missed_object() -> None:
    vit: Any = detectors.opened("yolos")
    images = detectors.images("yolos")
    found = vit.detect(images, threshold=0)[2]
    label = next(name for name in detectors.LABELS if name not in {each.label for each in vit.detect(images, 0)})
    question = pl.heads.Box(box=found.box, label=label, missed=True)
    asked = vit.ask(question).prepared(images)
    wanted, won = asked.question.references
    assert wanted.query == won.query
    assert vit.class_names[wanted.label] == label
    assert won.label != wanted.label
    att = pl.explain(vit, images, "ixg", head=question, target=0, against=1)
    assert att.labels[0].startswith(f"{label} ")
    assert att.against_names[0].startswith(vit.class_names[won.label])


def test_scores() -> None:
    vit: Any = detectors.opened("yolos")
    images = detectors.images("yolos")
    out = vit.call(images)
    boxes, chances = corners(out.pred_boxes)[0], out.logits[0].softmax(1)[:, :-1]

    def value(which: int = 0, **given: Any) -> float:
        asked = vit.ask(pl.heads.Box(query=1, label="dog", **given)).prepared(images)
        return float(asked.logits(images)[0, which])

    overlap = iou(boxes, boxes[1])
    assert value(score="match") == pytest.approx(float((overlap * chances[:, 1]).max()), abs=1e-6)
    assert value(1) == value(score="match")
    assert value(1, score="class") == pytest.approx(float(chances[1, 1]), abs=1e-6)
    assert value(score="logit") == pytest.approx(float(out.logits[0, 1, 1]), abs=1e-5)
    assert value(score="box") == pytest.approx(1)
    assert value(score="top") == pytest.approx(float(boxes[1, 1]), abs=1e-6)
    same = torch.cosine_similarity(chances, chances[1], 1)
    assert value(score="drise") == pytest.approx(float((overlap * same).max()), abs=1e-6)


def test_boxes_explains_all_detections() -> None:
    vit, images = detectors.opened("conditional"), detectors.images("conditional", 2)
    att = pl.explain(vit, images, "ixg", head=pl.heads.Boxes(threshold=0.1, top=3))
    assert tuple(att.scores.shape) == (2, 3, 2, 3)
    single = pl.explain(vit, images[1:], "ixg", head=pl.heads.Box(detection=2))
    torch.testing.assert_close(att.scores[1, 2], single.scores[0], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (lambda: pl.heads.Boxes(threshold=math.nan), "detects nothing with a score of at least nan"),
        (lambda: pl.heads.Boxes(threshold=0.999), "detects nothing with a score of at least 0.999"),
        (lambda: pl.heads.Box(box=(200, 10, 250, 40)), "lies outside the image, which is 96 pixels wide and 64 high"),
        (lambda: pl.heads.Box(box=(30, 10, 20, 40)), "is empty"),
        (
            lambda: pl.heads.Box(box=(0, 0, 1, 1), label="dog", missed=True),
            "no query of yolos overlaps the box you gave",
        ),
        (lambda: pl.heads.Box(label="dgo"), "yolos has no label 'dgo'; did you mean 'dog'?"),
        (lambda: pl.heads.Box(label=7), "label 7 does not exist; yolos has classes 0 to 4"),
        (lambda: pl.heads.Box(query=9), "query 9 does not exist; yolos has queries 0 to 4"),
        (lambda: pl.heads.Box(detection=9), "detection 9 does not exist; yolos has 5 detections"),
        (lambda: pl.heads.Box(query=1, detection=1), "give one of"),
        (lambda: pl.heads.Box(missed=True), "needs the box and the label"),
        (lambda: pl.heads.Box(score="best"), "setting score='best' of 'Box' is not valid"),
        (lambda: pl.heads.Box(box=(1, 2, 3)), "box has 3 numbers"),
    ],
)
def test_wrong_questions_are_refused_in_one_sentence(question: Any, words: str) -> None:
    with pytest.raises(PatchlightError) as error:
        pl.explain(detectors.opened("yolos"), detectors.images("yolos"), "ixg", head=question())
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_opens_with_its_processor(tmp_path: Path) -> None:
    transformers.set_seed(0)
    detectors.yolos().save_pretrained(tmp_path)
    transformers.YolosImageProcessorPil(size={"height": 64, "width": 96}).save_pretrained(tmp_path)
    vit = pl.load(f"hf:{tmp_path}")
    assert (vit.preprocess.size, vit.preprocess.fit) == ((64, 96), "squash")
    transformers.YolosImageProcessorPil(size={"shortest_edge": 96, "longest_edge": 160}).save_pretrained(tmp_path)
    with pytest.warns(pl.AssumedPreprocess, match="keeps the aspect of each photograph; all are resized to 96 x 128"):
        assert pl.load(f"hf:{tmp_path}").preprocess.size == (96, 128)


SQUARED: list[tuple[str, dict[str, Any], tuple[int, int], str]] = [
    ("Owlv2ImageProcessor", {"size": {"height": 192, "width": 192}}, (192, 192), "pad"),
    ("EomtImageProcessor", {"size": {"shortest_edge": 192, "longest_edge": 192}, "do_pad": True}, (192, 192), "pad"),
    (
        "SamImageProcessor",
        {"size": {"longest_edge": 192}, "pad_size": {"height": 192, "width": 192}},
        (192, 192),
        "pad-mean",
    ),
    ("RfDetrImageProcessor", {"size": {"height": 192, "width": 192}}, (192, 192), "squash"),
    ("RTDetrImageProcessor", {"size": {"height": 192, "width": 192}, "do_normalize": False}, (192, 192), "squash"),
]


@pytest.mark.parametrize(("kind", "options", "size", "fit"), SQUARED)
def test_photographs_are_prepared_as_published(kind: str, options: Any, size: tuple[int, int], fit: str) -> None:
    """As the processors of published checkpoints do it, in pixels of the tiny models; less than one 256th apart."""
    processor = getattr(transformers, kind)(**options)
    preprocess = prepared_by(None, processor, {"name": "m"})["preprocess"]
    assert (preprocess.size, preprocess.fit) == (size, fit)
    photo = Image.open(SCENES / "scene-4.png").convert("RGB").crop((0, 0, 96, 60))
    theirs = torch.as_tensor(processor(photo, return_tensors="pt")["pixel_values"][0])
    apart = (preprocess.tensor(photo) - theirs).abs().mean((1, 2)) * torch.tensor(preprocess.std)
    assert float(apart.max()) < 1 / 256


@pytest.mark.parametrize(
    ("kind", "options", "size"),
    [
        ("DPTImageProcessor", {"size": {"height": 70, "width": 70}, "keep_aspect_ratio": True}, (70, 70)),
        ("MaskFormerImageProcessor", {"size": 96, "max_size": 400}, (96, 128)),
        ("EomtImageProcessor", {"size": {"shortest_edge": 96}, "do_split_image": True, "do_pad": False}, (96, 96)),
    ],
)
def test_one_size_for_photographs_whose_aspect_is_kept(kind: str, options: Any, size: tuple[int, int]) -> None:
    with pytest.warns(pl.AssumedPreprocess, match=f"all are resized to {size[0]} x {size[1]} here"):
        preprocess = prepared_by(None, getattr(transformers, kind)(**options), {"name": "m"})["preprocess"]
    assert (preprocess.size, preprocess.fit) == (size, "squash")


def test_owl_without_a_tokenizer_says_so() -> None:
    with pytest.raises(PatchlightError, match="has no tokenizer"):
        pl.wrap(detectors.owl(), texts=["dog"], preprocess=pl.Preprocess((64, 64)))


@cache
def pocket() -> pl.Anatomy:
    return pl.load("pocket-detector")


def scene(number: int) -> tuple[Path, list[dict[str, Any]]]:
    card = json.loads((SCENES / "scenes.json").read_text())[number]
    return SCENES / card["file"], card["objects"]


@pytest.mark.parametrize("number", [0, 2])
def test_the_bundled_detector_finds_the_objects(number: int) -> None:
    photo, objects = scene(number)
    found = pocket().detect(photo)
    for each in objects:
        overlaps = [
            float(iou(torch.tensor(d.box), torch.tensor(each["box"]))) for d in found if d.label == each["label"]
        ]
        assert max(overlaps) > 0.7


def test_maps_of_a_box_lie_on_it() -> None:
    photo, _ = scene(0)
    for number in range(2):
        maps = pl.explain(pocket(), photo, ["auto", "genatt"], head=pl.heads.Box(detection=number))
        values = pl.evaluate(pocket(), photo, maps, ["pointing-game", "energy-pointing"])
        for name in maps:
            assert values[name]["pointing-game"].values.item() == 1
            assert values[name]["energy-pointing"].values.item() > 0.3  # the boxes cover 4 % and 11 % of the scene


def test_drise_and_odam() -> None:
    photo, _ = scene(0)
    drise = pl.explain(pocket(), photo, "drise", samples=100, grid=6)
    assert tuple(drise.scores.shape) == (1, 96, 96)
    left, top, right, bottom = map(round, pocket().detect(photo)[0].box)
    inside = drise.scores[0, top:bottom, left:right].mean()
    assert inside > drise.scores.mean() + drise.scores.std()
    odam = pl.explain(pocket(), photo, "gradcam-elementwise", preset="odam")
    assert odam.settings["layer"] == "blocks[-1].input"
    with pytest.raises(PatchlightError, match="it explains detections, and pocket is not a detector"):
        pl.explain(pl.load("pocket"), torch.zeros(1, 3, 32, 32), "drise")


def test_other_objects_of_the_class() -> None:
    vit: Any = pocket()
    photo, _ = scene(0)
    image = vit.batch(photo)
    twice = image.clone()
    twice[..., 2:26, 60:84] = image[..., 20:44, 17:41]  # a second cross
    assert [d.label for d in vit.detect(twice)].count("cross") == 2
    first = vit.detect(twice)[0]
    for number, detection in enumerate(vit.detect(twice)):
        if detection.label == "cross":  # the map of each copy lies on it, not on the other
            maps = pl.explain(vit, twice, "genatt", head=pl.heads.Box(detection=number))
            values = pl.evaluate(vit, twice, maps, ["energy-pointing", "other-objects"])
            assert values["energy-pointing"].values.item() > 5 * values["other-objects"].values.item()
    ones = torch.ones(1, 12, 12)
    value = pl.evaluate(vit, twice, ones, "other-objects", head=pl.heads.Box()).values.item()
    other = next(d for d in vit.detect(twice) if d.label == first.label and d.query != first.query)
    area = (other.box[2] - other.box[0]) * (other.box[3] - other.box[1]) / 96**2
    assert value == pytest.approx(area, rel=0.1)
    alone = pl.evaluate(vit, image, ones, "other-objects", head=pl.heads.Box())
    assert alone.reasons == ("no other object of its class was detected",)


def test_studies_prepare_the_question_for_every_image() -> None:
    vit = pocket().ask(pl.heads.Box())
    photos = [scene(0)[0], scene(2)[0]]
    batch = Batch([photo.name for photo in photos], vit.batch(photos), None, None, None, [])
    plan = [(resolve("genatt"), [resolve_metric("deletion", {"steps": 8})])]
    found = list(study_batch(vit, batch, plan).cells())
    alone = [
        pl.evaluate(vit, photo, pl.explain(vit, photo, "genatt"), "deletion", steps=8).values.item() for photo in photos
    ]
    assert [cell.value for cell in found] == pytest.approx(alone, abs=1e-4)
