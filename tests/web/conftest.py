"""One server with the bundled model for all tests here, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.web.server import Server, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server") / "here") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120, trust_env=False, verify=False) as talking:
        yield talking
