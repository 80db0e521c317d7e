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
        self.worker, self.panel, self.record, self.clock = worker, worker.panel, worker.record, worker.clock
        self.deciding = list(self.panel.deciding)
        self.floor = random_of(self.record)

    def run(self) -> None:
        self._opening()
        self._rounds((1 - RACE) * self.clock.budget)
        if decide(self.record).best is None:
            self._rounds()
        self._check_trained()
        self._look_closer()
        self._rounds()
        self._use_the_rest(self._kept)
        self._check_trained()

    @property
    def _kept(self) -> float:
        """Seconds for comparing the leader, or another one, with what it is on an untrained model."""
        alive = self._alive(self.race)
        return MARGIN**2 * self.worker.seconds_new(alive[0], COPIED, self.deciding) if alive else 0.0

    def _check_trained(self) -> None:
        alive = self._alive(self.race)
        if alive and self.race.count(alive[0]) >= FEWEST:
            self.worker.untrained(alive[0], self.worker.gallery.first(COPIED))

    @property
    def following(self) -> list[str]:
        """The methods that take part, in order of worth."""
        return [label for label in self.worker.panel.methods if label not in self.record.left_out]

    @property
    def race(self) -> Race:
        return race_of(self.record)

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
                if label not in self.record.left_out and (surely or self._fits(label, six, kept)):
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
            self.record.leave_out(label, f"six images of it would take about {duration(takes)}", for_time=True)
        elif self.clock.spent + others + takes > share * budget:
            self.record.leave_out(label, "no time was left for it", for_time=True)
        return label not in self.record.left_out

    def _with_the_cheapest(self, first: Sequence[int]) -> list[str]:
        """`random`, the cheapest method, and the others in order of worth; the first two must fit on one image."""
        worker = self.worker
        takes = {label: worker.seconds(label, first, self.deciding) for label in self.following}
        if self.floor not in takes or len(takes) < 2:
            lost = self.floor if self.floor not in takes else "every other method"
            reasons = self.record.left_out.items()
            told = "; ".join(f"{label}: {reason}" for label, reason in reasons if label in worker.panel.methods)
            raise PatchlightError(
                f"{lost} was left out before, so nothing can be compared with random ({told}); begin in another folder"
            )
        cheapest = min((label for label in takes if label != self.floor), key=lambda label: takes[label])
        needed = MARGIN * (takes[self.floor] + takes[cheapest])
        if needed > self.clock.left:
            whole = needed + self.clock.spent + max(self.clock.reserve, 1.0)
            raise PatchlightError(
                f"a budget of {duration(self.clock.budget)} is too small for one image under random and {cheapest}: "
                f"that takes about {duration(whole)} here"
            )
        return list(dict.fromkeys([self.floor, cheapest, *takes]))

    def _rounds(self, least: float = 0.0) -> None:
        """More images for those that may be the best, until that is decided or time is over.

        `least` seconds are kept, and always as many as comparing the leader with an untrained copy takes.
        """
        gallery, worker = self.worker.gallery, self.worker
        while True:
            if self.floor in self.record.left_out:
                return
            race = self.race
            planned = looks(len(gallery))
            alive = self._alive(race)
            ahead = [n for n in planned if any(worker.seconds(m, gallery.planned(n), self.deciding) > 0 for m in alive)]
            if not ahead or (self._decided(race, alive) and ahead[0] > SOME):
                return
            places = gallery.planned(ahead[0])
            everything = sum(worker.seconds(label, gallery.planned(planned[-1]), self.deciding) for label in alive)
            kept = max(least, self._kept)
            room = self.clock.left - kept
            if everything * MARGIN > room:
                alive = self._that_fit(alive, places, room / len(ahead), room)
            if len(alive) < 2 or (self._decided(race, alive) and ahead[0] > SOME):
                return
            for start in range(0, len(places), HELD):  # no more than are held: so each is read once for all methods
                some = places[start : start + HELD]
                for label in alive:
                    if not worker.fill(label, some, self.deciding, kept) and label not in self.record.left_out:
                        return
                worker.fall(some)

    def _alive(self, race: Race) -> list[str]:
        """`random`, and those that may be the best and were not set aside, highest first; of those alike only one."""
        best: list[str] = []
        for method in race.candidates:
            if method not in self.record.left_out and not any(race.same(method, better) for better in best):
                best.append(method)
        return [*best[:1], self.floor, *best[1:]] if best else []

    def _decided(self, race: Race, alive: Sequence[str]) -> bool:
        """Whether only one method is left to follow, and it beats random."""
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
            if not race.same(label, alive[0]):
                self._catch_up(label, race.look(alive[0]), kept)
        for label in [label for label in worker.panel.methods if label in self.record.set_aside and alive]:
            if MARGIN * worker.seconds(label, worker.gallery.planned(FEWEST), self.deciding) < self.clock.left - kept:
                self.record.take_in(label)
                self._catch_up(label, race.look(alive[0]), kept)

    def _catch_up(self, label: str, most: int, kept: float) -> None:
        """More images for one method, until it is beaten, has `most` or time is over."""
        gallery = self.worker.gallery
        for count in sorted({min(n, most) for n in looks(len(gallery))}):
            places = gallery.planned(count)
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
        quick = decide(self.record).quick
        first = [alive[0], *([quick] if quick is not None else []), *alive, *race.standing]
        finalists = [m for m in dict.fromkeys(first) if m != self.floor and m not in race.beaten][:FINALISTS]
        drawn = [m for m in finalists if worker.panel.methods[m].method.stochastic] if self.panel.agreement else []
        others = [label for label in self.panel.metrics if label not in self.deciding]
        plan: list[tuple[str, list[str], int]] = [(AGREEMENT, drawn, FEW)] if drawn else []
        for label in sorted(others, key=lambda label: (label != SANITY, label != SENSITIVITY)):
            explains = self.panel.metrics[label].metric.explains
            plan.append((label, finalists if explains else [*finalists, self.floor], FEW if explains else SOME))
        for i, (metric, methods, count) in enumerate(plan):
            end = max(0.0, self.clock.left) * (1 - 1 / (len(plan) - i))
            self._measure_in_turn(metric, methods, worker.gallery.first(count), end)

    def _measure_in_turn(self, metric: str, methods: Sequence[str], places: Sequence[int], end: float) -> None:
        """Image by image, so that all have the same ones, until `end` seconds are left."""
        for place in places:
            for method in methods:
                if not self.worker.fill(method, [place], [metric], end) and method not in self.record.left_out:
                    return
