"""What a verdict says in plain words, and its table as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from patchlight.core.statistics import FEWEST
from patchlight.study.recommend.cells import FALL
from patchlight.study.recommend.panel import AGREEMENT
from patchlight.study.recommend.race import ALPHA
from patchlight.study.recommend.verdict import FALLS, HOUR, INSANE, Row, Undecided, Verdict, above_untrained, blind

MOST = 8
"""Names that are listed; of more, how many."""


def as_text(verdict: Verdict) -> str:
    """Title, sentences and table."""
    return "\n".join([title(verdict), "", *(f"- {line}" for line in sentences(verdict)), "", *_table(verdict)])


def title(verdict: Verdict) -> str:
    about = verdict.about
    there = about["images"] - len(verdict.failed)
    seen = f"{len(verdict.rows)} methods on {verdict.images} of {there} image(s)"
    return f"{about['model']}: {seen}, scored by {score_name(verdict)}"


def score_name(verdict: Verdict) -> str:
    """What decides, in words."""
    about = verdict.about
    lower = set(about["lower_is_better"])
    names = [f"{name} (negative, as lower is better)" if name in lower else name for name in about["deciding"]]
    return names[0] if len(names) == 1 else f"the mean of {' and '.join(names)}"


def sentences(verdict: Verdict) -> list[str]:
    """The verdict, one statement a sentence or two."""
    told = [
        *_best(verdict),
        *_tied(verdict),
        *_others(verdict),
        *_random(verdict),
        *_sanity(verdict),
        *_beside(verdict),
        *_sure(verdict),
        *_hour(verdict),
        *_missing(verdict),
    ]
    return [line for line in told if line]


def _best(verdict: Verdict) -> list[str]:
    if verdict.best is not None:
        row = verdict.row(verdict.best)
        sure = f"{100 * min(verdict.confidence, 0.999):.1f} %"
        return [
            f"Best: {row.method}, score {row.score:.3f} [{row.low:.3f}, {row.high:.3f}] on {row.images} images, "
            f"{duration(row.seconds)} a map. That it beats random is {sure} sure, corrected for all methods and looks.",
            *_untrained(verdict),
        ]
    ahead = f" The highest mean so far is that of {verdict.leading}." if verdict.leading else ""
    if verdict.images < FEWEST:
        return [
            f"Nothing is decided: {verdict.images} image(s) were measured, and from fewer than {FEWEST} nothing can be."
            + ahead
        ]
    found = [f"Nothing is shown to beat random, so no method is recommended.{ahead}"]
    return [*found, *_fall(verdict), *_untrained(verdict)]


def _untrained(verdict: Verdict) -> list[str]:
    """How the leader stands to itself on an untrained copy."""
    pair = verdict.untrained
    if verdict.leading is None:
        return []
    if pair is None:
        return [
            f"{verdict.leading} was not compared with itself on an untrained copy of the model: {verdict.uncompared}. "
            "So what it finds may be there without anything learnt."
        ]
    there = f"{pair.mean:.3f} less than here, on {pair.images} images"
    more = "more than in" if above_untrained(pair, verdict.about["worth"]) else "not surely more than in"
    return [
        f"On a copy of the model with weights drawn anew {verdict.leading} scores {there}: what it finds here is "
        f"{more} a model that has learnt nothing."
    ]


def _fall(verdict: Verdict) -> list[str]:
    """Why, where the model hardly looks at the image."""
    falls = {name.removeprefix(f"{FALL} "): own for name, own in verdict.fall.items() if name.startswith(FALL)}
    if not falls or "score" not in verdict.fall:
        return []
    told = " and ".join(f"{own:+.3f} under {fill}" for fill, own in falls.items())
    line = f"Removing the whole image lowers the class's score ({verdict.fall['score']:.3f} on average) by {told}"
    worth = verdict.about["worth"]
    if blind(verdict.fall, worth):
        line += f", less than {FALLS * worth:g}: the prediction hardly depends on the image, so no map can be right"
    return [f"{line}."]


def _tied(verdict: Verdict) -> list[str]:
    if verdict.best is None:
        return []
    best, tied = verdict.row(verdict.best), verdict.having("tied")
    told = [f"{row.method} ({row.difference:+.3f}, {_cheaper(row, best)})" for row in tied]
    alone = "" if verdict.having("undecided", "behind") else "No other method is level with it."
    lines = [f"Not told apart from it: {_listed(told)}." if tied else alone]
    if verdict.quick and verdict.quick != verdict.best:
        quick = verdict.row(verdict.quick)
        sure = "surely" if _surely_lower(quick, best, verdict.about["worth"]) else "which is not sure"
        loses = f"loses {-quick.difference:.3f}, {sure}" if quick.difference < 0 else "loses nothing"
        lines.append(
            f"Quick: {quick.method} takes {duration(quick.seconds)} a map instead of {duration(best.seconds)} "
            f"({_cheaper(quick, best)}) and {loses}."
        )
    return lines


def _surely_lower(row: Row, best: Row, worth: float) -> bool:
    """Whether it is the best that beats it; `worse` may be by another."""
    return row.beaten_by == best.method or (row.difference < -worth and row.difference_low < row.difference_high < 0)


def _cheaper(row: Row, best: Row) -> str:
    ratio = best.seconds / row.seconds if row.seconds > 0 else math.inf
    if 0.8 < ratio < 1.25:
        return "as cheap"
    return f"{ratio:.2g} times cheaper" if ratio > 1 else f"{1 / ratio:.2g} times dearer"


def _others(verdict: Verdict) -> list[str]:
    worse, behind, unsure = verdict.having("worse"), verdict.having("behind"), verdict.having("undecided")
    if verdict.best is None:
        unsure = []
    return [
        f"Undecided, told apart neither from it nor from random: {_listed([row.method for row in unsure])}."
        if unsure
        else "",
        f"Surely worse: {_listed([row.method for row in worse])}." if worse else "",
        f"Behind, and set aside for time before that was sure: {_listed([row.method for row in behind])}."
        if behind
        else "",
    ]


def _random(verdict: Verdict) -> list[str]:
    if verdict.best is None:
        return []
    no = [row for row in verdict.rows if row.above_random is False and row.status != "tied"]
    unknown = [row.method for row in verdict.rows if row.above_random is None and row.status != "baseline"]
    if not no and not unknown:
        return ["All methods that were followed beat random."]
    chance = [row for row in no if not row.random_p < ALPHA]
    early = [row for row in no if row.random_p < ALPHA]
    found = []
    for words, rows in (("No better than random", chance), ("Above random, but on too few images to be sure", early)):
        told = [f"{row.method} ({row.score:+.3f}, {row.images} images)" for row in rows]
        found.append(f"{words}: {_listed(told)}." if told else "")
    if unknown:
        found.append(f"Not compared with random, on fewer than {FEWEST} images: {_listed(unknown)}.")
    return found


def _sanity(verdict: Verdict) -> list[str]:
    if not verdict.sanity:
        return []
    bad = [f"{m} ({own:.2f})" for m, own in verdict.sanity.items() if own > INSANE]
    good = [f"{m} ({own:.2f})" for m, own in verdict.sanity.items() if own <= INSANE]
    told = []
    if bad:
        told.append(
            f"Fails the sanity check, its map stays much the same when the weights are drawn anew: {_listed(bad)}."
        )
    if good:
        told.append(f"Passes {'it' if bad else 'the sanity check'}: {_listed(good)}.")
    return [" ".join(told)]


def _beside(verdict: Verdict) -> list[str]:
    drawn = [(row.method, row.others[AGREEMENT]) for row in verdict.rows if AGREEMENT in row.others]
    seeds = [f"{method} {value:.2f}" for method, value in drawn]
    lines = [f"Two seeds agree (rank correlation of the maps): {_listed(seeds)}." if seeds else ""]
    if verdict.disagreements:
        lines.append(f"Other metrics disagree with the choice: {'; '.join(verdict.disagreements)}.")
    elif verdict.best is not None and len(verdict.row(verdict.best).others) > 0:
        lines.append("No other metric that was measured surely prefers another method.")
    return lines


def _sure(verdict: Verdict) -> list[str]:
    if not verdict.looks or verdict.images < FEWEST:
        return []
    return [
        f"How sure: pairs are compared by paired t at {verdict.level:.1g}, which is 5 % over all pairs of "
        f"{len(verdict.rows)} methods and {len(verdict.looks)} looks; a difference below {verdict.about['worth']:g} "
        "counts as none."
    ]


def _hour(verdict: Verdict) -> list[str]:
    """What more time would settle."""
    if verdict.images < FEWEST or not verdict.undecided:
        return []
    worth, there = verdict.about["worth"], verdict.about["images"] - len(verdict.failed)
    alike = [u for u in verdict.undecided if abs(u.difference) <= worth]
    open_ = [u for u in verdict.undecided if abs(u.difference) > worth]
    spent, soon = 0.0, []
    for one in [u for u in open_ if u.needed <= there]:
        spent += one.seconds
        if spent <= HOUR:
            soon.append(one)
    short = [u for u in open_ if u.needed > there]
    lines = []
    if soon:
        lines.append(
            f"Another hour would settle, by present differences and spreads: {_listed([_pair(u) for u in soon])}."
        )
    far = [u for u in open_ if u not in soon and u.needed <= there]
    if short:
        lines.append(f"More than these {there} image(s) would be needed for: {_listed(list(map(_pair, short)))}.")
    if far:
        lines.append(f"More than an hour would be needed for: {_listed(list(map(_pair, far)))}.")
    if alike:
        names = _listed([u.second for u in alike])
        lines.append(f"Nearer to {alike[0].first} than {worth:g}, so not worth settling: {names}.")
    return lines


def _pair(one: Undecided) -> str:
    needed = (
        f"about {one.needed:.0f} images, {duration(one.seconds)}" if math.isfinite(one.needed) else "no end in sight"
    )
    return f"{one.first} against {one.second} ({needed})"


def _missing(verdict: Verdict) -> list[str]:
    left, failed = verdict.left_out, verdict.failed
    lost = [f"{row.method} ({row.undefined})" for row in verdict.rows if row.undefined]
    lines = []
    if lost:
        lines.append(f"Gave no map that can be scored, and counts as random there, on so many images: {_listed(lost)}.")
    if left:
        why: dict[str, list[str]] = {}
        for method, reason in left.items():
            why.setdefault(reason, []).append(method)
        lines.append(f"Left out: {_listed([f'{_listed(own)} ({reason})' for reason, own in why.items()], ';')}.")
    if failed:
        told = [f"{name} ({reason})" for name, reason in failed.items()]
        lines.append(f"{len(failed)} image(s) could not be read and do not count: {_listed(told, ';')}.")
    return lines


def _listed(names: Sequence[str], sign: str = ",") -> str:
    more = f"{sign} and {len(names) - MOST} more" if len(names) > MOST else ""
    return f"{sign} ".join(names[:MOST]) + more


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


def headings(verdict: Verdict) -> list[str]:
    others = list(dict.fromkeys(name for row in verdict.rows for name in row.others))
    return ["method", "status", "score [95 %]", "images", "to the best", "s/map", "beats random", *others]


def lines(verdict: Verdict) -> list[list[str]]:
    """The table, a line per method."""
    others = headings(verdict)[7:]
    return [
        [
            row.method,
            row.status,
            f"{row.score:.3f}" + (f" [{row.low:.3f}, {row.high:.3f}]" if math.isfinite(row.low) else ""),
            str(row.images),
            "" if not math.isfinite(row.difference) or row.method == verdict.best else f"{row.difference:+.3f}",
            f"{row.seconds:.2g}",
            {True: "yes", False: "no", None: ""}[row.above_random],
            *(f"{row.others[name]:.3f}" if name in row.others else "" for name in others),
        ]
        for row in verdict.rows
    ]


def _table(verdict: Verdict) -> list[str]:
    rows = [headings(verdict), *lines(verdict)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    drawn = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [drawn[0], "  ".join("─" * width for width in widths), *drawn[1:]]
