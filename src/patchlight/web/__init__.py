"""The local web page and its API: `patchlight serve`, and `pl.show` in a notebook. Needs the extra `web`."""

from __future__ import annotations

from patchlight.core.errors import PatchlightError
from patchlight.core.extras import EXTRAS, missing_extra


class Refused(PatchlightError):
    """A refused request: its HTTP status, a sentence, and headers."""

    def __init__(self, status: int, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.status, self.headers = status, headers


def check_extra() -> None:
    """Raise an error that names the missing packages of the extra."""
    missing = EXTRAS["web"].missing()
    if missing:
        raise missing_extra("the page needs", ", ".join(missing), "web")
