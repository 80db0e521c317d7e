"""`patchlight methods`, `patchlight metrics` and `patchlight models`: what there is."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from patchlight.cli.common import print_json, print_table, progress, say
from patchlight.cli.complete import complete_method, complete_metric, complete_model
from patchlight.cli.names import Row, find_row, known_names
from patchlight.cli.names import table as names
from patchlight.cli.options import AsJson, ModelOptions, Plugin, command
from patchlight.core.errors import PatchlightError, nearest

if TYPE_CHECKING:
    from patchlight.anatomy.opened import Anatomy


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
        rows = names()["methods"] if vit is None and not plugin else method_rows(vit)
    if name is not None:
        rows = [find_row(rows, name) or _composed(rows, name)]
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
        rows = metric_rows() if plugin else names()["metrics"]
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
        known = names()["models"]
    from patchlight.core.registry import matching as matching_names

    matching = matching_names(known, pattern)
    if not matching:
        raise PatchlightError(f"no model's name matches '{pattern}'; {nearest(pattern, known)}")
    if as_json:
        print_json(matching)
        return
    for model in matching:
        print(model)
    say(f"{len(matching)} models; also hf:NAME (transformers), open_clip:NAME and torchvision:NAME")


def method_rows(vit: Anatomy | None = None) -> list[Row]:
    """Every method as the registry has it: what `list_methods` tells, its text, and what may follow its name."""
    from patchlight.methods.base import METHODS
    from patchlight.methods.requests import list_methods

    rows = []
    for info in list_methods(vit):
        method = METHODS[info.name]
        row = asdict(info) if vit is not None else {k: v for k, v in asdict(info).items() if k not in _OF_A_MODEL}
        told = {"score": method.score, "presets": list(method.presets), "text": inspect.getdoc(method.function) or ""}
        rows.append({**row, **told, **_followed(info.name)})
    return rows


_OF_A_MODEL = ("supported", "reason")


def _followed(name: str) -> dict[str, list[str]]:
    """The compositions and backward rules that may stand behind a name."""
    from patchlight.evidence.rules import RULES
    from patchlight.methods.base import COMPOSITIONS
    from patchlight.methods.requests import resolve

    def fits(word: str) -> bool:
        try:
            return resolve(f"{name}.{word}").name != name
        except PatchlightError:
            return False

    rules = [rule for rule in RULES if rule != "plain"]
    return {"compositions": list(filter(fits, COMPOSITIONS)), "rules": list(filter(fits, rules))}


def metric_rows() -> list[Row]:
    """Every metric as the registry has it: what `list_metrics` tells, and its text."""
    from patchlight.metrics.base import list_metrics, resolve_metric

    return [
        {**asdict(info), "text": inspect.getdoc(resolve_metric(info.name).metric.function) or ""}
        for info in list_metrics()
    ]


def _composed(rows: Sequence[Row], asked: str) -> Row:
    """The row of a name with a composition or a rule behind it, which have settings and texts of their own."""
    with progress("loading the methods"):
        from patchlight.core.registry import in_words
        from patchlight.methods.requests import resolve

        request = resolve(asked)
    composition = request.composition
    row = next(row for row in rows if row["name"] == request.method.name)
    text = row["text"]
    if composition is not None and composition is not request.method.composition:
        text += f"\n\n.{composition.name}: {inspect.getdoc(composition.function)}"
    if request.rule.name != "plain":
        text += f"\n\nBackward rule {request.rule.name}: {request.rule.paper}"
    kinds = request.method.settings(composition)
    settings = {key: f"{in_words(setting.kind)} = {request.settings[key]!r}" for key, setting in kinds.items()}
    return {**row, "name": request.name, "settings": settings, "text": text}


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
