"""Which quantities metrics can read of a model's outputs."""

from __future__ import annotations

from collections.abc import Callable

from patchlight.anatomy.opened import Anatomy
from patchlight.core.registry import Settings


def lacking(quantity: str, vit: Anatomy) -> str | None:
    """Why a model does not have a quantity; None if it has."""
    outputs, classes = vit.outputs, vit.classes
    if quantity == "accuracy":
        return outputs.no_accuracy(classes)
    if quantity == "kl":
        return outputs.no_divergence(classes)
    if quantity == "cosine":
        return outputs.no_cosine()
    return outputs.no_probability(classes) if quantity in ("probability", "nll") else None


def unread(quantity: Callable[[Settings], str], instead: str) -> Callable[[Settings, Anatomy], str | None]:
    """A metric's `refuses`, for the quantity that its settings name, with a suggestion."""

    def refuses(settings: Settings, vit: Anatomy) -> str | None:
        reason = lacking(quantity(settings), vit)
        return None if reason is None else f"{reason}; {instead}"

    return refuses


no_score = unread(lambda settings: str(settings["score"]), "score='logit' works")
