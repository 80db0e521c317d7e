"""What a shell offers behind a tab: names of methods, metrics, models and settings, without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import typer

from patchlight.cli.names import known_names, table

Offer = tuple[str, str]
"""A completion, and a word about it where the shell shows one."""


def complete_method(incomplete: str) -> list[Offer]:
    """One method; behind a dot, the compositions and rules that may follow it."""
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
    return _beginning(incomplete, ((f"{base}.{composed}.{w}" if again else f"{base}.{w}", "") for w in words))


def complete_metric(incomplete: str) -> list[Offer]:
    """One metric."""
    return _listed(incomplete, "metrics")


def complete_figure(incomplete: str) -> list[Offer]:
    """One figure."""
    return _listed(incomplete, "figures", "shows")


def complete_methods(incomplete: str) -> list[Offer]:
    """Methods, separated by commas; or a group of them."""
    groups = [("all", "every method"), ("inside", "every method that reads the model's inside")]
    return _last(incomplete, lambda one: [*complete_method(one), *_beginning(one, groups)])


def complete_metrics(incomplete: str) -> list[Offer]:
    """Metrics, separated by commas."""
    return _last(incomplete, complete_metric)


def complete_model(incomplete: str) -> list[Offer]:
    """The models that are known by a name."""
    return _beginning(incomplete, ((name, "") for name in [*table("models")["models"], "hf:", "torchvision:"]))


def complete_kind(incomplete: str) -> list[Offer]:
    """Kinds of data."""
    return _beginning(incomplete, ((name, "") for name in table()["data"]))


def complete_recipe(incomplete: str) -> list[Offer]:
    """The bundled recipes of the benchmark."""
    from patchlight.core.recipes import bundled_recipes

    return _beginning(incomplete, ((name, "") for name in bundled_recipes("bench")))


def complete_training_recipe(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """The bundled recipes of the explainer that is to be trained."""
    from patchlight.core.recipes import bundled_recipes

    command = ctx.parent.info_name if ctx.parent is not None else None
    return _beginning(incomplete, ((name, "") for name in bundled_recipes(command or "")))


def complete_setting(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """NAME.SETTING= of the methods and metrics named so far."""
    return _beginning(
        incomplete,
        (
            (f"{asked}.{key}=", words)
            for asked, row in _asked(ctx, "method", "metric")
            for key, words in row["settings"].items()
        ),
    )


def complete_preset(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Presets of the metrics named so far."""
    return _beginning(
        incomplete, ((preset, asked) for asked, row in _asked(ctx, "metric") for preset in row["presets"])
    )


def one_of(*words: str) -> Callable[[str], list[Offer]]:
    """A completion of fixed words."""

    def complete(incomplete: str) -> list[Offer]:
        return _beginning(incomplete, ((word, "") for word in words))

    return complete


def _beginning(incomplete: str, offers: Iterable[Offer]) -> list[Offer]:
    return [offer for offer in dict(offers).items() if offer[0].startswith(incomplete)]


def _listed(incomplete: str, kind: str, about: str = "summary") -> list[Offer]:
    return _beginning(incomplete, ((name, row[about]) for row in table()[kind] for name in known_names([row])))


def _last(incomplete: str, complete: Callable[[str], list[Offer]]) -> list[Offer]:
    """Complete the last of several names."""
    before, comma, last = incomplete.rpartition(",")
    return [(f"{before}{comma}{word}", words) for word, words in complete(last)]


def _asked(ctx: typer.Context, *options: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The names that were given for these options, with their rows."""
    for option in options:
        known = {name: row for row in table()[f"{option}s"] for name in known_names([row])}
        for asked in str(ctx.params.get(option) or "").split(","):
            if asked.strip().split(".")[0] in known:
                yield asked.strip(), known[asked.strip().split(".")[0]]
