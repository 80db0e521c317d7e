"""What is on the screen as a file: a picture, arrays, a report. Nothing is written to a disk here."""

from __future__ import annotations

import io
import math
import re
import shlex
import zipfile
from collections.abc import Mapping

from patchlight.anatomy.opened import Anatomy
from patchlight.core.attribution import Attribution
from patchlight.core.attribution_files import attribution_bytes
from patchlight.core.drawing import figure_bytes, seen_figure
from patchlight.metrics.base import on_grid
from patchlight.report.explanations import Explained, describe_run, report_html, section_of
from patchlight.study.faithfulness import Trial, run_trial
from patchlight.web.answers import explain
from patchlight.web.jobs import RunningJob
from patchlight.web.schemas import FileRequest
from patchlight.web.service import JobInput, ResolvedQuestion

SHARPER = 2
"""How many times as many dots a picture has as a figure in a notebook."""
MOST = 5
"""Classes that a report lists."""
_LONG_AGO = (1980, 1, 1, 0, 0, 0)
KINDS = {
    "png": ("image/png", ".png"),
    "pdf": ("application/pdf", ".pdf"),
    "arrays": ("application/zip", ".zip"),
    "report": ("text/html; charset=utf-8", ".html"),
}


def make_file(given: JobInput[FileRequest], job: RunningJob) -> None:
    """Make the file of a job: its bytes, their type, and a name."""
    request = given.request
    kind, end = KINDS[request.kind]
    if request.kind == "report":
        given.service.trial(given.question, request)  # what cannot be tested is refused before any map is made
    maps = explain(given, job)
    if request.kind == "report":
        data = report(given, maps, job)
    else:
        data = arrays(maps) if request.kind == "arrays" else picture(given.question, maps, end)
    job.file = data, kind, f"{_plain(request.name)}-patchlight{end}"
    job.status.file = f"/api/jobs/{job.status.id}/file"


def picture(question: ResolvedQuestion, maps: Mapping[str, Attribution], end: str) -> bytes:
    """A figure of the maps, as `pl.figure` draws it, with sharper pictures."""
    fig = seen_figure([question.image.seen], maps, [_predictions(question)[0]], question.vit)
    fig.set_dpi(SHARPER * fig.dpi)
    return figure_bytes(fig, f"figure{end}")


def arrays(maps: Mapping[str, Attribution]) -> bytes:
    """A zip with a folder for each method, which `pl.Attribution.load` opens once it is unpacked."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for label, att in maps.items():
            for name, data in attribution_bytes(att).items():
                entry = zipfile.ZipInfo(f"{label}/{name}", _LONG_AGO)
                entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                made.writestr(entry, data)
    return out.getvalue()


def report(given: JobInput[FileRequest], maps: Mapping[str, Attribution], job: RunningJob) -> bytes:
    """The maps with their test, and how all of it was made, as one HTML file."""
    question, request = given.question, given.request
    trial = given.service.trial(question, request)
    tested = run_trial(trial, {name: on_grid(att.scores, question.vit)[0] for name, att in maps.items()})
    section = section_of(
        Explained(
            name=request.name,
            picture=question.image.seen,
            predictions=_predictions(question),
            maps=maps,
            trial=trial,
            results=tested,
            failures=job.status.failures,
        )
    )
    warnings = [f"{found.method}: {found.warning}" for found in job.status.maps if found.warning]
    page = report_html([section], describe_run(maps, trial, command(given), warnings))
    return page.encode(errors="backslashreplace")


def command(given: JobInput[FileRequest]) -> str:
    """The command that makes the same report of the image under its name.

    There is none of a model that was given in Python, nor of a test that the command line does not make.
    """
    service, question, request = given.service, given.question, given.request
    test = (request.steps, request.unit, request.fill, request.randoms)
    if not service.cli or test != (Trial.steps, Trial.unit, Trial.fill, Trial.randoms):
        return ""
    image = f"./{request.name}" if request.name.startswith("-") else request.name
    words = ["patchlight", "explain", image, *shlex.split(service.cli)]
    for text in request.texts or ():
        words += ["--text", text]
    words += ["--template", request.template] if request.texts and request.template != "{}" else []
    words += ["--method", ",".join(method.name for method in request.methods)]
    for method in request.methods:
        for key, value in method.settings.items():
            words += ["--set", f"{method.name}.{key}={'null' if value is None else _setting(value)}"]
    words += ["--target", _class(question.vit, question.index)]
    words += [] if question.against is None else ["--against", _class(question.vit, question.against)]
    words += ["--seed", str(request.seed)] if request.seed else []
    return shlex.join([*words, "--report", "report.html"])


def _class(vit: Anatomy, index: int) -> str:
    """The word of a class at the command line: its index, unless a class is called so."""
    return vit.label(index) if str(index) in (vit.labels or ()) else str(index)


def _setting(value: bool | int | float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _predictions(question: ResolvedQuestion) -> list[tuple[str, float]]:
    first = question.predictions(question.logits, MOST)[0].predictions
    return [(one.label, math.nan if one.value is None else one.value) for one in first]


def _plain(name: str) -> str:
    """A name that any disk and any header takes.

    >>> _plain("Mein Hund (2).jpg")
    'Mein-Hund-2'
    """
    return re.sub(r"[^A-Za-z0-9]+", "-", re.sub(r"\.[A-Za-z]{1,5}$", "", name)).strip("-")[:60] or "image"
