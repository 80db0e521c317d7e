"""One word per concept: no setting or option uses a removed word, and one name has one type everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import typer

from patchlight.cli import app
from patchlight.core.errors import PatchlightError
from patchlight.core.registry import Entry, Setting, settings_of
from patchlight.data import KINDS
from patchlight.evidence.ablation import Unit
from patchlight.evidence.precision import PassPrecision, Precision
from patchlight.methods.base import COMPOSITIONS, METHODS, Level
from patchlight.methods.requests import resolve
from patchlight.metrics.base import METRICS
from patchlight.report.figures import FIGURES
from patchlight.report.figures.base import FigureEntry
from patchlight.study.evaluate import evaluate
from patchlight.trained.diffmask import DiffMaskSettings
from patchlight.trained.shapley import ShapleySettings

ROOT = Path(__file__).parents[1]
GONE = {
    "mode": "unit (what is removed), terms (what a composition sums), order (of randomisation)",
    "segments": "unit",
    "n": "samples",
    "n_masks": "samples",
    "n_noise": "samples",
    "n_random": "random_masks",
    "p": "keep",
    "of": "integrand",
    "rows": "readout",
    "layers": "gates, which DiffMask trains",
    "fresh": "current (maps), resume (a training)",
    "again": "explains",
    "anew": "explain",
    "how": "ablation_settings",
    "autocast": "precision",
}
GONE_VALUES = {
    "fill": {"drop"},
    "unit": {"tokens", "pixels", "patches"},
    "precision": {"autocast", "float32", "float64"},
    "target_class": {"predicted"},
    "normaliser": {"p"},
}
VOCABULARIES: dict[str, set[Any]] = {
    "unit": {"auto", *get_args(get_args(Unit)[0])},
    "quantity": {"accuracy", "probability", "logit", "cosine", "kl", "nll", "aopc"},
    "sign": {"signed", "abs", "relu"},
}
"""Vocabularies of which each method or metric uses a part."""


def entries() -> Iterator[tuple[str, Entry, dict[str, Setting]]]:
    """Every method (alone and with every composition), metric and figure: its name, entry and settings."""
    for name, method in METHODS.items():
        yield name, method, method.settings(method.composition)
        for word, composition in COMPOSITIONS.items():
            try:
                resolve(f"{name}.{word}")
            except PatchlightError:
                continue
            yield f"{name}.{word}", method, method.settings(composition)
    for name, metric in METRICS.items():
        yield name, metric, dict(metric.settings)
    for name, figure in FIGURES.items():
        yield name, figure, dict(settings_of(figure.function))


def members(kind: Any) -> frozenset[Any]:
    """The values of a type without limits: the words of a Literal, and the names of types."""
    if hasattr(kind, "__metadata__"):
        return members(kind.__origin__)
    if get_origin(kind) is Literal:
        return frozenset(get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return frozenset().union(*map(members, get_args(kind)))
    if get_origin(kind) is not None:
        inside = ", ".join(str(sorted(map(str, members(part)))) for part in get_args(kind) if part is not Ellipsis)
        return frozenset({f"{get_origin(kind).__name__}[{inside}]"})
    return frozenset({None if kind is NoneType else kind})


def allowed_types() -> dict[str, dict[str, frozenset[Any]]]:
    """The values that each setting allows, by its name and owner."""
    allowed: dict[str, dict[str, frozenset[Any]]] = {}
    for owner, _, settings in entries():
        for name, setting in settings.items():
            allowed.setdefault(name, {})[owner] = members(setting.kind)
    return allowed


def test_one_name_has_one_type() -> None:
    """One type contains all others of the same name, or it is one of the vocabularies above."""
    for name, types in allowed_types().items():
        everything = VOCABULARIES.get(name) or max(types.values(), key=len)
        others = {owner: sorted(map(str, kind - everything)) for owner, kind in types.items() if kind - everything}
        assert not others, f"'{name}' is {sorted(map(str, everything))}, but also {others}"


@pytest.mark.parametrize(("name", "kinds"), [("level", [Level]), ("precision", [Precision, PassPrecision])])
def test_vocabularies_are_the_same_everywhere(name: str, kinds: list[Any]) -> None:
    """Passes with a backward know one precision more."""
    types = allowed_types()[name]
    assert len(types) > 5
    assert set(types.values()) == {members(kind) for kind in kinds}
    assert members(Precision) == members(PassPrecision) - {"fp16"}


def test_training_has_the_same_words() -> None:
    for settings in (DiffMaskSettings, ShapleySettings):
        assert settings.model_fields["precision"].annotation == Precision
        assert not set(GONE) & set(settings.model_fields)


def test_every_setting_is_documented() -> None:
    """By its line under `Args:`, or by its type where many share one. Figures have none yet."""
    kinds = ((name, dict(settings_of(kind.function))) for name, kind in KINDS.items())
    methods = ((owner, settings) for owner, entry, settings in entries() if not isinstance(entry, FigureEntry))
    missing = [(owner, name) for owner, own in (*methods, *kinds) for name, one in own.items() if not one.text]
    assert not missing


def test_no_setting_uses_a_removed_word() -> None:
    for owner, _, settings in entries():
        for name, setting in settings.items():
            assert name not in GONE, f"{owner} has a setting '{name}'; say {GONE[name]}"
            old = GONE_VALUES.get(name, set()) & members(setting.kind)
            assert not old, f"{owner} takes {name}={old}"
    assert "layer" not in METHODS["diffmask"].settings(METHODS["diffmask"].composition), "its word is gate"
    assert not set(GONE) & set(evaluate.__kwdefaults__ or {})


def test_presets_use_existing_settings() -> None:
    """Each word is a setting under some composition, and each value is one it takes."""
    owned: dict[str, dict[str, Setting]] = {}
    for _, entry, settings in entries():
        owned.setdefault(entry.name, {}).update(settings)
    for _, entry, _ in entries():
        for values in (entry.quick, *entry.presets.values(), getattr(entry, "composed", {})):
            for key, value in values.items():
                if key != "score":
                    assert key in owned[entry.name], f"a preset of {entry.name} sets '{key}'"
                    assert owned[entry.name][key].checked(value, entry.name) == value


def commands(command: Any) -> Iterator[Any]:
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from commands(inner)


def test_no_option_uses_a_removed_word() -> None:
    options = [
        option.lstrip("-").replace("-", "_")
        for command in commands(typer.main.get_command(app))
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    ]
    assert "explainer" in options
    assert not [option for option in options if option in GONE]
    assert "start" not in options, "a training begins with --initial gates; start is the first block of a composition"


def test_commands_in_the_docs_set_what_is_there() -> None:
    words = {*allowed_types(), *DiffMaskSettings.model_fields, *ShapleySettings.model_fields, "preset", "score", "key"}
    files = [
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("src/patchlight/recipes/*/*.toml"),
        *ROOT.glob("benchmarks/*.py"),
    ]
    found = {key for file in files for key in re.findall(r"--set\s+(?:[\w+-]+\.)?(\w+)=", file.read_text())}
    assert len(found) > 8
    assert found <= words, sorted(found - words)
