"""The API against its own description: whatever is sent, no 5xx, and no answer that the description does not name."""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.web.server import Server

OPERATIONS = {
    "GET /api/model": 5,
    "GET /api/methods": 40,
    "POST /api/images": 20,
    "GET /api/images/{}": 250,
    "POST /api/predict": 250,
    "POST /api/choices": 100,
    "POST /api/ablate": 300,
    "POST /api/inside": 200,
    "POST /api/hide": 100,
    "POST /api/explain": 300,
    "POST /api/measure": 250,
    "POST /api/files": 200,
    "GET /api/jobs/{}": 60,
    "DELETE /api/jobs/{}": 60,
    "GET /api/jobs/{}/file": 60,
    "GET /api/jobs/{}/events": 60,
}
"""Every operation, and how many cases `make test-page` sends to it."""


@pytest.fixture(scope="module")
def schema(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/api/openapi.json")


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as talking:
        yield talking


def send(server: Server, schema: Any, session: requests.Session, name: str, count: int) -> collections.Counter[int]:
    """Cases of one operation, half of them valid and half of them not; each is checked against the description."""
    statuses: collections.Counter[int] = collections.Counter()
    word, path = name.split()
    operation = next(schema[p][word] for p in schema if re.sub(r"{\w+}", "{}", p) == path)
    body = {"image": "cat", "methods": [{"name": "genatt"}], "kind": "arrays", "wait": 60}
    job = session.post(f"{server.url}/api/files", json=body, timeout=90).json()["id"] if "jobs" in path else ""

    def cases(mode: GenerationMode) -> None:
        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=max(1, count // 2),
            derandomize=True,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check(case: Any) -> None:
            if mode == GenerationMode.POSITIVE:
                met(case, statuses.total() % 4, job)
            answer = case.call(session=session, timeout=90)
            statuses[answer.status_code] += 1
            case.validate_response(answer, excluded_checks=[positive_data_acceptance])
            if answer.status_code == 202:
                session.delete(f"{server.url}/api/jobs/{answer.json()['id']}").raise_for_status()

        with contextlib.suppress(Unsatisfiable):  # nothing of it can be invalid
            check()

    cases(GenerationMode.POSITIVE)
    cases(GenerationMode.NEGATIVE)
    return statuses


def met(case: Any, lucky: int, job: str) -> None:
    """Of valid cases the names are often those of things that are there, so that more than refusals is seen."""
    body = case.body
    if lucky and "{" in case.path:
        case.path_parameters = dict.fromkeys(case.path_parameters, job or "cat")
    if not isinstance(body, dict) or not lucky:
        return
    body["image"] = "cat"
    if "wait" in body:
        body["wait"] = min(body["wait"], 0.2)
    if lucky > 1:
        body.pop("texts", None)
        body.pop("head", None)
        body |= {key: body[key] % 10 for key in ("target", "against") if body.get(key) is not None}
    if lucky > 1 and "methods" in body:
        for method, known in zip(body["methods"], ("genatt", "rise", "tis", "rollout"), strict=False):
            method |= {"name": known, "settings": {}}
        del body["methods"][4:]
    if lucky > 2 and "removed" in body:
        body["removed"] = [[patch % 64 for patch in patches][:64] for patches in body["removed"]]


def test_every_operation_is_described(client: httpx.Client) -> None:
    """And each says what it may be refused with, and gives an example where it takes a body."""
    told = client.get("/api/openapi.json").json()
    found = {
        re.sub(r"{\w+}", "{}", f"{word.upper()} {path}") for path, words in told["paths"].items() for word in words
    }
    assert found == set(OPERATIONS)
    for path, words in told["paths"].items():
        for word, operation in words.items():
            assert operation.get("summary"), (word, path)
            assert {"401", "403", "429"} <= set(operation["responses"]), (word, path)
            assert "5XX" not in operation["responses"]


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("count", ["few", pytest.param("many", marks=pytest.mark.page)])
def test_cases(server: Server, schema: Any, session: requests.Session, name: str, count: str) -> None:
    statuses = send(server, schema, session, name, 6 if count == "few" else OPERATIONS[name])
    print(f"{name}: {dict(statuses)}")
    if count == "many" and "jobs" not in name:
        assert statuses[200] + statuses[201] + statuses[202]
