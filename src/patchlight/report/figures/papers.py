"""Registers the figures of the papers from the TOML files in `recipes/figures`: a layout and its settings each."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, get_type_hints

from matplotlib.figure import Figure

from patchlight.core.recipes import bundled_recipes
from patchlight.report.figures import counting as counting  # registers its layout
from patchlight.report.figures import vitcx as vitcx
from patchlight.report.figures.base import register_figure
from patchlight.report.figures.drawing import Drawing
from patchlight.report.figures.layouts import LAYOUTS


def methods_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """Methods by label: those in the table, or those of the benchmark recipe that it names.

    With `recipe`, `labels` are patterns of the labels to take (default: all) and `without` labels to skip.
    """
    if "recipe" not in table:
        return dict(table)
    methods = tomllib.loads(bundled_recipes("bench")[table["recipe"]].read_text(encoding="utf-8"))["methods"]
    patterns, without = table.get("labels", ["*"]), table.get("without", [])
    taken = [label for label in methods if any(fnmatchcase(label, pattern) for pattern in patterns)]
    return {label: methods[label] for label in taken if label not in without}


def figure_function(figure: Mapping[str, Any]) -> Callable[..., Figure]:
    """A figure as a function whose keyword arguments are its settings.

    The settings are the positional parameters of the layout, with the defaults in the file's `settings`. The file's
    `options` set the keyword-only parameters.
    """
    layout = LAYOUTS[figure["layout"]]
    defaults, options = (
        {key: methods_of(value) if isinstance(value, dict) else value for key, value in figure.get(table, {}).items()}
        for table in ("settings", "options")
    )
    parameters = [p for p in inspect.signature(layout).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    hints = get_type_hints(layout, include_extras=True)

    def function(drawing: Drawing, **settings: Any) -> Figure:
        return layout(drawing, **options, **settings)

    function.__doc__ = figure["text"].strip()
    function.__annotations__ = {p.name: hints[p.name] for p in parameters}
    signature = inspect.Signature([p.replace(default=defaults.get(p.name, p.default)) for p in parameters])
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _register_all() -> None:
    for file in bundled_recipes("figures").values():
        figures = tomllib.loads(file.read_text(encoding="utf-8"))
        paper = figures.pop("paper")
        for name, figure in figures.items():
            register_figure(
                name,
                paper=f"{paper}, {figure['place']}",
                shows=figure["shows"],
                stand_in=figure.get("stand_in", ""),
                needs=frozenset(figure.get("needs", ())),
                least=figure.get("least", 1),
                aliases=tuple(figure.get("aliases", ())),
                quick=figure.get("quick", {}),
            )(figure_function(figure))


_register_all()
