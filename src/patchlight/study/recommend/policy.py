"""Where the time goes: an opening over all methods, more images for fewer of them, then the other metrics."""

from __future__ import annotations

from collections.abc import Sequence

from patchlight.core.errors import PatchlightError
from patchlight.core.statistics import FEWEST
from patchlight.study.recommend.decide import SANITY, SENSITIVITY, decide, race_of, random_of
from patchlight.study.recommend.gallery import HELD
from patchlight.study.recommend.panel import AGREEMENT
from patchlight.study.recommend.race import Race, looks
from patchlight.study.recommend.words import duration
from patchlight.study.recommend.work import EXPLANATION, MARGIN, RaceWorker

RACE = 0.75
"""Of the budget, what the race has before the other metrics have their turn."""
PANEL, OPENING = 4, 0.35
"""Of the budget, what the first six images of all methods may take; of methods that were named, or so few, more."""
DEAR = 0.1
"""Of the budget, what six maps of one method may take; what is dearer is left out unless it was named."""
FINALISTS, FEW, SOME = 5, 4, 16
"""Methods that the other metrics look at; images for metrics that explain many times, and for those that do not. With
fewer than the latter no race ends by itself, however clear it is."""
COPIED = 12
"""Images for the leader's score on an untrained copy of the model."""


