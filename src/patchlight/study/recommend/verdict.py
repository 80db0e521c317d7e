"""The verdict: a pure function of the finished cells, told in words, as a table, as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from patchlight.core.files import finite_or_none, write_whole
from patchlight.core.frames import frame
from patchlight.core.statistics import FEWEST
from patchlight.study.recommend.cells import EXPLANATION, FALL, MODEL, UNTRAINED, Cells
from patchlight.study.recommend.panel import AGREEMENT, RANDOM
from patchlight.study.recommend.race import ALPHA, Pair, Race, paired

if TYPE_CHECKING:
    from pandas import DataFrame

Status = Literal["best", "tied", "worse", "behind", "undecided", "baseline"]
"""`tied`: beats random and is not told apart from the best on half as many images at least, or surely nearer to it
than is worth anything; `worse`: surely worse than another; `behind`: set aside for time before that was sure;
`undecided`: not told apart from the best, nor from random."""
SANITY, SENSITIVITY = "randomisation", "max-sensitivity"
INSANE = 0.5
"""Mean rank correlation with the maps of a randomised model from which on a map hardly depends on what was learnt."""
FALLS = 10
"""How many times `worth` the class's score must fall without the image, or there is nothing to explain."""
HOUR = 3600.0
CHEAPER = 2
"""How many times less a quick method must take."""


@dataclass(frozen=True)
class Row:
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
    others: dict[str, float] = field(default_factory=dict)
    """The means of the other metrics."""
    counts: dict[str, int] = field(default_factory=dict)
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
    rows: tuple[Row, ...]
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

    def row(self, method: str) -> Row:
        return next(row for row in self.rows if row.method == method)

    def having(self, *statuses: Status) -> list[Row]:
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
        from patchlight.study.recommend.html import as_html

        folder = Path(folder)
        write_whole(folder / "verdict.json", self.to_json().encode())
        write_whole(folder / "verdict.txt", f"{self}\n".encode())
        return write_whole(folder / "verdict.html", as_html(self).encode(errors="backslashreplace"))

    def __str__(self) -> str:
        from patchlight.study.recommend.words import as_text

        return as_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from patchlight.study.recommend.html import body

        return body(self)


_COLUMNS = ("method", "status", "score", "low", "high", "images", "difference", "seconds", "above_random")


def race_of(cells: Cells) -> Race:
    """The race so far: a map's score is the mean of the deciding metrics, turned so that more is better.

    Where a method gives no map that can be scored, it counts as the random one does there.
    """
    lower, deciding = set(cells.about["lower_is_better"]), cells.about["deciding"]
    each = [(-1 if label in lower else 1, cells.values(label)) for label in deciding]
    scores: dict[str, dict[int, float]] = {}
    for method in cells.about["methods"]:
        own = [(sign, values.get(method, {})) for sign, values in each]
        places = sorted(set.intersection(*(set(values) for _, values in own)))
        if places:
            scores[method] = {p: sum(sign * values[p] for sign, values in own) / len(own) for p in places}
    name = random_of(cells)
    floor = scores.get(name, {})
    for metric in deciding:
        for method, places in cells.undefined(metric).items():
            scores.setdefault(method, {}).update({p: floor[p] for p in places if p in floor})
    return Race(scores, cells.about["images"] - len(cells.failed), cells.about["worth"], floor=name)


def random_of(cells: Cells) -> str:
    """The label of the random map."""
    methods: dict[str, Any] = cells.about["methods"]
    return next(label for label, spec in methods.items() if spec["method"] == RANDOM)


