"""Recipes: a TOML file that says models x data x methods x metrics. What is wrong with one is told with its line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from patchlight.errors import PatchlightError, nearest

Line = Mapping[tuple[str, ...], int]
Whole = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Many = Annotated[int, Field(strict=True, ge=1)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Spread = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]
DEEPEST = 16
"""Tables and lists inside each other, at most; a recipe has five."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cut(_Part):
    """Where a model's preprocessing is replaced; None leaves the model's own."""

    size: tuple[Many, Many] | None = None
    mean: tuple[Number, Number, Number] | None = None
    std: tuple[Spread, Spread, Spread] | None = None
    crop_pct: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] | None = None
    fit: Literal["crop", "squash"] | None = None


class Model(_Part):
    """A model, by a name `load` knows; `stands_for` is the recipe's model in whose place the user gave this one."""

    name: str
    weights: str | None = None
    stage: Whole | None = None
    preprocess: Cut = Cut()
    stands_for: str = ""


class Source(_Part):
    """The images: a kind and a path for `open_data`, and which of them.

    `images` of them are picked `spread` evenly over the list, `first`, or at `random` (seeded).
    """

    kind: str
    path: str = ""
    options: dict[str, Any] = {}
    images: Many | None = None
    pick: Literal["spread", "first", "random"] = "spread"
    stands_for: str = ""


