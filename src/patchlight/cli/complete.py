"""Completions in the shell: names of methods, metrics, models and settings, without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import typer

from patchlight.cli.names import known_names, table

Offer = tuple[str, str]
"""A completion, and a description that some shells show."""


def complete_method(incomplete: str) -> list[Offer]:
    """A method; after a dot, the compositions and rules that may follow it."""
    base, dot, rest = incomplete.partition(".")
    if not dot:
        return _listed(incomplete, "methods")
    row = next((row for row in table()["methods"] if base in known_names([row])), None)
    if row is None:
        return []
    composed, again, _ = rest.partition(".")
    if again and composed not in row["compositions"]:
        return []
    words = row["rules"] if again else [*row["compositions"], *row["rules"]]
    return _matching(incomplete, ((f"{base}.{composed}.{w}" if again else f"{base}.{w}", "") for w in words))


def complete_metric(incomplete: str) -> list[Offer]:
    """A metric."""
    return _listed(incomplete, "metrics")


def complete_figure(incomplete: str) -> list[Offer]:
    """A figure."""
    return _listed(incomplete, "figures", "shows")


def complete_methods(incomplete: str) -> list[Offer]:
    """Methods, separated by commas, or a word for several."""
    groups = [
        ("auto", "the best method with one pass that works on the model"),
        ("inside", "all methods that read attention, gradients or tokens inside the model"),
        ("all", "every method"),
    ]
    return _last(incomplete, lambda one: [*complete_method(one), *_matching(one, groups)])


def complete_metrics(incomplete: str) -> list[Offer]:
    """Metrics, separated by commas."""
    return _last(incomplete, complete_metric)


def complete_model(incomplete: str) -> list[Offer]:
    """Models that have a name."""
    names = [*table("models")["models"], "hf:", "open_clip:", "torchvision:"]
    return _matching(incomplete, ((name, "") for name in names))


def complete_kind(incomplete: str) -> list[Offer]:
    """Kinds of data sets."""
    return _matching(incomplete, ((name, "") for name in table()["data"]))


def complete_recipe(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Bundled recipes of the group of commands: bench, diffmask or shapley."""
    from patchlight.core.recipes import bundled_recipes

    group = ctx.parent.info_name if ctx.parent is not None else None
    return _matching(incomplete, ((name, "") for name in bundled_recipes(group or "")))


def complete_setting(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """NAME.SETTING= for the methods and metrics named so far."""
    return _matching(
        incomplete,
        (
            (f"{name}.{key}=", words)
            for name, row in _named_rows(ctx, "method", "metric")
            for key, words in row["settings"].items()
        ),
    )


def complete_preset(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Presets of the metrics named so far."""
    return _matching(
        incomplete, ((preset, name) for name, row in _named_rows(ctx, "metric") for preset in row["presets"])
    )


def one_of(*words: str) -> Callable[[str], list[Offer]]:
    """A completion with fixed words."""

    def complete(incomplete: str) -> list[Offer]:
        return _matching(incomplete, ((word, "") for word in words))

    return complete


def _matching(incomplete: str, offers: Iterable[Offer]) -> list[Offer]:
    return [offer for offer in dict(offers).items() if offer[0].startswith(incomplete)]


def _listed(incomplete: str, kind: str, description: str = "summary") -> list[Offer]:
    return _matching(incomplete, ((name, row[description]) for row in table()[kind] for name in known_names([row])))


def _last(incomplete: str, complete: Callable[[str], list[Offer]]) -> list[Offer]:
    """Completions of the last of several names."""
    before, comma, last = incomplete.rpartition(",")
    return [(f"{before}{comma}{word}", words) for word, words in complete(last)]


def _named_rows(ctx: typer.Context, *options: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The names given for these options, with their rows."""
    for option in options:
        rows = {name: row for row in table()[f"{option}s"] for name in known_names([row])}
        for name in map(str.strip, str(ctx.params.get(option) or "").split(",")):
            if name.split(".")[0] in rows:
                yield name, rows[name.split(".")[0]]
