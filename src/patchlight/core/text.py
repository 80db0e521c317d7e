"""Counts and durations in words."""

from __future__ import annotations

import math


def duration(seconds: float) -> str:
    """A duration in words.

    >>> duration(0.0123), duration(7.25), duration(140), duration(7300)
    ('12 ms', '7.2 s', '2.3 min', '2 h')
    """
    if not math.isfinite(seconds):
        return "an unknown time"
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 0.995 * size:
            number = seconds / size
            return f"{number:.1f}".removesuffix(".0") + f" {unit}" if number < 9.95 else f"{number:.0f} {unit}"
    return "under 1 ms" if seconds < 0.0005 else f"{1000 * seconds:.0f} ms"


def plural(count: float, noun: str) -> str:
    """A count and its noun.

    >>> plural(1, "image"), plural(6, "image")
    ('1 image', '6 images')
    """
    return f"{count:g} {noun}{'' if count == 1 else 's'}"
