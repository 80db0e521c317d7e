"""The API answers what the library computes: predictions, maps, ablations, tests, attention, predictions per block."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import patchlight as pl
from patchlight.core.errors import Cancelled
from patchlight.core.targets import Targets
from patchlight.evidence.fills import fill_images
from patchlight.methods.base import GROUPS
from patchlight.study.faithfulness import Trial
from patchlight.zoo import pocket

fastapi = pytest.importorskip("fastapi")
from starlette.testclient import TestClient  # noqa: E402

from patchlight.web.serve import guarded  # noqa: E402
from patchlight.web.service import ModelService  # noqa: E402
from tests.families import build  # noqa: E402
from tests.pairs import TEXTS, shared_pair  # noqa: E402

CAT = pocket.PHOTOS / "cat.jpg"


@pytest.fixture(scope="module")
def vit() -> pl.Anatomy:
    return pl.load("pocket")


@pytest.fixture(scope="module")
def client(vit: pl.Anatomy) -> Iterator[TestClient]:
    service = ModelService(vit)
    with TestClient(guarded(service), base_url="http://localhost") as client:
        yield client
    service.close()


def post(client: TestClient, route: str, status: int = 200, **asked: Any) -> dict[str, Any]:
    answer = client.post(f"/api/{route}", json=asked)
    assert answer.status_code == status, answer.text
    told: dict[str, Any] = answer.json()
    return told


def of_class(said: dict[str, Any]) -> dict[str, float]:
    return {one["label"]: one["value"] for one in said["predictions"]}


def test_predictions(client: TestClient, vit: pl.Anatomy) -> None:
    told = post(client, "predict", image="cat", most=3, against=5)
    assert [(one["label"], pytest.approx(one["value"], abs=1e-6)) for one in told["predictions"]] == vit.predict(
        CAT, 3
    )[0]
    assert [one["label"] for one in told["asked"]] == ["cat", "dog"]
    assert told["quantity"] == "probability"


def test_an_upload_is_what_the_file_is(client: TestClient) -> None:
    sent = client.post("/api/images", content=CAT.read_bytes(), headers={"content-type": "image/jpeg"})
    assert sent.status_code == 201
    assert (sent.json()["width"], sent.json()["height"]) == (320, 213)
    own, bundled = (post(client, "predict", image=image) for image in (sent.json()["id"], "cat"))
    assert own == bundled
    again = client.post("/api/images", content=CAT.read_bytes(), headers={"content-type": "image/jpeg"})
    assert again.json()["id"] == sent.json()["id"]


def test_the_refusal_of_json_without_its_type_says_what_is_missing(client: TestClient) -> None:
    answer = client.post("/api/predict", content=b'{"image": "cat"}')
    assert answer.status_code == 422
    assert "Content-Type: application/json" in answer.json()["error"]


@pytest.mark.parametrize("wrong", [{"target": True}, {"target": "3"}, {"seed": True}, {"wait": "5"}, {"wait": True}])
def test_numbers_are_no_words_and_no_booleans(client: TestClient, wrong: dict[str, Any]) -> None:
    told = post(client, "explain", 422, image="cat", methods=[{"name": "ixg"}], **wrong)
    assert told["error"] == f"{next(iter(wrong))}: give a number"


def test_maps(client: TestClient, vit: pl.Anatomy) -> None:
    names = ["genatt", "decompx.skipplus", "posterior"]
    told = post(client, "explain", image="cat", target=3, against=5, methods=[{"name": n} for n in names], wait=60)
    wanted = pl.explain(vit, CAT, names, target=("cat", "dog"))
    assert told["state"] == "done"
    assert {one["method"] for one in told["maps"]} == set(names)
    for one in told["maps"]:
        scores = wanted[one["method"]].scores[0]
        scale = float(scores.abs().max())
        torch.testing.assert_close(torch.tensor(one["scores"]), scores, atol=1e-4 * scale, rtol=0)
        assert (one["target_label"], one["against_label"]) == ("cat", "dog")
    assert next(one for one in told["maps"] if one["method"] == "posterior")["error"] is not None


def test_settings_and_seeds_count(client: TestClient, vit: pl.Anatomy) -> None:
    asked = [{"name": "tis", "settings": {"samples": 40}}]
    one = post(client, "explain", image="cat", methods=asked, seed=7, wait=60)["maps"][0]
    wanted = pl.explain(vit, CAT, "tis", samples=40, seed=7).scores[0]
    torch.testing.assert_close(torch.tensor(one["scores"]), wanted, atol=1e-3 * float(wanted.abs().max()), rtol=0)
    other = post(client, "explain", image="cat", methods=asked, seed=8, wait=60)["maps"][0]
    assert one["scores"] != other["scores"]
    assert one["settings"]["samples"] == 40


def test_a_map_has_the_name_that_was_asked_for(client: TestClient) -> None:
    for name in ("attn-gradcam", "attcam"):
        told = post(client, "explain", image="ship", methods=[{"name": name}], wait=30)
        assert [one["method"] for one in told["maps"]] == [name], "whatever name it was made by"


def test_what_fails_leaves_the_rest(client: TestClient) -> None:
    methods = [{"name": "rolout"}, {"name": "genatt", "settings": {"foo": 1}}, {"name": "rollout"}]
    told = post(client, "explain", image="cat", methods=methods, wait=60)
    assert [one["method"] for one in told["maps"]] == ["rollout"]
    assert "did you mean 'rollout'" in told["failures"]["rolout"]
    assert "has no setting 'foo'" in told["failures"]["genatt"]
    alone = post(client, "explain", image="cat", methods=methods[:1], wait=60)
    assert alone["state"] == "failed"
    assert "did you mean 'rollout'" in alone["error"]


def test_a_method_is_asked_for_once(client: TestClient) -> None:
    methods = [{"name": "rollout", "settings": {"start": 1}}, {"name": "rollout", "settings": {"start": 2}}]
    assert "'rollout' is listed 2 times" in post(client, "explain", 422, image="cat", methods=methods)["error"]


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("tis", {"samples": 10**7}, "too large here"),
        ("rise", {"grid": 256}, "the limit is 28"),
        ("tis", {"chunk": 10**6}, "cannot be"),
        ("genatt", {"compile": True}, "cannot be"),
        ("rise", {"samples": True}, "cannot be true; give a number"),
        ("diffmask", {"explainer": "/etc"}, "cannot be '/etc' here"),
    ],
)
def test_what_a_stranger_may_not_say(client: TestClient, method: str, settings: dict[str, Any], words: str) -> None:
    told = post(client, "explain", image="cat", methods=[{"name": method, "settings": settings}], wait=60)
    assert told["state"] == "failed"
    assert words in told["error"]


def test_settings_of_an_answer_can_be_requested(client: TestClient) -> None:
    first = post(client, "explain", image="cat", methods=[{"name": "gradcam"}], wait=60)["maps"][0]
    assert first["settings"]["layer"] == "blocks[-1].norm1"
    methods = [{"name": "gradcam", "settings": first["settings"]}]
    second = post(client, "explain", image="cat", methods=methods, wait=60)
    assert second["state"] == "done", second["error"]
    assert second["maps"][0]["scores"] == first["scores"]


def test_hiding_paints_or_removes_tokens(client: TestClient, vit: pl.Anatomy) -> None:
    image, removed = vit.batch(CAT), [27, 28, 35]
    told = post(client, "ablate", image="cat", removed=[removed, []], fill="blur-tis")
    painted = image.clone()
    fill = fill_images("blur-tis", image, vit)
    for patch in removed:
        rows, columns = slice(patch // 8 * 4, patch // 8 * 4 + 4), slice(patch % 8 * 4, patch % 8 * 4 + 4)
        painted[:, :, rows, columns] = fill[:, :, rows, columns]
    for variant, wanted in zip(told["variants"], (painted, image), strict=True):
        values = vit.logits(wanted).softmax(1)[0]
        assert of_class(variant) == pytest.approx({vit.label(i): float(values[i]) for i in range(10)}, abs=1e-5)
    told = post(client, "ablate", image="cat", removed=[removed], unit="token")
    keep = torch.tensor([[i for i in range(64) if i not in removed]])
    with torch.no_grad(), vit.steady():
        values = vit.readout(vit.run(vit.embed(image), keep=keep)).softmax(1)[0]
    assert of_class(told["variants"][0]) == pytest.approx({vit.label(i): float(values[i]) for i in range(10)}, abs=1e-5)
    assert "patches are 0 to 63" in post(client, "ablate", 400, image="cat", removed=[[64]])["error"]


def test_the_faithfulness_test(client: TestClient, vit: pl.Anatomy) -> None:
    methods = [{"name": "genatt"}, {"name": "random"}]
    told = post(client, "measure", image="cat", methods=methods, steps=8, randoms=4, sanity=True, wait=60)["measured"]
    att = pl.explain(vit, CAT, "genatt")
    wanted = pl.evaluate(vit, CAT, att, "ins-del", unit="patch", steps=8, fill="image-mean")
    mine = told["methods"][0]
    assert mine["curve"]["score"] == pytest.approx(float(wanted.values[0]), abs=1e-5)
    assert told["removed"] == list(range(0, 65, 8))
    assert len(mine["predictions"]) == len(told["fractions"]) == 9
    assert mine["predictions"][0]["asked"][0]["value"] == pytest.approx(mine["curve"]["deletion"][0], abs=1e-5)
    order = [8 * r + c for r, c in att.top_patches(64)[0].tolist()]
    assert mine["order"] == order
    sanity = pl.evaluate(vit, CAT, att, "randomisation")
    assert mine["sanity"] == pytest.approx(float(sanity.values[0]), abs=1e-4)
    assert len(told["random"]["scores"]) == 4
    trial = Trial(vit, vit.batch(CAT), Targets(torch.tensor([[3]])), 8, randoms=4)
    assert mine["effect"] == pytest.approx(trial.of(att.scores[0]).effect, abs=1e-4)
    assert {one["rank"] for one in told["methods"]} == {1, 2}
    assert f"Rank {mine['rank']} of 2 among the methods shown." in mine["words"]


def test_hiding_the_strongest_patches(client: TestClient, vit: pl.Anatomy) -> None:
    """The numbers and the sentence are those of the library's test; `auto` is named by what it chose."""
    att = pl.explain(vit, CAT, "auto", target=3)
    trial = Trial(vit, vit.batch(CAT), Targets(torch.tensor([[3]])))
    wanted = trial.hiding(trial.of(att.scores[0]))
    told = post(client, "hide", image="cat")
    assert told["words"] == wanted.words
    assert told["method"] == att.method
    assert (told["before"], told["after"], told["random_after"]) == pytest.approx(
        (wanted.before, wanted.after, wanted.random_after), abs=1e-5
    )
    shown = post(client, "ablate", image="cat", removed=[told["order"]], target=3)["variants"][0]
    assert shown["asked"][0]["value"] == pytest.approx(told["after"], abs=1e-5)
    pair = post(client, "hide", image="cat", against=5, methods=[{"name": "genatt"}])
    assert pair["quantity"] == "difference of probabilities"
    refused = post(client, "hide", 400, image="cat", against=5, methods=[{"name": "rollout"}])
    assert "ignores the class" in refused["error"]


