"""Benchmark recipes: models, data, methods and metrics, and a user's overrides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from patchlight.anatomy.spec import ModelSpec
from patchlight.core.errors import PatchlightError, nearest
from patchlight.core.recipes import Int64, Keys, OpenSpec, PositiveInt, Spec, at_line, parse_as, read_text
from patchlight.data.spec import DataSpec
from patchlight.study.spec import MethodSpec, MetricSpec

ErrorAt = Callable[[Keys, object], PatchlightError]
T = TypeVar("T", MethodSpec, MetricSpec)


class Published(OpenSpec):
    """The paper's numbers for one model: the metrics of its columns, and a row of numbers for each method."""

    metrics: list[str]

    @property
    def rows(self) -> dict[str, list[float]]:
        return self.settings


class Quick(Spec):
    """Settings of a quick run by the registered name of a method or metric; labels in `leave_out` are skipped."""

    leave_out: tuple[str, ...] = ()
    images: PositiveInt | None = None
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = Field(default_factory=dict)


class Recipe(Spec):
    """What to measure. The keys of `models`, `methods` and `metrics` are the labels in tables.

    `data_of` are further options of the data by model, such as the task: its classes, masks and boxes may differ, its
    images do not.
    """

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    paper: str = ""
    notes: str = ""
    target: Literal["label", "prediction"] = "prediction"
    seed: Int64 = 0
    batch_size: Annotated[int, Field(strict=True, ge=1, le=4096)] = 16
    models: Annotated[dict[str, ModelSpec], Field(min_length=1)]
    data: DataSpec
    data_of: dict[str, dict[str, Any]] = Field(default_factory=dict)
    methods: Annotated[dict[str, MethodSpec], Field(min_length=1)]
    metrics: Annotated[dict[str, MetricSpec], Field(min_length=1)]
    published: dict[str, Published] = Field(default_factory=dict)
    quick: Quick = Quick()

    def data_for(self, model: str) -> DataSpec:
        """The data with the options of a model."""
        spec = self.models.get(model)
        options = self.data_of.get((spec.stands_for if spec else "") or model, {})
        return self.data.model_copy(update={"options": {**self.data.options, **options}}) if options else self.data

    def number(self, model: str, method: str, metric: str) -> float | None:
        """The number that the paper prints; None if it has none."""
        spec = self.models.get(model)
        printed = self.published.get((spec.stands_for if spec else "") or model)
        if printed is None or method not in printed.rows or metric not in printed.metrics:
            return None
        value = printed.rows[method][printed.metrics.index(metric)]
        return None if value != value else value


def read_recipe(source: str | Path) -> tuple[Recipe, str]:
    """Read a recipe and its text from a file, or the bundled recipe of that name."""
    text = read_text(source)
    return parse(text, str(source)), text


def parse(text: str, where: str = "recipe") -> Recipe:
    """Parse a recipe in TOML and check its names and settings; errors call it `where`."""
    recipe = parse_as(Recipe, text, where)

    def error_at(keys: Keys, sentence: object) -> PatchlightError:
        return at_line(text, where, keys, sentence)

    _check_names(recipe, error_at)
    _check_published(recipe, error_at)
    return recipe


def _check_names(recipe: Recipe, error_at: ErrorAt) -> None:
    """Refuse data, methods, metrics and settings that are not registered, also in the quick settings."""
    from patchlight.data import KINDS

    try:
        KINDS.find(recipe.data.kind)
    except PatchlightError as error:
        raise error_at(("data", "kind"), error) from error
    for label in recipe.data_of:
        _check_label("model", label, recipe.models, ("data_of", label), error_at)
    labels = [*recipe.methods, *recipe.metrics]
    for label in recipe.quick.leave_out:
        if label not in labels:
            raise error_at(("quick", "leave_out"), f"the recipe has no '{label}'; {nearest(label, labels)}")
    _check_table("methods", MethodSpec, recipe.methods, recipe.quick.methods, error_at)
    _check_table("metrics", MetricSpec, recipe.metrics, recipe.quick.metrics, error_at)


def _check_label(kind: str, label: str, labels: Collection[str], keys: Keys, error_at: ErrorAt) -> None:
    if label not in labels:
        raise error_at(keys, f"no {kind} is called '{label}'; {nearest(label, labels)}")


def _check_table(
    table: str, kind: type[T], specs: Mapping[str, T], quick: Mapping[str, Mapping[str, Any]], error_at: ErrorAt
) -> None:
    def check(spec: T, keys: Keys, **settings: Any) -> str:
        try:
            return spec.changed(**settings).registered_name if settings else spec.registered_name
        except PatchlightError as error:
            raise error_at(keys, error) from error

    registered_names = {check(spec, (table, label)) for label, spec in specs.items()}
    for name, values in quick.items():
        if name not in registered_names:
            raise error_at(("quick", table, name), f"the recipe has no '{name}'; {nearest(name, registered_names)}")
        check(kind.model_validate(name), ("quick", table, name), **values)


