"""Which unit is next, while others take from the same folder; and how large units are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from patchlight.bench.claims import Claim, Claims
from patchlight.bench.events import Listener, Waiting
from patchlight.bench.plan import Group, Plan, Unit
from patchlight.bench.rows import Row, rows_of
from patchlight.bench.store import Store
from patchlight.bench.unit import Resources, run_unit
from patchlight.core.errors import PatchlightError

SECONDS = 30.0
"""How long a unit should take."""
EACH = 4
"""Units that everyone who shares the work should have of a group."""
FEW = 4
"""Batches of a unit where the first says nothing about the others, because it failed."""
MOST = 4096
"""Images a unit may have, whose rows and maps are kept in memory until it is done."""
PAUSE = 0.5
"""Seconds between two looks at what others do."""


@dataclass
class Stop:
    """A wish to stop: the unit in flight is finished, and nothing begun after it. `leave` says goodbye at once."""

    asked: threading.Event = field(default_factory=threading.Event)
    leave: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Part:
    """One of `count` equal parts of every group's images, the first being 1."""

    number: int = 1
    count: int = 1

    @staticmethod
    def parse(given: str) -> Part:
        """`3/16` as the third of sixteen.

        >>> Part.parse("3/16")
        Part(number=3, count=16)
        """
        number, slash, count = given.partition("/")
        if not (slash and number.strip().isdecimal() and count.strip().isdecimal() and int(count)):
            raise PatchlightError(f"--shard {given or 'of nothing'} is not possible; give I/N, as in 3/16")
        part = Part(int(number), int(count))
        if not 1 <= part.number <= part.count:
            raise PatchlightError(
                f"--shard {given} is not possible; of {count} shards give 1/{count} to {count}/{count}"
            )
        return part

    def span(self, images: int) -> tuple[int, int]:
        """Where this part of so many images begins and ends."""
        begin, end = (-(-place * images // self.count) for place in (self.number - 1, self.number))
        return begin, end

    def has(self, unit: Unit, images: int) -> bool:
        """Whether a unit holds an image of this part; a unit at a border belongs to both."""
        begin, end = self.span(images)
        return max(unit.start, begin) < min(unit.stop, end)


WHOLE = Part()


@dataclass(frozen=True)
class Begun:
    """A run that is begun or gone on with: its plan, what it runs on, and notes on what changed."""

    store: Store
    claims: Claims
    whole: Plan
    resources: Resources
    retry: bool
    notes: tuple[str, ...]
    shares: int = 1


class Queue:
    """The units of a part that are still to be done, each once, while others take from the same folder."""

    def __init__(self, begun: Begun, part: Part, stop: Stop, listen: Listener) -> None:
        self.begun, self.part, self.stop, self.listen = begun, part, stop, listen
        self.done: set[str] = begun.store.done()
        self.held: set[str] = set()
        self._units: dict[str, list[Unit]] = {}

    def __iter__(self) -> Iterator[tuple[Unit, Claim]]:
        waits = False
        while not self.stop.asked.is_set():
            found = self.take()
            if found is not None:
                waits = False
                yield found
                continue
            if not self.open():
                return
            if not waits:
                self.listen(Waiting(len(self.begun.claims.others())))
                waits = True
            self.stop.asked.wait(PAUSE)
            self.done |= self.begun.store.done()

    def take(self) -> tuple[Unit, Claim] | None:
        """The first unit that is free, and not done meanwhile; it is held until it is `finished`."""
        for unit in self.open():
            if unit.key in self.held:
                continue
            claim = self.begun.claims.take(unit.key)
            if claim.state == "done":
                self._known(unit)
            elif claim.state == "mine" and unit.key in self.begun.store.done():
                self._known(unit)
                self.begun.claims.finish(unit.key, claim)
            elif claim.state == "mine":
                self.held.add(unit.key)
                return unit, claim
        return None

    def _known(self, unit: Unit) -> None:
        """A unit is done; where whoever did it had no time to say how large the others shall be, its rows tell."""
        self.done.add(unit.key)
        if self.sizes(unit):
            files = self.begun.store.files().get(unit.key)
            table = files.table() if files is not None else None
            rows = rows_of(table) if table is not None else []
            seconds = lasted(rows, 0.0, known=True)
            self._write_size(unit, seconds)

    def _write_size(self, first: Unit, seconds: float) -> None:
        """Units of about half a minute, and several for each of those that share the work."""
        images = len(self.begun.whole.images)
        size = unit_size(first, seconds, images)
        if self.begun.shares > 1:
            size = min(size, size_of(first.group, -(-images // (self.begun.shares * EACH))))
        self.begun.store.write_size(first.group, size)

    def finished(self, unit: Unit, claim: Claim, seconds: float) -> None:
        """A unit is stored; the first of a group says how large the others shall be, by the seconds it took."""
        if self.sizes(unit):
            self._write_size(unit, seconds)
        self.done.add(unit.key)
        self.held.discard(unit.key)
        self.begun.claims.finish(unit.key, claim)

    def sizes(self, unit: Unit) -> bool:
        """Whether a unit is the first of its group, which says how large the others shall be, and has not."""
        more = unit.stop < len(self.begun.whole.images)
        return unit.start == 0 and more and self.begun.store.size(unit.group) is None

    def open(self) -> list[Unit]:
        """The units of this part that are not known to be done; of a group without a size, its first.

        One model after the other, as loading takes long, and of each all methods on the first images first, so that
        methods can be compared on what is done of a run.
        """
        total = len(self.begun.whole.images)
        found = [
            unit
            for group in self.begun.whole.groups
            for unit in self._of(group)
            if (self._first(unit) or (unit.key not in self.done and self.part.has(unit, total)))
        ]
        models = list(self.begun.whole.recipe.models)
        return sorted(found, key=lambda unit: (models.index(unit.group.label), unit.start))

    def _first(self, unit: Unit) -> bool:
        """Whether the units behind this one are not known yet: whoever comes first does it, or waits for who does."""
        return len(self._units[unit.group.key]) == 1 and unit.stop < len(self.begun.whole.images)

    def _of(self, group: Group) -> Sequence[Unit]:
        if len(self._units.get(group.key, ())) < 2:
            size = self.begun.store.size(group)
            self._units[group.key] = list(self.begun.whole.units(group, size))
        return self._units[group.key]

    def left(self) -> int:
        """How many values of this part are not done; where a group's units are not known yet, of all its images."""
        images, part = self.begun.whole.images, self.part
        begin, end = part.span(len(images))
        left = 0
        for group in self.begun.whole.groups:
            known = self._of(group)
            if len(known) == 1 and known[0].stop < len(images):
                left += max(end - begin, len(known[0].images)) * len(group.made)
            else:
                left += sum(u.values for u in known if u.key not in self.done and part.has(u, len(images)))
        return left

    def values_done(self) -> int:
        """How many values of the whole plan are done, by anyone."""
        return sum(
            unit.values for group in self.begun.whole.groups for unit in self._of(group) if unit.key in self.done
        )


def lasted(rows: Sequence[Row], seconds: float, known: bool) -> float:
    """What a unit is taken to last: what was known takes no time now, and what failed says nothing about the others."""
    if all(row.error for row in rows):
        return SECONDS / FEW
    return max(seconds, recorded(rows)) if known else seconds


def recorded(rows: Iterable[Row]) -> float:
    """The seconds that rows say they took: a pass is shared by methods, and an explanation by metrics."""
    found = list(rows)
    metrics = max(1, len({row.metric for row in found}))
    explained = sum((row.explain_seconds or 0.0) / (row.shared_by or 1) for row in found) / metrics
    return explained + sum(row.measure_seconds or 0.0 for row in found)


def unit_size(first: Unit, seconds: float, images: int) -> int:
    """How many images make a unit of about half a minute, where the first of a group took so many seconds."""
    left = images - len(first.images)
    return size_of(first.group, left if fits(first, seconds, images) else SECONDS / seconds * len(first.images))


def fits(first: Unit, seconds: float, images: int) -> bool:
    """Whether all images behind the first unit make one unit."""
    return seconds / len(first.images) * (images - len(first.images)) <= SECONDS


def steady(first: Unit, rows: Sequence[Row], seconds: float, images: int, resources: Resources) -> float:
    """The seconds of a group's first unit. What runs first is slow: where that matters, it is timed once more."""
    if seconds >= SECONDS or fits(first, seconds, images) or all(row.error for row in rows):
        return seconds
    begin = time.perf_counter()
    run_unit(first, resources)
    return min(seconds, time.perf_counter() - begin)


def size_of(group: Group, images: float) -> int:
    """About so many images, in whole batches."""
    return max(1, -(-int(min(images, MOST)) // group.batch_size)) * group.batch_size