def test_methods_are_listed_by_group(client: TestClient, vit: pl.Anatomy) -> None:
    facts, listed = client.get("/api/model").json(), client.get("/api/methods").json()["methods"]
    assert facts["auto"] == facts["methods"][0] == listed[0]["name"] == pl.explain(vit, CAT, "auto").method
    assert [one["name"] for one in listed if one["purpose"]] == [one["name"] for one in listed[:5]]
    groups = [one["group"] for one in listed[5:]]
    assert groups == sorted(groups, key=list(GROUPS).index)
    ignoring = {one["name"] for one in listed if one["ignores_class"]}
    assert {"rollout", "attnfrom", "alti"} <= ignoring
    assert "genatt" not in ignoring
    told = post(client, "explain", image="cat", methods=[{"name": "auto"}, {"name": "rollout"}], wait=60)["maps"]
    assert {one["method"]: (one["made_by"], one["ignores_class"]) for one in told} == {
        "auto": (facts["auto"], False),
        "rollout": ("rollout", True),
    }


def test_a_finished_test_is_reused(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps and tests that are there are not computed again, neither for another test nor for a report."""
    asked = {"image": "deer", "methods": [{"name": "genatt"}, {"name": "ixg"}], "steps": 4, "randoms": 2, "wait": 60}
    first = post(client, "measure", **asked)["measured"]
    monkeypatch.setattr("patchlight.web.answers.explain_each", lambda *args, **options: args[2] and pytest.fail("maps"))
    monkeypatch.setattr(Trial, "curves", lambda *args: pytest.fail("a test"))
    assert post(client, "measure", **asked)["measured"] == first
    assert post(client, "files", **asked, kind="report")["state"] == "done"


def test_inside(client: TestClient, vit: pl.Anatomy) -> None:
    told = post(client, "inside", image="cat")
    with pl.trace(vit, CAT) as trace:
        attention = torch.stack([a.mean(1)[0, 0, 1:] for a in trace.attention])
        tokens = list(trace.tokens)
    torch.testing.assert_close(torch.tensor(told["attention"]), attention, atol=1e-6, rtol=0)
    for block, said in zip(tokens[1:], told["lens"], strict=True):
        with torch.no_grad():
            value = float(vit.readout(block).softmax(1)[0, 3])
        assert said["asked"][0]["value"] == pytest.approx(value, abs=1e-5)
    assert told["reads"] == "from the class token"


@pytest.mark.parametrize("family", ["reg4-gap", "siglip", "swin"])
def test_other_models_say_what_they_lack(family: str) -> None:
    other = build(family)
    service = ModelService(other)
    with TestClient(guarded(service), base_url="http://localhost") as client:
        facts = client.get("/api/model").json()
        assert facts["grid"] == list(other.grid)
        told = post(client, "inside", image="cat")
        assert told["attention"] is not None or told["attention_reason"]
        method = facts["methods"][0]
        assert post(client, "explain", image="cat", methods=[{"name": method}], wait=60)["state"] == "done"
        whole = list(range(other.grid[0] * other.grid[1]))
        assert post(client, "ablate", image="cat", removed=[whole])["variants"]
        if other.can_drop is None:
            assert (
                "nothing is left to classify"
                in post(client, "ablate", 400, image="cat", removed=[whole], unit="token")["error"]
            )
        else:
            assert (
                "cannot drop tokens" in post(client, "ablate", 400, image="cat", removed=[[0]], unit="token")["error"]
            )
    service.close()


def test_what_cannot_be_tested_is_reported_before_any_map_is_made() -> None:
    service = ModelService(build("reg4-gap"))
    with TestClient(guarded(service), base_url="http://localhost") as client:
        asked = {"image": "cat", "methods": [{"name": "ixg"}], "unit": "token", "wait": 60}
        for told in (post(client, "measure", **asked), post(client, "files", **asked, kind="report")):
            assert told["state"] == "failed"
            assert "unit='patch' fills patches instead" in told["error"]
            assert told["maps"] == []
    service.close()


@pytest.mark.parametrize("kind", ["transformers-CLIPModel", "open_clip-custom"])
def test_sentences_are_classes(kind: str) -> None:
    pytest.importorskip(kind.split("-")[0])
    vit = shared_pair(kind)
    service = ModelService(vit)
    with TestClient(guarded(service), base_url="http://localhost") as client:
        assert client.get("/api/model").json()["takes_texts"]
        texts = [TEXTS[1], TEXTS[0]]
        told = post(client, "predict", image="cat", texts=texts)
        other = vit.bare.ask(pl.heads.Texts(texts))  # type: ignore[union-attr]
        logits = other.logits(other.batch(CAT)).float()
        values = other.probabilities(logits)[0] if told["quantity"] == "probability" else logits[0]
        assert of_class(told) == pytest.approx(
            {text: float(v) for text, v in zip(texts, values, strict=True)}, abs=1e-5
        )
        one = post(client, "explain", image="cat", texts=texts, target=1, methods=[{"name": "ixg"}], wait=60)["maps"][0]
        assert one["target_label"] == texts[1]
        wanted = pl.explain(other, CAT, "ixg", target=1).scores[0]
        torch.testing.assert_close(torch.tensor(one["scores"]), wanted, atol=1e-3 * float(wanted.abs().max()), rtol=0)
        assert "template" in post(client, "predict", 400, image="cat", texts=texts, template="none")["error"]
    service.close()


def test_jobs_tell_what_happens_and_stop(client: TestClient) -> None:
    job = post(client, "explain", 202, image="dog", methods=[{"name": "rise"}])
    with client.stream("GET", f"/api/jobs/{job['id']}/events") as stream:
        for line in stream.iter_lines():
            if line.startswith("data:") and '"running"' in line and '"done":' in line:
                break
    client.delete(f"/api/jobs/{job['id']}")
    with client.stream("GET", f"/api/jobs/{job['id']}/events") as stream:
        events = [line.removeprefix("event: ") for line in stream.iter_lines() if line.startswith("event:")]
    assert events[-1] == "end"
    assert client.get(f"/api/jobs/{job['id']}").json()["state"] == "cancelled"
    assert post(client, "explain", image="dog", methods=[{"name": "tis", "settings": {"samples": 20}}], wait=60)["maps"]


def test_a_job_that_breaks_is_in_the_log_and_keeps_nothing(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[weakref.ref[torch.Tensor]] = []
    errors: list[BaseException] = [Cancelled("enough"), RuntimeError("unforeseen")]

    def broken(*given: Any, **options: Any) -> None:
        large = torch.zeros(3)
        kept.append(weakref.ref(large))
        raise errors.pop()

    monkeypatch.setattr("patchlight.study.run.explain", broken)
    told = post(client, "explain", image="ship", methods=[{"name": "ixg"}], wait=30)
    assert told["state"] == "failed"
    assert "the server's log has the details" in told["error"]
    assert "unforeseen" in caplog.text
    told = post(client, "explain", image="ship", methods=[{"name": "ixg"}], wait=30)
    assert told["state"] == "cancelled"
    gc.collect()
    assert kept[1]() is None, "a finished job keeps nothing of what it computed with"


def test_jobs_are_forgotten_before_they_fill_the_memory(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (post(client, "explain", image="ship", methods=[{"name": "ixg"}], wait=30)["id"] for _ in "12")
    monkeypatch.setattr("patchlight.web.jobs.ROOM", 0)
    third = post(client, "explain", image="ship", methods=[{"name": "ixg"}], wait=30)["id"]
    assert [client.get(f"/api/jobs/{job}").status_code for job in (first, second, third)] == [404, 404, 200]


def test_jobs_are_forgotten_after_a_while(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nobody has asked for anything since."""
    job = post(client, "explain", image="ship", methods=[{"name": "ixg"}], wait=30)["id"]
    assert client.get(f"/api/jobs/{job}").status_code == 200
    monkeypatch.setattr("patchlight.web.jobs.MINUTES", 0)
    assert client.get(f"/api/jobs/{job}").status_code == 404


def test_a_queue_that_is_full_says_so(client: TestClient) -> None:
    jobs, busy = [], None
    for _ in range(12):
        answer = client.post("/api/explain", json={"image": "bird", "methods": [{"name": "rise"}]})
        if answer.status_code == 429:
            busy = answer
            break
        jobs.append(answer.json()["id"])
    assert busy is not None
    assert int(busy.headers["retry-after"]) >= 1
    for job in jobs:
        client.delete(f"/api/jobs/{job}")
    assert post(client, "explain", image="bird", methods=[{"name": "tis", "settings": {"samples": 20}}], wait=60)[
        "maps"
    ]
