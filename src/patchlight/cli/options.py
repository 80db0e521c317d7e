"""Options that several commands share, and `command`, which makes a command with plain, grouped help."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from patchlight.cli.common import answering, say, showing_warnings
from patchlight.cli.complete import (
    complete_kind,
    complete_methods,
    complete_metrics,
    complete_model,
    complete_setting,
    one_of,
)
from patchlight.cli.names import table
from patchlight.core.errors import PatchlightError

if TYPE_CHECKING:
    from patchlight.anatomy.opened import Anatomy
    from patchlight.anatomy.spec import ModelSpec

_HELP = tomllib.loads(Path(__file__).with_name("help.toml").read_text(encoding="utf-8"))
OPTIONS: dict[str, dict[str, list[str]]] = _HELP["options"]
"""The options of all commands, by the panel of the help: the kind of value, and what the option is for."""
_PLACES = {name: (panel, *words) for panel, options in OPTIONS.items() for name, words in options.items()}
_ORDER = {name: place for place, name in enumerate(_PLACES)}
_FLAGS = {
    "as_json": "--json",
    "csv_file": "--csv",
    "listed": "--list",
    "open_it": "--open",
    "settings": "--set",
    "source": "--from",
    "style": "--format",
}
"""Flags of options that are not called as in Python."""
_COMPLETIONS = {
    "data": complete_kind,
    "device": one_of("cpu", "cuda", "mps"),
    "method": complete_methods,
    "metric": complete_metrics,
    "model": complete_model,
    "other": complete_model,
    "score": one_of("logit", "probability", "cosine"),
    "settings": complete_setting,
    "size": one_of("small", "base"),
}


class _PlainHelp(TyperCommand):
    """Help with bare flags and arguments, and examples below."""

    def __init__(self, *args: Any, help: str | None = None, **options: Any) -> None:
        paragraphs = (" ".join(paragraph.split()) for paragraph in (help or "").split("\n\n"))
        super().__init__(*args, help="\n\n".join(paragraphs), **options)

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx), "Run")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {flag for one in self.params for flag in one.opts}
        return super().parse_args(ctx, [new for word in args for new in _current_words(word, flags)])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [one for one in self.params if one.param_type_name == "argument"]
        return ["[OPTIONS]", *map(usage_of, arguments)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        words = [str(self.name)] if ctx.parent.parent is None else [ctx.parent.info_name, str(self.name)]
        examples = [line for line in _HELP["examples"]["commands"] if line.split()[1 : len(words) + 1] == words]
        print("\n ".join([" Examples:", *(f"  {line}" for line in examples)]))


def _current_words(word: str, flags: Collection[str]) -> list[str]:
    """A word of the command line, or with a warning the words that replace it in a command with these flags."""
    flag, equals, value = word.partition("=")
    new = _HELP["renamed"].get(flag, "")
    if flag in flags or new.partition(" ")[0] not in flags:
        return [word]
    say(f"warning: {flag} is now {new}; the old word will be removed")
    return [f"{new}={value}"] if equals else new.split()


class _PlainGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))


def _plain(params: Iterable[Any], panel: str | None = None) -> list[Any]:
    """Parameters whose help has no type for flags and arguments; options without a panel are in `panel`."""
    shown = list(params)
    for one in shown:
        if one.param_type_name == "argument":
            one.display_type_rich = lambda ctx: None  # typer writes "<path>" beside an argument
        else:
            one.metavar = one.metavar or ""
            one.rich_help_panel = one.rich_help_panel or panel
    return shown


def usage_of(argument: Any) -> str:
    """An argument as a usage line shows it: in brackets if it is optional."""
    word = (argument.metavar or str(argument.name).upper()) + "..." * (argument.nargs == -1)
    return word if argument.required else f"[{word}]"


def group(name: str, help: str) -> typer.Typer:
    """A group of commands."""
    return typer.Typer(name=name, help=help, no_args_is_help=True, cls=_PlainGroup, pretty_exceptions_enable=False)


def add_commands(app: typer.Typer, **commands: Callable[..., None]) -> None:
    """Add commands to a group, by name."""
    for name, run in commands.items():
        app.command(name, cls=_PlainHelp)(run)


def _load_plugins(files: list[str] | None) -> list[str] | None:
    from patchlight.core.plugins import load_plugin

    with answering(as_json=False, debug=False):
        for file in files or ():
            load_plugin(file)
    return files


Plugin = Annotated[list[str] | None, typer.Option(is_eager=True, callback=_load_plugins)]


@dataclass(frozen=True)
class ModelOptions:
    """The options that name a model and its classes."""

    model: str = "pocket"
    weights: Path | None = None
    labels: Path | None = None
    stage: int | None = None
    preprocess: Path | None = None
    sigmoid: bool = False
    no_pretrained: bool = False
    device: str = "cpu"
    text: list[str] | None = None
    template: str | None = None
    similar_to: list[Path] | None = None
    plugin: Plugin = None

    def __post_init__(self) -> None:
        if self.text and self.similar_to:
            raise PatchlightError("--text and --similar-to cannot be combined: classes are sentences or images")
        if self.template is not None and not self.text:
            raise PatchlightError("--template needs --text, the sentences it is the template of")

    def spec(self, base: ModelSpec | None = None) -> ModelSpec:
        """The model; `base`, if given, with the changes that the options make to it."""
        from patchlight.anatomy.spec import ModelSpec

        changes: dict[str, Any] = {"stage": self.stage, "sigmoid": self.sigmoid or None, "template": self.template}
        changes["pretrained"] = False if self.no_pretrained else None
        changes |= {key: str(path) for key in ("weights", "labels") if (path := getattr(self, key)) is not None}
        changes |= {"texts": tuple(self.text)} if self.text else {}
        changes |= {"similar_to": tuple(map(str, self.similar_to))} if self.similar_to else {}
        if self.preprocess is not None:
            from patchlight.anatomy.preprocessing import as_spec

            changes["preprocess"] = as_spec(self.preprocess)
        return (base or ModelSpec(name=self.model or "pocket")).other(self.model, **changes)

    def check(self, *classes: str | None) -> None:
        """Refuse what is wrong with the model and these classes, as far as that is possible without loading it."""
        for option, paths in (("weights", [self.weights]), ("labels", [self.labels]), ("similar-to", self.similar_to)):
            missing = next((path for path in paths or () if path is not None and not os.path.isfile(path)), None)
            if missing is not None:
                raise PatchlightError(f"no file at '{missing}' (--{option})")
        self.spec()
        class_names = self._class_names()
        if class_names is not None:
            from patchlight.core.targets import read_class

            for word in filter(None, classes):
                read_class(word, len(class_names), class_names)
        base = (self.model or "pocket").partition(".")[0]
        if ":" not in base and base != "pocket" and not self.plugin and base not in table("models")["models"]:
            self.load()  # it is refused, for a reason that only the library can give

    def _class_names(self) -> list[str] | None:
        """The names of the classes; None if only the model has them."""
        if self.text or self.similar_to:
            return None  # the head names them
        if self.labels is not None:
            from patchlight.anatomy.weights import read_labels

            return read_labels(self.labels)
        if self.model == "pocket" and self.weights is None:
            from patchlight.zoo import pocket

            return list(pocket.description()["classes"])
        return None

    def load(self) -> Anatomy:
        """Load the model."""
        return self.spec().load(self.device)


@dataclass(frozen=True)
class QuestionOptions:
    """The options that ask a question about the output of a model."""

    detections: int | None = None
    box: str | None = None
    region: str | None = None
    region_mask: Path | None = None
    point: str | None = None
    against_region: str | None = None
    label: str | None = None
    missed: bool = False
    prompt: str | None = None
    answer: str | None = None
    words: str | None = None

    def __post_init__(self) -> None:
        subjects = [flag_of(name) for name in _SUBJECT_OPTIONS if getattr(self, name) is not None]
        if len(subjects) > 1:
            raise PatchlightError(f"{' and '.join(subjects)} cannot be combined: give one of them")
        if self.detections is not None and not 1 <= self.detections <= MOST_DETECTIONS:
            raise PatchlightError(f"--detections {self.detections} is not possible; give 1 to {MOST_DETECTIONS}")
        place = bool(subjects) and subjects[0] not in ("--detections", "--prompt")
        if self.missed and (self.label is None or not place):
            raise PatchlightError("--missed needs --label and --box or --region, the object that was missed")
        if self.label is not None and not place:
            raise PatchlightError("--label needs --box, --region, --region-mask or --point, where the object is")
        if self.against_region is not None and self.region is None and self.region_mask is None:
            raise PatchlightError("--against-region needs --region or --region-mask, what it is compared with")
        if self.prompt is None and (self.answer is not None or self.words is not None):
            raise PatchlightError("--answer and --words need --prompt, the question to the model")
        for name, count in (("box", 4), ("region", 4), ("point", 2)):
            self._numbers(name, count)

    def _numbers(self, name: str, count: int) -> list[float] | None:
        """The numbers of an option."""
        text = getattr(self, name)
        try:
            numbers = None if text is None else [float(each) for each in text.split(",")]
        except ValueError:
            numbers = []
        if numbers is not None and len(numbers) != count:
            raise PatchlightError(f"{flag_of(name)} {text} is not {_COUNTS[count]}")
        return numbers

    def heads(self, task: str) -> list[Any]:
        """The questions of a model with this task; none for the model's own."""
        from patchlight.anatomy.heads import Answer, Box, Mask, Region

        if self.prompt is not None:
            words = [[word.strip()] for word in self.words.split(",")] if self.words else ["visual"]
            return [Answer(self.prompt, self.answer, words=each) for each in words]
        if self.detections is not None:
            return [Box(detection=number, threshold=SURE) for number in range(self.detections)]
        box, region, point = self._numbers("box", 4), self._numbers("region", 4), self._numbers("point", 2)
        if box is not None:
            return [Box(box=box, label=self.label, missed=self.missed)]
        about: dict[str, Any] = {"label": self.label, "missed": self.missed}
        if point is not None and task == "masks":
            return [Mask(points=(point[0], point[1]))]
        if point is not None:
            return [Region(point=point, predicted=task == "segmentation", **about)]
        against: Any = self.against_region
        if against is not None and not os.path.exists(against):
            against = self._numbers("against_region", 4)
        if region is not None or self.region_mask is not None:
            return [Region(self.region_mask, box=region, against=against, **about)]
        return []