def _check_published(recipe: Recipe, error_at: ErrorAt) -> None:
    """Refuse published numbers of models, methods or metrics that the recipe does not have."""
    for label, printed in recipe.published.items():
        _check_label("model", label, recipe.models, ("published", label), error_at)
        for metric in printed.metrics:
            _check_label("metric", metric, recipe.metrics, ("published", label, "metrics"), error_at)
        for row, numbers in printed.rows.items():
            keys = ("published", label, row)
            _check_label("method", row, recipe.methods, keys, error_at)
            valid = isinstance(numbers, list) and all(type(number) in (int, float) for number in numbers)
            if not valid or len(numbers) != len(printed.metrics):
                count = len(printed.metrics)
                raise error_at(keys, f"'{row}' has {numbers!r}; give {count} numbers (nan for a missing one)")


def with_quick_settings(recipe: Recipe) -> Recipe:
    """The recipe with its [quick] settings."""
    quick = recipe.quick

    def change(specs: Mapping[str, T], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, T]:
        shown = {label: spec for label, spec in specs.items() if label not in quick.leave_out}
        return {label: spec.changed(**settings.get(spec.registered_name, {})) for label, spec in shown.items()}

    changes: dict[str, Any] = {
        "methods": change(recipe.methods, quick.methods),
        "metrics": change(recipe.metrics, quick.metrics),
    }
    if quick.images is not None:
        changes["data"] = recipe.data.model_copy(update={"images": quick.images})
    return recipe.model_copy(update=changes)


@dataclass(frozen=True)
class Overrides:
    """A user's replacements for parts of a recipe.

    Args:
        models: `LABEL=NAME` replaces the recipe's model of that label; `NAME` alone if the recipe has one model.
        weights: Weight files of the models, in order.
        data: `DIR` or `KIND:DIR`.
        images: Number of images.
        listed: A file that lists the images to use.
        quick: Whether to use the recipe's quick settings.
        seed: The random seed.
        target: The class to explain: `label` or `prediction`.
        settings: Further settings of methods and metrics, by label.
        model_options: Labels and preprocessing of the models, in order.
        flags: Model settings that apply to all models.
    """

    models: Sequence[str] = ()
    weights: Sequence[str] = ()
    data: str | None = None
    images: int | None = None
    listed: str | None = None
    quick: bool = False
    seed: int | None = None
    target: str | None = None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model_options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)


def override(recipe: Recipe, overrides: Overrides | None = None, **changes: Any) -> Recipe:
    """The recipe with a user's replacements, given as `Overrides` or as its fields by name."""
    changed = replace(overrides or Overrides(), **changes)
    recipe = with_quick_settings(recipe) if changed.quick else recipe
    data = recipe.data if changed.data is None else recipe.data.at(changed.data)
    data = data if changed.listed is None else data.with_list(changed.listed)
    data = data if changed.images is None else data.model_copy(update={"images": changed.images})
    if changed.target not in (None, "label", "prediction"):
        raise PatchlightError(f"target '{changed.target}' is not valid; give label or prediction")
    return recipe.model_copy(
        update={
            "models": _models(recipe, changed),
            "data": data,
            "data_of": {} if data.stands_for else recipe.data_of,
            "methods": _with_settings(recipe.methods, changed.settings),
            "metrics": _with_settings(recipe.metrics, changed.settings),
            "seed": recipe.seed if changed.seed is None else changed.seed,
            "target": changed.target or recipe.target,
        }
    )


def _with_settings(specs: Mapping[str, T], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, T]:
    """Methods or metrics with further settings, by label."""
    changed = {label: spec.changed(**settings[label]) for label, spec in specs.items() if settings.get(label)}
    for spec in changed.values():
        _ = spec.request  # raises an error for wrong settings
    return {**specs, **changed}


def _models(recipe: Recipe, overrides: Overrides) -> dict[str, ModelSpec]:
    """The user's models, else the recipe's, with their options."""
    names = [_label_and_name(recipe, text) for text in overrides.models]
    names = names or [(label, spec.name) for label, spec in recipe.models.items()]
    options: dict[str, Sequence[Any]] = {"weights": overrides.weights, **overrides.model_options}
    for option, values in options.items():
        if len(values) > len(names):
            raise PatchlightError(f"{len(values)} {option} were given for {len(names)} model(s)")
    specs: dict[str, ModelSpec] = {}
    for i, (label, name) in enumerate(names):
        base = recipe.models[label]
        changes = {option: values[i] for option, values in options.items() if i < len(values)}
        spec = base.other(name, **changes, **overrides.flags)
        shown = label if name == base.name else name
        if shown in specs:
            raise PatchlightError(f"model '{name}' was given twice")
        specs[shown] = spec if name == base.name else spec.model_copy(update={"stands_for": label})
    return specs


def _label_and_name(recipe: Recipe, text: str) -> tuple[str, str]:
    """The label and the name in `LABEL=NAME`; a `NAME` alone replaces the only model of the recipe."""
    label, equals, name = text.partition("=")
    if equals and label in recipe.models:
        return label, name
    if equals:
        raise PatchlightError(
            f"'{text}' replaces '{label}', which is not a model of the recipe; {nearest(label, recipe.models)}"
        )
    if len(recipe.models) == 1:
        return next(iter(recipe.models)), text
    choices = " or ".join(f"'{label}={text}'" for label in recipe.models)
    raise PatchlightError(f"the recipe has several models; give {choices}")
