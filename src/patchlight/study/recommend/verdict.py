"""The result of a race: which explanation to trust, with the evidence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from patchlight.core.files import finite_or_none, write_atomic
from patchlight.core.frames import make_frame
from patchlight.study.recommend.race import SENSITIVE, Pair
from patchlight.study.recommend.words import as_html, as_text

if TYPE_CHECKING:
    from pandas import DataFrame

Status = Literal["best", "tied", "worse", "behind", "undecided", "baseline"]
"""`tied`: beats random, and no significant difference to the best on at least half as many images, or a difference
significantly smaller than `worth`; `worse`: significantly worse than another method; `behind`: lower, and stopped for
lack of time before that was significant; `undecided`: no significant difference to the best, nor to random."""


@dataclass(frozen=True)
class BlankEffect:
    """The change of the class's score when a fill replaces the whole image.

    Attributes:
        change: Mean absolute change per image.
        falls: Images on which the score falls.
        rises: Images on which it rises: the model is surer without the image.
    """

    change: float
    falls: int
    rises: int


def hardly_changes(blanked: Mapping[str, BlankEffect], worth: float) -> bool:
    """Whether the class's score hardly changes without the image, under every fill."""
    return bool(blanked) and max(effect.change for effect in blanked.values()) < SENSITIVE * worth


@dataclass(frozen=True)
class MethodResult:
    """The result of one method: its score with a 95 % interval, and its difference to the best with a corrected one."""

    method: str
    status: Status
    score: float
    low: float
    high: float
    images: int
    seconds: float
    difference: float
    difference_low: float
    difference_high: float
    above_random: bool | None
    random_p: float
    """The p-value of the difference to random, not corrected."""
    beaten_by: str
    undefined: int
    """Number of images without a usable map; they are scored as random."""
    others: dict[str, float]
    """Means of the other metrics."""
    counts: dict[str, int]
    """Number of images behind each of these means."""
    ignores_class: bool = False
    """Whether the method gives the same map for every class."""

    @property
    def name(self) -> str:
        """The method with the badge that tables show."""
        return f"{self.method} (ignores the class)" if self.ignores_class else self.method


@dataclass(frozen=True)
class Undecided:
    """Two methods without a significant difference, and the images and seconds that would settle it."""

    first: str
    second: str
    difference: float
    images: int
    needed: float
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """Which explanation to trust on these images. Equal cells give equal verdicts, apart from the run's own fields.

    Attributes:
        about: Model, images, metrics and methods of the race.
        best: The best method. None if fewer than three methods were compared on at least six shared images, or if the
            leading one does not beat random and an untrained copy of the model.
        leading: The method with the highest score so far.
        quick: A method that takes at most half the time of the best: the highest of the cheapest that are tied with it,
            else the highest that beats random, else the best itself.
        rows: Results by method, highest score first.
        compared: The methods, besides random, that share at least six images with the leading one and random.
        undecided: Pairs without a significant difference.
        sanity: By method, the similarity of its maps to those of a randomised model.
        disagreements: Metrics that prefer another method.
        score: Mean score of the predicted class.
        blanked: By fill, the change of that score without the image.
        untrained: The leading method's score compared with its score on a copy of the model with random weights.
        uncompared: Why there is no such comparison; empty if there is one, or nothing leads.
        looks: Numbers of images after which methods were compared.
        level: The one-sided significance level of one comparison.
        confidence: How certain it is that the best method beats random.
        left_out: Why methods did not take part.
        failed: Why images could not be read.
        seconds: Time of the run.
        comparison_seconds: Estimated budget for a comparison of three methods.
        page: Example maps as HTML.
    """

    about: dict[str, Any]
    best: str | None
    leading: str | None
    quick: str | None
    rows: tuple[MethodResult, ...]
    compared: tuple[str, ...]
    undecided: tuple[Undecided, ...]
    sanity: dict[str, float]
    disagreements: tuple[str, ...]
    score: float
    blanked: dict[str, BlankEffect]
    untrained: Pair | None
    uncompared: str
    looks: tuple[int, ...]
    level: float
    confidence: float
    left_out: dict[str, str]
    failed: dict[str, str]
    seconds: float = field(default=math.nan, compare=False)
    comparison_seconds: float = field(default=math.nan, compare=False)
    page: str = field(default="", compare=False, repr=False)

    @property
    def methods(self) -> dict[str, dict[str, Any]]:
        """By label, the method and its settings, as in `pl.explain(vit, image, {best: verdict.methods[best]})`."""
        return dict(self.about["methods"])

    @property
    def images(self) -> int:
        """The largest number of images that a method was scored on."""
        return max((row.images for row in self.rows), default=0)

    @property
    def learnt(self) -> bool:
        """Whether the leading method scores significantly more than on an untrained copy of the model."""
        return self.untrained is not None and self.untrained.surely_above(self.about["worth"])

    @property
    def blind(self) -> bool:
        """Whether the prediction hardly depends on the image."""
        return hardly_changes(self.blanked, self.about["worth"])

    def row(self, method: str) -> MethodResult:
        """The result of a method."""
        return next(row for row in self.rows if row.method == method)

    def having(self, *statuses: Status) -> list[MethodResult]:
        """The methods with these statuses."""
        return [row for row in self.rows if row.status in statuses]

    @property
    def table(self) -> DataFrame:
        """A pandas table with a row per method, highest score first."""
        others = list(dict.fromkeys(name for row in self.rows for name in row.others))
        keys = ["method", "status", "score", "low", "high", "images", "difference", "seconds"]
        keys += ["above_random", "ignores_class"]
        columns: dict[str, list[Any]] = {key: [getattr(row, key) for row in self.rows] for key in keys}
        return make_frame(columns | {name: [row.others.get(name, math.nan) for row in self.rows] for name in others})

    def to_json(self) -> str:
        """The verdict as JSON, without the run's own fields; numbers that are not finite become null."""
        run = ("seconds", "comparison_seconds", "page")
        values = {key: value for key, value in asdict(self).items() if key not in run}
        return json.dumps(finite_or_none(values), indent=1, ensure_ascii=False, allow_nan=False)

    def save(self, folder: str | Path) -> Path:
        """Write verdict.json, verdict.txt and verdict.html, and return the path of the last."""
        folder = Path(folder)
        write_atomic(folder / "verdict.json", self.to_json().encode())
        write_atomic(folder / "verdict.txt", f"{self}\n".encode())
        return write_atomic(folder / "verdict.html", as_html(self).encode(errors="backslashreplace"))

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self, "contents.html")
