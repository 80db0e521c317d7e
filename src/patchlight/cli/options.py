"""Options that several commands share, and `command`, which makes a command with plain, grouped help."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from patchlight.cli.common import answering, showing_warnings
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

OPTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Model": {
        "model": ("NAME", "pocket, a timm name, hf:NAME, open_clip:NAME or torchvision:NAME."),
        "weights": ("FILE", "Weights of the model, a safetensors file."),
        "labels": ("FILE", "Class names: a text file, one per line, or a CSV file."),
        "preprocess": ("FILE", "Preprocessing: a JSON or TOML file (size, mean, std), or the folder of a processor."),
        "stage": ("N", "Stage at which a hierarchical model (Swin, PVT) is opened."),
        "sigmoid": ("", "Multi-label model (use sigmoid)."),
        "no_pretrained": ("", "Use random weights."),
        "other": ("NAME", "Second model, for figures of two."),
        "other_weights": ("FILE", "Weights of the second model."),
    },
    "Question": {
        "recipe": ("RECIPE", "Name of a bundled recipe, or a TOML file. Other options take precedence over it."),
        "images": ("PATH", "The images: a folder, or one image."),
        "data": ("KIND", "Kind of data set at --images, such as imagenet or folder."),
        "listed": ("FILE", "Text file of the images to use: one name or index per line."),
        "limit": ("N", "Use this many of the images, evenly spread."),
        "held_out": ("PATH", "Images that the model was not trained on, measured at the end."),
        "method": ("NAME,…", "Methods, separated by commas. `patchlight methods` lists them."),
        "metric": ("NAME,…", "Metrics, separated by commas. `patchlight metrics` lists them."),
        "target": ("CLASS", "Class to explain, a name or index. Default: the prediction."),
        "against": ("CLASS", "Class that the target is contrasted with."),
        "text": ("TEXT", "A sentence as a class, for an image-text model. Repeatable."),
        "template": ("TEXT", "Prompt template for each --text: 'a photo of a {}'."),
        "similar_to": ("IMAGE", "An image as a class: explain the similarity to it. Repeatable."),
        "score": ("NAME", "Number to explain: logit, probability or cosine."),
        "preset": ("NAME", "Preset of every metric, such as tis."),
        "settings": ("KEY=VALUE", "A setting: key=value, or name.key=value if several names are given. Repeatable."),
        "explainer": ("FOLDER", "Folder of a trained explainer, for diffmask and vit-shapley."),
        "initial": ("FOLDER", "Explainer whose gates the training starts from."),
        "alpha": ("NUMBER", "Scale of the gates' stretch. Default: as in the file."),
        "size": ("NAME", "small (minutes on a CPU) or base (ViT-Base as in the paper, for an accelerator)."),
        "distractors": ("N", "Colours besides red: 5 (the released code) or 6 (the paper)."),
        "grids": ("N", "Number of held-out grids to test on."),
        "quick": ("", "Use the quick settings of the recipe."),
        "baseline": ("METHOD", "Add the difference of every method to this one (Markdown)."),
        "worth": ("NUMBER", "Smallest difference of scores that counts."),
    },
    "Output": {
        "out": ("PATH", "An empty or new folder."),
        "save": ("FOLDER", "Folder for the raw scores of every method."),
        "report": ("FILE", "HTML file for a report: the maps, a faithfulness test and how they were computed."),
        "html": ("FILE", "Write the whole report to this HTML file."),
        "csv_file": ("FILE", "CSV file with a line per image and metric."),
        "numbers": ("FILE", "File for the numbers in the figure: .csv or .json."),
        "style": ("NAME", "What to print: markdown or csv."),
        "licence": ("NAME", "Licence of the values and maps, such as CC-BY-4.0."),
        "data_licence": ("NAME", "Licence of the images they were computed from."),
        "open_it": ("", "Open the result in a browser or viewer."),
        "force": ("", "Replace existing output."),
        "as_json": ("", "Print the results as JSON."),
    },
    "Run": {
        "budget": ("TIME", "Time for everything: 90s, 10m or 1h. Loading counts."),
        "device": ("NAME", "Device: cpu, cuda, cuda:1 or mps."),
        "batch_size": ("N", "Images at once."),
        "workers": ("N", "Number of processes."),
        "seed": ("N", "Random seed."),
        "resume": ("", "Continue with what is in --out."),
        "retry": ("", "Run again what failed."),
        "shard": ("I/N", "Run only this part of the images, as in 3/16."),
        "ray": ("ADDRESS", "Run on a Ray cluster: auto, or HOST:PORT."),
        "source": ("FOLDER", "Another run, or an export: its values are not measured again."),
        "estimate": ("", "Time a first batch of every group of methods."),
        "seconds": ("NUMBER", "Longest time for timing one group of methods."),
        "host": ("ADDRESS", "Address to listen on; 0.0.0.0 allows other machines to connect."),
        "port": ("N", "Port; 0 takes a free one."),
        "token": ("TEXT", "Secret that the page and the API require; 'new' creates one."),
        "allow_host": ("NAME", "Name that this server is reached by, behind a proxy. Repeatable."),
        "array": ("N", "Number of tasks; 64%8 runs eight at once."),
        "time": ("TIME", "Time limit of a task: 2h, 90m or 1-12:00:00. A task that needs more is requeued."),
        "cpus": ("N", "CPUs per task."),
        "gpus": ("N", "GPUs per task, used unless --device names another device."),
        "mem": ("SIZE", "Memory per task, such as 32G."),
        "partition": ("NAME", "Partition."),
        "account": ("NAME", "Account."),
        "mail": ("ADDRESS", "Address that is notified when the report is ready."),
        "setup": ("COMMAND", "Shell command to run first, such as 'source venv/bin/activate'. Repeatable."),
        "plugin": ("FILE", "Python file that registers methods, metrics or models. Repeatable."),
        "debug": ("", "Show the traceback of an error."),
    },
}
"""The options of all commands, by the panel of the help: the kind of value, and what the option is for.

