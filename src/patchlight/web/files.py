"""What is on the screen as a file: a picture, arrays, a report."""

from __future__ import annotations

from patchlight.errors import PatchlightError
from patchlight.web.album import Held
from patchlight.web.jobs import Work
from patchlight.web.schemas import FileAsked
from patchlight.web.site import Site


def make_file(site: Site, asked: FileAsked, held: Held, work: Work) -> None:
    """Make the file of a job."""
    raise PatchlightError("files are not made yet")
