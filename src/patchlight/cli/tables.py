"""`patchlight methods`, `patchlight metrics` and `patchlight models`: what there is."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from textwrap import fill
from typing import Annotated, Any

import typer

from patchlight.cli.common import print_json, print_table, progress, say
from patchlight.cli.complete import complete_method, complete_metric, complete_model
from patchlight.cli.names import Row, find_row, known_names
from patchlight.cli.names import table as names
from patchlight.cli.options import AsJson, ModelOptions, Plugin, command
from patchlight.core.errors import PatchlightError, nearest


@command
def methods(
    name: Annotated[
        str | None, typer.Argument(help="One method, to see its settings.", autocompletion=complete_method)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Say which methods work on this model.", autocompletion=complete_model)
    ] = None,
    plugin: Plugin = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or the settings of one."""
    with progress(f"loading {model or 'the methods'}"):
        vit = None if model is None else ModelOptions(model, no_pretrained=True).load()
        rows = names()["methods"] if vit is None and not plugin else catalogue().method_rows(vit)
        if name is not None:
            rows = [find_row(rows, name) or catalogue().composed_row(rows, name)]
    if as_json:
        print_json(rows)
    elif name is not None:
        row = rows[0]
        settings = {"score": f"'logit' | 'probability' | a callable of the logits = {row['score']!r}"}
        describe(row, f"{row['paper']}; {row['cost']}", settings)
    else:
        print_table(
            ("method", *(("works",) if model else ()), "paper", "cost", "what it shows"),
            [(row["name"], *_works(row), row["paper"], row["cost"], row["summary"]) for row in rows],
        )
        words = "a composition (.plus, .rollout) and a rule (.libra) may follow a name"
        say(f"`patchlight methods NAME` tells more; {words}")


@command
def metrics(
    name: Annotated[
        str | None, typer.Argument(help="One metric, to see its settings.", autocompletion=complete_metric)
    ] = None,
    plugin: Plugin = None,
    as_json: AsJson = False,
) -> None:
    """List the metrics, or the settings of one."""
    with progress("loading the metrics"):
        rows = catalogue().metric_rows() if plugin else names()["metrics"]
    if name is not None:
        found = find_row(rows, name)
        if found is None:
            raise PatchlightError(f"no metric is called '{name}'; {nearest(name, known_names(rows))}")
        rows = [found]
    if as_json:
        print_json(rows)
    elif name is not None:
        low, high = rows[0]["bounds"]
        span = f"{_better(rows[0])} is better, from {low:g} to {high:g}"
        describe(rows[0], f"{rows[0]['paper']}; {rows[0]['cost']}; {span}", needs=rows[0]["needs"])
    else:
        print_table(
            ("metric", "better", "needs", "paper", "cost", "what it says"),
            [(r["name"], _better(r), ", ".join(r["needs"]), r["paper"], r["cost"], r["summary"]) for r in rows],
        )
        say("`patchlight metrics NAME` tells more")


@command
def models(
    pattern: Annotated[str, typer.Argument(help="Part of a name, or a pattern such as 'deit*'.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the models that can be loaded by name."""
    with progress("loading the names"):
        known = names("models")["models"]
    from patchlight.core.registry import match_names

    matches = match_names(known, pattern)
    if not matches:
        raise PatchlightError(f"no model's name matches '{pattern}'; {nearest(pattern, known)}")
    if as_json:
        print_json(matches)
        return
    for model in matches:
        print(model)
    say(f"{len(matches)} models; also hf:NAME (transformers), open_clip:NAME and torchvision:NAME")


def catalogue() -> Any:
    """The rows of what is registered; importing them imports torch."""
    return importlib.import_module("patchlight.study.catalogue")


def _works(row: Row) -> tuple[str, ...]:
    """Whether a method works, where a model was named."""
    return ("yes" if row["supported"] else f"no: {row['reason']}",) if "supported" in row else ()


def _better(row: Row) -> str:
    return "higher" if row["higher_is_better"] else "lower"


def describe(row: Row, heading: str, settings: Row | None = None, needs: Sequence[str] = ()) -> None:
    """Print all that is told of a method, metric or figure."""
    print(f"{row['name']}  ({heading})")
    if needs:
        print(f"needs {' and '.join(needs)}")
    if row["aliases"]:
        print(f"also called {', '.join(row['aliases'])}")
    print(f"{row['text']}\n")
    if row.get("stand_in"):
        print(f"The paper's own: {row['stand_in']}\n")
    print("Settings:")
    presets = {"preset": ", ".join(row["presets"])} if row.get("presets") else {}
    for key, words in (row["settings"] | (settings or {}) | presets).items():
        print(f"  {key}: {words}")
        text = row.get("setting_texts", {}).get(key)
        if text:
            print(fill(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6))
