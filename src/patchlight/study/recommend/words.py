"""A verdict as sentences, a table and a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from patchlight.core.display import text_table
from patchlight.core.drawing import table_html
from patchlight.core.drawing.charts import Dot, dot_chart
from patchlight.core.drawing.page import render_page
from patchlight.core.statistics import FEWEST
from patchlight.core.text import duration, plural
from patchlight.study.recommend.panel import AGREEMENT
from patchlight.study.recommend.race import ALPHA, COMPARED, SENSITIVE

if TYPE_CHECKING:
    from patchlight.study.recommend.verdict import MethodResult, Undecided, Verdict

MOST = 8
"""Longer lists of names are cut to this many."""
HOUR = 3600.0
INSANE = 0.5
"""Maps with a higher mean rank correlation to those of a randomised model fail the sanity check."""
COLOURS = {
    **{"best": "#0072b2", "tied": "#009e73", "worse": "#8a8a8a", "behind": "#b8a34a"},
    **{"undecided": "#555555", "baseline": "#d55e00"},
}
"""Colours of the statuses in the chart, which also shows them in words."""


def title(verdict: Verdict) -> str:
    """Model, methods, images and metric in a line."""
    facts = verdict.about
    readable = facts["images"] - len(verdict.failed)
    measured = f"{plural(len(verdict.rows), 'method')} on {verdict.images} of {plural(readable, 'image')}"
    return f"{facts['model']}: {measured}, scored by {score_name(verdict)}"


def score_name(verdict: Verdict) -> str:
    """The deciding metrics in words."""
    lower = set(verdict.about["lower_is_better"])
    each = [f"{name} (negated, as lower is better)" if name in lower else name for name in verdict.about["deciding"]]
    return each[0] if len(each) == 1 else f"the mean of {' and '.join(each)}"


def sentences(verdict: Verdict) -> list[str]:
    """The verdict as a list of statements."""
    parts = (_best, _near, _worse, _other_metrics, _more_time, _missing)
    return [line for part in parts for line in part(verdict) if line]


def _names(words: str, names: Sequence[str], separator: str = ",") -> str:
    """Words, followed by the first names; empty if there are no names."""
    return f"{words}: {_list(names, separator)}." if names else ""


def _list(names: Sequence[str], separator: str = ",") -> str:
    more = f"{separator} and {len(names) - MOST} more" if len(names) > MOST else ""
    return f"{separator} ".join(names[:MOST]) + more


def _methods(rows: Sequence[MethodResult]) -> list[str]:
    return [row.method for row in rows]


def _best(verdict: Verdict) -> Iterator[str]:
    ahead = f" The highest mean so far is that of {verdict.leading}." if verdict.leading else ""
    if verdict.best is not None:
        row, certain = verdict.row(verdict.best), 100 * min(verdict.confidence, 0.999)
        yield (
            f"Best: {row.name}, score {row.score:.3f} [{row.low:.3f}, {row.high:.3f}] on {row.images} images, "
            f"{duration(row.seconds)} per map. It beats random with {certain:.1f} % confidence, corrected for all "
            "methods and looks."
        )
    elif verdict.images < FEWEST:
        yield (
            f"No method is recommended: {plural(verdict.images, 'image')} measured, and a comparison needs at least "
            f"{FEWEST}.{ahead}"
        )
        yield from _comparison(verdict)
        return
    elif len(verdict.compared) < COMPARED:
        done = _list(verdict.compared) or "no method"
        yield (
            f"No method is recommended: a recommendation needs {COMPARED} methods besides random on at least {FEWEST} "
            f"shared images, and only {done} had them.{ahead}"
        )
        yield from _comparison(verdict)
    else:
        random = verdict.leading and verdict.row(verdict.leading).above_random
        reason = f"{verdict.leading} beats random, but" if random else "No method is shown to beat random, so"
        why = " it is not shown to use anything the model has learnt, so" if random else ""
        yield f"{reason}{why} no method is recommended.{'' if random else ahead}"
        yield from _blank(verdict)
    if verdict.untrained is not None:
        difference = verdict.untrained.mean
        yield (
            f"On a copy of the model with random weights {verdict.leading} scores {abs(difference):.3f} "
            f"{'lower' if difference >= 0 else 'higher'} ({verdict.untrained.images} images): its maps "
            f"{'depend' if verdict.learnt else 'are not shown to depend'} on what the model has learnt."
        )
    elif verdict.leading is not None:
        yield (
            f"{verdict.leading} was not compared with itself on an untrained copy of the model: {verdict.uncompared}. "
            "It is not shown that its maps depend on what the model has learnt."
        )


def _comparison(verdict: Verdict) -> Iterator[str]:
    """What is missing for a comparison."""
    if verdict.about["images"] - len(verdict.failed) < FEWEST:
        yield f"Give at least {FEWEST} images."
    elif len(verdict.about["methods"]) <= COMPARED:
        yield f"Name at least {COMPARED} methods besides random, or leave the methods out to compare all."
    elif math.isfinite(verdict.comparison_seconds):
        needed = duration(verdict.comparison_seconds)
        yield f"A comparison of {COMPARED} methods needs a budget of about {needed} on this machine."


def _blank(verdict: Verdict) -> Iterator[str]:
    """The effect of blanking the whole image on the score."""
    if verdict.blanked:
        each = " and ".join(
            f"{effect.change:.3f} under {fill} (falls on {plural(effect.falls, 'image')}, rises on {effect.rises})"
            for fill, effect in verdict.blanked.items()
        )
        least = SENSITIVE * verdict.about["worth"]
        yield (
            f"Blanking the whole image changes the class's score ({verdict.score:.3f} on average) by {each} on average"
            + (f", less than {least:g}: the prediction hardly depends on the image." if verdict.blind else ".")
        )


def _near(verdict: Verdict) -> Iterator[str]:
    """Methods about as good as the best, and a cheaper one."""
    if verdict.best is None:
        return
    best, tied = verdict.row(verdict.best), verdict.having("tied")
    yield _names(
        "No significant difference to it", [f"{row.name} ({row.difference:+.3f}, {_cost(row, best)})" for row in tied]
    )
    if not verdict.having("tied", "undecided", "behind"):
        yield f"It is significantly better than the other {plural(len(verdict.compared) - 1, 'method')} compared."
    if verdict.quick and verdict.quick != verdict.best:
        quick, worth = verdict.row(verdict.quick), verdict.about["worth"]
        lower = quick.difference < -worth and quick.difference_low < quick.difference_high < 0
        significant = quick.beaten_by == best.method or lower  # `worse` may be due to another method
        loss = f"{-quick.difference:.3f} lower, {'' if significant else 'not '}significant"
        yield (
            f"Quick: {quick.name} takes {duration(quick.seconds)} per map instead of {duration(best.seconds)} "
            f"({_cost(quick, best)}); its score is {loss if quick.difference < 0 else 'not lower'}."
        )
    yield _names(
        "Undecided, without a significant difference to it or to random", _methods(verdict.having("undecided"))
    )


def _cost(row: MethodResult, best: MethodResult) -> str:
    ratio = best.seconds / row.seconds if row.seconds > 0 else math.inf
    if 0.8 < ratio < 1.25:
        return "same cost"
    times = max(ratio, 1 / ratio) if ratio > 0 else math.inf
    return f"{times:.{0 if times >= 10 else 1}f} times {'cheaper' if ratio > 1 else 'slower'}"


def _worse(verdict: Verdict) -> Iterator[str]:
    """Methods that are worse than the best, and those that do not beat random."""
    yield _names("Significantly worse", _methods(verdict.having("worse")))
    yield _names("Lower, but stopped for lack of time before that was significant", _methods(verdict.having("behind")))
    if verdict.best is None:
        return
    no = [row for row in verdict.rows if row.above_random is False and row.status != "tied"]
    unknown = [row.method for row in verdict.rows if row.above_random is None and row.status != "baseline"]
    early = [row for row in no if row.random_p < ALPHA]
    for words, rows in (
        ("No better than random", [row for row in no if row not in early]),
        ("Above random, but on too few images to be significant", early),
    ):
        yield _names(words, [f"{row.method} ({row.score:+.3f}, {row.images} images)" for row in rows])
    yield _names(f"Not compared with random, for lack of {FEWEST} images", unknown)
    if not no and not unknown:
        yield "Every method tested beat random."


def _other_metrics(verdict: Verdict) -> Iterator[str]:
    """The other metrics, and how statements are tested."""
    bad, good = (
        [f"{m} ({r:.2f})" for m, r in verdict.sanity.items() if (r > INSANE) is fails] for fails in (True, False)
    )
    fails = _names("Fails the sanity check (the map stays much the same with random weights)", bad)
    yield " ".join(filter(None, [fails, _names(f"Passes {'it' if bad else 'the sanity check'}", good)]))
    seeds = [f"{row.method} {row.others[AGREEMENT]:.2f}" for row in verdict.rows if AGREEMENT in row.others]
    yield _names("Agreement of two seeds (rank correlation of the maps)", seeds)
    if verdict.disagreements:
        yield f"Other metrics disagree: {'; '.join(verdict.disagreements)}."
    elif verdict.best is not None and verdict.row(verdict.best).others:
        yield "No other metric significantly prefers another method."
    if verdict.looks and verdict.images >= FEWEST:
        yield (
            f"Statistics: paired t-tests at level {verdict.level:.1g}, which is 5 % over all pairs of "
            f"{plural(len(verdict.rows), 'method')} and {plural(len(verdict.looks), 'look')}; differences below "
            f"{verdict.about['worth']:g} do not count."
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
    yield _names("Another hour would settle, if differences and spreads stay the same", soon)
    yield _names(f"Would need more than these {plural(readable, 'image')}", short)
    yield _names("Would need more than an hour", far)
    if alike:
        yield _names(f"Within {worth:g} of {alike[0].first}, not worth settling", [pair.second for pair in alike])


def _pair(pair: Undecided) -> str:
    images = f"about {pair.needed:.0f} images, {duration(pair.seconds)}"
    return f"{pair.first} against {pair.second} ({images if math.isfinite(pair.needed) else 'too close to estimate'})"


def _missing(verdict: Verdict) -> Iterator[str]:
    unusable = [f"{row.method} ({plural(row.undefined, 'image')})" for row in verdict.rows if row.undefined]
    yield _names("No usable map, scored as random", unusable)
    why: dict[str, list[str]] = {}
    for method, reason in verdict.left_out.items():
        why.setdefault(reason, []).append(method)
    yield _names("Left out", [f"{_list(methods)} ({reason})" for reason, methods in why.items()], ";")
    failed = [f"{name} ({reason})" for name, reason in verdict.failed.items()]
    were = "was" if len(failed) == 1 else "were"
    yield _names(f"{plural(len(failed), 'image')} could not be read and {were} skipped", failed, ";")


def table(verdict: Verdict) -> list[list[str]]:
    """The headings, and a line per method."""
    others = list(dict.fromkeys(name for row in verdict.rows for name in row.others))
    lines = [["method", "status", "score [95 %]", "images", "vs best", "time per map", "beats random", *others]]
    for row in verdict.rows:
        interval = f" [{row.low:.3f}, {row.high:.3f}]" if math.isfinite(row.low) else ""
        apart = math.isfinite(row.difference) and row.method != verdict.best
        beats = {True: "yes", False: "no", None: ""}[row.above_random]
        numbers = [f"{row.others[name]:.3f}" if name in row.others else "" for name in others]
        score, difference = f"{row.score:.3f}{interval}", f"{row.difference:+.3f}" if apart else ""
        time = duration(row.seconds) if math.isfinite(row.seconds) else ""
        lines.append([row.name, row.status, score, str(row.images), difference, time, beats, *numbers])
    return lines


def as_text(verdict: Verdict) -> str:
    """Title, sentences and table."""
    headings, *rows = table(verdict)
    lines = (f"- {line}" for line in sentences(verdict))
    return "\n".join([title(verdict), "", *lines, "", text_table(headings, rows)])


def as_html(verdict: Verdict, template: str = "verdict.html") -> str:
    """A page that opens offline; with the template `contents.html`, the part that a notebook shows."""
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
