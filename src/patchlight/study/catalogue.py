"""Every method and metric with its description, as rows of plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.registry import describe_type, split_docstring
from patchlight.evidence.rules import RULES
from patchlight.methods.base import COMPOSITIONS, GROUPS, METHODS
from patchlight.methods.requests import list_methods, resolve
from patchlight.metrics.base import list_metrics, resolve_metric

RECOMMENDED = {
    "auto": "A good map now, and the default: fullgrad-plus.libra, or the next best that works on the model.",
    "posterior": "The most faithful map; also called best.",
    "decompx.skipplus": "The outline of the object.",
    "rise": "Any black box: only the outputs of the model are used.",
    "kernel-shap": "Shapley values of the patches.",
}
"""The methods to try first, and what each is for."""


def method_rows(vit: Anatomy | None = None) -> list[dict[str, Any]]:
    """The rows of `list_methods` with descriptions, presets, and the compositions and rules that may follow a name."""
    rows, omitted = [], ("supported", "reason") if vit is None else ()
    for info in list_methods(vit):
        method = METHODS[info.name]
        row = {key: value for key, value in asdict(info).items() if key not in omitted}
        row |= {"score": method.score, "presets": list(method.presets), "text": method.text}
        rules = [rule for rule in RULES if rule != "plain"]
        row["compositions"] = [word for word in COMPOSITIONS if _may_follow(info.name, word)]
        row["rules"] = [word for word in rules if _may_follow(info.name, word)]
        rows.append(row)
    return sorted(rows, key=lambda row: list(GROUPS).index(row["group"]))


def _may_follow(name: str, word: str) -> bool:
    try:
        return resolve(f"{name}.{word}").name != name
    except PatchlightError:
        return False


def composed_row(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """The row of a name with a composition or rule, including their settings and descriptions."""
    request = resolve(name)
    composition = request.composition
    row = next(row for row in rows if row["name"] == request.method.name)
    text = row["text"]
    if composition is not None and composition is not request.method.composition:
        text += f"\n\n.{composition.name}: {split_docstring(composition.function)[0]}"
    if request.rule.name != "plain":
        text += f"\n\nBackward rule {request.rule.name}: {request.rule.paper}"
    kinds = request.method.settings(composition)
    settings = {key: f"{describe_type(setting.kind)} = {request.settings[key]!r}" for key, setting in kinds.items()}
    texts = {key: setting.text for key, setting in kinds.items()}
    return {**row, "name": request.name, "settings": settings, "setting_texts": texts, "text": text}


def metric_rows() -> list[dict[str, Any]]:
    """The rows of `list_metrics` with descriptions."""
    return [{**asdict(info), "text": resolve_metric(info.name).metric.text} for info in list_metrics()]