class Policy:
    """What is done when; `named`: whether the methods were named by the user, and so may take more of the time."""

    def __init__(self, worker: RaceWorker, named: bool) -> None:
        self.named = named
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
    def _reserved(self) -> float:
        """Seconds for comparing the leader, or another one, with what it is on an untrained model."""
        alive = self._alive(self.race)
        return MARGIN**2 * self.worker.seconds_new(alive[0], COPIED) if alive else 0.0

    def _check_trained(self) -> None:
        alive = self._alive(self.race)
        if alive and self.race.count(alive[0]) >= FEWEST:
            self.worker.untrained(alive[0], self.gallery.first(COPIED))

    def _opening(self) -> None:
        """Six images for `random`, the cheapest method, and in order of worth all that a share of the time allows.

        A method's first image tells what it takes.
        """
        first, six = self.gallery.first(1), self.gallery.first(FEWEST)
        chosen: list[str] = []
        for label in self._in_order(first):
            surely = len(chosen) < 2
            if surely or self._fits(label, six, chosen):
                self.worker.fill(label, first, self.deciding)
                if label not in self.record.left_out and (surely or self._fits(label, six, chosen)):
                    chosen.append(label)
        self.worker.fall(first)
        takes = MARGIN * sum(self._seconds(label, six) for label in chosen)
        for places in [six] if takes < self.clock.left else [[place] for place in six]:
            for label in chosen:  # image by image where time is short: so all have seen the same ones
                self.worker.fill(label, places, self.deciding)
        self.worker.fall(six)

    def _fits(self, label: str, six: Sequence[int], chosen: Sequence[str]) -> bool:
        """Whether there is time for six images of it beside those of others; else it is left out."""
        takes, others = self._seconds(label, six), sum(self._seconds(other, six) for other in chosen)
        share = RACE if self.named or len(chosen) < PANEL else OPENING
        dear = (RACE if self.named else DEAR) * self.clock.budget
        if len(six) * self.worker.cost(label, EXPLANATION) > dear:
            self.record.leave_out(label, f"six images of it would take about {duration(takes)}", for_time=True)
        elif self.clock.spent + others + takes > share * self.clock.budget:
            self.record.leave_out(label, "no time was left for it", for_time=True)
        return label not in self.record.left_out

    def _in_order(self, first: Sequence[int]) -> list[str]:
        """`random`, the cheapest method, and the others in order of worth; the first two must fit on one image."""
        left_out = self.record.left_out
        takes = {label: self._seconds(label, first) for label in self.worker.panel.methods if label not in left_out}
        if self.floor not in takes or len(takes) < 2:
            lost = self.floor if self.floor not in takes else "every other method"
            methods = self.worker.panel.methods
            reasons = "; ".join(f"{label}: {reason}" for label, reason in left_out.items() if label in methods)
            raise PatchlightError(
                f"{lost} was left out before, so nothing can be compared with random ({reasons}); begin in another "
                "folder"
            )
        cheapest = min((label for label in takes if label != self.floor), key=lambda label: takes[label])
        needed = MARGIN * (takes[self.floor] + takes[cheapest])
        if needed > self.clock.left:
            total = needed + self.clock.spent + max(self.clock.reserve, 1.0)
            raise PatchlightError(
                f"a budget of {duration(self.clock.budget)} is too small for one image under random and {cheapest}: "
                f"that takes about {duration(total)} here"
            )
        return list(dict.fromkeys([self.floor, cheapest, *takes]))

    def _rounds(self, least: float = 0.0) -> None:
        """More images for those that may be the best, until that is decided or time is over.

        `least` seconds are kept, and always as many as comparing the leader with an untrained copy takes.
        """
        while self.floor not in self.record.left_out:
            race, planned = self.race, looks(len(self.gallery))
            alive = self._alive(race)
            ahead = [n for n in planned if any(self._seconds(m, self.gallery.planned(n)) > 0 for m in alive)]
            if not ahead:
                return
            places, reserved = self.gallery.planned(ahead[0]), max(least, self._reserved)
            room = self.clock.left - reserved
            if MARGIN * sum(self._seconds(m, self.gallery.planned(planned[-1])) for m in alive) > room:
                alive = self._that_fit(alive, places, room / len(ahead), room)
            beats_random = len(alive) == 2 and race.beats(alive[0], self.floor, race.level_of_random)
            if len(alive) < 2 or (beats_random and ahead[0] > SOME):
                return
            for start in range(0, len(places), HELD):  # no more than are held: so each is read once for all methods
                some = places[start : start + HELD]
                for label in alive:
                    filled = self.worker.fill(label, some, self.deciding, reserved)
                    if not filled and label not in self.record.left_out:
                        return
                self.worker.fall(some)

    def _alive(self, race: Race) -> list[str]:
        """`random`, and those that may be the best and were not set aside, highest first; of those alike only one."""
        best: list[str] = []
        for method in race.candidates:
            if method not in self.record.left_out and not any(race.same(method, better) for better in best):
                best.append(method)
        return [*best[:1], self.floor, *best[1:]] if best else []

    def _that_fit(self, alive: Sequence[str], places: Sequence[int], share: float, room: float) -> list[str]:
        """The first of them whose next round fits into an equal share of the time; leader, random and one other."""
        fitting: list[str] = []
        for label in alive:
            takes = MARGIN * self._seconds(label, places)
            if takes > (room if len(fitting) < 3 else share):
                break
            room, share = room - takes, share - takes
            fitting.append(label)
        return fitting

    def _use_the_rest(self) -> None:
        """Where time is left: those that were set aside catch up with the leader, then those left out come in."""
        race, reserved = self.race, self._reserved
        alive = self._alive(race)
        if not alive:
            return
        for label in race.standing:
            if label not in race.beaten and label not in alive and not race.same(label, alive[0]):
                self._catch_up(label, race.look(alive[0]), reserved)
        for label in self.worker.panel.methods:
            takes = MARGIN * self._seconds(label, self.gallery.planned(FEWEST))
            if label in self.record.set_aside and takes < self.clock.left - reserved:
                self.record.take_in(label)
                self._catch_up(label, race.look(alive[0]), reserved)

    def _catch_up(self, label: str, most: int, reserved: float) -> None:
        """More images for one method, until it is beaten, has `most` or time is over."""
        for count in sorted({min(n, most) for n in looks(len(self.gallery))}):
            places = self.gallery.planned(count)
            fits = MARGIN * self._seconds(label, places) <= self.clock.left - reserved
            if not fits or not self.worker.fill(label, places, self.deciding, reserved) or label in self.race.beaten:
                return

    def _look_closer(self) -> None:
        """The other metrics, for the finalists: each has an equal share of the time that is left."""
        race, panel = self.race, self.worker.panel
        alive = self._alive(race)
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
        """Image by image, so that all have the same ones, until `end` seconds are left."""
        for place in places:
            for method in methods:
                if not self.worker.fill(method, [place], [metric], end) and method not in self.record.left_out:
                    return
