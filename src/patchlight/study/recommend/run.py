"""`recommend`: methods race on one's own images within a time, and the verdict says which explanation to trust."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy, undisturbed
from patchlight.core.attribution import versions
from patchlight.core.errors import PatchlightError, integer, known_keywords
from patchlight.core.files import check_writable
from patchlight.core.fingerprints import identity
from patchlight.core.progress import Progress, telling
from patchlight.core.registry import Asked
from patchlight.core.statistics import FEWEST
from patchlight.engine import explain
from patchlight.methods.requests import Request
from patchlight.study.recommend.cells import EXPLANATION, Cells
from patchlight.study.recommend.gallery import Gallery
from patchlight.study.recommend.panel import (
    SHARE,
    Metrics,
    choose_methods,
    choose_metrics,
    from_specs,
    method_spec,
    metrics_from,
    sampled,
)
from patchlight.study.recommend.policy import Policy
from patchlight.study.recommend.verdict import Verdict, decide, race_of, random_of
from patchlight.study.recommend.work import MARGIN, Clock, Worker, forward_seconds

NUMBER = r"\d+(?:\.\d+)?\s*"
"""Of a budget; only its last one may stand without a unit, so there is one way to read it."""
OTHER = {
    **{"images": "another number of images", "weights": "other weights", "metrics": "other metrics"},
    **{"deciding": "other deciding metrics", "lower_is_better": "other metrics", "versions": "other versions"},
    "worth": "another smallest difference",
}
"""What cells may be about instead, in words."""
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
    if folder is not None:
        check_writable(folder)
    earlier = _earlier(folder, resume)
    works, refused = choose_methods(methods, vit)
    gallery = Gallery(vit, images, seed)
    if not gallery.first(1):
        name, why = next(iter(gallery.failed.items()))
        raise PatchlightError(f"none of the {gallery.total} image(s) can be read, '{name}' for one: {why}")
    forward = forward_seconds(vit, gallery.batch(gallery.first(1)), 0.02 * clock.budget)
    if earlier is not None and metrics is None:
        chosen = metrics_from(earlier.about, vit, agreement=True)
    else:
        chosen = choose_metrics(metrics, vit, clock.budget / forward)
    about = _about(vit, gallery, chosen, seed, worth)
    if earlier is not None:
        _check_same(earlier, about, gallery, None if methods is None else works)
        cells, works = earlier, from_specs(earlier.about["methods"], vit) if methods is None else works
        for label in sorted(cells.set_aside):
            cells.take_in(label)
    else:
        if methods is None:
            works, unaffordable = _affordable(works, forward, clock.budget, len(gallery))
            refused |= unaffordable
        cells = Cells(about | {"methods": _specs(works)}, folder)
        cells.begin()
        for label, reason in refused.items():
            cells.leave_out(label, reason)
    gallery.tell(cells.fail)
    with telling(progress, "racing") as tell:

        def told() -> None:
            tell(int(min(clock.spent, clock.budget)), math.ceil(clock.budget))

        worker = Worker(vit, gallery, works, chosen, cells, clock, seed, forward, told)
        Policy(worker, chosen, methods is not None).run()
        if not race_of(cells).scores:
            reasons = "; ".join(f"{label}: {reason}" for label, reason in cells.left_out.items())
            raise PatchlightError(f"no method could be scored on {vit.name}: {reasons}")
        verdict = decide(cells)
        verdict = replace(verdict, page=_examples(worker, verdict))
    verdict = replace(verdict, seconds=round(clock.spent, 2))
    if folder is not None:
        verdict.save(folder)
    return verdict


def _about(vit: Anatomy, gallery: Gallery, metrics: Metrics, seed: int, worth: float) -> dict[str, Any]:
    """What cells are about: the same again, or they are of another question."""
    return {
        "format": 1,
        "model": vit.name,
        "weights": identity(vit),
        "seed": seed,
        "images": gallery.total,
        "metrics": _written(metrics.specs),
        "deciding": list(metrics.deciding),
        "lower_is_better": [label for label in metrics.requests if metrics.sign(label) < 0],
        "worth": float(worth),
        "versions": versions(),
    }


def _specs(works: Mapping[str, Request]) -> Any:
    return _written({label: method_spec(request) for label, request in works.items()})


def _earlier(folder: Path | None, resume: bool) -> Cells | None:
    """The cells of an earlier run, where they are to be used."""
    if folder is None:
        if resume:
            raise PatchlightError("resume=True goes on with the cells in a folder; give it as out=")
        return None
    found = Cells.opened(folder)
    if found is not None and not resume:
        raise PatchlightError(
            f"'{folder}' holds cells already; resume=True (--resume) goes on, or choose another folder"
        )
    return found


def _check_same(
    earlier: Cells, about: Mapping[str, Any], gallery: Gallery, methods: Mapping[str, Request] | None
) -> None:
    """Refuse cells that are about something else."""
    for key, value in about.items():
        if earlier.about.get(key) != value:
            other = OTHER.get(key, f"another {key}")
            raise PatchlightError(
                f"the folder holds cells about {other} ({_short(earlier.about.get(key))}) than is asked now "
                f"({_short(value)}); ask the same, or choose another folder"
            )
    if methods is not None and _specs(methods) != earlier.about["methods"]:
        raise PatchlightError(
            "the folder holds cells of other methods or settings; name the same, or leave methods out"
        )
    for place, known in earlier.images().items():
        if gallery.readable(place) and gallery.hashes([place])[0] != known:
            raise PatchlightError(
                f"'{gallery.name(place)}' is not the image its cells are of; give the same images in the same order"
            )
        break  # one is enough to tell another folder


def _written(value: Any) -> Any:
    """A value as it comes back from a file."""
    return json.loads(json.dumps(value, default=repr))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _affordable(
    works: Mapping[str, Request], forward: float, budget: float, images: int
) -> tuple[dict[str, Request], dict[str, str]]:
    """The methods at settings that the budget allows, and why others are left out."""
    allowed = SHARE * budget / min(24, max(FEWEST, images))
    found: dict[str, Request] = {}
    left: dict[str, str] = {}
    for label, request in works.items():
        fitting = sampled(request, forward, allowed)
        if isinstance(fitting, str):
            left[label] = f"{fitting}, too long for this budget"
        else:
            found[fitting.label] = fitting
    return found, left


def _examples(worker: Worker, verdict: Verdict) -> str:
    """Maps of the best, the quick and the random method on some images, as HTML; none where time is over."""
    from patchlight.core.drawing import maps_html

    floor = random_of(worker.cells)
    shown = [m for m in dict.fromkeys([verdict.best or verdict.leading, verdict.quick, floor]) if m is not None]
    places = worker.gallery.first(SHOWN)
    takes = len(places) * sum(worker.costs.of(m, EXPLANATION) for m in shown)
    if MARGIN * takes > worker.clock.left + worker.clock.reserve / 2:
        return ""
    sources = [worker.gallery.source(place) for place in places]
    asked = {label: verdict.methods[label] for label in shown}
    maps = explain(worker.vit, sources, asked, seed=verdict.about["seed"], progress=False, finite=False)
    return maps_html(maps)
