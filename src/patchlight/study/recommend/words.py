"""What a verdict says: sentences, a table and a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from io import StringIO
from typing import TYPE_CHECKING

from patchlight.core.drawing import table_html
from patchlight.core.drawing.charts import Dot, dot_chart
from patchlight.core.drawing.page import render_page
from patchlight.core.statistics import FEWEST
from patchlight.study.recommend.panel import AGREEMENT
from patchlight.study.recommend.race import ALPHA
from patchlight.study.recommend.record import FALL, FALLS

if TYPE_CHECKING:
    from patchlight.study.recommend.verdict import MethodResult, Undecided, Verdict

MOST = 8
"""Names that are listed; of more, how many."""
HOUR = 3600.0
INSANE = 0.5
"""Mean rank correlation with the maps of a randomised model above which a map hardly depends on what was learnt."""
COLOURS = {
    **{"best": "#0072b2", "tied": "#009e73", "worse": "#8a8a8a", "behind": "#b8a34a"},
    **{"undecided": "#555555", "baseline": "#d55e00"},
}
"""Of the statuses, which are told in words too."""


def title(verdict: Verdict) -> str:
    about = verdict.about
    readable = about["images"] - len(verdict.failed)
    seen = f"{len(verdict.rows)} methods on {verdict.images} of {readable} image(s)"
    return f"{about['model']}: {seen}, scored by {score_name(verdict)}"


def score_name(verdict: Verdict) -> str:
    """What decides, in words."""
    lower = set(verdict.about["lower_is_better"])
    each = [f"{name} (negative, as lower is better)" if name in lower else name for name in verdict.about["deciding"]]
    return each[0] if len(each) == 1 else f"the mean of {' and '.join(each)}"


def sentences(verdict: Verdict) -> list[str]:
    """The verdict, one statement a sentence or two."""
    parts = (_best, _near, _others, _beside, _more_time, _missing)
    return [line for part in parts for line in part(verdict) if line]


def _names(words: str, names: Sequence[str], sign: str = ",") -> str:
    """Words and the first names after them; nothing where there are no names."""
    return f"{words}: {_listed(names, sign)}." if names else ""


def _listed(names: Sequence[str], sign: str = ",") -> str:
    more = f"{sign} and {len(names) - MOST} more" if len(names) > MOST else ""
    return f"{sign} ".join(names[:MOST]) + more


def _methods(rows: Sequence[MethodResult]) -> list[str]:
    return [row.method for row in rows]


def _best(verdict: Verdict) -> Iterator[str]:
    ahead = f" The highest mean so far is that of {verdict.leading}." if verdict.leading else ""
    if verdict.best is not None:
        row, sure = verdict.row(verdict.best), 100 * min(verdict.confidence, 0.999)
        yield (
            f"Best: {row.method}, score {row.score:.3f} [{row.low:.3f}, {row.high:.3f}] on {row.images} images, "
            f"{duration(row.seconds)} a map. That it beats random is {sure:.1f} % sure, corrected for all methods and "
            "looks."
        )
    elif verdict.images < FEWEST:
        measured = f"{verdict.images} image(s) were measured, and from fewer than {FEWEST} nothing can be."
        yield f"Nothing is decided: {measured}{ahead}"
        return
    else:
        yield f"Nothing is shown to beat random, so no method is recommended.{ahead}"
        yield from _fall(verdict)
    if verdict.untrained is not None:
        there = f"{verdict.untrained.mean:.3f} less than here, on {verdict.untrained.images} images"
        yield (
            f"On a copy of the model with weights drawn anew {verdict.leading} scores {there}: what it finds here is "
            f"{'' if verdict.learnt else 'not surely '}more than in a model that has learnt nothing."
        )
    elif verdict.leading is not None:
        yield (
            f"{verdict.leading} was not compared with itself on an untrained copy of the model: {verdict.uncompared}. "
            "So what it finds may be there without anything learnt."
        )


def _fall(verdict: Verdict) -> Iterator[str]:
    """What removing the whole image does, where nothing beats random."""
    falls = {name.removeprefix(f"{FALL} "): value for name, value in verdict.fall.items() if name != "score"}
    if falls:
        each = " and ".join(f"{value:+.3f} under {fill}" for fill, value in falls.items())
        least = FALLS * verdict.about["worth"]
        none = f", less than {least:g}: the prediction hardly depends on the image, so no map can be right"
        yield (
            f"Removing the whole image lowers the class's score ({verdict.fall['score']:.3f} on average) by {each}"
            f"{none if verdict.blind else ''}."
        )


def _near(verdict: Verdict) -> Iterator[str]:
    """What is about as good as the best, and what is cheaper."""
    if verdict.best is None:
        return
    best, tied = verdict.row(verdict.best), verdict.having("tied")
    yield _names(
        "Not told apart from it", [f"{row.method} ({row.difference:+.3f}, {_cost(row, best)})" for row in tied]
    )
    if not verdict.having("tied", "undecided", "behind"):
        yield "No other method is level with it."
    if verdict.quick and verdict.quick != verdict.best:
        quick, worth = verdict.row(verdict.quick), verdict.about["worth"]
        lower = quick.difference < -worth and quick.difference_low < quick.difference_high < 0
        sure = "surely" if quick.beaten_by == best.method or lower else "which is not sure"  # worse may be by another
        loses = f"loses {-quick.difference:.3f}, {sure}" if quick.difference < 0 else "loses nothing"
        yield (
            f"Quick: {quick.method} takes {duration(quick.seconds)} a map instead of {duration(best.seconds)} "
            f"({_cost(quick, best)}) and {loses}."
        )
    yield _names("Undecided, told apart neither from it nor from random", _methods(verdict.having("undecided")))


def _cost(row: MethodResult, best: MethodResult) -> str:
    ratio = best.seconds / row.seconds if row.seconds > 0 else math.inf
    if 0.8 < ratio < 1.25:
        return "as cheap"
    return f"{ratio:.2g} times cheaper" if ratio > 1 else f"{1 / ratio:.2g} times dearer"


def _others(verdict: Verdict) -> Iterator[str]:
    """What is worse than the best, and what is no better than random."""
    yield _names("Surely worse", _methods(verdict.having("worse")))
    yield _names("Behind, and set aside for time before that was sure", _methods(verdict.having("behind")))
    if verdict.best is None:
        return
    no = [row for row in verdict.rows if row.above_random is False and row.status != "tied"]
    unknown = [row.method for row in verdict.rows if row.above_random is None and row.status != "baseline"]
    early = [row for row in no if row.random_p < ALPHA]
    for words, rows in (
        ("No better than random", [row for row in no if row not in early]),
        ("Above random, but on too few images to be sure", early),
    ):
        yield _names(words, [f"{row.method} ({row.score:+.3f}, {row.images} images)" for row in rows])
    yield _names(f"Not compared with random, on fewer than {FEWEST} images", unknown)
    if not no and not unknown:
        yield "All methods that were followed beat random."


def _beside(verdict: Verdict) -> Iterator[str]:
    """What the other metrics say, and how sure all of it is."""
    bad, good = (
        [f"{m} ({r:.2f})" for m, r in verdict.sanity.items() if (r > INSANE) is fails] for fails in (True, False)
    )
    fails = _names("Fails the sanity check, its map stays much the same when the weights are drawn anew", bad)
    yield " ".join(filter(None, [fails, _names(f"Passes {'it' if bad else 'the sanity check'}", good)]))
    seeds = [f"{row.method} {row.others[AGREEMENT]:.2f}" for row in verdict.rows if AGREEMENT in row.others]
    yield _names("Two seeds agree (rank correlation of the maps)", seeds)
    if verdict.disagreements:
        yield f"Other metrics disagree with the choice: {'; '.join(verdict.disagreements)}."
    elif verdict.best is not None and verdict.row(verdict.best).others:
        yield "No other metric that was measured surely prefers another method."
    if verdict.looks and verdict.images >= FEWEST:
        yield (
            f"How sure: pairs are compared by paired t at {verdict.level:.1g}, which is 5 % over all pairs of "
            f"{len(verdict.rows)} methods and {len(verdict.looks)} looks; a difference below "
            f"{verdict.about['worth']:g} counts as none."
        )


def _more_time(verdict: Verdict) -> Iterator[str]:
    """What another hour would settle."""
    if verdict.images < FEWEST:
        return
    worth, readable = verdict.about["worth"], verdict.about["images"] - len(verdict.failed)
    alike: list[Undecided] = []
    short, soon, far = list[str](), list[str](), list[str]()
    spent = 0.0
    for pair in verdict.undecided:
        if abs(pair.difference) <= worth:
            alike.append(pair)
        elif pair.needed > readable:
            short.append(_pair(pair))
        else:
            spent += pair.seconds
            (soon if spent <= HOUR else far).append(_pair(pair))
    yield _names("Another hour would settle, by present differences and spreads", soon)
    yield _names(f"More than these {readable} image(s) would be needed for", short)
    yield _names("More than an hour would be needed for", far)
    if alike:
        yield _names(f"Nearer to {alike[0].first} than {worth:g}, so not worth settling", [u.second for u in alike])


def _pair(pair: Undecided) -> str:
    images = f"about {pair.needed:.0f} images, {duration(pair.seconds)}"
    return f"{pair.first} against {pair.second} ({images if math.isfinite(pair.needed) else 'no end in sight'})"


def _missing(verdict: Verdict) -> Iterator[str]:
    lost = [f"{row.method} ({row.undefined})" for row in verdict.rows if row.undefined]
    yield _names("Gave no map that can be scored, and counts as random there, on so many images", lost)
    why: dict[str, list[str]] = {}
    for method, reason in verdict.left_out.items():
        why.setdefault(reason, []).append(method)
    yield _names("Left out", [f"{_listed(methods)} ({reason})" for reason, methods in why.items()], ";")
    failed = [f"{name} ({reason})" for name, reason in verdict.failed.items()]
    yield _names(f"{len(failed)} image(s) could not be read and do not count", failed, ";")


def duration(seconds: float) -> str:
    """
    >>> duration(0.0123), duration(75), duration(7300)
    ('0.012 s', '1.2 min', '2 h')
    """
    if not math.isfinite(seconds):
        return "an unknown time"
    if seconds < 60:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.2g} min" if seconds < HOUR else f"{seconds / HOUR:.2g} h"


def table(verdict: Verdict) -> list[list[str]]:
    """The headings, and a line per method."""
    others = list(dict.fromkeys(name for row in verdict.rows for name in row.others))
    lines = [["method", "status", "score [95 %]", "images", "to the best", "s/map", "beats random", *others]]
    for row in verdict.rows:
        interval = f" [{row.low:.3f}, {row.high:.3f}]" if math.isfinite(row.low) else ""
        apart = math.isfinite(row.difference) and row.method != verdict.best
        beats = {True: "yes", False: "no", None: ""}[row.above_random]
        numbers = [f"{row.others[name]:.3f}" if name in row.others else "" for name in others]
        score, difference = f"{row.score:.3f}{interval}", f"{row.difference:+.3f}" if apart else ""
        lines.append(
            [row.method, row.status, score, str(row.images), difference, f"{row.seconds:.2g}", beats, *numbers]
        )
    return lines


def as_text(verdict: Verdict) -> str:
    """Title, sentences and table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    headings, *lines = table(verdict)
    drawn, out = Table(*headings, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False), StringIO()
    for line in lines:
        drawn.add_row(*line)
    Console(file=out, width=10**4, color_system=None, markup=False, emoji=False, highlight=False).print(drawn)
    rows = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join([title(verdict), "", *(f"- {line}" for line in sentences(verdict)), "", *rows])


def as_html(verdict: Verdict, template: str = "verdict.html") -> str:
    """A page that opens offline, or with `contents.html` what a notebook shows of it."""
    dots = [
        Dot(
            row.method,
            row.score,
            COLOURS[row.status],
            row.low,
            row.high,
            f"{row.method}, {row.status}: {row.score:.3f} on {row.images} images",
        )
        for row in verdict.rows
    ]
    headings, *lines = table(verdict)
    words = f"score: {score_name(verdict)}; mean and 95 % interval"
    legend = {COLOURS[row.status]: row.status for row in verdict.rows}
    return render_page(
        "patchlight.study.recommend",
        template,
        verdict=verdict,
        title=title(verdict),
        sentences=sentences(verdict),
        chart=dot_chart(dots, x=words, zero=True, legend=legend, words=words) if dots else "",
        table=table_html(headings, lines),
    )