class _Named(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Method(_Named):
    """A registered method; all other keys are its settings.

    `upsampling` says how its map becomes pixels where that is the method's own affair; it wins over the metrics'.
    """

    method: str
    upsampling: Literal["nearest", "bilinear", "bicubic"] | None = None

    def measured_by(self, metric: Metric) -> dict[str, Any]:
        """The settings of a metric when it measures this method."""
        from patchlight.metrics.base import resolve_metric

        known = resolve_metric(metric.metric).metric.settings
        own = {"upsampling": self.upsampling} if self.upsampling and "upsampling" in known else {}
        return {**metric.settings, **own}


class Metric(_Named):
    """A registered metric; all other keys are its settings. Tables show value x `scale` with `digits` decimals."""

    metric: str
    scale: Number = 1.0
    digits: Annotated[int, Field(strict=True, ge=0, le=8)] = 3


class Published(_Named):
    """What the paper printed for one model: the metrics of its columns, then a row of numbers for each method."""

    metrics: list[str]

    @property
    def rows(self) -> dict[str, list[float]]:
        return dict(self.model_extra or {})


class Quick(_Part):
    """Settings of a quick run, by the registered name of a method or metric; labels in `leave_out` are not run."""

    leave_out: list[str] = []
    images: Many | None = None
    methods: dict[str, dict[str, Any]] = {}
    metrics: dict[str, dict[str, Any]] = {}


def _short(key: str) -> BeforeValidator:
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


class Recipe(_Part):
    """What is to be measured. Keys of `models`, `methods` and `metrics` are the words the tables show."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    paper: str = ""
    notes: str = ""
    target: Literal["label", "prediction"] = "prediction"
    seed: Whole = 0
    shard: Annotated[int, Field(strict=True, ge=1, le=4096)] = 16
    models: Annotated[dict[str, Annotated[Model, _short("name")]], Field(min_length=1)]
    data: Source
    methods: Annotated[dict[str, Annotated[Method, _short("method")]], Field(min_length=1)]
    metrics: Annotated[dict[str, Annotated[Metric, _short("metric")]], Field(min_length=1)]
    published: dict[str, Published] = {}
    quick: Quick = Quick()

    def number(self, model: str, method: str, metric: str) -> float | None:
        """The paper's number, as it is printed there; None where it has none."""
        own = self.models.get(model)
        printed = self.published.get((own.stands_for if own else "") or model)
        if printed is None or method not in printed.rows or metric not in printed.metrics:
            return None
        value = printed.rows[method][printed.metrics.index(metric)]
        return None if value != value else value


def read_recipe(path: str | Path) -> tuple[Recipe, str]:
    """The recipe in a file, checked against the registries, and its text."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        near = [p.stem for p in Path("recipes").glob("*.toml")]
        hint = f"; {nearest(path.stem, near)}" if near else ""
        raise PatchlightError(f"no recipe at '{path}'{hint}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise PatchlightError(
            f"'{path}' cannot be read as a recipe: {getattr(error, 'strerror', None) or error}"
        ) from error
    return parse(text, str(path)), text


def parse(text: str, where: str = "recipe") -> Recipe:
    """A recipe from TOML; an error names the line."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        at = int(line.group(1)) if line else text.count("\n") + 1
        raise PatchlightError(f"{where}, line {at}: not TOML: {str(error).split(' (at')[0]}") from error
    except RecursionError as error:
        raise PatchlightError(f"{where} is nested too deeply; a recipe has tables in tables, and no more") from error
    if _depth(content) > DEEPEST:
        raise PatchlightError(f"{where} is nested too deeply; a recipe has tables in tables, and no more")
    lines = key_lines(text)
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        # An unknown section tells more than the missing one it was meant to be.
        first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        keys = tuple(str(key) for key in first["loc"])
        raise PatchlightError(f"{where}, line {line_of(keys, lines)}: {_in_words(first, keys)}") from error
    _check(recipe, lines, where)
    return recipe


def _depth(value: Any) -> int:
    """How many tables and lists lie inside each other."""
    level, depth = [value], 0
    while level:
        level = [one for each in level for one in (each.values() if isinstance(each, dict) else each)]
        level = [one for one in level if isinstance(one, dict | list)]
        depth += 1
    return depth


def _in_words(error: Any, keys: tuple[str, ...]) -> str:
    name = ".".join(keys)
    if error["type"] == "missing":
        return f"'{name}' is missing"
    if error["type"] == "extra_forbidden":
        tables: dict[str, type[BaseModel]] = {"models": Model, "data": Source, "quick": Quick}
        known = tables.get(keys[0], Recipe) if len(keys) > 1 else Recipe
        return f"there is no key '{name}'; {nearest(keys[-1], known.model_fields)}"
    return f"'{name}': {error['msg']}, not {error['input']!r}"


def _check(recipe: Recipe, lines: Line, where: str) -> None:
    """Refuse names and settings the registries do not know, and published numbers of nothing measured."""
    from patchlight.data import KINDS
    from patchlight.methods.requests import resolve
    from patchlight.metrics.base import resolve_metric

    def told(keys: tuple[str, ...], sentence: object) -> PatchlightError:
        return PatchlightError(f"{where}, line {line_of(keys, lines)}: {sentence}")

    if recipe.data.kind not in KINDS:
        raise told(("data", "kind"), f"no data set is called '{recipe.data.kind}'; {nearest(recipe.data.kind, KINDS)}")
    labels = [*recipe.methods, *recipe.metrics]
    for label in recipe.quick.leave_out:
        if label not in labels:
            raise told(("quick", "leave_out"), f"the recipe has no '{label}'; {nearest(label, labels)}")
    named: dict[str, set[str]] = {"methods": set(), "metrics": set()}
    for label, method in recipe.methods.items():
        try:
            named["methods"].add(resolve(method.method, method.settings).method.name)
        except PatchlightError as error:
            raise told(("methods", label), error) from error
    for label, metric in recipe.metrics.items():
        try:
            named["metrics"].add(resolve_metric(metric.metric, metric.settings).metric.name)
        except PatchlightError as error:
            raise told(("metrics", label), error) from error
    for table, own in (("methods", recipe.quick.methods), ("metrics", recipe.quick.metrics)):
        for name, settings in own.items():
            if name not in named[table]:
                raise told(("quick", table, name), f"the recipe has no '{name}'; {nearest(name, named[table])}")
            try:
                resolve(name, settings) if table == "methods" else resolve_metric(name, settings)
            except PatchlightError as error:
                raise told(("quick", table, name), error) from error
    for label, printed in recipe.published.items():
        if label not in recipe.models:
            raise told(("published", label), f"no model is called '{label}'; {nearest(label, recipe.models)}")
        for metric_label in printed.metrics:
            if metric_label not in recipe.metrics:
                hint = nearest(metric_label, recipe.metrics)
                raise told(("published", label, "metrics"), f"no metric is called '{metric_label}'; {hint}")
        for row, numbers in printed.rows.items():
            keys = ("published", label, row)
            if row not in recipe.methods:
                raise told(keys, f"no method is called '{row}'; {nearest(row, recipe.methods)}")
            plain = isinstance(numbers, list) and all(type(one) in (int, float) for one in numbers)
            if not plain or len(numbers) != len(printed.metrics):
                raise told(
                    keys, f"'{row}' has {numbers!r}; give {len(printed.metrics)} numbers (nan where there is none)"
                )


def quickened(recipe: Recipe) -> Recipe:
    """The recipe with its [quick] settings in force."""
    from patchlight.methods.requests import resolve
    from patchlight.metrics.base import resolve_metric

    methods = {
        label: Method(method=m.method, upsampling=m.upsampling, **m.settings | quick)
        for label, m in recipe.methods.items()
        if label not in recipe.quick.leave_out
        for quick in [recipe.quick.methods.get(resolve(m.method).method.name, {})]
    }
    metrics = {
        label: Metric(metric=m.metric, scale=m.scale, digits=m.digits, **m.settings | quick)
        for label, m in recipe.metrics.items()
        if label not in recipe.quick.leave_out
        for quick in [recipe.quick.metrics.get(resolve_metric(m.metric).metric.name, {})]
    }
    changes: dict[str, Any] = {"methods": methods, "metrics": metrics}
    if recipe.quick.images is not None:
        changes["data"] = recipe.data.model_copy(update={"images": recipe.quick.images})
    return recipe.model_copy(update=changes)


def override(
    recipe: Recipe,
    models: Sequence[str] = (),
    weights: Sequence[str] = (),
    data: str | None = None,
    images: int | None = None,
    quick: bool = False,
    seed: int | None = None,
    target: str | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Recipe:
    """The recipe with a user's own models, data and sizes.

    A model is `NAME` or `LABEL=NAME`; it stands for the recipe's model of that label, else for the one whose name
    begins most alike. Weights belong to the models in order, else to the recipe's own. `data` is `DIR` or `KIND:DIR`.
    `settings` are further settings of methods and metrics, by label.
    """
    if quick:
        recipe = quickened(recipe)
    changes: dict[str, Any] = {}
    if len(weights) > len(models or recipe.models):
        raise PatchlightError(f"{len(weights)} weights were given for {len(models or recipe.models)} model(s)")
    files = [*weights, *[None] * len(models or recipe.models)]
    if models:
        changes["models"] = _replaced(recipe, models, files)
    elif weights:
        pairs = zip(recipe.models.items(), files, strict=False)
        changes["models"] = {k: m.model_copy(update={"weights": w or m.weights}) for (k, m), w in pairs}
    source: dict[str, Any] = {}
    if data is not None:
        from patchlight.data import KINDS

        kind, colon, path = data.partition(":")
        kind, path = (kind, path) if colon and kind in KINDS else (recipe.data.kind, data)
        source = {"kind": kind, "path": path}
        if kind != recipe.data.kind:
            source |= {"options": {}, "stands_for": recipe.data.kind}
    if images is not None:
        source["images"] = images
    if source:
        changes["data"] = recipe.data.model_copy(update=source)
    if seed is not None:
        changes["seed"] = seed
    if target is not None:
        if target not in ("label", "prediction"):
            raise PatchlightError(f"target '{target}' is not possible; give label or prediction")
        changes["target"] = target
    if settings and any(settings.values()):
        changes |= _set(recipe, settings)
    return recipe.model_copy(update=changes)


def _set(recipe: Recipe, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The recipe's methods and metrics with further settings, checked."""
    from patchlight.methods.requests import resolve
    from patchlight.metrics.base import resolve_metric

    changed: dict[str, Any] = {"methods": dict(recipe.methods), "metrics": dict(recipe.metrics)}
    for label, own in settings.items():
        for table in changed.values():
            if label in table:
                table[label] = type(table[label]).model_validate(table[label].model_dump() | dict(own))
    for method in changed["methods"].values():
        resolve(method.method, method.settings)
    for metric in changed["metrics"].values():
        resolve_metric(metric.metric, metric.settings)
    return changed


def _replaced(recipe: Recipe, models: Sequence[str], files: Sequence[str | None]) -> dict[str, Model]:
    found: dict[str, Model] = {}
    for given, weights in zip(models, files, strict=False):
        label, equals, name = given.partition("=")
        if not equals:
            name = given
            label = max(recipe.models, key=lambda k: _alike(recipe.models[k].name, name))
        elif label not in recipe.models:
            raise PatchlightError(
                f"'{given}' stands for '{label}', which is no model of the recipe; {nearest(label, recipe.models)}"
            )
        own = recipe.models[label]
        same = own.name == name
        shown = label if same else name
        if shown in found:
            raise PatchlightError(f"model '{name}' was given twice")
        found[shown] = Model(
            name=name,
            weights=weights or (own.weights if same else None),
            stage=own.stage if same else None,
            preprocess=own.preprocess if same else Cut(),
            stands_for="" if same else label,
        )
    return found


def _alike(a: str, b: str) -> int:
    """How many letters two names have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


_HEADER = re.compile(r"^\s*\[\[?\s*(.+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_WORD = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line (from 1) of every table and key of a TOML text; keys inside inline tables stand on their table's."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    inside = ""
    for number, line in enumerate(text.splitlines(), 1):
        if not inside:
            key, header = _KEY.match(line), _HEADER.match(line)
            if key:
                found.setdefault((*table, *_words(key.group(1))), number)
            elif header:
                table = _words(header.group(1))
                found.setdefault(table, number)
        for quotes in ('"""', "'''"):
            if line.count(quotes) % 2 and inside in ("", quotes):
                inside = "" if inside else quotes
    return found


def _words(key: str) -> tuple[str, ...]:
    return tuple(word.strip("\"'") for word in _WORD.findall(key))


def line_of(keys: tuple[str, ...], lines: Line) -> int:
    """The line of a key, else of the nearest table around it, else the first."""
    for end in range(len(keys), 0, -1):
        if keys[:end] in lines:
            return lines[keys[:end]]
    return 1
