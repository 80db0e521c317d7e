"""The statistics of a race: paired differences of scores, corrected for all pairs of methods and all looks.

Scores are numbers by method and by the place of the image in the random order; higher is better.
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
"""The smallest number of methods besides random, on shared images, for which a best one is named."""
SENSITIVE = 10
"""The model hardly uses the image if blanking it changes the class's score by less than this many times `worth`."""
FARTHEST = 10**6
"""The largest number of images that `Pair.images_needed` considers."""
Scores = Mapping[str, Mapping[int, float]]
"""By method, the scores of images by place."""


def looks(images: int) -> list[int]:
    """The numbers of images after which methods are compared: 6, 8, 12, 16, 24, 32, … and all of them.

    >>> looks(20), looks(5)
    ([6, 8, 12, 16, 20], [])
    """
    numbers, n = [], FEWEST
    while n < images:
        numbers.append(n)
        n = 8 if n == FEWEST else n * 3 // 2 if n & (n - 1) == 0 else n * 4 // 3
    return [*numbers, images] if images >= FEWEST else []


@dataclass(frozen=True)
class Pair:
    """The difference of two methods on the same images.

    Attributes:
        images: The number of images.
        mean: The mean difference, first minus second.
        error: Its standard error.
        p: The one-sided p-value of a paired t-test that the difference is above zero.
    """

    images: int
    mean: float
    error: float
    p: float

    def reach(self, level: float) -> float:
        """Half the width of the confidence interval of the difference at a one-sided level."""
        return float(-stdtrit(self.images - 1, level)) * self.error if self.images > 1 else math.inf

    def surely_above(self, worth: float) -> bool:
        """Whether the difference is significant in this comparison alone, and larger than `worth`."""
        return self.p < ALPHA and self.mean > worth

    def images_needed(self, level: float) -> float:
        """The number of images that would make the difference significant, if mean and spread stay the same."""
        if self.images < 2 or not abs(self.mean) > 0:
            return math.inf
        spread, n = self.error * math.sqrt(self.images), FEWEST
        while n < FARTHEST and abs(self.mean) * math.sqrt(n) <= -stdtrit(n - 1, level) * spread:
            n += max(1, n // 16)
        return float(n) if n < FARTHEST else math.inf


def paired_test(first: np.ndarray, second: np.ndarray) -> Pair:
    """Compare scores of the same images [n]. If all differences are equal, p is that of a sign test, 0.5^n."""
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
    """The scores of a race, and their statistics at 95 % confidence.

    Two methods are compared on the images that both have, up to the last planned look. Therefore the correction
    (Bonferroni over all ordered pairs and all looks) does not depend on when the race stops or in which order it runs.

    Attributes:
        scores: Scores by method and place.
        images: The number of images.
        worth: The smallest difference that counts.
        floor: The random method.
    """

    scores: Scores
    images: int
    worth: float = 0.01
    floor: str = ""

    @cached_property
    def looks(self) -> list[int]:
        return looks(self.images)

    @property
    def level(self) -> float:
        """The one-sided significance level of one comparison of two methods at one look."""
        m = len(self.scores)
        return ALPHA / max(1, m * (m - 1) * len(self.looks))

    @property
    def level_of_random(self) -> float:
        """The same for comparisons with random, which was not chosen by its scores."""
        return ALPHA / max(1, (len(self.scores) - 1) * len(self.looks))

    def count(self, method: str) -> int:
        return len(self.scores[method])

    def mean(self, method: str) -> float:
        scores = self.scores[method].values()
        return fmean(scores) if scores else math.nan

    def pair(self, first: str, second: str) -> Pair:
        """Compare two methods at the last planned look, or before the first look on all images that they share."""
        key = (first, second)
        if key not in self._pairs:
            a, b = self.scores[first], self.scores[second]
            shared = sorted(a.keys() & b.keys())
            most = max((n for n in self.looks if n <= len(shared)), default=len(shared))
            x, y = (np.array([scores[place] for place in shared[:most]], dtype=np.float64) for scores in (a, b))
            self._pairs[key] = paired_test(x, y)
        return self._pairs[key]

    @cached_property
    def _pairs(self) -> dict[tuple[str, str], Pair]:
        return {}

    def beats(self, first: str, second: str, level: float | None = None) -> bool:
        """Whether the first is significantly better than the second, by more than `worth`."""
        pair = self.pair(first, second)
        level = self.level if level is None else level
        return pair.images >= FEWEST and pair.p < level and pair.mean > self.worth

    def above_random(self, method: str) -> bool | None:
        """Whether a method beats random significantly; None with fewer than six shared images."""
        if method == self.floor or self.floor not in self.scores or self.pair(method, self.floor).images < FEWEST:
            return None
        return self.beats(method, self.floor, self.level_of_random)

    def confidence(self, method: str) -> float:
        """The confidence that a method beats random, corrected for all methods and looks."""
        return 1 - min(1.0, self.pair(method, self.floor).p * ALPHA / self.level_of_random)

    def same(self, first: str, second: str) -> bool:
        """Whether the two differ by less than `worth`, at both ends of the confidence interval."""
        pair = self.pair(first, second)
        return pair.images >= FEWEST and abs(pair.mean) + pair.reach(self.level) < self.worth

    @cached_property
    def beaten(self) -> dict[str, str]:
        """The methods that cannot be the best, each with one that beats it."""
        order = self.standing
        winners = {
            method: next((better for better in order[:i] if self.beats(better, method)), None)
            for i, method in enumerate(order)
        }
        return {method: winner for method, winner in winners.items() if winner is not None}

    @cached_property
    def standing(self) -> list[str]:
        """The methods with a score, highest first.

        The order is that of the differences to the method with the most images, on shared images, as methods may have
        different images.
        """
        scored = [m for m in self.scores if self.scores[m]]
        if not scored:
            return []
        first = max(scored, key=lambda m: (self.count(m), self.mean(m), m))
        above = {m: self.pair(m, first).mean for m in scored}
        return sorted(scored, key=lambda m: (-above[m] if above[m] == above[m] else math.inf, m))

    def look(self, method: str) -> int:
        """The last planned look that a method has reached; before the first look, its number of images."""
        count = self.count(method)
        return max((n for n in self.looks if n <= count), default=count)

    @cached_property
    def candidates(self) -> list[str]:
        """The methods that may be the best: not beaten, with at least half of the largest number of images among them.

        The leading one comes first: the highest of those with the most images. The rest follow, highest first.
        """
        alive = [m for m in self.standing if m not in self.beaten and m != self.floor]
        last = max(map(self.look, alive), default=0)
        leader = [m for m in alive if self.look(m) == last][:1]
        return [*leader, *(m for m in alive if m not in leader and 2 * self.look(m) >= last)]
