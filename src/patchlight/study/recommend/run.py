"""`recommend`: methods race on one's own images within a time, and the verdict says which explanation to trust."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy, undisturbed
from patchlight.core.attribution import versions
from patchlight.core.drawing import maps_html
from patchlight.core.errors import PatchlightError, integer, known_keywords
from patchlight.core.files import check_writable
from patchlight.core.fingerprints import identity
from patchlight.core.progress import Progress, telling
from patchlight.core.registry import Asked
from patchlight.core.statistics import FEWEST
from patchlight.engine import explain
from patchlight.methods.requests import Request, resolve
from patchlight.metrics.base import resolve_metric
from patchlight.study.recommend.decide import decide, race_of, random_of
from patchlight.study.recommend.gallery import Gallery
from patchlight.study.recommend.panel import (
    SHARE,
    Panel,
    affordable_methods,
    choose_methods,
    choose_metrics,
    method_spec,
    metric_spec,
)
from patchlight.study.recommend.policy import Policy
from patchlight.study.recommend.record import IMAGE_HASH, MODEL, RaceRecord
from patchlight.study.recommend.verdict import Verdict
from patchlight.study.recommend.work import EXPLANATION, MARGIN, Clock, RaceWorker, forward_seconds

NUMBER = r"\d+(?:\.\d+)?\s*"
"""Of a budget; only its last one may stand without a unit, so there is one way to read it."""
SHOWN = 3
"""Images of which the page shows maps."""


def seconds_of(budget: str | float) -> float:
    """A budget in seconds: a number, or words as 90s, 10m, 1h, 1h30m.

    >>> seconds_of("10m"), seconds_of("1h30m"), seconds_of(90)
    (600.0, 5400.0, 90.0)
    """
    units = {"h": 3600, "m": 60, "s": 1, "": 1}
    found = 0.0
    if isinstance(budget, int | float) and not isinstance(budget, bool):
        found = float(budget)
    elif isinstance(budget, str) and re.fullmatch(rf"\s*(?:{NUMBER}(?:h|min|m|s)\s*)*(?:{NUMBER})?", budget):
        parts = re.findall(r"(\d+(?:\.\d+)?)\s*(h|m|s)?", budget)
        found = sum(float(number) * units[unit] for number, unit in parts)
    if not 0 < found < math.inf:
        raise PatchlightError(f"budget {budget!r} is no time; give seconds, or words such as '90s', '10m' or '1h'")
    return found


@known_keywords
@undisturbed
def recommend(
    vit: Anatomy | nn.Module,
    images: Any,
    *,
    budget: str | float | Clock = "10m",
    methods: Asked | None = None,
    metrics: Asked | None = None,
    seed: int = 0,
    worth: float = 0.01,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | bool = True,
) -> Verdict:
    """Find out on one's own images which explanation of a model to trust, within a time.

    `images`: a folder, paths, pictures, a tensor or `pl.open_data`'s; labels are not needed. `methods`: as `explain`
    takes them; by default all that work on the model, sampling ones at settings that fit the time. `metrics`: as
    `evaluate` takes them, the first decides; by default SRG over two fills decides, and others stand beside it. Methods
    race over the images in a seeded order: those that are surely worse get no more images, and where time is short,
    those that stand low are set aside. `budget`: seconds, or "90s", "10m", "1h". `worth`: the smallest difference of
    scores that counts. `out`: a folder for the finished cells and for verdict.json, .txt and .html; with `resume`,
    cells that are there already are used, and the budget is that of the new run.

    >>> verdict = pl.recommend(vit, "photos/", budget="10m")      # doctest: +SKIP
    """
    clock = budget if isinstance(budget, Clock) else Clock(seconds_of(budget))
    vit, seed = wrap(vit), integer("seed", seed, 0)
    if not (isinstance(worth, int | float) and worth >= 0):
        raise PatchlightError(f"worth {worth!r} is no smallest difference; give a number of 0 or more")
    folder = None if out is None else Path(out)
    earlier = _earlier(folder, resume)
    works, refused = choose_methods(methods, vit)
    gallery = Gallery(vit, images, seed)
    if not gallery.first(1):
        name, why = next(iter(gallery.failed.items()))
        raise PatchlightError(f"none of the {gallery.total} image(s) can be read, '{name}' for one: {why}")
    forward = forward_seconds(vit, gallery.batch(gallery.first(1)), 0.02 * clock.budget)
    if earlier is not None and metrics is None:
        specs = earlier.about["metrics"]
        requests = {label: resolve_metric(label, spec).suited(vit) for label, spec in specs.items()}
        panel = Panel(requests, tuple(earlier.about["deciding"]), agreement=True)
    else:
        panel = choose_metrics(metrics, vit, clock.budget / forward)
    about = _about(gallery, panel, seed, worth)
    if earlier is not None:
        _check_same(earlier, about, gallery)
        if methods is None:
            works = {label: resolve(label, spec).suited(vit) for label, spec in earlier.about["methods"].items()}
        elif _specs(works) != earlier.about["methods"]:
            raise PatchlightError(
                "the folder holds cells of other methods or settings; name the same, or leave methods out"
            )
        record = earlier
        for label in sorted(record.set_aside):
            record.take_in(label)
    else:
        if methods is None:
            allowed = SHARE * clock.budget / min(24, max(FEWEST, len(gallery)))
            works, unaffordable = affordable_methods(works, forward, allowed)
            refused |= unaffordable
        record = RaceRecord.begin(about | {"methods": _specs(works)}, folder)
        first = gallery.first(1)[0]
        record.add(first, MODEL, IMAGE_HASH, note=gallery.hash(first))
        for label, reason in refused.items():
            record.leave_out(label, reason)
    for name, reason in gallery.failed.items():
        record.fail(name, reason)
    gallery.on_failure = record.fail
    with telling(progress, "racing") as tell:

        def show() -> None:
            tell(int(min(clock.spent, clock.budget)), math.ceil(clock.budget))

        worker = RaceWorker(gallery, replace(panel, methods=works), record, clock, forward, show)
        Policy(worker, methods is not None).run()
        if not race_of(record).scores:
            reasons = "; ".join(f"{label}: {reason}" for label, reason in record.left_out.items())
            raise PatchlightError(f"no method could be scored on {vit.name}: {reasons}")
        verdict = decide(record)
        verdict = replace(verdict, page=_examples(worker, verdict))
    verdict = replace(verdict, seconds=round(clock.spent, 2))
    if folder is not None:
        verdict.save(folder)
    return verdict


def _about(gallery: Gallery, panel: Panel, seed: int, worth: float) -> dict[str, Any]:
    """What cells are about: the same again, or they are of another question."""
    return {
        "format": 1,
        "model": gallery.vit.name,
        "weights": identity(gallery.vit),
        "seed": seed,
        "images": gallery.total,
        "metrics": _from_json({label: metric_spec(request) for label, request in panel.metrics.items()}),
        "deciding": list(panel.deciding),
        "lower_is_better": [label for label in panel.metrics if panel.sign(label) < 0],
        "worth": float(worth),
        "versions": versions(),
    }


def _specs(works: Mapping[str, Request]) -> Any:
    return _from_json({label: method_spec(request) for label, request in works.items()})


def _from_json(value: Any) -> Any:
    """A value as it comes back from a file."""
    return json.loads(json.dumps(value, default=repr))


def _earlier(folder: Path | None, resume: bool) -> RaceRecord | None:
    """The cells of an earlier run, where they are to be used."""
    if folder is None:
        if resume:
            raise PatchlightError("resume=True goes on with the cells in a folder; give it as out=")
        return None
    check_writable(folder)
    earlier = RaceRecord.resume(folder)
    if earlier is not None and not resume:
        raise PatchlightError(
            f"'{folder}' holds cells already; resume=True (--resume) goes on, or choose another folder"
        )
    return earlier


def _check_same(earlier: RaceRecord, about: Mapping[str, Any], gallery: Gallery) -> None:
    """Refuse cells that are about something else."""
    for key, value in about.items():
        if earlier.about.get(key) != value:
            theirs, ours = (textwrap.shorten(str(of.get(key)), 80) for of in (earlier.about, about))
            raise PatchlightError(
                f"the folder holds cells of another question: '{key}' is {theirs} there and {ours} now; ask the same, "
                "or choose another folder"
            )
    for place, cell in earlier.cells(IMAGE_HASH):  # one is enough to tell another folder
        if gallery.readable(place) and gallery.hash(place) != cell.note:
            raise PatchlightError(
                f"'{gallery.name(place)}' is not the image its cells are of; give the same images in the same order"
            )


def _examples(worker: RaceWorker, verdict: Verdict) -> str:
    """Maps of the best, the quick and the random method on some images, as HTML; none where time is over."""
    shown = dict.fromkeys([verdict.best or verdict.leading, verdict.quick, random_of(worker.record)])
    asked = {label: verdict.methods[label] for label in shown if label is not None}
    places = worker.gallery.first(SHOWN)
    takes = len(places) * sum(worker.cost(label, EXPLANATION) for label in asked)
    if MARGIN * takes > worker.clock.left + worker.clock.reserve / 2:
        return ""
    sources = [worker.gallery.source(place) for place in places]
    return maps_html(explain(worker.vit, sources, asked, seed=verdict.about["seed"], progress=False, finite=False))