A word means the same in every command. A command may explain it in more detail.
"""
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
_EXAMPLES = "Examples:\n"


class _PlainHelp(TyperCommand):
    """Help with bare flags and arguments, and examples below."""

    def __init__(self, *args: Any, help: str | None = None, **options: Any) -> None:
        text, _, examples = (help or "").partition(_EXAMPLES)
        self.examples = [line.strip() for line in examples.splitlines() if line.strip()]
        paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
        super().__init__(*args, help="\n\n".join(paragraphs).strip(), **options)

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [one for one in self.params if one.param_type_name == "argument"]
        return ["[OPTIONS]", *map(usage_of, arguments)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        if self.examples:
            print("\n ".join([" Examples:", *(f"  {line}" for line in self.examples)]))


class _PlainGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))


def _plain(params: Iterable[Any]) -> list[Any]:
    """Parameters whose help has no type for flags and arguments."""
    shown = list(params)
    for one in shown:
        if one.param_type_name == "argument":
            one.display_type_rich = lambda ctx: None  # typer writes "<path>" beside an argument
        elif one.metavar is None:
            one.metavar = ""
        if one.name == "help":
            one.rich_help_panel = "Run"
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
            missing = next((path for path in paths or () if path is not None and not path.is_file()), None)
            if missing is not None:
                raise PatchlightError(f"no file at '{missing}' (--{option})")
        self.spec()
        known = self._class_names()
        if known is not None:
            from patchlight.core.targets import read_class

            for word in filter(None, classes):
                read_class(word, len(known), known)
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
class TrainedModelOptions(ModelOptions):
    """The same, for commands whose recipe may name the model."""

    model: str | None = None  # type: ignore[assignment]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command for `add_commands`.

    A parameter that is a dataclass becomes an option for each of its fields. `OPTIONS` says what an option is for.
    `--debug` is added. An error becomes one sentence and an exit code.
    """
    parameters = _parameters(function)
    bundles: dict[str, Any] = {name: one.annotation for name, one in parameters.items() if is_dataclass(one.annotation)}
    options = {
        each: one
        for name, parameter in parameters.items()
        for each, one in (_parameters(bundles[name]) if name in bundles else {name: parameter}).items()
    }
    options.setdefault("debug", inspect.Parameter("debug", _KEYWORD, default=False, annotation=bool))

    @functools.wraps(function)
    def run(**values: Any) -> None:
        with answering(bool(values.get("as_json")), values["debug"], options), showing_warnings():
            arguments = {name: values[name] for name in parameters if name not in bundles}
            for name, kind in bundles.items():
                arguments[name] = kind(**{field.name: values[field.name] for field in fields(kind)})
            function(**arguments)

    ordered = sorted(options.values(), key=lambda one: _ORDER.get(one.name, -1))
    shown = [one.replace(annotation=_as_option(one)) for one in ordered]
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in shown}
    del run.__wrapped__
    return run


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _as_option(parameter: inspect.Parameter) -> Any:
    """The annotation of a parameter for typer: with its flag, kind of value, help, panel and completion."""
    kind, *infos = get_args(parameter.annotation) if _is_annotated(parameter) else (parameter.annotation,)
    if parameter.name not in _PLACES or (infos and isinstance(infos[0], ArgumentInfo)):
        return parameter.annotation
    info = copy.copy(infos[0]) if infos else typer.Option()
    info.rich_help_panel, info.metavar, text = _PLACES[parameter.name]
    info.help = info.help or text
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
    every = inspect.signature(function).parameters
    return {name: one.replace(annotation=hints[name], kind=_KEYWORD) for name, one in every.items()}


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
