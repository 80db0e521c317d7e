"""The race: what paired differences of scores decide, corrected for every pair of methods and every look at them.

Nothing here knows a model. Scores are numbers by method and by the image's place in the seeded order; more is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np
from scipy.special import stdtr, stdtrit

from patchlight.core.statistics import FEWEST

ALPHA = 0.05
COMPARED = 3
"""A best method needs a comparison of at least this many methods besides random, on shared images."""
SENSITIVE = 10
"""The class's score must change by this many times `worth` without the image, or the model hardly uses the image."""
FARTHEST = 10**6
"""Images beyond which nobody will look."""
Scores = Mapping[str, Mapping[int, float]]
"""By method, the score of each image, by its place."""


def looks(images: int) -> list[int]:
    """The numbers of images after which methods are compared: 6, 8, 12, 16, 24, 32, … and all of them.

    >>> looks(20), looks(5)
    ([6, 8, 12, 16, 20], [])
    """
    found, n = [], FEWEST
    while n < images:
        found.append(n)
        n = 8 if n == FEWEST else n * 3 // 2 if n & (n - 1) == 0 else n * 4 // 3
    return [*found, images] if images >= FEWEST else []


@dataclass(frozen=True)
class Pair:
    """How far one method is above another on the same images: the mean difference, its standard error, a p-value.

    `p` is one-sided, of a difference that is not above zero: paired t.
    """

    images: int
    mean: float
    error: float
    p: float

    def reach(self, level: float) -> float:
        """Half the width of the interval of the difference at a one-sided `level`."""
        return float(-stdtrit(self.images - 1, level)) * self.error if self.images > 1 else math.inf

    def surely_above(self, worth: float) -> bool:
        """Whether this comparison alone shows a difference that is worth anything."""
        return self.p < ALPHA and self.mean > worth

    def needed(self, level: float) -> float:
        """How many images would tell the two apart, by the present difference and spread."""
        if self.images < 2 or not abs(self.mean) > 0:
            return math.inf
        spread, n = self.error * math.sqrt(self.images), FEWEST
        while n < FARTHEST and abs(self.mean) * math.sqrt(n) <= -stdtrit(n - 1, level) * spread:
            n += max(1, n // 16)
        return float(n) if n < FARTHEST else math.inf


def paired(first: np.ndarray, second: np.ndarray) -> Pair:
    """Compare scores of the same images [n]. Differences that are all the same are as sure as n coins on one side."""
    d = first - second
    n = len(d)
    mean = float(d.mean()) if n else math.nan
    if n < 2:
        return Pair(n, mean, math.inf, 1.0)
    error = float(d.std(ddof=1)) / math.sqrt(n)
    if error <= 1e-12 * abs(mean) or error == 0:
        return Pair(n, mean, 0.0, 0.5**n if mean > 0 else 1.0)
    return Pair(n, mean, error, float(stdtr(n - 1, -mean / error)))


@dataclass(frozen=True, eq=False)
class Race:
    """Scores of methods on images, of which there are `images` in all, and what can be said of them at 95 %.

    Two methods are compared on the images that both have, cut to the last planned look: so the correction, Bonferroni
    over all ordered pairs and all looks, holds whenever the race was stopped, and in whatever order it was run.
    `worth`: the smallest difference that counts; what is surely above zero but smaller decides nothing. `floor` is the
    random one, which runs beside.
    """

    scores: Scores
    images: int
    worth: float = 0.01
    alpha: float = ALPHA
    floor: str = ""

    @cached_property
    def looks(self) -> list[int]:
        return looks(self.images)

    @property
    def level(self) -> float:
        """The one-sided level of one comparison of two methods at one look."""
        m = len(self.scores)
        return self.alpha / max(1, m * (m - 1) * len(self.looks))

    @property
    def level_of_random(self) -> float:
        """The same of comparisons with one method that was not chosen by its scores."""
        return self.alpha / max(1, (len(self.scores) - 1) * len(self.looks))

    def count(self, method: str) -> int:
        return len(self.scores[method])

    def mean(self, method: str) -> float:
        scores = self.scores[method].values()
        return fmean(scores) if scores else math.nan

    def pair(self, first: str, second: str) -> Pair:
        """The two compared at the last planned look; of fewer images than the first look has, at all they share."""
        key = (first, second)
        if key not in self._pairs:
            a, b = self.scores[first], self.scores[second]
            shared = sorted(a.keys() & b.keys())
            most = max((n for n in self.looks if n <= len(shared)), default=len(shared))
            x, y = (np.array([own[place] for place in shared[:most]], dtype=np.float64) for own in (a, b))
            self._pairs[key] = paired(x, y)
        return self._pairs[key]

    @cached_property
    def _pairs(self) -> dict[tuple[str, str], Pair]:
        return {}

    def beats(self, first: str, second: str, level: float | None = None) -> bool:
        """Whether the first is surely better than the second, and by a difference that is worth anything."""
        found = self.pair(first, second)
        level = self.level if level is None else level
        return found.images >= FEWEST and found.p < level and found.mean > self.worth

    def above_random(self, method: str) -> bool | None:
        """Whether a method is shown to beat random; None where fewer than six images could show it."""
        if method == self.floor or self.floor not in self.scores or self.pair(method, self.floor).images < FEWEST:
            return None
        return self.beats(method, self.floor, self.level_of_random)

    def confidence(self, method: str) -> float:
        """How sure it is that a method beats random, corrected for all methods and looks."""
        return 1 - min(1.0, self.pair(method, self.floor).p * self.alpha / self.level_of_random)

    def same(self, first: str, second: str) -> bool:
        """Whether the two surely differ by less than is worth anything: the whole interval lies inside."""
        found = self.pair(first, second)
        return found.images >= FEWEST and abs(found.mean) + found.reach(self.level) < self.worth

    @cached_property
    def beaten(self) -> dict[str, str]:
        """The methods that cannot be the best, each with one that beats it."""
        order = self.standing
        found = {}
        for i, method in enumerate(order):
            by = next((better for better in order[:i] if self.beats(better, method)), None)
            if by is not None:
                found[method] = by
        return found

    @cached_property
    def standing(self) -> list[str]:
        """The methods with a score, highest first.

        By what each is above the one with the most images, on the images both have: scores of few images compare so.
        """
        known = [m for m in self.scores if self.scores[m]]
        if not known:
            return []
        first = max(known, key=lambda m: (self.count(m), self.mean(m), m))
        above = {m: self.pair(m, first).mean for m in known}
        return sorted(known, key=lambda m: (-above[m] if above[m] == above[m] else math.inf, m))

    def look(self, method: str) -> int:
        """The last planned look that a method has the images for; before the first, the images it has."""
        count = self.count(method)
        return max((n for n in self.looks if n <= count), default=count)

    @cached_property
    def candidates(self) -> list[str]:
        """Those that may be the best: not beaten, and followed to half the images of the farthest of these at least.

        The leader stands first, the highest of those that were followed farthest; then the others, highest first.
        """
        alive = [m for m in self.standing if m not in self.beaten and m != self.floor]
        last = max(map(self.look, alive), default=0)
        leader = [m for m in alive if self.look(m) == last][:1]
        return [*leader, *(m for m in alive if m not in leader and 2 * self.look(m) >= last)]
