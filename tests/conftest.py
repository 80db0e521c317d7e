"""Two cores are shared by two pytest workers: one torch thread each, and no deadline for examples."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests import close

settings.register_profile("patchlight", deadline=None, derandomize=True)
settings.load_profile("patchlight")

torch.set_num_threads(int(os.environ.get("PATCHLIGHT_TEST_THREADS", "1")))
if "PATCHLIGHT_MARGINS" in os.environ:
    close.watch()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the tests keep from plan to plan lies in a folder of theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATCHLIGHT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
