"""`patchlight methods`, `patchlight metrics` and `patchlight models`: what there is."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from patchlight.cli.common import AsJson, Debug, Plugin, answering, console, load_model, print_json, progress, say
from patchlight.errors import PatchlightError, nearest

_OF_A_MODEL = ("supported", "reason")


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, to see its settings.")] = None,
    model: Annotated[str | None, typer.Option(help="Say which methods work on this model.")] = None,
    plugin: Plugin = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the methods, or the settings of one."""
    with answering(as_json, debug):
        with progress(f"loading {model or 'the methods'}"):
            from patchlight.methods.requests import list_methods as table
            from patchlight.methods.requests import resolve

            vit = load_model(model, pretrained=False) if model is not None else None
            rows = table(vit)
        if name is not None:
            request = resolve(name)
            rows = [row for row in rows if row.name == request.method.name]
        if as_json:
            print_json(
                [{k: v for k, v in asdict(row).items() if vit is not None or k not in _OF_A_MODEL} for row in rows]
            )
        elif name is not None:
            _describe_method(rows[0], request)
        else:
            _list_methods(rows, vit is not None)


def metrics(
    name: Annotated[str | None, typer.Argument(help="One metric, to see its settings.")] = None,
    plugin: Plugin = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the metrics, or the settings of one."""
    with answering(as_json, debug):
        with progress("loading the metrics"):
            from patchlight.metrics.base import list_metrics as table
            from patchlight.metrics.base import resolve_metric

            rows = table()
        if name is not None:
            entry = resolve_metric(name).metric
            rows = [row for row in rows if row.name == entry.name]
        if as_json:
            print_json([asdict(row) for row in rows])
        elif name is not None:
            _describe_metric(rows[0], entry)
        else:
            _list_metrics(rows)


def models(
    pattern: Annotated[str, typer.Argument(help="Part of a name, or a pattern such as 'deit*'.")] = "",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the models that can be loaded by name."""
    with answering(as_json, debug):
        with progress("loading the names"):
            from patchlight.anatomy.load import list_models

            names = list_models(pattern)
            if not names:
                raise PatchlightError(f"no model's name matches '{pattern}'; {nearest(pattern, list_models())}")
        if as_json:
            print_json(names)
            return
        for model in names:
            print(model)
        say(f"{len(names)} models; also hf:NAME (transformers) and torchvision:NAME")


def _list_methods(rows: Sequence[Any], of_model: bool) -> None:
    table = Table(
        "method", *(("works",) if of_model else ()), "paper", "cost", "what it shows", box=None, pad_edge=False
    )
    for row in rows:
        works = ("yes" if row.supported else f"no: {row.reason}",) if of_model else ()
        table.add_row(row.name, *works, row.paper, row.cost, row.summary)
    console().print(table)
    say("`patchlight methods NAME` tells more; a composition (.plus, .rollout) and a rule (.libra) may follow a name")


def _describe_method(row: Any, request: Any) -> None:
    from patchlight.registry import in_words

    entry = request.method
    print(f"{request.name}  ({row.paper}; {row.cost})")
    if row.aliases:
        print(f"also called {', '.join(row.aliases)}")
    print(inspect.getdoc(entry.function) or "")
    composition = request.composition
    if composition is not entry.composition:
        print(f"\n.{composition.name}: {inspect.getdoc(composition.function)}")
    if request.rule.name != "plain":
        print(f"\nBackward rule {request.rule.name}: {request.rule.paper}")
    print("\nSettings:")
    for key, setting in entry.settings(composition).items():
        print(f"  {key}: {in_words(setting.kind)} = {request.settings[key]!r}")
    print(f"  score: 'logit' | 'probability' | a callable of the logits = {entry.score!r}")
    if entry.presets:
        print(f"  preset: {', '.join(entry.presets)}")


def _list_metrics(rows: Sequence[Any]) -> None:
    table = Table("metric", "better", "needs", "paper", "cost", "what it says", box=None, pad_edge=False)
    for row in rows:
        better = "higher" if row.higher_is_better else "lower"
        table.add_row(row.name, better, ", ".join(row.needs), row.paper, row.cost, row.summary)
    console().print(table)
    say("`patchlight metrics NAME` tells more")


def _describe_metric(row: Any, entry: Any) -> None:
    low, high = row.bounds
    better = "higher" if row.higher_is_better else "lower"
    print(f"{row.name}  ({row.paper}; {row.cost}; {better} is better, from {low:g} to {high:g})")
    if row.aliases:
        print(f"also called {', '.join(row.aliases)}")
    if row.needs:
        print(f"needs {' and '.join(row.needs)}")
    print(inspect.getdoc(entry.function) or "")
    print("\nSettings:")
    for key, words in row.settings.items():
        print(f"  {key}: {words}")
    if row.presets:
        print(f"  preset: {', '.join(row.presets)}")
