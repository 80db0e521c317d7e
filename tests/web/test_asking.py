"""Questions about the output of a model that is no classifier, over the API."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from PIL import Image

import patchlight as pl

fastapi = pytest.importorskip("fastapi")
pytest.importorskip("transformers")
from starlette.testclient import TestClient  # noqa: E402

from patchlight.web.asking import frame_of  # noqa: E402
from patchlight.web.serve import guarded  # noqa: E402
from patchlight.web.service import ModelService  # noqa: E402
from tests import detectors  # noqa: E402
from tests.web.test_answers import post  # noqa: E402

WIDTH, HEIGHT = 180, 100
BOX = [20, 10, 120, 90]
MISSED = {"kind": "box", "box": BOX, "label": "dog", "missed": True}


def photograph() -> Image.Image:
    noise = torch.randint(0, 256, (HEIGHT, WIDTH, 3), generator=torch.Generator().manual_seed(0))
    return Image.fromarray(noise.byte().numpy())


@pytest.fixture(scope="module")
def detector() -> pl.Anatomy:
    return detectors.opened("yolos")


@pytest.fixture(scope="module")
def client(detector: pl.Anatomy) -> Iterator[TestClient]:
    service = ModelService(detector)
    with TestClient(guarded(service), base_url="http://localhost") as client:
        yield client
    service.close()


@pytest.fixture(scope="module")
def image(client: TestClient) -> str:
    out = io.BytesIO()
    photograph().save(out, "PNG")
    sent = client.post("/api/images", content=out.getvalue(), headers={"content-type": "image/png"})
    return str(sent.json()["id"])


def test_what_a_detector_can_be_asked(client: TestClient, image: str, detector: Any) -> None:
    said = post(client, "choices", image=image, head=MISSED)
    found = detector.detect(photograph(), threshold=0)
    assert said["frame"] == [0, 0, WIDTH, HEIGHT]
    assert len(said["detections"]) >= 3
    for one, other in zip(said["detections"], found, strict=False):
        assert one["label"] == other.label
        assert one["score"] == pytest.approx(other.score, abs=1e-5)
        assert one["box"] == pytest.approx(other.box, abs=1e-2)
    assert said["boxes"] == [pytest.approx(BOX, abs=1e-2)] * len(said["boxes"])
    facts = client.get("/api/model").json()
    assert (facts["task"], facts["class_names"]) == ("detection", detectors.LABELS)


@pytest.mark.parametrize("head", [None, {"kind": "box", "detection": 1}, MISSED], ids=["default", "second", "missed"])
def test_maps_of_questions(client: TestClient, image: str, detector: Any, head: dict[str, Any] | None) -> None:
    methods = [{"name": name} for name in ("ixg", "genatt", "rise")]
    said = post(client, "explain", image=image, head=head, methods=methods, wait=60)
    fields = {key: value for key, value in (head or {}).items() if key != "kind"}
    wanted = pl.explain(detector, photograph(), ["ixg", "genatt", "rise"], head=pl.heads.Box(**fields))
    assert said["failures"] == {}
    for each in said["maps"]:
        scores = wanted[each["method"]].scores[0]
        torch.testing.assert_close(torch.tensor(each["scores"]), scores, atol=1e-4 * float(scores.abs().max()), rtol=0)
        assert each["target_label"] == wanted[each["method"]].labels[0]


def test_the_share_of_the_evidence_inside_the_box(client: TestClient, image: str) -> None:
    """The box covers exactly the upper left quarter of the picture: 2 x 3 of the 4 x 6 patches."""
    head = {"kind": "box", "box": [0, 0, WIDTH // 2, HEIGHT // 2]}
    (said,) = post(client, "explain", image=image, head=head, methods=[{"name": "ixg"}], wait=60)["maps"]
    scores = torch.tensor(said["scores"]).clamp(min=0)
    assert said["inside"] == pytest.approx(float(scores[:2, :3].sum() / scores.sum()), abs=1e-5)
    (other,) = post(client, "explain", image=image, head={"kind": "box"}, methods=[{"name": "ixg"}], wait=60)["maps"]
    assert other["inside"] != pytest.approx(said["inside"], abs=1e-3)


def test_everything_else_works_for_a_question(client: TestClient, image: str, detector: pl.Anatomy) -> None:
    asked = {"image": image, "head": MISSED}
    whole = post(client, "predict", **asked)
    assert len(whole["predictions"]) == 2
    for unit in ("patch", "token") if detector.can_drop is None else ("patch",):
        said = post(client, "ablate", **asked, removed=[[0, 1, 6, 7], []], unit=unit)
        assert said["variants"][1]["predictions"][0]["value"] == pytest.approx(
            whole["predictions"][0]["value"], abs=1e-5
        )
        assert said["variants"][0] != said["variants"][1]
    assert "Hiding" in post(client, "hide", **asked)["words"]
    inside = post(client, "inside", **asked)
    assert len(inside["attention"]) == len(inside["lens"]) == 3
    assert inside["reads"] == "from all patches on average"
    last = inside["lens"][-1]["asked"][0]
    assert last["value"] == pytest.approx(whole["asked"][0]["value"], abs=1e-5)
    contrast = post(client, "explain", **asked, target=0, against=1, methods=[{"name": "ixg"}], wait=60)
    assert contrast["maps"][0]["against"] == 1
    test = {"methods": [{"name": "ixg"}], "steps": 4, "randoms": 4, "wait": 60}
    assert post(client, "measure", **asked, **test)["measured"]["methods"][0]["words"]
    for kind in ("png", "report", "arrays"):
        job = post(client, "files", **asked, **test, kind=kind)
        assert job["state"] == "done", job["error"]
        assert client.get(job["file"]).content


@pytest.mark.parametrize(
    ("head", "status", "words"),
    [
        ({"kind": "box", "detection": 99}, 400, "detection 99 does not exist"),
        ({"kind": "box", "box": [10, 10, 5, 90]}, 400, "is empty"),
        ({"kind": "box", "box": [900, 900, 950, 950]}, 400, "lies outside the image"),
        ({"kind": "box", "box": BOX, "label": "whale"}, 400, "has no label 'whale'"),
        ({"kind": "box", "box": BOX, "detection": 0}, 400, "give one of detection="),
        ({"kind": "box", "missed": True}, 400, "missed=True needs the box and the label"),
        ({"kind": "region", "point": [3, 4]}, 400, "a question for models for segmentation or depth, and yolos is a"),
        ({"kind": "mask", "points": [3, 4]}, 400, "a question for models for masks, and yolos is a model"),
        ({"kind": "answer", "prompt": "What is this?"}, 400, "a question for models for answers, and yolos is a model"),
        ({"kind": "box", "box": [1, 2, 3]}, 422, "head.box.box.3"),
        ({"kind": "box", "box": [-1, 2, 3, 4]}, 422, "greater than or equal to 0"),
        ({"kind": "box", "box": [0, 0, 1e300, 9]}, 422, "less than or equal to"),
        ({"kind": "box", "box": ["0", 0, 9, 9]}, 422, "give a number"),
        ({"kind": "box", "detection": -1}, 422, "greater than or equal to 0"),
        ({"kind": "box", "label": "x" * 301}, 422, "at most 300 characters"),
        ({"kind": "box", "path": "/etc/passwd"}, 422, "not permitted"),
        ({"kind": "answer", "prompt": "x" * 1001}, 422, "at most 1000 characters"),
        ({"kind": "tree"}, 422, "does not match any of the expected tags"),
        ({}, 422, "Unable to extract tag"),
        ("box", 422, ""),
    ],
)
def test_what_a_question_refuses(client: TestClient, image: str, head: Any, status: int, words: str) -> None:
    for route in ("choices", "predict"):
        assert words in post(client, route, status, image=image, head=head)["error"]


def test_a_target_that_the_question_lacks(client: TestClient, image: str) -> None:
    assert "class" in post(client, "predict", 400, image=image, head={"kind": "box"}, target=1)["error"]
    both = {"texts": ["a dog"], "head": {"kind": "box"}}
    assert "not both" in post(client, "predict", 400, image=image, **both)["error"]


def test_a_classifier_has_no_such_questions() -> None:
    service = ModelService(pl.load("pocket"))
    with TestClient(guarded(service), base_url="http://localhost") as client:
        assert client.get("/api/model").json()["task"] == ""
        said = post(client, "choices", image="cat")
        assert said["detections"] == said["boxes"] == said["words"] == []
        assert "pocket is a classifier" in post(client, "predict", 400, image="cat", head={"kind": "box"})["error"]
    service.close()


@pytest.mark.parametrize("size", [(320, 213), (100, 300), (64, 64)])
@pytest.mark.parametrize("fit", ["crop", "squash", "pad"])
def test_the_frame_is_what_the_model_sees(detector: Any, size: tuple[int, int], fit: Any) -> None:
    preprocess = pl.Preprocess((64, 64), crop_pct=0.9 if fit == "crop" else 1.0, fit=fit)
    seen = detector.copy_with(preprocess=preprocess)
    frame = torch.tensor([frame_of(seen, size)])
    back = preprocess.boxes(frame, size)
    torch.testing.assert_close(back, torch.tensor([[0.0, 0, 64, 64]]), atol=1e-3, rtol=0)


def test_words_of_an_answer() -> None:
    """The bundled model is asked; a word has its gain, its map is that of `pl.heads.Answer`."""
    vlm = pl.load("pocket-vlm")
    service = ModelService(vlm)
    head = {"kind": "answer", "prompt": "what colour is the ring ?"}
    with TestClient(guarded(service), base_url="http://localhost") as client:
        said = post(client, "choices", image="cat", head=head)
        vit = vlm.ask(pl.heads.Answer(head["prompt"], force=True)).prepared(
            service.images.find("cat").tensor, service.images.find("cat").size
        )
        words: Any = vit.question
        assert (said["answer"], said["prompt"]) == (words.text, head["prompt"])
        assert [(each["word"], pytest.approx(each["gain"], abs=1e-4)) for each in said["words"]] == [
            (each.word, each.gain) for each in words.words
        ]
        gains = [each["gain"] for each in said["words"]]
        assert gains[said["index"]] == max(gains)
        asked = {"image": "cat", "head": head, "methods": [{"name": "ixg"}], "wait": 60}
        (one,) = post(client, "explain", **asked)["maps"]
        wanted = pl.explain(vit, service.images.find("cat").tensor, "ixg", target=said["index"]).scores[0]
        torch.testing.assert_close(torch.tensor(one["scores"]), wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)
        assert (one["target"], one["inside"]) == (said["index"], None)
        weak = [i for i, gain in enumerate(gains) if gain <= 0.5]
        for i in weak[:1]:
            assert "has almost no effect" in post(client, "predict", 400, image="cat", head=head, target=i)["error"]
            post(client, "predict", image="cat", head={**head, "force": True}, target=i)
        assert "Hiding" in post(client, "hide", image="cat", head=head)["words"]
    service.close()
