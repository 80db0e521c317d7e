"""The verdict: which explanation to trust, with the evidence."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from patchlight.core.files import finite_or_none, write_whole
from patchlight.core.frames import frame
from patchlight.study.recommend.race import Pair
from patchlight.study.recommend.record import hardly_falls
from patchlight.study.recommend.words import as_html, as_text

if TYPE_CHECKING:
    from pandas import DataFrame

Status = Literal["best", "tied", "worse", "behind", "undecided", "baseline"]
"""`tied`: beats random and is not told apart from the best on half as many images at least, or surely nearer to it
than is worth anything; `worse`: surely worse than another; `behind`: set aside for time before that was sure;
`undecided`: not told apart from the best, nor from random."""


@dataclass(frozen=True)
class MethodResult:
    """How one method stands: its score with a 95 % interval, its difference to the best with an adjusted one."""

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
    """How likely such a difference to random is by chance, corrected for nothing."""
    beaten_by: str
    undefined: int
    """Images on which it gave no map that can be scored, and counts as random."""
    others: dict[str, float]
    """The means of the other metrics."""
    counts: dict[str, int]
    """Of how many images each of these is."""


@dataclass(frozen=True)
class Undecided:
    """Two methods that are not told apart: by how much they differ now, and what would settle it."""

    first: str
    second: str
    difference: float
    images: int
    needed: float
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """Which explanation to trust, on these images: `best` (None where nothing is shown to beat random) and the rest.

    `quick` is a cheaper method: of the cheapest that are not told apart from the best the highest, else the highest
    that beats random; the best itself where there is none. `methods` says how each is asked of `explain`.
    `rows` stand in falling order of score. Equal cells give equal verdicts; `seconds` alone is of the run.
    """

    about: dict[str, Any]
    best: str | None
    leading: str | None
    quick: str | None
    rows: tuple[MethodResult, ...]
    undecided: tuple[Undecided, ...]
    sanity: dict[str, float]
    disagreements: tuple[str, ...]
    fall: dict[str, float]
    untrained: Pair | None
    """The leading method's score above what it has on a copy of the model with weights drawn anew."""
    uncompared: str
    """Why there is no such comparison; empty where there is one, or nothing leads."""
    looks: tuple[int, ...]
    level: float
    confidence: float
    left_out: dict[str, str]
    failed: dict[str, str]
    seconds: float = field(default=math.nan, compare=False)
    page: str = field(default="", compare=False, repr=False)
    """The example maps, as HTML."""

    @property
    def methods(self) -> dict[str, dict[str, Any]]:
        """By label, the method and its settings: `pl.explain(vit, image, {best: verdict.methods[best]})`."""
        return dict(self.about["methods"])

    @property
    def images(self) -> int:
        """The most images any method was scored on."""
        return max((row.images for row in self.rows), default=0)

    @property
    def learnt(self) -> bool:
        """Whether the leading method surely scores more here than on an untrained copy of the model."""
        return self.untrained is not None and self.untrained.surely_above(self.about["worth"])

    @property
    def blind(self) -> bool:
        """Whether the prediction hardly depends on the image."""
        return hardly_falls(self.fall, self.about["worth"])

    def row(self, method: str) -> MethodResult:
        """How a method stands."""
        return next(row for row in self.rows if row.method == method)

    def having(self, *statuses: Status) -> list[MethodResult]:
        """The methods of these statuses."""
        return [row for row in self.rows if row.status in statuses]

    @property
    def table(self) -> DataFrame:
        """A pandas table with a row per method, highest score first."""
        others = list(dict.fromkeys(name for row in self.rows for name in row.others))
        columns: dict[str, list[Any]] = {key: [getattr(row, key) for row in self.rows] for key in _COLUMNS}
        return frame(columns | {name: [row.others.get(name, math.nan) for row in self.rows] for name in others})

    def to_json(self) -> str:
        """Everything but the seconds of the run, as JSON; what is not finite is null."""
        values = {key: value for key, value in asdict(self).items() if key not in ("seconds", "page")}
        return json.dumps(finite_or_none(values), indent=1, ensure_ascii=False, allow_nan=False)

    def save(self, folder: str | Path) -> Path:
        """Write verdict.json, verdict.txt and verdict.html, each whole or not at all."""
        folder = Path(folder)
        write_whole(folder / "verdict.json", self.to_json().encode())
        write_whole(folder / "verdict.txt", f"{self}\n".encode())
        return write_whole(folder / "verdict.html", as_html(self).encode(errors="backslashreplace"))

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self, "contents.html")


_COLUMNS = ("method", "status", "score", "low", "high", "images", "difference", "seconds", "above_random")
