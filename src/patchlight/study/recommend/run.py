"""`recommend`: compare methods on your own images within a time budget, and recommend one."""

from __future__ import annotations

import json
import math
import re
import sys
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
from patchlight.core.errors import PatchlightError, check_keywords, integer
from patchlight.core.files import check_writable
from patchlight.core.fingerprints import identity
from patchlight.core.progress import Progress, show_progress
from patchlight.core.registry import Selection
from patchlight.core.statistics import FEWEST
from patchlight.core.text import plural
from patchlight.engine import explain
from patchlight.methods.requests import Request, resolve
from patchlight.metrics.base import resolve_metric
from patchlight.study.cost import forward_seconds
from patchlight.study.recommend.decide import decide, race_of, random_of
from patchlight.study.recommend.gallery import Gallery
from patchlight.study.recommend.panel import (
    RANDOM,
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
from patchlight.study.recommend.work import EXPLANATION, MARGIN, Clock, RaceWorker

NUMBER = r"\d+(?:\.\d+)?\s*"
"""A number in a budget; only the last one may lack a unit."""
SHOWN = 3
"""Images whose maps the page shows."""


def seconds_of(budget: str | float) -> float:
    """Convert a budget to seconds: a number, or text such as 90s, 10m, 1h, 1h30m.

    >>> seconds_of("10m"), seconds_of("1h30m"), seconds_of(90)
    (600.0, 5400.0, 90.0)
    """
    units = {"h": 3600, "m": 60, "s": 1, "": 1}
    total = 0.0
    if isinstance(budget, int | float) and not isinstance(budget, bool):
        total = float(budget)
    elif isinstance(budget, str) and re.fullmatch(rf"\s*(?:{NUMBER}(?:h|min|m|s)\s*)*(?:{NUMBER})?", budget):
        parts = re.findall(r"(\d+(?:\.\d+)?)\s*(h|m|s)?", budget)
        total = sum(float(number) * units[unit] for number, unit in parts)
    if not 0 < total < math.inf:
        raise PatchlightError(f"budget {budget!r} is not a valid duration; give seconds, or '90s', '10m' or '1h'")
    return total


@check_keywords
@undisturbed
def recommend(
    vit: Anatomy | nn.Module,
    images: Any,
    *,
    budget: str | float | Clock = "10m",
    methods: Selection | None = None,
    metrics: Selection | None = None,
    seed: int = 0,
    worth: float = 0.01,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | bool = True,
) -> Verdict:
    """Compare explanation methods on your own images within a time budget, and recommend one.

    Methods race over the images in a seeded order. A method that is significantly worse than another gets no more
    images. A recommendation needs at least three methods, besides random, on at least six shared images.

    Args:
        vit: The model.
        images: A folder, paths, pictures, a tensor or the result of `pl.open_data`. No labels are needed.
        budget: Seconds, or text such as "90s", "10m" or "1h".
        methods: Methods as in `explain`. Default: all that work on the model, with sample counts that fit the budget.
        metrics: Metrics as in `evaluate`; the first decides. Default: SRG over two fills decides, others are reported.
        seed: Random seed.
        worth: The smallest difference of scores that counts.
        out: A folder for the measurements and for verdict.json, verdict.txt and verdict.html.
        resume: Whether to use the measurements that are already in `out`.
        progress: True for a plan and a progress bar on stderr, or a function of (seconds spent, budget).

    Returns:
        The verdict: the best method, if any, with the evidence.

    Raises:
        PatchlightError: If the input is not usable, or the budget is too small for a single image.

    Example:
        >>> verdict = pl.recommend(vit, "photos/", budget="10m")  # doctest: +SKIP
    """
    clock = budget if isinstance(budget, Clock) else Clock(seconds_of(budget))
    vit, seed = wrap(vit), integer("seed", seed, 0)
    if not (isinstance(worth, int | float) and worth >= 0):
        raise PatchlightError(f"worth={worth!r} is not a valid difference; give a number of at least 0")
    folder = None if out is None else Path(out)
    earlier = earlier_run(folder, resume)
    works, refused = choose_methods(methods, vit)
    gallery = Gallery(vit, images, seed)
    if not gallery.first(1):
        name, why = next(iter(gallery.failed.items()))
        raise PatchlightError(f"none of the {plural(gallery.total, 'image')} can be read; '{name}': {why}")
    forward = forward_seconds(vit, gallery.batch(gallery.first(1)), 0.02 * clock.budget)
    if earlier is not None and metrics is None:
        specs = earlier.about["metrics"]
        requests = {label: resolve_metric(label, spec).suited(vit) for label, spec in specs.items()}
        panel = Panel(requests, tuple(earlier.about["deciding"]), agreement=True)
    else:
        panel = choose_metrics(metrics, vit, clock.budget / forward)
    facts = run_facts(gallery, panel, seed, worth)
    if earlier is not None:
        _check_same(earlier, facts, gallery)
        if methods is None:
            works = {label: resolve(label, spec).suited(vit) for label, spec in earlier.about["methods"].items()}
        elif _specs(works) != earlier.about["methods"]:
            raise PatchlightError(
                "the folder contains measurements of other methods or settings; give the same, or leave methods out"
            )
        record = earlier
        for label in sorted(record.set_aside):
            record.readmit(label)
    else:
        if methods is None:
            allowed = SHARE * clock.budget / min(24, max(FEWEST, len(gallery)))
            works, unaffordable = affordable_methods(works, forward, allowed)
            refused |= unaffordable
        ignoring = [label for label, request in works.items() if request.ignores_class and request.name != RANDOM]
        record = RaceRecord.begin(facts | {"methods": _specs(works), "ignores_class": ignoring}, folder)
        first = gallery.first(1)[0]
        record.add(first, MODEL, IMAGE_HASH, note=gallery.hash(first))
        for label, reason in refused.items():
            record.leave_out(label, reason)
    for name, reason in gallery.failed.items():
        record.fail(name, reason)
    gallery.on_failure = record.fail
    with show_progress(progress, "racing") as advance:

        def show() -> None:
            advance(int(min(clock.spent, clock.budget)), math.ceil(clock.budget))

        worker = RaceWorker(gallery, replace(panel, methods=works), record, clock, forward, show)
        policy = Policy(worker, methods is not None)
        if progress is True:
            print(policy.plan(), file=sys.stderr)
        policy.run()
        if not race_of(record).scores:
            reasons = "; ".join(f"{label}: {reason}" for label, reason in record.left_out.items())
            raise PatchlightError(f"no method could be scored on {vit.name}: {reasons}")
        verdict = decide(record)
        verdict = replace(verdict, comparison_seconds=policy.comparison_seconds, page=_examples(worker, verdict))
    verdict = replace(verdict, seconds=round(clock.spent, 2))
    if folder is not None:
        verdict.save(folder)
    return verdict


def run_facts(gallery: Gallery, panel: Panel, seed: int, worth: float) -> dict[str, Any]:
    """What the measurements are about; a run can only be resumed if this is the same."""
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
    """A value after it was written as JSON and read again."""
    return json.loads(json.dumps(value, default=repr))


def earlier_run(folder: Path | None, resume: bool) -> RaceRecord | None:
    """The record of an earlier run, if it is to be resumed."""
    if folder is None:
        if resume:
            raise PatchlightError("resume=True needs the folder of an earlier run; give it as out=")
        return None
    check_writable(folder)
    earlier = RaceRecord.resume(folder)
    if earlier is not None and not resume:
        raise PatchlightError(
            f"'{folder}' already contains measurements; resume them (resume=True) or choose another folder"
        )
    return earlier


def _check_same(earlier: RaceRecord, facts: Mapping[str, Any], gallery: Gallery) -> None:
    """Raise an error if earlier measurements are about something else."""
    for key, value in facts.items():
        if earlier.about.get(key) != value:
            theirs, ours = (textwrap.shorten(str(of.get(key)), 80) for of in (earlier.about, facts))
            raise PatchlightError(
                f"the folder contains measurements with another '{key}': {theirs} there, {ours} now; use the same, or "
                "choose another folder"
            )
    for place, cell in earlier.cells(IMAGE_HASH):  # one image is enough to recognise another folder
        if gallery.readable(place) and gallery.hash(place) != cell.note:
            raise PatchlightError(
                f"'{gallery.name(place)}' is not the image that was measured; give the same images in the same order"
            )


def _examples(worker: RaceWorker, verdict: Verdict) -> str:
    """Maps of the best, the quick and the random method on some images as HTML; empty if the time is over."""
    shown = dict.fromkeys([verdict.best or verdict.leading, verdict.quick, random_of(worker.record)])
    selected = {label: verdict.methods[label] for label in shown if label is not None}
    places = worker.gallery.first(SHOWN)
    takes = len(places) * sum(worker.cost(label, EXPLANATION) for label in selected)
    if MARGIN * takes > worker.clock.left + worker.clock.reserve / 2:
        return ""
    sources = [worker.gallery.source(place) for place in places]
    return maps_html(explain(worker.vit, sources, selected, seed=verdict.about["seed"], progress=False, finite=False))