_SUBJECT_OPTIONS = ("detections", "box", "region", "region_mask", "point", "prompt")
"""Options of which one says what a question is about."""
_COUNTS = {2: "two numbers; write X,Y", 4: "four numbers; write LEFT,TOP,RIGHT,BOTTOM"}
SURE, MOST_DETECTIONS = 0.5, 1000
"""The lowest score of a detection that --detections explains, and its largest value."""


@dataclass(frozen=True)
class TrainedModelOptions(ModelOptions):
    """The same, for commands whose recipe may name the model."""

    model: str | None = None  # type: ignore[assignment]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command for `add_commands`.

    A parameter that is a dataclass becomes an option for each of its fields. help.toml says what an option is for, in
    `[commands.NAME]` of the function or the dataclass, else in `[options]`. `--debug` is added. An error becomes one
    sentence and an exit code.
    """
    parameters = _parameters(function)
    bundles: dict[str, Any] = {name: one.annotation for name, one in parameters.items() if is_dataclass(one.annotation)}
    options = {
        each: one
        for name, parameter in parameters.items()
        for each, one in (_parameters(bundles[name]) if name in bundles else {name: parameter}).items()
    }
    owners = (function, *bundles.values())
    texts = {name: text for owner in owners for name, text in _HELP["commands"].get(owner.__name__, {}).items()}
    options.setdefault("debug", inspect.Parameter("debug", _KEYWORD, default=False, annotation=bool))

    @functools.wraps(function)
    def run(**values: Any) -> None:
        with answering(bool(values.get("as_json")), values["debug"], options), showing_warnings():
            arguments = {name: values[name] for name in parameters if name not in bundles}
            for name, kind in bundles.items():
                arguments[name] = kind(**{field.name: values[field.name] for field in fields(kind)})
            function(**arguments)

    ordered = sorted(options.values(), key=lambda one: _ORDER.get(one.name, -1))
    shown = [one.replace(annotation=_as_option(one, texts.get(one.name))) for one in ordered]
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in shown}
    del run.__wrapped__
    return run


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _as_option(parameter: inspect.Parameter, text: str | None) -> Any:
    """The annotation of a parameter for typer: with its flag, kind of value, help, panel and completion."""
    kind, *infos = get_args(parameter.annotation) if _is_annotated(parameter) else (parameter.annotation,)
    if parameter.name not in _PLACES and not infos:
        return parameter.annotation
    info = copy.copy(infos[0]) if infos else typer.Option()
    info.help = info.help or text
    if parameter.name not in _PLACES or isinstance(info, ArgumentInfo):
        return Annotated[kind, info]
    info.rich_help_panel, info.metavar, usual = _PLACES[parameter.name]
    info.help = info.help or usual
    info.autocompletion = info.autocompletion or _COMPLETIONS.get(parameter.name)
    if parameter.default is not True:  # else the flag has a negative, --no-…
        info.default = flag_of(parameter.name)
    return Annotated[kind, info]


def _is_annotated(parameter: inspect.Parameter) -> bool:
    return hasattr(parameter.annotation, "__metadata__")


def flag_of(name: str) -> str:
    """The flag of an option."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters
    return {name: one.replace(annotation=hints[name], kind=_KEYWORD) for name, one in parameters.items()}


def option_words(options: Any) -> Iterator[str]:
    """The words at the command line that give the options in a dataclass, without those that have their default."""
    hints = get_type_hints(type(options), include_extras=True)
    for field in fields(options):
        value = getattr(options, field.name)
        if value == field.default or value is None:
            continue
        argument = any(isinstance(info, ArgumentInfo) for info in getattr(hints[field.name], "__metadata__", ()))
        for one in value if isinstance(value, list) else [value]:
            if not argument:
                yield flag_of(field.name)
            if one is not True:
                yield str(one)
