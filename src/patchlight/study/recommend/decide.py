"""Turn the cells of a race into a verdict. Equal cells give equal verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Any

import numpy as np

from patchlight.core.statistics import FEWEST
from patchlight.study.recommend.panel import AGREEMENT, RANDOM
from patchlight.study.recommend.race import ALPHA, COMPARED, Pair, Race, paired_test
from patchlight.study.recommend.record import BLANKED, MODEL, UNTRAINED, RaceRecord
from patchlight.study.recommend.verdict import BlankEffect, MethodResult, Status, Undecided, Verdict, hardly_changes

SANITY, SENSITIVITY = "randomisation", "max-sensitivity"
CHEAPER = 2
"""How many times less time a quick method must take."""


def race_of(record: RaceRecord) -> Race:
    """The race so far. A map's score is the mean of the deciding metrics, signed so that higher is better.

    A map that is not usable has the score of the random map of the same image.
    """
    lower, deciding = set(record.about["lower_is_better"]), record.about["deciding"]
    each = [(-1 if label in lower else 1, record.values(label)) for label in deciding]
    scores: dict[str, dict[int, float]] = {}
    for method in record.about["methods"]:
        signed = [(sign, values.get(method, {})) for sign, values in each]
        places = sorted(set.intersection(*(set(values) for _, values in signed)))
        if places:
            scores[method] = {p: sum(sign * values[p] for sign, values in signed) / len(signed) for p in places}
    floor = random_of(record)
    by_chance = scores.get(floor, {})
    for metric in deciding:
        for place, cell in record.cells(metric):
            if cell.value is None and place in by_chance:
                scores.setdefault(cell.method, {})[place] = by_chance[place]
    return Race(scores, record.about["images"] - len(record.failed), record.about["worth"], floor=floor)


def random_of(record: RaceRecord) -> str:
    """The label of the random map."""
    methods: dict[str, Any] = record.about["methods"]
    return next(label for label, spec in methods.items() if spec["method"] == RANDOM)


def decide(record: RaceRecord) -> Verdict:
    """The verdict on finished cells."""
    race = race_of(record)
    leading = next(iter(race.candidates), None)
    blanked = _blank_effects(record)
    scores = record.values("score").get(MODEL, {})
    untrained, uncompared = _compare_untrained(record, race, leading)
    used = not hardly_changes(blanked, race.worth) if untrained is None else untrained.surely_above(race.worth)
    above = {method: race.above_random(method) for method in race.standing}
    compared = _comparable(record, race, leading)
    best = leading if leading is not None and above[leading] and used and len(compared) >= COMPARED else None
    results = _Results(record, race, best, above)
    rows = tuple(map(results.row, race.standing))
    return Verdict(
        about=record.about,
        best=best,
        leading=leading,
        quick=_quick(rows, best),
        rows=rows,
        compared=compared,
        undecided=tuple(results.undecided(rows, best or leading)),
        sanity={row.method: row.others[SANITY] for row in rows if SANITY in row.others and row.method != race.floor},
        disagreements=tuple(results.disagreements()),
        score=fmean(scores.values()) if scores else math.nan,
        blanked=blanked,
        untrained=untrained,
        uncompared=uncompared,
        looks=tuple(race.looks),
        level=race.level,
        confidence=math.nan if best is None else race.confidence(best),
        left_out=dict(sorted(record.left_out.items())),
        failed=dict(sorted(record.failed.items())),
    )


@dataclass(frozen=True)
class _Results:
    """The results of the methods of a race, with the best one and whether each beats random (`above`)."""

    record: RaceRecord
    race: Race
    best: str | None
    above: Mapping[str, bool | None]

    @cached_property
    def other_metrics(self) -> dict[str, dict[str, dict[int, float]]]:
        """By metric and method, values by place, without a metric that decides alone."""
        about = self.record.about
        hidden = {UNTRAINED, *(about["deciding"] if len(about["deciding"]) == 1 else ())}
        order = {name: place for place, name in enumerate([*about["metrics"], AGREEMENT])}
        names = sorted(
            {c.metric for _, c in self.record.cells() if c.method}, key=lambda name: (order.get(name, len(order)), name)
        )
        return {name: self.record.values(name) for name in names if name not in hidden}

    @cached_property
    def undefined(self) -> list[tuple[str, int]]:
        """Methods and places without a deciding value."""
        cells = [item for metric in self.record.about["deciding"] for item in self.record.cells(metric)]
        return sorted({(cell.method, place) for place, cell in cells if cell.value is None})

    def seconds(self, method: str, measuring: bool = False) -> float:
        """The median seconds of explaining an image, and with `measuring` of scoring it too; NaN if unknown."""
        deciding = self.record.about["deciding"]
        explaining = [c.explain_seconds for _, c in self.record.cells(deciding[0], method)]
        times = [[seconds for seconds in explaining if seconds is not None]]
        for metric in deciding if measuring else ():
            column = (c.measure_seconds for _, c in self.record.cells(metric, method))
            times.append([seconds for seconds in column if seconds is not None])
        return sum(map(median, filter(None, times))) if measuring or times[0] else math.nan

    def row(self, method: str) -> MethodResult:
        race, best = self.race, self.best
        values = list(race.scores[method].values())
        count, mean = len(values), race.mean(method)
        half = difference = difference_half = math.nan
        if count >= FEWEST:
            error = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (count - 1) / count)
            half = Pair(count, mean, error, 1.0).reach(0.025)
        if best is not None:
            pair = race.pair(method, best)
            difference = pair.mean
            difference_half = pair.reach(race.level) if pair.images >= FEWEST and method != best else math.nan
        others = {name: list(by[method].values()) for name, by in self.other_metrics.items() if by.get(method)}
        return MethodResult(
            method,
            self.status(method),
            mean,
            mean - half,
            mean + half,
            count,
            self.seconds(method),
            difference,
            difference - difference_half,
            difference + difference_half,
            self.above[method],
            race.pair(method, race.floor).p if race.floor in race.scores and method != race.floor else math.nan,
            race.beaten.get(method, ""),
            sum(lost == method for lost, _ in self.undefined),
            {name: fmean(values) for name, values in others.items()},
            {name: len(values) for name, values in others.items()},
            method in self.record.about.get("ignores_class", ()),
        )

    def status(self, method: str) -> Status:
        race, best = self.race, self.best
        if method == race.floor:
            return "baseline"
        if best is None:
            return "undecided"
        if method == best:
            return "best"
        if method in race.beaten:
            return "worse"
        if race.same(method, best):
            return "tied"
        if method not in race.candidates:
            return "behind"
        return "tied" if self.above[method] else "undecided"

    def undecided(self, rows: Sequence[MethodResult], first: str | None) -> list[Undecided]:
        """The best (or leading) method against each one that may still be better, the easiest to settle first."""
        race, pairs = self.race, list[Undecided]()
        for row in rows:
            if first is None or row.method == first or row.status in ("worse", "best"):
                continue
            level = race.level_of_random if row.status == "baseline" else race.level
            pair = race.pair(first, row.method)
            settled = row.status == "baseline" and race.beats(first, row.method, level)
            if pair.images >= FEWEST and not settled:
                needed = pair.images_needed(level)
                missing = {first: needed - race.count(first), row.method: needed - row.images}
                seconds = sum(max(0.0, images) * self.seconds(m, measuring=True) for m, images in missing.items())
                pairs.append(Undecided(first, row.method, pair.mean, pair.images, needed, seconds))
        return sorted(pairs, key=lambda pair: (pair.seconds, pair.second))

    def disagreements(self) -> list[str]:
        """Metrics that significantly prefer another method to the best."""
        about, best = self.record.about, self.best
        lower = {*about["lower_is_better"], *(f"deletion {label.removeprefix('srg ')}" for label in about["deciding"])}
        names = [name for name in self.other_metrics if name not in (SANITY, SENSITIVITY, AGREEMENT)]
        lines = []
        for name in names:
            sign = -1 if name in lower else 1
            scores = {m: {p: sign * v for p, v in values.items()} for m, values in self.other_metrics[name].items()}
            if best is None or best not in scores:
                continue
            race = Race(scores, self.race.images, 0.0)
            level = ALPHA / max(1, (len(scores) - 1) * len(names) * len(self.race.looks))
            rivals = [m for m in scores if m not in (best, self.race.floor) and race.beats(m, best, level)]
            if rivals:
                rival = min(rivals, key=lambda m: (-race.pair(m, best).mean, m))
                pair = race.pair(rival, best)
                lines.append(f"{name} prefers {rival} (by {pair.mean:.3f} on {pair.images} images)")
        return lines


def _quick(rows: Sequence[MethodResult], best: str | None) -> str | None:
    """The highest of the cheapest methods tied with the best, else the highest cheap one, else the best itself."""
    if best is None:
        return None
    limit = next(row.seconds for row in rows if row.method == best) / CHEAPER
    cheap = [row for row in rows if row.above_random and row.seconds <= limit]
    tied = [row for row in cheap if row.status == "tied"]
    least = min((row.seconds for row in tied), default=0.0)
    return next((row.method for row in (*(r for r in tied if r.seconds <= 2 * least), *cheap)), best)


def _comparable(record: RaceRecord, race: Race, leading: str | None) -> tuple[str, ...]:
    """The methods, without random ones, that share at least six images with the leading one and random."""
    if leading is None or race.floor not in race.scores:
        return ()
    shared = race.scores[leading].keys() & race.scores[race.floor].keys()
    specs = record.about["methods"]
    real = [method for method in race.standing if specs[method]["method"] != RANDOM]
    return tuple(method for method in real if len(shared & race.scores[method].keys()) >= FEWEST)


def _blank_effects(record: RaceRecord) -> dict[str, BlankEffect]:
    """By fill, the change of the score without the image: its mean magnitude, so that rises do not cancel falls."""
    effects = {}
    for metric in dict.fromkeys(c.metric for _, c in record.cells(method=MODEL) if c.metric.startswith(BLANKED)):
        changes = list(record.values(metric).get(MODEL, {}).values())
        if changes:
            signs = [sum(change < 0 for change in changes), sum(change > 0 for change in changes)]
            effects[metric.removeprefix(f"{BLANKED} ")] = BlankEffect(fmean(map(abs, changes)), *signs)
    return effects


def _compare_untrained(record: RaceRecord, race: Race, leading: str | None) -> tuple[Pair | None, str]:
    """The leading method's scores against those on an untrained copy; or why there is no such comparison."""
    if leading is None:
        return None, ""
    here, copied = race.scores[leading], dict(record.cells(UNTRAINED, leading))
    there = {place: cell.value for place, cell in copied.items() if cell.value is not None}
    shared = sorted(here.keys() & there.keys())
    if len(shared) >= FEWEST:
        return paired_test(np.array([here[p] for p in shared]), np.array([there[p] for p in shared])), ""
    if not copied:
        return None, "there was not enough time"
    reason = next((cell.reason for cell in copied.values() if cell.reason), "")
    few = f"only {len(there)} of {len(copied)} images have a score there, and at least {FEWEST} are needed"
    return None, reason or few
