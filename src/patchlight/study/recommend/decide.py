"""The verdict on finished cells. It depends on nothing else: equal cells give equal verdicts."""

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
from patchlight.study.recommend.race import ALPHA, Pair, Race, paired
from patchlight.study.recommend.record import MODEL, UNTRAINED, RaceRecord, hardly_falls
from patchlight.study.recommend.verdict import MethodResult, Status, Undecided, Verdict

SANITY, SENSITIVITY = "randomisation", "max-sensitivity"
CHEAPER = 2
"""How many times less a quick method must take."""


def race_of(record: RaceRecord) -> Race:
    """The race so far: a map's score is the mean of the deciding metrics, with the sign at which more is better.

    Where a method gives no map that can be scored, it counts as the random one does there.
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
    falls = {name: record.values(name).get(MODEL) for name in _metrics(record, MODEL)}
    fall = {name: fmean(values.values()) for name, values in falls.items() if values}
    untrained, uncompared = _untrained(record, race, leading)
    nothing = hardly_falls(fall, race.worth) or (untrained is not None and not untrained.surely_above(race.worth))
    above = {m: None if (shown := race.above_random(m)) is None else shown and not nothing for m in race.standing}
    best = leading if leading is not None and above[leading] else None
    judge = _Judge(record, race, best, above)
    rows = tuple(map(judge.result, race.standing))
    return Verdict(
        about=record.about,
        best=best,
        leading=leading,
        quick=_quick(rows, best),
        rows=rows,
        undecided=tuple(judge.undecided(rows, best or leading)),
        sanity={row.method: row.others[SANITY] for row in rows if SANITY in row.others and row.method != race.floor},
        disagreements=tuple(judge.disagreements()),
        fall=fall,
        untrained=untrained,
        uncompared=uncompared,
        looks=tuple(race.looks),
        level=race.level,
        confidence=math.nan if best is None else race.confidence(best),
        left_out=dict(sorted(record.left_out.items())),
        failed=dict(sorted(record.failed.items())),
    )


@dataclass(frozen=True)
class _Judge:
    """What is said of the methods of a race, given the best of them and which are above random."""

    record: RaceRecord
    race: Race
    best: str | None
    above: Mapping[str, bool | None]

    @cached_property
    def others(self) -> dict[str, dict[str, dict[int, float]]]:
        """By metric and method, values by place; all metrics but the sole deciding one."""
        about = self.record.about
        hidden = {UNTRAINED, *(about["deciding"] if len(about["deciding"]) == 1 else ())}
        order = {name: place for place, name in enumerate([*about["metrics"], AGREEMENT])}
        names = sorted(_metrics(self.record), key=lambda name: (order.get(name, len(order)), name))
        return {name: self.record.values(name) for name in names if name not in hidden}

    @cached_property
    def undefined(self) -> list[tuple[str, int]]:
        """Methods and places without a value that decides."""
        cells = [item for metric in self.record.about["deciding"] for item in self.record.cells(metric)]
        return sorted({(cell.method, place) for place, cell in cells if cell.value is None})

    def seconds(self, method: str, measuring: bool = False) -> float:
        """The median time of explaining an image, and of scoring it too; NaN where it is not known."""
        deciding = self.record.about["deciding"]
        times = [
            [c.explain_seconds for _, c in self.record.cells(deciding[0], method) if c.explain_seconds is not None]
        ]
        if measuring:
            times += [
                [c.measure_seconds for _, c in self.record.cells(metric, method) if c.measure_seconds is not None]
                for metric in deciding
            ]
        return sum(map(median, filter(None, times))) if measuring or times[0] else math.nan

    def result(self, method: str) -> MethodResult:
        race, best = self.race, self.best
        values = list(race.scores[method].values())
        count, mean = len(values), race.mean(method)
        reach = to_best = far = math.nan
        if count >= FEWEST:
            error = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (count - 1) / count)
            reach = Pair(count, mean, error, 1.0).reach(0.025)
        if best is not None:
            pair = race.pair(method, best)
            to_best = pair.mean
            far = pair.reach(race.level) if pair.images >= FEWEST and method != best else math.nan
        others = {name: list(by[method].values()) for name, by in self.others.items() if by.get(method)}
        return MethodResult(
            method,
            self.status(method),
            mean,
            mean - reach,
            mean + reach,
            count,
            self.seconds(method),
            to_best,
            to_best - far,
            to_best + far,
            self.above[method],
            race.pair(method, race.floor).p if race.floor in race.scores and method != race.floor else math.nan,
            race.beaten.get(method, ""),
            sum(lost == method for lost, _ in self.undefined),
            {name: fmean(own) for name, own in others.items()},
            {name: len(own) for name, own in others.items()},
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
        """The best (or leading) against each that may still be better, easiest to settle first."""
        race, pairs = self.race, list[Undecided]()
        for row in rows:
            if first is None or row.method == first or row.status in ("worse", "best"):
                continue
            level = race.level_of_random if row.status == "baseline" else race.level
            pair = race.pair(first, row.method)
            settled = row.status == "baseline" and race.beats(first, row.method, level)
            if pair.images >= FEWEST and not settled:
                needed = pair.needed(level)
                missing = {first: needed - race.count(first), row.method: needed - row.images}
                seconds = sum(max(0.0, images) * self.seconds(m, measuring=True) for m, images in missing.items())
                pairs.append(Undecided(first, row.method, pair.mean, pair.images, needed, seconds))
        return sorted(pairs, key=lambda pair: (pair.seconds, pair.second))

    def disagreements(self) -> list[str]:
        """Where another metric surely prefers another method to the best."""
        about, best = self.record.about, self.best
        lower = {*about["lower_is_better"], *(f"deletion {label.removeprefix('srg ')}" for label in about["deciding"])}
        names = [name for name in self.others if name not in (SANITY, SENSITIVITY, AGREEMENT)]
        lines = []
        for name in names:
            sign = -1 if name in lower else 1
            scores = {m: {p: sign * v for p, v in values.items()} for m, values in self.others[name].items()}
            if best is None or best not in scores:
                continue
            race = Race(scores, self.race.images, 0.0)
            level = ALPHA / max(1, (len(scores) - 1) * len(names) * len(self.race.looks))
            rivals = [m for m in scores if m not in (best, self.race.floor) and race.beats(m, best, level)]
            if rivals:
                rival = min(rivals, key=lambda m: (-race.pair(m, best).mean, m))
                pair = race.pair(rival, best)
                lines.append(f"{name} prefers {rival} (better by {pair.mean:.3f} on {pair.images} images)")
        return lines


def _quick(rows: Sequence[MethodResult], best: str | None) -> str | None:
    """Of those tied with the best that cost about the least, and less than it, the highest; else the highest cheap."""
    if best is None:
        return None
    limit = next(row.seconds for row in rows if row.method == best) / CHEAPER
    cheap = [row for row in rows if row.above_random and row.seconds <= limit]
    tied = [row for row in cheap if row.status == "tied"]
    least = min((row.seconds for row in tied), default=0.0)
    return next((row.method for row in (*(r for r in tied if r.seconds <= 2 * least), *cheap)), best)


def _metrics(record: RaceRecord, method: str | None = None) -> list[str]:
    """The metrics that have cells, of one method or of all but the model itself."""
    return list(
        dict.fromkeys(c.metric for _, c in record.cells() if (c.method == method if method is not None else c.method))
    )


def _untrained(record: RaceRecord, race: Race, leading: str | None) -> tuple[Pair | None, str]:
    """The leader's scores against those on an untrained copy; or why there are none, or fewer than six."""
    if leading is None:
        return None, ""
    here, copied = race.scores[leading], dict(record.cells(UNTRAINED, leading))
    there = {place: cell.value for place, cell in copied.items() if cell.value is not None}
    shared = sorted(here.keys() & there.keys())
    if len(shared) >= FEWEST:
        return paired(np.array([here[p] for p in shared]), np.array([there[p] for p in shared])), ""
    if not copied:
        return None, "there was no time for it"
    reason = next((cell.reason for cell in copied.values() if cell.reason), "")
    few = f"only {len(there)} of {len(copied)} images have a score there, fewer than {FEWEST}"
    return None, reason or few
