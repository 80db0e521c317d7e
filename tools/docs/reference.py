"""Pages of methods and metrics, written from the registries, the docstrings and the measured tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from patchlight.core.registry import Entry, Setting, describe_type
from patchlight.evidence.ablation import ABLATION
from patchlight.methods.base import CAPTURED, GROUPS, METHODS, PASSES, Ablates, LayerMap, Method, OwnPasses
from patchlight.methods.requests import AUTO
from patchlight.metrics.base import METRICS, Metric
from patchlight.study.catalogue import method_rows
from tools.docs import formulas
from tools.docs.families import KINDS
from tools.docs.pictures import COMPOSED, PHOTOS
from tools.docs.staging import DOCS
from tools.docs.tables import measured, tables
from tools.docs.words import as_blocks, as_markdown, code, table, toctree

COMMON = {*ABLATION, *PASSES, *CAPTURED}
"""Settings that many have and `docs/methods.md` explains."""
COMPUTATION = {
    LayerMap: "computed inside the shared forward (and backward) pass",
    Ablates: "scores variants of the image",
    OwnPasses: "runs its own passes",
}


def references() -> Any:
    """Papers by key, and which of them each method and metric is from."""
    return json.loads((DOCS / "references.json").read_text(encoding="utf-8"))


def bibtex(key: str, fields: Mapping[str, str]) -> str:
    """A paper as BibTeX; what is not known is left out."""
    inside = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items() if name != "type")
    return f"@{fields['type']}{{{key},\n{inside}\n}}"


def cited(kind: str, entry: Entry) -> str:
    """The papers of an entry as BibTeX."""
    known = references()
    keys = known[kind].get(entry.name, [])
    if not keys:
        return ""
    blocks = "\n\n".join(bibtex(key, known["papers"][key]) for key in keys)
    return f"```bibtex\n{blocks}\n```\n"


def settings_table(settings: Mapping[str, Setting]) -> str:
    """A table of settings with types, defaults and meaning: its own first, then common ones."""
    own = {name: one for name, one in settings.items() if name not in COMMON}
    rest = {name: one for name, one in settings.items() if name in COMMON}
    rows = (
        (code(name), code(describe_type(one.kind)), code(repr(one.default)), as_markdown(one.text))
        for name, one in (own | rest).items()
    )
    return table(("setting", "type", "default", "meaning"), rows) if settings else "None.\n"


def presets_table(entry: Entry) -> str:
    """A table of presets with the settings of each."""

    def listed(values: Mapping[str, Any]) -> str:
        return ", ".join(code(f"{key}={value!r}") for key, value in values.items()) or "the defaults"

    return table(("preset", "settings"), ((code(name), listed(values)) for name, values in entry.presets.items()))


@cache
def suffixes() -> dict[str, str]:
    """By method, the compositions and rules that may follow its name."""
    rows = ((row["name"], [*row["compositions"], *row["rules"]]) for row in method_rows())
    return {name: ", ".join(code(f".{word}") for word in words) or "nothing" for name, words in rows}


def facts(method: Method) -> str:
    yes = {True: "yes", False: "no"}
    rows = [
        ("paper", as_markdown(method.paper)),
        ("also called", ", ".join(map(code, method.aliases)) or "–"),
        ("cost", as_markdown(method.cost)),
        ("computation", next(text for kind, text in COMPUTATION.items() if isinstance(method, kind))),
        ("resolution", ", ".join(map(code, method.levels)) + " (the first is the default)" * (len(method.levels) > 1)),
        ("explains", "ignores the class" if method.ignores_class else f"the {method.score}"),
        ("depends on the seed", yes[method.stochastic]),
        ("may be followed by", suffixes()[method.name]),
        ("source", f"`{method.function.__module__.replace('.', '/')}.py`"),
    ]
    return table(("", ""), rows)


def recommended(method: Method) -> list[str]:
    """Purposes for which docs/howto/choose.md recommends a method, with what was measured."""
    chosen = {"auto": AUTO[0], "best": "posterior"}
    lines = []
    for _, head, rows in tables(DOCS / "howto" / "choose.md"):
        for want, use, result in rows if head[0] == "you want" else ():
            names = re.findall(r"`([\w.+-]+)`", use.partition(", not ")[0])
            if method.name in {chosen.get(name, name).split(".")[0] for name in names}:
                lines.append(f"- **{want}**: {use}; {result}".replace("](../", "](../../"))
    return lines


def when(method: Method) -> str:
    """What a method is recommended for, and what to know before using it."""
    lines = recommended(method)
    if not lines:
        lines = ["- [Which method?](../../howto/choose.md) recommends other methods for the usual purposes."]
    if method.ignores_class:
        lines.append("- It ignores the class: the map is the same for every target, and a contrast is refused.")
    if method.nonnegative:
        lines.append("- Scores are not negative: it does not show what opposes the class.")
    if "samples" in method.settings(method.composition):
        lines.append("- It samples: more `samples` give a more exact map and cost more.")
    return "\n".join(lines) + "\n"


def where(method: Method) -> str:
    """Whether a method works on the small model of each family."""
    rows = (
        (f"[{kind.title}](../families/{kind.name}.md)", as_markdown(kind.refused.get(method.name, "works")))
        for kind in KINDS
    )
    return table(("models", ""), rows)


def fared(method: Method) -> str:
    """The rows of a method in the measured tables."""
    rows = measured(method.name)
    if not rows:
        return "It is in none of the measured tables yet; [Results](../../results/index.md) lists them.\n"
    parts = ["Bold: best of the whole table. †: statistically tied with it. The linked page explains the brackets.\n"]
    for one in rows:
        title = f"[{one.title}](../../results/{one.page}.md)" + (f", {one.heading}" if one.heading else "")
        lines = [one.head, *one.rows]
        if len(one.rows) < len(one.head) - 1:
            lines = [list(column) for column in zip(*lines, strict=True)]  # narrow, so that it is read on a phone
        parts.append(f"{title}\n\n{table(lines[0], lines[1:])}")
    return "\n".join(parts)


def gallery_row(name: str) -> str:
    cells = "".join(
        f'<img src="../../_static/methods/{name}-{photo}.jpg" alt="{name} on the photograph {photo}" loading="lazy">'
        for photo in PHOTOS
    )
    originals = "".join(
        f'<img src="../../_static/methods/photo-{photo}.jpg" alt="the photograph {photo}" loading="lazy">'
        for photo in PHOTOS
    )
    return f'<div class="maps">{originals}</div>\n<div class="maps">{cells}</div>\n'


def _without_formulas(blocks: list[str], formula: str) -> list[str]:
    """The blocks of a docstring, without its formulas in plain text if the page has them typeset."""
    return [block for block in blocks if not (formula and block.startswith("```text"))]


def method_page(method: Method, drawn: Mapping[str, Mapping[str, Any]]) -> str:
    formula = formulas.block("methods", method.name)
    summary, *details = _without_formulas(as_blocks(method.function), formula)
    parts = [f"# {method.name}", summary, formula]
    if method.name in drawn:
        settings = ", ".join(f"{key}={value!r}" for key, value in drawn[method.name].items())
        call = f'pl.explain(vit, photo, "{method.name}"{", " + settings if settings else ""})'
        shorter = " (fewer samples than the default, to build this page faster)" if settings else ""
        parts += [
            gallery_row(method.name),
            f"`{call}` with the bundled model, for *dog*, *bird* and *horse*{shorter}.",
        ]
    parts += [
        facts(method),
        *(["## Details", *details] if details else []),
        "## Settings",
        settings_table(method.settings(method.composition)),
        "[Common settings](../../methods.md#common-settings) are described in more detail elsewhere.",
    ]
    if method.presets:
        parts += ["### Presets", presets_table(method)]
    parts += ["## When to use it", when(method), "## Models", where(method), "## How it fared", fared(method)]
    bib = cited("methods", method)
    if bib:
        parts += ["## Paper", bib]
    return "\n\n".join(parts) + "\n"


def _heading(group: str) -> str:
    return group[0].upper() + group[1:]


def methods_index() -> str:
    parts = [
        "# All methods",
        "[Which method?](../../howto/choose.md) recommends one for each purpose, and "
        "[Methods and their names](../../methods.md) explains how names compose.",
    ]
    for group in GROUPS:
        rows = [
            (f"[{name}]({name}.md)", as_markdown(one.summary), as_markdown(one.cost), as_markdown(one.paper))
            for name, one in METHODS.items()
            if one.group == group
        ]
        if rows:
            parts += [f"## {_heading(group)}", table(("method", "what it shows", "cost", "paper"), rows)]
    parts += [formulas.symbols()]
    return "\n\n".join([*parts, toctree(METHODS)])


def metric_page(metric: Metric) -> str:
    settings = metric.settings
    defaults = {key: one.default for key, one in settings.items()}
    low, high = metric.limits(defaults)
    needs = [*sorted(metric.needs), *(["a method (it explains images itself)"] if metric.explains else [])]
    rows = [
        ("paper", as_markdown(metric.paper)),
        ("also called", ", ".join(map(code, metric.aliases)) or "–"),
        ("better", "higher" if metric.rises(defaults) else "lower"),
        ("bounds", f"{low:g} to {high:g}"),
        ("needs", ", ".join(needs) or "only images and maps"),
        ("cost", as_markdown(metric.cost)),
        ("source", f"`{metric.function.__module__.replace('.', '/')}.py`"),
    ]
    data = {"boxes", "masks", "boxes or masks"} & set(metric.needs)
    how = (
        f"patchlight evaluate --method genatt,random --metric {metric.name} --images FOLDER --data KIND"
        if data
        else f"patchlight evaluate --method genatt,random --metric {metric.name} --images FOLDER"
    )
    summary, *details = _without_formulas(as_blocks(metric.function), formulas.block("metrics", metric.name))
    parts = [
        f"# {metric.name}",
        summary,
        formulas.block("metrics", metric.name),
        *details,
        table(("", ""), rows),
        f"```\n{how}\n```",
        "## Settings",
        settings_table(settings),
    ]
    if metric.presets:
        parts += ["### Presets", presets_table(metric)]
    bib = cited("metrics", metric)
    return "\n\n".join([*parts, *(["## Paper", bib] if bib else [])]) + "\n"


def metrics_index() -> str:
    def better(metric: Metric) -> str:
        return "higher" if metric.rises({key: one.default for key, one in metric.settings.items()}) else "lower"

    rows = (
        (f"[{name}]({name}.md)", better(one), ", ".join(sorted(one.needs)) or "–", as_markdown(one.summary))
        for name, one in METRICS.items()
    )
    return (
        "# All metrics\n\n[Metrics](../../metrics.md) explains how they differ, and [Which metrics are consistent]"
        "(../../results/metric-consistency.md) compares them by measurements.\n\n"
        + table(("metric", "better", "needs", "what it measures"), rows)
        + "\n"
        + toctree(METRICS)
    )


def gallery(drawn: Mapping[str, Mapping[str, Any]], photo: str = PHOTOS[0]) -> str:
    """One picture per method on one photograph."""

    def tile(name: str, link: str) -> str:
        return (
            f'<a href="reference/methods/{link}.html"><img src="_static/methods/{name}-{photo}.jpg" alt="{name}" '
            f'loading="lazy"><span>{name}</span></a>'
        )

    parts = [
        "# Gallery",
        "Every method that explains classifiers on one photograph, with the bundled model, for the class *dog*. "
        "Methods that ignore the class give the same map for *cat*. Each map has its own colour scale; "
        "[reading a map without fooling yourself](start/reading.md) explains how to read it.",
        f'<div class="gallery"><a href="_static/methods/photo-{photo}.jpg"><img '
        f'src="_static/methods/photo-{photo}.jpg" alt="the photograph"><span>the photograph</span></a></div>',
    ]
    for group in GROUPS:
        tiles = "\n".join(tile(name, name) for name, one in METHODS.items() if one.group == group and name in drawn)
        if tiles:
            parts += [f"## {_heading(group)}", f'<div class="gallery">\n{tiles}\n</div>']
    tiles = "\n".join(tile(name, name.split(".")[0]) for name in COMPOSED)
    parts += ["## With compositions and rules", f'<div class="gallery">\n{tiles}\n</div>']
    return "\n\n".join(parts) + "\n"


def write(folder: Path, drawn: Mapping[str, Mapping[str, Any]]) -> None:
    """The pages of all methods and metrics, and the gallery, into the staged folder."""
    pages: Iterable[tuple[str, str]] = [
        ("reference/methods/index", methods_index()),
        ("reference/metrics/index", metrics_index()),
        ("gallery", gallery(drawn)),
        *((f"reference/methods/{name}", method_page(method, drawn)) for name, method in METHODS.items()),
        *((f"reference/metrics/{name}", metric_page(metric)) for name, metric in METRICS.items()),
    ]
    for name, text in pages:
        path = folder / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
