"""Numbers that a method reports per image, as a column of a table."""

from __future__ import annotations

import math

import torch

from patchlight.metrics.base import Measure, Measured, register_metric


@register_metric(
    "fact", paper="Xie et al., IJCAI 2023, the number of masks", higher_is_better=False, bounds=(-math.inf, math.inf)
)
def fact(ask: Measure, fact: str = "masks") -> Measured:
    """A number that the method itself reports for each image, such as the number of masks of `vit-cx`.

    It describes the work of a method, not how good a map is; where a table ranks, lower is better. A map without this
    number has no value.

    Args:
        fact: Its name in the attribution's `facts`.
    """
    values = ask.facts.get(fact)
    if values is not None:
        return Measured(values.double())
    missing = "no method reported it with these maps" if not ask.facts else f"reported are {_names(ask)}"
    count = len(ask.images)
    reasons = dict.fromkeys(range(count), f"'{fact}' is not known: {missing}")
    return Measured(torch.full((count,), torch.nan, dtype=torch.float64), reasons=reasons)


def _names(ask: Measure) -> str:
    return ", ".join(sorted(ask.facts))
