"""Options that several commands share, and `command`, which gives a command the options in a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.models import ArgumentInfo

from patchlight.cli.common import answering, showing_warnings
from patchlight.cli.complete import complete_kind, complete_model, complete_setting, one_of
from patchlight.core.errors import PatchlightError

if TYPE_CHECKING:
    from patchlight.anatomy.opened import Anatomy
    from patchlight.anatomy.spec import ModelSpec


def _load_plugins(files: list[str] | None) -> list[str] | None:
    from patchlight.core.plugins import load_plugin

    with answering(as_json=False, debug=False):
        for file in files or ():
            load_plugin(file)
    return files


AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Force = Annotated[bool, typer.Option("--force", help="Replace existing output.")]
ImageList = Annotated[
    str | None,
    typer.Option("--list", help="A text file of the images to use: names or indices, one per line.", metavar="FILE"),
]
DataKind = Annotated[
    str | None,
    typer.Option(
        help="Kind of data set at --images, for its labels, boxes and masks.",
        metavar="KIND",
        autocompletion=complete_kind,
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, …", autocompletion=one_of("cpu", "cuda", "mps"))]
Seed = Annotated[int, typer.Option(help="Seed of everything drawn at random.")]
Plugin = Annotated[
    list[str] | None,
    typer.Option(
        help="A Python file that registers methods, metrics, …; repeatable.", is_eager=True, callback=_load_plugins
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting: name.key=value, or key=value.", autocompletion=complete_setting),
]
Sigmoid = Annotated[bool, typer.Option("--sigmoid", help="Probabilities are sigmoids: several classes at once.")]
NoPretrained = Annotated[bool, typer.Option("--no-pretrained", help="Random weights instead of pretrained ones.")]
_MODEL = typer.Option(
    help="pocket, a timm name, hf:NAME, open_clip:NAME or torchvision:NAME.", autocompletion=complete_model
)


@dataclass(frozen=True)
class ModelOptions:
    """The options that name a model: `spec` is the model they name, `load` opens it."""

    model: Annotated[str, _MODEL] = "pocket"
    weights: Annotated[Path | None, typer.Option(help="Weights of the model, a safetensors file.")] = None
    labels: Annotated[Path | None, typer.Option(help="Class names: a text file, one a line, or a CSV.")] = None
    stage: Annotated[int | None, typer.Option(help="Stage that a hierarchical model (Swin, PVT, …) is opened at.")] = (
        None
    )
    preprocess: Annotated[
        Path | None,
        typer.Option(help="How images are prepared: a processor's folder, or a JSON or TOML file of size, mean, …"),
    ] = None
    sigmoid: Sigmoid = False
    no_pretrained: NoPretrained = False
    device: Device = "cpu"
    text: Annotated[
        list[str] | None, typer.Option(help="A sentence as a class, for a model with a text side; repeatable.")
    ] = None
    template: Annotated[str | None, typer.Option(help="What stands around each --text, as in 'a photo of a {}'.")] = (
        None
    )
    similar_to: Annotated[
        list[Path] | None, typer.Option(help="An image as a class: what is similar to it; repeatable.", metavar="IMAGE")
    ] = None
    plugin: Plugin = None

    def __post_init__(self) -> None:
        missing = next((path for path in self.similar_to or () if not path.is_file()), None)
        if missing is not None:
            raise PatchlightError(f"no image at '{missing}' (--similar-to)")
        if self.text and self.similar_to:
            raise PatchlightError("give either --text or --similar-to: classes are sentences or images")
        if self.template is not None and not self.text:
            raise PatchlightError("--template stands around the sentences of --text; give one or more")

    def spec(self, base: ModelSpec | None = None) -> ModelSpec:
        """The model that is named; `base`, where one is given, with what the options say of it."""
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

    def load(self) -> Anatomy:
        """The model; what it warns of are lines on stderr."""
        with showing_warnings():
            return self.spec().load(self.device)


@dataclass(frozen=True)
class TrainedModelOptions(ModelOptions):
    """The same, where a recipe may name the model."""

    model: Annotated[str | None, _MODEL] = None  # type: ignore[assignment]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A command of the program, for typer.

    A parameter that is a dataclass becomes an option for each of its fields. `--debug` is added. An error becomes one
    sentence and an exit code, and where there is `--json`, JSON.
    """
    parameters = _parameters(function)
    bundles: dict[str, Any] = {name: one.annotation for name, one in parameters.items() if is_dataclass(one.annotation)}
    options = {
        each: one
        for name, parameter in parameters.items()
        for each, one in (_parameters(bundles[name]) if name in bundles else {name: parameter}).items()
    }
    options.setdefault("debug", inspect.Parameter("debug", _KEYWORD, default=False, annotation=Debug))

    @functools.wraps(function)
    def run(**given: Any) -> None:
        with answering(bool(given.get("as_json")), given["debug"]):
            own = {name: given[name] for name in parameters if name not in bundles}
            for name, kind in bundles.items():
                own[name] = kind(**{field.name: given[field.name] for field in fields(kind)})
            function(**own)

    every = sorted(options.values(), key=lambda one: one.default is not inspect.Parameter.empty)  # required ones first
    run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in every}
    del run.__wrapped__
    return run


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    hints = get_type_hints(function, include_extras=True)
    every = inspect.signature(function).parameters
    return {name: one.replace(annotation=hints[name], kind=_KEYWORD) for name, one in every.items()}


def option_words(options: Any) -> list[str]:
    """The words at the command line that give the options in a dataclass; those with their default are left out."""
    hints = get_type_hints(type(options), include_extras=True)
    words: list[str] = []
    for field in fields(options):
        value, info = getattr(options, field.name), hints[field.name].__metadata__[0]
        if value == field.default or value is None:
            continue
        named = isinstance(info.default, str)  # in `Annotated`, the first word is the option's name
        option = info.default if named else f"--{field.name.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            words += [] if isinstance(info, ArgumentInfo) else [option]
            words += [] if one is True else [str(one)]
    return words
