"""Whether the model hub can be reached, asked briefly at every load, and what of it lies in the local cache."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from patchlight.core.errors import PatchlightError

PATIENCE = 2.0
"""Seconds that the hub has to answer a knock; its own client would try for most of a minute."""


def endpoint() -> str:
    """Where the hub is: https://huggingface.co, or what HF_ENDPOINT says."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def unreachable() -> str:
    """Why the hub cannot be reached, or "" where it can.

    It is asked through the hub's own client, which knows the user's proxies and certificates. Any answer will do, and
    so will a slow one from a host that is there.
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

    # looking a host up cannot be given a time limit, so it is left behind
    asking = threading.Thread(target=knock, daemon=True)
    asking.start()
    asking.join(PATIENCE + 0.5)
    return answer[0] if answer else f"no answer in {PATIENCE:g} s"


def cached(repository: str, *names: str) -> Path | None:
    """The first of these files of a repository ("owner/name" or "owner/name@revision") that is in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    owner_and_name, _, revision = repository.partition("@")
    for name in names:
        found: Any = try_to_load_from_cache(owner_and_name, name, revision=revision or None)
        if isinstance(found, str):
            return Path(found)
    return None


def not_cached(name: str, what: str, reason: str, advice: str) -> PatchlightError:
    """The error about weights that are neither in the local cache nor, for a reason, to be had of the hub."""
    return PatchlightError(
        f"'{name}' could not be loaded: {what} not in the local cache, and {endpoint()} cannot be reached ({reason}); "
        f"give {advice}"
    )
