"""`patchlight methods`, `patchlight metrics` and `patchlight models`: lists, and the details of one entry."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import Annotated, Any

import typer

from patchlight.cli.common import print_json, print_table, progress, say, show, show_text
from patchlight.cli.complete import complete_method, complete_metric
from patchlight.cli.names import Row, find_row, known_names
from patchlight.cli.names import table as names
from patchlight.cli.options import ModelOptions, Plugin, command
from patchlight.core.errors import PatchlightError, match_names, nearest


@command
def methods(
    name: Annotated[str | None, typer.Argument(autocompletion=complete_method)] = None,
    model: str | None = None,
    plugin: Plugin = None,
    as_json: bool = False,
) -> None:
    """List the methods, or show the formula, paper, cost and settings of one."""
    with progress(f"loading {model or 'the methods'}"):
        vit = None if model is None else ModelOptions(model, no_pretrained=True).load()
        rows = names()["methods"] if vit is None and not plugin else catalogue().method_rows(vit)
        if name is not None:
            exact = name != "auto" and name in known_names(rows)
            rows = [find_row(rows, name, "method") if exact else catalogue().composed_row(rows, name)]
        if name == "auto":
            from patchlight.methods.requests import AUTO

            rows[0]["text"] = f"The first of these that works on the model: {', '.join(AUTO)}.\n\n{rows[0]['text']}"
    if as_json:
        print_json(rows)
    elif name is not None:
        row = rows[0]
        score = {"score": f"'logit' | 'probability' | 'cosine' | a function of the logits = {row['score']!r}"}
        describe({**row, "settings": row["settings"] | score}, {"Paper": row["paper"], "Cost": row["cost"]})
    else:
        print_table(("method", *(("works",) if model else ()), "what it shows", "cost per image"), _method_cells(rows))
        say("Details: patchlight methods NAME. A composition (.plus) and a backward rule (.libra) may follow a name.")


def _method_cells(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """The recommended methods, then all of them by group."""
    blank = ("",) * (3 if "supported" in rows[0] else 2)
    yield ("Recommended", *blank)
    for name, purpose in names()["recommended"].items():
        row = next((row for row in rows if name.partition(".")[0] in known_names([row])), None)
        cost = row["cost"] if row is not None else "1 forward + 1 backward"
        yield (f"  {name}", *(_works(row) if row is not None else blank[2:]), purpose, cost)
    for group in dict.fromkeys(row["group"] for row in rows):
        yield ("", *blank)
        yield (group[:1].upper() + group[1:], *blank)
        for row in rows:
            if row["group"] == group:
                yield (f"  {row['name']}", *_works(row), row["summary"], row["cost"])


def _works(row: Row) -> tuple[str, ...]:
    """Whether a method works on the model, if one was named."""
    return ("yes" if row["supported"] else f"no: {row['reason']}",) if "supported" in row else ()


@command
def metrics(
    name: Annotated[str | None, typer.Argument(autocompletion=complete_metric)] = None,
    plugin: Plugin = None,
    as_json: bool = False,
) -> None:
    """List the metrics, or show the formula, paper, cost and settings of one."""
    with progress("loading the metrics"):
        rows = catalogue().metric_rows() if plugin else names()["metrics"]
    if name is not None:
        rows = [find_row(rows, name, "metric")]
    if as_json:
        print_json(rows)
    elif name is not None:
        (low, high), needs = rows[0]["bounds"], " and ".join(rows[0]["needs"])
        span = f"{_better(rows[0])} is better, from {low:g} to {high:g}"
        describe(rows[0], {"Paper": rows[0]["paper"], "Cost": rows[0]["cost"], "Values": span, "Needs": needs})
    else:
        cells = [(r["name"], r["summary"], _better(r), ", ".join(r["needs"]), r["cost"]) for r in rows]
        print_table(("metric", "what it measures", "better", "needs", "cost per image"), cells)
        say("Details: patchlight metrics NAME")


def _better(row: Row) -> str:
    return "higher" if row["higher_is_better"] else "lower"


@command
def models(
    pattern: Annotated[str, typer.Argument()] = "",
    as_json: bool = False,
) -> None:
    """List the models that can be loaded by name."""
    with progress("loading the names"):
        model_names = names("models")["models"]
    matches = match_names(model_names, pattern)
    if not matches:
        raise PatchlightError(f"no model name matches '{pattern}'; {nearest(pattern, model_names)}")
    if as_json:
        print_json(matches)
        return
    for model in matches:
        show(model)
    say(f"{len(matches)} models. Also: hf:NAME (transformers), open_clip:NAME and torchvision:NAME.")


def catalogue() -> Any:
    """The module with the rows of everything registered; importing it imports torch."""
    return importlib.import_module("patchlight.study.catalogue")


def describe(row: Row, facts: Mapping[str, str]) -> None:
    """Print a method, metric or figure: its text, facts about it, and a line for every setting."""
    show(row["name"])
    show_text(row["text"].replace(".. math::", "Formula:") + "\n\n")
    for heading, words in {**facts, "Also called": ", ".join(row["aliases"])}.items():
        if words:
            show(f"{heading}: {words}")
    if row.get("stand_in"):
        show(f"In the paper: {row['stand_in']}")
    show()
    show("Settings (--set key=value):" if row["settings"] else "It has no settings.")
    presets = {"preset": ", ".join(row["presets"])} if row.get("presets") else {}
    for key, words in (row["settings"] | presets).items():
        show(f"  {key}: {words}")
        text = row.get("setting_texts", {}).get(key)
        if text:
            show_text(fill(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6) + "\n")
