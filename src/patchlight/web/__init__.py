"""The page and the API beneath it: `patchlight serve`, and `pl.show` in a notebook. Needs the extra `web`."""

from __future__ import annotations

import importlib.util

from patchlight.errors import PatchlightError


def check_extra() -> None:
    """Refuse, in one sentence, to begin without the packages of the extra."""
    missing = [name for name in ("fastapi", "uvicorn", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise PatchlightError(f"the page needs {', '.join(missing)}: pip install 'patchlight[web]'")