def decide(cells: Cells) -> Verdict:
    """The verdict on finished cells."""
    race, floor = race_of(cells), random_of(cells)
    seconds = {m: median(own) for m, own in cells.seconds(EXPLANATION).items()}
    fall = _fall(cells)
    above = {m: above_random(race, m, floor) for m in race.standing}
    candidates = race.candidates
    leading = next(iter(candidates), None)
    untrained = _untrained(cells, race, leading)
    if blind(fall, cells.about["worth"]) or (untrained is not None and not above_untrained(untrained, race.worth)):
        above = {m: None if shown is None else False for m, shown in above.items()}
    best = leading if leading is not None and above.get(leading) else None
    others = _others(cells)
    lost = [cells.undefined(metric) for metric in cells.about["deciding"]]
    none = {m: len({p for own in lost for p in own.get(m, ())}) for m in race.standing}
    rows = [_row(race, m, best, candidates, floor, seconds, above, others, none[m]) for m in race.standing]
    lasting = {label: math.fsum(own) / len(own) for label, own in _times(cells).items() if own}
    return Verdict(
        about=cells.about,
        best=best,
        leading=leading,
        quick=_quick(rows, best),
        rows=tuple(rows),
        undecided=tuple(_undecided(race, best or leading, rows, lasting)),
        sanity={m: own[SANITY] for m, own in ((r.method, r.others) for r in rows) if SANITY in own and m != floor},
        disagreements=tuple(_disagreements(cells, best, race)) if best is not None else (),
        fall=fall,
        untrained=untrained,
        uncompared=_uncompared(cells, leading) if untrained is None else "",
        looks=tuple(race.looks),
        level=race.level,
        confidence=_confidence(race, best, floor),
        left_out=dict(sorted(cells.left_out.items())),
        failed=dict(sorted(cells.failed.items())),
    )


def _quick(rows: list[Row], best: str | None) -> str | None:
    """Of those tied with the best that cost about the least, and less than it, the highest; else the highest cheap."""
    if best is None:
        return None
    limit = next(row.seconds for row in rows if row.method == best) / CHEAPER
    cheap = [row for row in rows if row.above_random and row.seconds <= limit]
    tied = [row for row in cheap if row.status == "tied"]
    least = min((row.seconds for row in tied), default=0.0)
    return next((row.method for row in (*(r for r in tied if r.seconds <= 2 * least), *cheap)), best)


def _fall(cells: Cells) -> dict[str, float]:
    """The mean score of the class, and how far it falls when the whole image gives way to each fill."""
    found = {name: list(cells.values(name).get(MODEL, {}).values()) for name in _metrics(cells, MODEL)}
    return {name: math.fsum(own) / len(own) for name, own in found.items() if own}


def _untrained(cells: Cells, race: Race, leading: str | None) -> Pair | None:
    """The leader's scores against those on an untrained copy; None where fewer than six images have both."""
    if leading is None:
        return None
    own, copied = race.scores[leading], cells.values(UNTRAINED).get(leading, {})
    shared = sorted(own.keys() & copied.keys())
    if len(shared) < FEWEST:
        return None
    return paired(np.array([own[p] for p in shared]), np.array([copied[p] for p in shared]))


def _uncompared(cells: Cells, leading: str | None) -> str:
    """Why the leader is not compared with what it is on an untrained copy."""
    if leading is None:
        return ""
    copied = [cell for cell in cells if cell.metric == UNTRAINED and cell.method == leading]
    if not copied:
        return "there was no time for it"
    own = sum(cell.value is not None for cell in copied)
    told = next((cell.reason for cell in copied if cell.reason), "")
    return told or f"only {own} of {len(copied)} images have a score there, fewer than {FEWEST}"


def above_untrained(pair: Pair, worth: float) -> bool:
    """Whether the model is surely better explained than an untrained one, by a difference that is worth anything."""
    return pair.p < ALPHA and pair.mean > worth


def blind(fall: Mapping[str, float], worth: float) -> bool:
    """Whether the prediction hardly depends on the image, under any fill: then no map can be right about it."""
    falls = [own for name, own in fall.items() if name.startswith(FALL)]
    return bool(falls) and max(falls) < FALLS * worth


def above_random(race: Race, method: str, floor: str) -> bool | None:
    """Whether a method is shown to beat random; None where fewer than six images could show it."""
    if method == floor or floor not in race.scores:
        return None
    found = race.pair(method, floor)
    return race.beats(method, floor, race.level_of_random) if found.images >= FEWEST else None


def _row(
    race: Race,
    method: str,
    best: str | None,
    candidates: list[str],
    floor: str,
    seconds: Mapping[str, float],
    above: Mapping[str, bool | None],
    others: Mapping[str, Mapping[str, Mapping[int, float]]],
    undefined: int,
) -> Row:
    values = list(race.scores[method].values())
    mean = race.mean(method)
    own = Pair(len(values), mean, _error(values), 1.0)
    reach = own.reach(0.025) if len(values) >= FEWEST else math.nan
    to_best = race.pair(method, best) if best is not None else Pair(0, math.nan, math.inf, 1.0)
    far = to_best.reach(race.level) if to_best.images >= FEWEST and method != best else math.nan
    extra = {name: by_method[method] for name, by_method in others.items() if by_method.get(method)}
    return Row(
        method,
        _status(race, method, best, candidates, floor, above[method]),
        mean,
        mean - reach,
        mean + reach,
        len(values),
        seconds.get(method, math.nan),
        to_best.mean,
        to_best.mean - far,
        to_best.mean + far,
        above[method],
        race.pair(method, floor).p if floor in race.scores and method != floor else math.nan,
        race.beaten.get(method, ""),
        undefined,
        {name: math.fsum(found.values()) / len(found) for name, found in extra.items()},
        {name: len(found) for name, found in extra.items()},
    )


