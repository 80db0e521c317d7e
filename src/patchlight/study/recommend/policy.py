"""How the budget is spent: six images of every method, more images for the leading ones, then the other metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence

from patchlight.core.errors import PatchlightError
from patchlight.core.statistics import FEWEST
from patchlight.core.text import duration, plural
from patchlight.study.recommend.decide import SANITY, SENSITIVITY, decide, race_of, random_of
from patchlight.study.recommend.gallery import HELD
from patchlight.study.recommend.panel import AGREEMENT
from patchlight.study.recommend.race import COMPARED, Race, looks
from patchlight.study.recommend.work import EXPLANATION, MARGIN, RaceWorker

RACE = 0.75
"""Share of the budget for the race, before the other metrics."""
OPENING = 0.35
"""Share of the budget for the first six images of all methods, unless the user chose the methods."""
DEAR = 0.1
"""Share of the budget for six maps of one method; more expensive methods are left out unless the user chose them."""
FINALISTS, FEW, SOME = 5, 4, 16
"""Number of methods that the other metrics measure, of images for metrics that explain often, and of images for others.
A race does not end early on fewer images than the last of these."""
COPIED = 12
"""Images for the leading method's score on an untrained copy of the model."""
NO_TIME = "not enough time"


class Policy:
    """The order of the work. Methods that the user chose (`by_user`) may take more of the time."""

    def __init__(self, worker: RaceWorker, by_user: bool) -> None:
        self.by_user, self._start = by_user, worker.clock.spent
        self.worker, self.gallery, self.record, self.clock = worker, worker.gallery, worker.record, worker.clock
        self.deciding = worker.panel.deciding
        self.floor = random_of(self.record)

    def run(self) -> None:
        """Spend the budget."""
        self._opening()
        self._rounds((1 - RACE) * self.clock.budget)
        if decide(self.record).best is None:
            self._rounds()
        self._check_trained()
        self._look_closer()
        self._rounds()
        self._use_the_rest()
        self._check_trained()

    @property
    def race(self) -> Race:
        return race_of(self.record)

    def _seconds(self, label: str, places: Sequence[int]) -> float:
        return self.worker.seconds(label, places, self.deciding)

    @property
    def _reserve(self) -> float:
        """Seconds reserved for the comparison of the leading method with an untrained copy of the model."""
        alive = self._contenders(self.race)
        return MARGIN**2 * self.worker.seconds_new(alive[0], COPIED) if alive else 0.0

    def _check_trained(self) -> None:
        alive = self._contenders(self.race)
        if alive and self.race.count(alive[0]) >= FEWEST:
            self.worker.score_untrained(alive[0], self.gallery.first(COPIED))

    def plan(self) -> str:
        """The estimated course of the race in words, before anything is measured."""
        six, chosen = self.gallery.first_without_reading(FEWEST), list[str]()
        order = self._in_order(six[:1])
        for label in order:
            if len(chosen) < 2 or not self._shortage(label, six, chosen):
                chosen.append(label)
        seconds = sum(self._seconds(label, six) for label in order)
        methods, fitting, images = len(order) - 1, len(chosen) - 1, len(self.gallery)  # besides random
        rest = f" Not enough time for {plural(methods - fitting, 'method')}." if methods > fitting else ""
        few = f" A recommendation needs at least {COMPARED} methods." if fitting < COMPARED else ""
        return (
            f"Plan: {plural(fitting, 'method')} and random on up to {plural(images, 'image')}, within "
            f"{duration(self.clock.budget)}. The first {min(FEWEST, images)} images of all {plural(methods, 'method')} "
            f"would take about {duration(seconds)}; the cheapest start.{rest}{few}"
        )

    @property
    def comparison_seconds(self) -> float:
        """Estimated budget for random and the three cheapest methods on six images, above this one; NaN if unknown."""
        able = [m for m in self.worker.panel.methods if m not in self.record.left_out or m in self.record.set_aside]
        costs = sorted(self.worker.seconds_new(m, FEWEST) for m in able if m != self.floor)[:COMPARED]
        if len(costs) < COMPARED:
            return math.nan
        work = self.worker.seconds_new(self.floor, FEWEST) + sum(costs) + costs[0]
        return max(MARGIN**2 * work + self._start + 1.0, 1.5 * self.clock.budget)  # this budget was too small

    def _opening(self) -> None:
        """Measure six images of random, the three cheapest methods, and as many others as a share of the time allows.

        The first image of a method shows what it costs.
        """
        first, six = self.gallery.first(1), self.gallery.first(FEWEST)
        chosen: list[str] = []
        for label in self._in_order(first):
            certain = len(chosen) < 2
            if certain or self._fits(label, six, chosen):
                self.worker.fill(label, first, self.deciding)
                if label not in self.record.left_out and (certain or self._fits(label, six, chosen)):
                    chosen.append(label)
        self.worker.blank(first)
        takes = MARGIN * sum(self._seconds(label, six) for label in chosen)
        for places in [six] if takes < self.clock.left else [[place] for place in six]:
            for label in chosen:  # image by image if time is short, so that all methods share the same images
                self.worker.fill(label, places, self.deciding)
        self.worker.blank(six)

    def _fits(self, label: str, six: Sequence[int], chosen: Sequence[str]) -> bool:
        """Whether there is time for six images of a method besides the chosen ones; if not, it is left out."""
        if reason := self._shortage(label, six, chosen):
            self.record.leave_out(label, reason, for_time=True)
        return not reason

    def _shortage(self, label: str, six: Sequence[int], chosen: Sequence[str]) -> str:
        """Why there is no time for six images of a method; empty if there is."""
        takes = self._seconds(label, six)
        total = takes + sum(self._seconds(other, six) for other in chosen)
        if len(chosen) <= COMPARED:  # random and three methods: without them there is no comparison at all
            return "" if MARGIN * total <= self.clock.left else NO_TIME
        if len(six) * self.worker.cost(label, EXPLANATION) > (RACE if self.by_user else DEAR) * self.clock.budget:
            return f"six images would take about {duration(takes)}"
        share = RACE if self.by_user else OPENING
        return NO_TIME if self.clock.spent + total > share * self.clock.budget else ""

    def _in_order(self, first: Sequence[int]) -> list[str]:
        """Random, the three cheapest methods, and all others in order of promise."""
        left_out = self.record.left_out
        takes = {label: self._seconds(label, first) for label in self.worker.panel.methods if label not in left_out}
        if self.floor not in takes or len(takes) < 2:
            lost = self.floor if self.floor not in takes else "every other method"
            methods = self.worker.panel.methods
            reasons = "; ".join(f"{label}: {reason}" for label, reason in left_out.items() if label in methods)
            raise PatchlightError(
                f"{lost} was left out in an earlier run, so there is nothing to compare with random ({reasons}); use "
                "another folder"
            )
        real = [label for label in takes if label != self.floor]
        least = max(min(takes[label] for label in real), 1e-9)
        cheap = sorted(real, key=lambda label: round(math.log2(max(takes[label] / least, 1.0))))[:COMPARED]
        needed = MARGIN * (takes[self.floor] + takes[cheap[0]])
        if needed > self.clock.left:
            total = needed + self.clock.spent + max(self.clock.reserve, 1.0)
            raise PatchlightError(
                f"a budget of {duration(self.clock.budget)} is too small for one image of random and {cheap[0]}; give "
                f"at least {duration(total)}"
            )
        return list(dict.fromkeys([self.floor, *cheap, *takes]))

    def _rounds(self, least: float = 0.0) -> None:
        """Measure more images of the methods that may be the best, until that is decided or the time is over.

        At least `least` seconds remain, and always enough to compare the leading method with an untrained copy.
        """
        while self.floor not in self.record.left_out:
            race, planned = self.race, looks(len(self.gallery))
            alive = self._contenders(race)
            ahead = [
                n for n in planned if any(self._seconds(m, self.gallery.first_without_reading(n)) > 0 for m in alive)
            ]
            if not ahead:
                return
            places, reserved = self.gallery.first_without_reading(ahead[0]), max(least, self._reserve)
            room = self.clock.left - reserved
            if MARGIN * sum(self._seconds(m, self.gallery.first_without_reading(planned[-1])) for m in alive) > room:
                alive = self._affordable(alive, places, room / len(ahead), room)
            beats_random = len(alive) == 2 and race.beats(alive[0], self.floor, race.level_of_random)
            if len(alive) < 2 or (beats_random and ahead[0] > SOME):
                return
            for start in range(0, len(places), HELD):  # as many as the cache holds: each is read once
                part = places[start : start + HELD]
                for label in alive:
                    complete = self.worker.fill(label, part, self.deciding, reserved)
                    if not complete and label not in self.record.left_out:
                        return
                self.worker.blank(part)

    def _contenders(self, race: Race) -> list[str]:
        """Random, and the methods that may be the best, highest first; only one of several equal ones."""
        best: list[str] = []
        for method in race.candidates:
            if method not in self.record.left_out and not any(race.same(method, better) for better in best):
                best.append(method)
        return [*best[:1], self.floor, *best[1:]] if best else []

    def _affordable(self, alive: Sequence[str], places: Sequence[int], share: float, room: float) -> list[str]:
        """The methods with time for another round; the leading one, random and one other may use all of it."""
        fitting: list[str] = []
        for label in alive:
            takes = MARGIN * self._seconds(label, places)
            if takes > (room if len(fitting) < 3 else share):
                break
            room, share = room - takes, share - takes
            fitting.append(label)
        return fitting

    def _use_the_rest(self) -> None:
        """Use the remaining time: stopped methods catch up with the leading one, then methods left out are measured."""
        race, reserved = self.race, self._reserve
        alive = self._contenders(race)
        if not alive:
            return
        for label in race.standing:
            if label not in race.beaten and label not in alive and not race.same(label, alive[0]):
                self._catch_up(label, race.look(alive[0]), reserved)
        for label in self.worker.panel.methods:
            takes = MARGIN * self._seconds(label, self.gallery.first_without_reading(FEWEST))
            if label in self.record.set_aside and takes < self.clock.left - reserved:
                self.record.readmit(label)
                self._catch_up(label, race.look(alive[0]), reserved)

    def _catch_up(self, label: str, most: int, reserved: float) -> None:
        """Measure more images of one method, until it is beaten, has `most` images or the time is over."""
        for count in sorted({min(n, most) for n in looks(len(self.gallery))}):
            places = self.gallery.first_without_reading(count)
            fits = MARGIN * self._seconds(label, places) <= self.clock.left - reserved
            if not fits or not self.worker.fill(label, places, self.deciding, reserved) or label in self.race.beaten:
                return

    def _look_closer(self) -> None:
        """Measure the other metrics for the finalists; each gets an equal share of the remaining time."""
        race, panel = self.race, self.worker.panel
        alive = self._contenders(race)
        if not alive:
            return
        first = dict.fromkeys([alive[0], decide(self.record).quick, *alive, *race.standing])
        finalists = [m for m in first if m is not None and m != self.floor and m not in race.beaten][:FINALISTS]
        sampling = [m for m in finalists if panel.methods[m].method.stochastic] if panel.agreement else []
        plan: list[tuple[str, list[str], int]] = [(AGREEMENT, sampling, FEW)] if sampling else []
        others = [label for label in panel.metrics if label not in self.deciding]
        for label in sorted(others, key=lambda label: (label != SANITY, label != SENSITIVITY)):
            explains = panel.metrics[label].metric.explains
            plan.append((label, finalists if explains else [*finalists, self.floor], FEW if explains else SOME))
        for i, (metric, methods, count) in enumerate(plan):
            end = max(0.0, self.clock.left) * (1 - 1 / (len(plan) - i))
            self._measure_in_turn(metric, methods, self.gallery.first(count), end)

    def _measure_in_turn(self, metric: str, methods: Sequence[str], places: Sequence[int], end: float) -> None:
        """Measure image by image, so that all methods share the same ones, until `end` seconds are left."""
        for place in places:
            for method in methods:
                if not self.worker.fill(method, [place], [metric], end) and method not in self.record.left_out:
                    return
