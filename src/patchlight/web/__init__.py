"""The local web page and its API: `patchlight serve`, and `pl.show` in a notebook. Needs the extra `web`."""

from __future__ import annotations

from patchlight.core.extras import EXTRAS, missing_extra


def check_extra() -> None:
    """Raise an error that names the missing packages of the extra."""
    missing = EXTRAS["web"].missing()
    if missing:
        raise missing_extra("the page needs", ", ".join(missing), "web")