def _status(race: Race, method: str, best: str | None, candidates: list[str], floor: str, above: bool | None) -> Status:
    if method == floor:
        return "baseline"
    if best is None:
        return "undecided"
    if method == best:
        return "best"
    if method in race.beaten:
        return "worse"
    if race.same(method, best):
        return "tied"
    if method not in candidates:
        return "behind"
    return "tied" if above else "undecided"


def _error(values: list[float]) -> float:
    n = len(values)
    if n < 2:
        return math.inf
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def _metrics(cells: Cells, method: str | None = None) -> list[str]:
    """The metrics that have cells, of one method or of all but the model itself."""
    return list(dict.fromkeys(c.metric for c in cells if (c.method == method if method is not None else c.method)))


def _others(cells: Cells) -> dict[str, dict[str, dict[int, float]]]:
    """By metric and method, values by place; all metrics but the sole deciding one."""
    deciding = cells.about["deciding"]
    alone = set(deciding) if len(deciding) == 1 else set()
    known = [*cells.about["metrics"], AGREEMENT]
    found = sorted(_metrics(cells), key=lambda m: (known.index(m) if m in known else len(known), m))
    return {name: cells.values(name) for name in found if name not in alone | {EXPLANATION, UNTRAINED}}


def _times(cells: Cells) -> dict[str, list[float]]:
    """By method, the seconds that one image takes to be explained and scored."""
    each = [cells.seconds(name) for name in (EXPLANATION, *cells.about["deciding"])]
    return {m: [sum(median(own[m]) for own in each if own.get(m))] for m in cells.about["methods"]}


def _undecided(race: Race, best: str | None, rows: list[Row], lasting: Mapping[str, float]) -> list[Undecided]:
    """The best (or leading) against each that may still be better, easiest to settle first."""
    found = []
    for row in rows:
        if best is None or row.method == best or row.status not in ("tied", "behind", "undecided", "baseline"):
            continue
        if row.status == "baseline" and race.beats(best, row.method, race.level_of_random):
            continue
        pair = race.pair(best, row.method)
        if pair.images < FEWEST:
            continue
        needed = pair.needed(race.level_of_random if row.status == "baseline" else race.level)
        more = max(0.0, needed - race.count(best)) * lasting[best] + max(0.0, needed - row.images) * lasting[row.method]
        found.append(Undecided(best, row.method, pair.mean, pair.images, needed, more))
    return sorted(found, key=lambda u: (u.seconds, u.second))


def _disagreements(cells: Cells, best: str, race: Race) -> list[str]:
    """Where another metric surely prefers another method to the best."""
    lower = set(cells.about["lower_is_better"]) | {
        f"deletion {w.removeprefix('srg ')}" for w in cells.about["deciding"]
    }
    names = [n for n in _others(cells) if n not in (SANITY, SENSITIVITY, AGREEMENT)]
    floor = random_of(cells)
    found = []
    for name in names:
        sign = -1 if name in lower else 1
        values = {m: {p: sign * v for p, v in own.items()} for m, own in cells.values(name).items()}
        if best not in values:
            continue
        other = Race(values, race.images, 0.0)
        level = ALPHA / max(1, (len(values) - 1) * len(names) * len(race.looks))
        rivals = [m for m in values if m not in (best, floor) and other.beats(m, best, level)]
        for rival in sorted(rivals, key=lambda m: (-other.pair(m, best).mean, m))[:1]:
            pair = other.pair(rival, best)
            found.append(f"{name} prefers {rival} (better by {pair.mean:.3f} on {pair.images} images)")
    return found


def _confidence(race: Race, best: str | None, floor: str) -> float:
    """How sure it is that the best beats random, corrected for all methods and looks."""
    if best is None:
        return math.nan
    return 1 - min(1.0, race.pair(best, floor).p * race.alpha / race.level_of_random)
