"""Maps as a file: a picture, arrays or a report. Nothing is written to disk."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import zipfile
from collections.abc import Mapping

from patchlight.anatomy.opened import Anatomy
from patchlight.core.attribution import Attribution
from patchlight.core.attribution_files import attribution_bytes
from patchlight.core.drawing import figure_bytes, seen_figure
from patchlight.report.explanations import Explained, describe_run, report_html, section_of
from patchlight.study.faithfulness import Trial, rank_results
from patchlight.web.answers import explain
from patchlight.web.jobs import RunningJob
from patchlight.web.schemas import FileRequest
from patchlight.web.service import JobInput, ResolvedQuestion

SHARPER = 2
"""Resolution of a picture, as a multiple of a figure in a notebook."""
MOST = 5
"""Number of classes in a report."""
_LONG_AGO = (1980, 1, 1, 0, 0, 0)
ENDS = {"png": ".png", "pdf": ".pdf", "arrays": ".zip", "report": ".html"}
MEDIA = {".png": "image/png", ".pdf": "application/pdf", ".zip": "application/zip", ".html": "text/html"}


def make_file(job: JobInput[FileRequest], running: RunningJob) -> None:
    """Make the file of a job; finished maps and tests are reused."""
    request = job.request
    end = ENDS[request.kind]
    if request.kind == "report":
        job.service.trial(job.question, request)  # refuses what cannot be tested before any map is made
    maps = explain(job, running)
    if request.kind == "report":
        data = report(job, maps, running)
    else:
        data = arrays(maps) if request.kind == "arrays" else picture(job.question, maps, end)
    running.file = data, MEDIA[end], f"{_plain(request.name)}-patchlight{end}"
    running.status.file = f"/api/jobs/{running.status.id}/file"


def picture(question: ResolvedQuestion, maps: Mapping[str, Attribution], end: str) -> bytes:
    """The maps as `pl.figure` draws them, at a higher resolution."""
    fig = seen_figure([question.image.seen], maps, [_predictions(question)[0]], question.vit)
    fig.set_dpi(SHARPER * fig.dpi)
    return figure_bytes(fig, f"figure{end}")


def arrays(maps: Mapping[str, Attribution]) -> bytes:
    """A zip archive with a folder for each method, which `pl.Attribution.load` reads after unpacking."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for label, att in maps.items():
            for name, data in attribution_bytes(att).items():
                entry = zipfile.ZipInfo(f"{label}/{name}", _LONG_AGO)
                entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(entry, data)
    return out.getvalue()


def report(job: JobInput[FileRequest], maps: Mapping[str, Attribution], running: RunningJob) -> bytes:
    """The maps, their faithfulness test and how they were made, as one HTML file."""
    question, request = job.question, job.request
    trial = job.service.trial(question, request)
    section = section_of(
        Explained(
            name=request.name,
            picture=question.image.seen,
            predictions=_predictions(question),
            maps=maps,
            trial=trial,
            results=rank_results({name: job.service.test_result(job, name, att) for name, att in maps.items()}),
            failures=running.status.failures,
        )
    )
    warnings = [f"{answer.method}: {answer.warning}" for answer in running.status.maps if answer.warning]
    page = report_html([section], describe_run(maps, trial, command(job), warnings))
    return page.encode(errors="backslashreplace")


def command(job: JobInput[FileRequest]) -> str:
    """The command that makes the same report from the image file.

    Empty for a model that was passed from Python, and for a test that the command line does not run.
    """
    service, question, request = job.service, job.question, job.request
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
            words += ["--set", f"{method.name}.{key}={value if isinstance(value, str) else json.dumps(value)}"]
    words += ["--target", _class(question.vit, question.index)]
    words += [] if question.against is None else ["--against", _class(question.vit, question.against)]
    words += ["--seed", str(request.seed)] if request.seed else []
    return shlex.join([*words, "--report", "report.html"])


def _class(vit: Anatomy, index: int) -> str:
    """A class on the command line: its index, unless a label looks like that index."""
    return vit.label(index) if str(index) in (vit.labels or ()) else str(index)


def _predictions(question: ResolvedQuestion) -> list[tuple[str, float]]:
    first = question.predictions(question.logits, MOST)[0].predictions
    return [(each.label, math.nan if each.value is None else each.value) for each in first]


def _plain(name: str) -> str:
    """A file name that is valid on every disk and in a header.

    >>> _plain("Mein Hund (2).jpg")
    'Mein-Hund-2'
    """
    return re.sub(r"[^A-Za-z0-9]+", "-", re.sub(r"\.[A-Za-z]{1,5}$", "", name)).strip("-")[:60] or "image"
