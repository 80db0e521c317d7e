"""Check briefly whether the model hub can be reached, and which of its files are in the local cache."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from patchlight.core.errors import PatchlightError

PATIENCE = 2.0
"""Seconds that the hub has to answer; its own client would try for most of a minute."""


def endpoint() -> str:
    """Address of the hub: https://huggingface.co, or HF_ENDPOINT."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def unreachable() -> str:
    """Why the hub cannot be reached; "" if it can.

    The request goes through the hub's own client, which uses the user's proxies and certificates. Any answer counts,
    even a slow one from a host that exists.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    answer: list[str] = []

    def knock() -> None:
        try:
            get_session().head(endpoint(), timeout=PATIENCE)
            answer.append("")
        except Exception as error:
            slow = type(error).__name__ == "ReadTimeout"
            answer.append("" if slow else " ".join(str(error).split()) or type(error).__name__)

    # looking up a host has no time limit, so the thread is abandoned
    asking = threading.Thread(target=knock, daemon=True)
    asking.start()
    asking.join(PATIENCE + 0.5)
    return answer[0] if answer else f"no answer in {PATIENCE:g} s"


def cached(repository: str, *names: str) -> Path | None:
    """The first of these files of a repository ("owner/name" or "owner/name@revision") that is in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    owner_and_name, _, revision = repository.partition("@")
    for name in names:
        path: Any = try_to_load_from_cache(owner_and_name, name, revision=revision or None)
        if isinstance(path, str):
            return Path(path)
    return None


def not_cached(name: str, what: str, reason: str, advice: str) -> PatchlightError:
    """The error for weights that are neither in the local cache nor available from the hub."""
    return PatchlightError(
        f"'{name}' could not be loaded: {what} not in the local cache, and {endpoint()} cannot be reached ({reason}); "
        f"give {advice}"
    )
