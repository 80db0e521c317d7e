"""`recommend`: methods race on one's own images within a time, and the verdict says which explanation to trust."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from patchlight.anatomy.base import Anatomy, undisturbed
from patchlight.anatomy.load import wrap
from patchlight.attribution import versions
from patchlight.engine import explain
from patchlight.errors import PatchlightError, integer, known_keywords
from patchlight.files import check_writable
from patchlight.fingerprints import identity
from patchlight.methods.requests import Request
from patchlight.progress import Progress, telling
from patchlight.registry import Asked
from patchlight.statistics import FEWEST
from patchlight.verdict.cells import EXPLANATION, Cells
from patchlight.verdict.gallery import Gallery
from patchlight.verdict.panel import (
    AGREEMENT,
    SHARE,
    Metrics,
    choose_methods,
    choose_metrics,
    from_specs,
    method_spec,
    metrics_from,
    sampled,
)
from patchlight.verdict.race import Race, looks
from patchlight.verdict.verdict import SANITY, SENSITIVITY, Verdict, decide, race_of, random_of
from patchlight.verdict.words import duration
from patchlight.verdict.work import MARGIN, Clock, Worker, forward_seconds

RACE = 0.75
"""Of the budget, what the race has before the other metrics have their turn."""
PANEL, OPENING = 4, 0.35
"""Of the budget, what the first six images of all methods may take; of methods that were named, or so few, more."""
DEAR = 0.1
"""Of the budget, what six maps of one method may take; what is dearer is left out unless it was named."""
FINALISTS, FEW, SOME = 5, 4, 16
"""Methods that the other metrics look at; images for metrics that explain many times, and for those that do not. With
fewer than the latter no race ends by itself, however clear it is."""
COPIED, SHOWN = 12, 3
"""Images for the leader's score on an untrained copy of the model, and for example maps."""


def seconds_of(budget: str | float) -> float:
    """A budget in seconds: a number, or words as 90s, 10m, 1h, 1h30m.

    >>> seconds_of("10m"), seconds_of("1h30m"), seconds_of(90)
    (600.0, 5400.0, 90.0)
    """
    units = {"h": 3600, "m": 60, "s": 1, "": 1}
    found = 0.0
    if isinstance(budget, int | float) and not isinstance(budget, bool):
        found = float(budget)
    elif isinstance(budget, str) and re.fullmatch(r"\s*(\d+(\.\d+)?\s*(h|m|s|min)?\s*)+", budget):
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
    budget: str | float = "10m",
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
    seconds = seconds_of(budget)
    clock = Clock(seconds, min(1.0 + 0.02 * seconds, 0.2 * seconds))
    vit, seed = wrap(vit), integer("seed", seed, 0)
    if not (isinstance(worth, int | float) and worth >= 0):
        raise PatchlightError(f"worth {worth!r} is no smallest difference; give a number of 0 or more")
    folder = None if out is None else Path(out)
    if folder is not None:
        check_writable(folder)
    earlier = _earlier(folder, resume)
    works, refused = choose_methods(methods, vit)
    failed: dict[str, str] = {}
    gallery = Gallery(vit, images, seed, lambda name, why: failed.setdefault(name, why))
    if not gallery.first(1):
        name, why = next(iter(failed.items()))
        raise PatchlightError(f"none of the {gallery.total} image(s) can be read, '{name}' for one: {why}")
    forward = forward_seconds(vit, gallery.batch(gallery.first(1)), 0.02 * seconds)
    if earlier is not None and metrics is None:
        chosen = metrics_from(earlier.about, vit, agreement=True)
    else:
        chosen = choose_metrics(metrics, vit, seconds / forward)
    about = {
        "format": 1,
        "model": vit.name,
        "weights": identity(vit),
        "seed": seed,
        "images": gallery.total,
        "metrics": chosen.specs,
        "deciding": list(chosen.deciding),
        "lower_is_better": [label for label in chosen.requests if chosen.sign(label) < 0],
        "worth": float(worth),
        "versions": versions(),
    }
    if earlier is not None:
        _check_same(earlier, about, gallery, None if methods is None else works)
        works = {label: request.suited(vit) for label, request in from_specs(earlier.about["methods"]).items()}
        refused = {}
    with telling(progress, "racing") as tell:

        def told() -> None:
            tell(int(min(clock.spent, clock.budget)), math.ceil(clock.budget))

        if earlier is None:
            unaffordable: dict[str, str] = {}
            if methods is None:
                works, unaffordable = _affordable(works, forward, seconds, len(gallery))
            about["methods"] = {label: method_spec(request) for label, request in works.items()}
            cells = Cells(about, folder)
            cells.begin()
            for label, reason in (refused | unaffordable).items():
                cells.leave_out(label, reason)
        else:
            cells = earlier
            for label in sorted(cells.set_aside):
                cells.take_in(label)
        worker = Worker(vit, gallery, works, chosen, cells, clock, seed, forward, told)
        for name, why in failed.items():
            cells.fail(name, why)
        gallery.fail = cells.fail
        _Policy(worker, chosen, methods is not None).run()
        verdict = decide(cells)
        verdict = replace(verdict, page=_examples(worker, verdict))
    verdict = replace(verdict, seconds=round(clock.spent, 2))
    if folder is not None:
        verdict.save(folder)
    return verdict


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
            raise PatchlightError(
                f"the folder holds cells about another {key} ({_short(earlier.about.get(key))}) than is asked now "
                f"({_short(value)}); ask the same, or choose another folder"
            )
    asked = None if methods is None else {label: method_spec(request) for label, request in methods.items()}
    if asked is not None and not all(earlier.about["methods"].get(k) == v for k, v in asked.items()):
        raise PatchlightError(
            "the folder holds cells of other methods or settings; name the same, or leave methods out"
        )
    for place, known in earlier.images().items():
        if gallery.first(place + 1)[-1:] == [place] and gallery.hashes([place])[0] != known:
            raise PatchlightError(
                f"'{gallery.name(place)}' is not the image its cells are of; give the same images in the same order"
            )
        break  # one is enough to tell another folder


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


class _Policy:
    """Where the time goes: an opening over all methods, rounds of more images for fewer, then the other metrics."""

    def __init__(self, worker: Worker, metrics: Metrics, named: bool) -> None:
        self.named = named
        self.worker, self.metrics, self.cells, self.clock = worker, metrics, worker.cells, worker.clock
        self.deciding = list(metrics.deciding)
        self.floor = random_of(self.cells)

    def run(self) -> None:
        self._opening()
        self._rounds((1 - RACE) * self.clock.budget)
        if decide(self.cells).best is None:
            self._rounds(0.0)
        self._check_trained()
        self._look_closer()
        self._rounds(self._kept)
        self._use_the_rest(self._kept)
        self._check_trained()

    @property
    def _kept(self) -> float:
        """Seconds for comparing another leader with what it is on an untrained model."""
        alive = self._alive(self.race)
        return MARGIN**2 * self.worker.seconds_new(alive[0], COPIED, self.deciding) if alive else 0.0

    def _check_trained(self) -> None:
        alive = self._alive(self.race)
        if alive and self.race.count(alive[0]) >= FEWEST:
            self.worker.untrained(alive[0], self.worker.gallery.first(COPIED))

    @property
    def following(self) -> list[str]:
        """The methods that take part, in order of worth."""
        return [label for label in self.worker.requests if label not in self.cells.left_out]

    @property
    def race(self) -> Race:
        return race_of(self.cells)

    def _opening(self) -> None:
        """Six images for `random`, the cheapest method, and in order of worth all that a share of the time allows.

        A method's first image tells what it takes.
        """
        worker = self.worker
        first, six = worker.gallery.first(1), worker.gallery.first(FEWEST)
        kept: list[str] = []
        for label in self._with_the_cheapest(first):
            surely = len(kept) < 2
            if surely or self._fits(label, six, kept):
                worker.fill(label, first, self.deciding)
                if label not in self.cells.left_out and (surely or self._fits(label, six, kept)):
                    kept.append(label)
        worker.fall(first)
        takes = MARGIN * sum(worker.seconds(label, six, self.deciding) for label in kept)
        for places in [six] if takes < self.clock.left else [[place] for place in six]:
            for label in kept:  # image by image where time is short: so all have seen the same ones
                worker.fill(label, places, self.deciding)
        worker.fall(six)

    def _fits(self, label: str, six: Sequence[int], kept: Sequence[str]) -> bool:
        """Whether there is time for six images of it beside those of others; else it is left out."""
        worker, budget = self.worker, self.clock.budget
        takes = worker.seconds(label, six, self.deciding)
        others = sum(worker.seconds(other, six, self.deciding) for other in kept)
        share = RACE if self.named or len(kept) < PANEL else OPENING
        if len(six) * worker.costs.of(label, EXPLANATION) > (RACE if self.named else DEAR) * budget:
            self.cells.leave_out(label, f"six images of it would take about {duration(takes)}", for_time=True)
        elif self.clock.spent + others + takes > share * budget:
            self.cells.leave_out(label, "no time was left for it", for_time=True)
        return label not in self.cells.left_out

    def _with_the_cheapest(self, first: Sequence[int]) -> list[str]:
        """`random`, the cheapest method, and the others in order of worth; the first two must fit on one image."""
        worker = self.worker
        takes = {label: worker.seconds(label, first, self.deciding) for label in self.following}
        cheapest = min((label for label in takes if label != self.floor), key=lambda label: takes[label])
        needed = MARGIN * (takes[self.floor] + takes[cheapest])
        if needed > self.clock.left:
            whole = needed + self.clock.spent + max(self.clock.reserve, 1.0)
            raise PatchlightError(
                f"a budget of {duration(self.clock.budget)} is too small for one image under random and {cheapest}: "
                f"that takes about {duration(whole)} here"
            )
        return list(dict.fromkeys([self.floor, cheapest, *takes]))

    def _rounds(self, kept: float) -> None:
        """More images for those that may be the best, until that is decided or only `kept` seconds are left."""
        gallery, worker = self.worker.gallery, self.worker
        while True:
            race = self.race
            planned = looks(len(gallery))
            alive = self._alive(race)
            done = min((race.count(label) for label in alive), default=0)
            ahead = [n for n in planned if n > done]
            if not ahead or (self._decided(race, alive) and done >= SOME):
                return
            places = gallery.first(ahead[0])
            everything = sum(worker.seconds(label, gallery.first(planned[-1]), self.deciding) for label in alive)
            room = self.clock.left - kept
            if everything * MARGIN > room:
                alive = self._that_fit(alive, places, room / len(ahead), room)
            if len(alive) < 2:
                return
            for label in alive:
                if not worker.fill(label, places, self.deciding, kept) and label not in self.cells.left_out:
                    return
            worker.fall(places)

    def _alive(self, race: Race) -> list[str]:
        """`random`, and those that may be the best and were not set aside, highest first."""
        best = [m for m in race.candidates if m != self.floor and m not in self.cells.left_out]
        return [*best[:1], self.floor, *best[1:]] if best else []

    def _decided(self, race: Race, alive: Sequence[str]) -> bool:
        """Whether one method beats all others, and random."""
        return len(alive) == 2 and race.beats(alive[0], self.floor, race.level_of_random)

    def _that_fit(self, alive: Sequence[str], places: Sequence[int], share: float, room: float) -> list[str]:
        """The first of them whose next round fits into an equal share of the time; leader, random and one other."""
        found: list[str] = []
        for label in alive:
            takes = MARGIN * self.worker.seconds(label, places, self.deciding)
            if takes > (room if len(found) < 3 else share):
                break
            room, share = room - takes, share - takes
            found.append(label)
        return found

    def _use_the_rest(self, kept: float) -> None:
        """Where time is left: those that were set aside catch up with the leader, then those left out come in."""
        worker, race = self.worker, self.race
        alive = self._alive(race)
        for label in [m for m in race.standing if alive and m not in race.beaten and m not in alive]:
            self._catch_up(label, race.look(alive[0]), kept)
        for label in [label for label in worker.requests if label in self.cells.set_aside and alive]:
            if MARGIN * worker.seconds(label, worker.gallery.first(FEWEST), self.deciding) < self.clock.left - kept:
                self.cells.take_in(label)
                self._catch_up(label, race.look(alive[0]), kept)

    def _catch_up(self, label: str, most: int, kept: float) -> None:
        """More images for one method, until it is beaten, has `most` or time is over."""
        gallery = self.worker.gallery
        for count in sorted({min(n, most) for n in looks(len(gallery))}):
            places = gallery.first(count)
            takes = MARGIN * self.worker.seconds(label, places, self.deciding)
            if takes > self.clock.left - kept or not self.worker.fill(label, places, self.deciding, kept):
                return
            if label in self.race.beaten:
                return

    def _look_closer(self) -> None:
        """The other metrics, for the finalists: each has an equal share of the time that is left."""
        race, worker = self.race, self.worker
        alive = self._alive(race)
        if not alive:
            return
        leading = alive[0]
        seconds = {m: worker.costs.of(m, EXPLANATION) for m in alive}
        cheap = sorted((m for m in alive if m != self.floor), key=lambda m: seconds[m])[:1]
        finalists = list(dict.fromkeys([leading, *cheap, *(m for m in alive if m != self.floor)]))[:FINALISTS]
        drawn = [m for m in finalists if worker.requests[m].method.stochastic] if self.metrics.agreement else []
        others = [label for label in self.metrics.requests if label not in self.deciding]
        plan: list[tuple[str, list[str], int]] = [(AGREEMENT, drawn, FEW)] if drawn else []
        for label in sorted(others, key=lambda label: (label != SANITY, label != SENSITIVITY)):
            explains = self.metrics.requests[label].metric.explains
            plan.append((label, finalists if explains else [*finalists, self.floor], FEW if explains else SOME))
        for i, (metric, methods, count) in enumerate(plan):
            end = max(0.0, self.clock.left) * (1 - 1 / (len(plan) - i))
            self._measure_in_turn(metric, methods, worker.gallery.first(count), end)

    def _measure_in_turn(self, metric: str, methods: Sequence[str], places: Sequence[int], end: float) -> None:
        """Image by image, so that all have the same ones, until `end` seconds are left."""
        for place in places:
            for method in methods:
                if not self.worker.fill(method, [place], [metric], end) and method not in self.cells.left_out:
                    return


def _examples(worker: Worker, verdict: Verdict) -> str:
    """Maps of the best, the quick and the random method on some images, as HTML; none where time is over."""
    from patchlight.viz import maps_html

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
