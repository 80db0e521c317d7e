"""What the commands share: options, the way they answer and fail, progress, and how settings are read."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchlight.cli.complete import complete_model, complete_setting, one_of
from patchlight.core.errors import AssumedPreprocess, PatchlightError, nearest
from patchlight.core.files import finite_or_none
from patchlight.core.progress import bar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from patchlight.anatomy.base import Anatomy
    from patchlight.data import Data

WIDE = 160
SOME_FAILED = 3
_ABOUT_ANSWERS = ("as_json", "debug", "force")
"""Options that change how a command answers, and not what."""


def _load(files: list[str] | None) -> list[str] | None:
    from patchlight.core.plugins import load_plugin

    with answering(as_json=False, debug=False):
        for file in files or ():
            load_plugin(file)
    return files


AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Model = Annotated[
    str,
    typer.Option(
        help="pocket, a timm name, hf:NAME, open_clip:NAME or torchvision:NAME.", autocompletion=complete_model
    ),
]
Weights = Annotated[Path | None, typer.Option(help="Weights of the model, a safetensors file.")]
Labels = Annotated[Path | None, typer.Option(help="Class names: a text file, one a line, or a CSV.")]
Stage = Annotated[int | None, typer.Option(help="Stage that a hierarchical model (Swin, PVT, …) is opened at.")]
Preprocessed = Annotated[
    Path | None,
    typer.Option(
        "--preprocess", help="How images are prepared: a processor's folder, or a JSON or TOML file of size, mean, …"
    ),
]
Sigmoid = Annotated[bool, typer.Option("--sigmoid", help="Probabilities are sigmoids: several classes at once.")]
NoPretrained = Annotated[bool, typer.Option("--no-pretrained", help="Random weights instead of pretrained ones.")]
Text = Annotated[
    list[str] | None, typer.Option(help="A sentence as a class, for a model with a text side; repeatable.")
]
Template = Annotated[str | None, typer.Option(help="What stands around each --text, as in 'a photo of a {}'.")]
SimilarTo = Annotated[
    list[Path] | None, typer.Option(help="An image as a class: what is similar to it; repeatable.", metavar="IMAGE")
]
ImageList = Annotated[
    str | None,
    typer.Option("--list", help="A text file of the images to use: names or indices, one per line.", metavar="FILE"),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, …", autocompletion=one_of("cpu", "cuda", "mps"))]
Seed = Annotated[int, typer.Option(help="Seed of everything drawn at random.")]
Plugin = Annotated[
    list[str] | None,
    typer.Option(help="A Python file that registers methods, metrics, …; repeatable.", is_eager=True, callback=_load),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting: name.key=value, or key=value.", autocompletion=complete_setting),
]


@contextlib.contextmanager
def answering(as_json: bool, debug: bool) -> Iterator[None]:
    """Errors become one sentence and an exit code; `--debug` lets them through."""
    try:
        yield
    except (PatchlightError, MemoryError, OSError) as error:
        if debug or isinstance(error, BrokenPipeError):
            raise
        _fail(" ".join(str(error).split()) or type(error).__name__, 2, as_json)
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            raise
        told = " ".join(str(error).split())
        _fail(f"unexpected {type(error).__name__}: {told} (--debug shows where)", 1, as_json)


def _fail(sentence: str, code: int, as_json: bool) -> None:
    if as_json:
        print_json({"error": sentence})
    say(f"error: {sentence}")
    raise typer.Exit(code)


def command_line(context: typer.Context) -> str:
    """The command that is being answered, as it can be typed: every option that was not left as it is."""
    words = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name in _ABOUT_ANSWERS or value == parameter.get_default(context) or value in (None, (), []):
            continue
        option = [] if parameter.param_type_name == "argument" else [max(parameter.opts, key=len)]
        for one in value if isinstance(value, list | tuple) else [value]:
            words += option if one is True else [*option, str(one)]
    return shlex.join(["patchlight", str(context.command.name), *words])


def program() -> str:
    """What to type for this command: `patchlight` where a shell finds this one, else the way to it."""
    here, found = Path(sys.argv[0]), shutil.which("patchlight")
    if here.name == "__main__.py":
        return f"{Path(sys.executable).name} -m patchlight"
    if here.stem != "patchlight" or (found is not None and here.exists() and here.samefile(found)):
        return "patchlight"
    whole = here.absolute()
    if not whole.is_relative_to(Path.cwd()):
        return shlex.quote(str(whole))
    near = str(whole.relative_to(Path.cwd()))
    return shlex.quote(near if os.sep in near else os.path.join(os.curdir, near))


def say(words: str) -> None:
    """A line on stderr, as it is."""
    print(words, file=sys.stderr)


def console() -> Console:
    """Tables on stdout; not squeezed where nobody watches."""
    from rich.console import Console

    return Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else WIDE)


def print_json(value: Any) -> None:
    """Print a value as JSON; NaN and infinity, which JSON does not have, become null."""
    print(json.dumps(finite_or_none(value), indent=1, ensure_ascii=False, default=str, allow_nan=False))


def progress(first: str) -> contextlib.AbstractContextManager[Progress]:
    """A bar on stderr while something is under way; silent where nobody watches."""
    return bar(first)


@contextlib.contextmanager
def telling_warnings() -> Iterator[None]:
    """Warnings are lines on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", AssumedPreprocess)
        warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
        yield


def load_model(
    name: str,
    weights: Path | None = None,
    labels: Path | None = None,
    device: str = "cpu",
    stage: int | None = None,
    asked: Mapping[str, Any] | None = None,
    **options: Any,
) -> Anatomy:
    """The model; `asked` are `texts`, `template` and `similar_to`."""
    from patchlight.anatomy.heads import head_of
    from patchlight.anatomy.load import load

    given = {key: value for key, value in {"stage": stage, **options}.items() if value is not None}
    with telling_warnings():
        head = head_of(**(asked or {}))
        return load(name, weights=weights, labels=labels, device=device, head=head, **given)


def open_images(kind: str | None, paths: Sequence[Path], vit: Anatomy, listed: str | None = None) -> Data:
    """The images with what is known of them, or those of them that a file lists."""
    data = _every_image(kind, paths, vit)
    return data if listed is None else data.listed(listed)


def _every_image(kind: str | None, paths: Sequence[Path], vit: Anatomy) -> Data:
    """The images with what is known of them; plain files and folders tell nothing but their images."""
    from patchlight.core.images import list_images, open_image
    from patchlight.data import Data, Sample, open_data, takes_classes

    if kind is not None:
        if len(paths) > 1:
            raise PatchlightError(f"a data set of kind '{kind}' lies at one place; {len(paths)} were given")
        named = {"classes": vit.labels} if takes_classes(kind) and vit.labels else {}
        return open_data(kind, paths[0], **named)
    found: dict[str, Path] = {}
    for path in paths:
        root = path if path.is_dir() else path.parent
        for one in list_images(path) if path.is_dir() else [path]:
            name = one.relative_to(root).as_posix()
            found[name if len(paths) == 1 or name not in found else one.as_posix()] = one
    return Data(paths[0].name, list(found), lambda name: Sample(name, open_image(found[name])))


def of_model(preprocess: Path | None, sigmoid: bool, no_pretrained: bool) -> dict[str, Any]:
    """What was said about a model beside its weights and labels; None where nothing was."""
    return {"preprocess": preprocess, "sigmoid": sigmoid or None, "pretrained": False if no_pretrained else None}


def asked_by(text: list[str] | None, template: str | None, similar_to: list[Path] | None) -> dict[str, Any]:
    """What --text, --template and --similar-to say, checked before anything slow is imported."""
    missing = next((path for path in similar_to or () if not path.is_file()), None)
    if missing is not None:
        raise PatchlightError(f"no image at '{missing}' (--similar-to)")
    if text and similar_to:
        raise PatchlightError("give either --text or --similar-to: classes are sentences or images")
    if template is not None and not text:
        raise PatchlightError("--template stands around the sentences of --text; give one or more")
    return {"texts": text or (), "template": template or "{}", "similar_to": similar_to or ()}


def read_settings(
    names: Sequence[str], given: Sequence[str], noun: str = "method", whose: str = ""
) -> dict[str, dict[str, Any]]:
    """Settings by name; `--set name.key=value` goes to that one, `key=value` to the only one.

    `whose` says what the names are, where they are not all of one kind.
    """
    wanted: dict[str, dict[str, Any]] = {name.strip(): {} for name in names if name.strip()}
    if not wanted:
        raise PatchlightError(f"no {noun} was named; `patchlight {noun}s` lists them")
    for setting in given:
        key, equals, text = setting.partition("=")
        name, _, key = key.strip().rpartition(".")
        if not equals or not key:
            raise PatchlightError(f"'--set {setting}' is not a setting; write {noun}.name=value or name=value")
        if not name and len(wanted) > 1:
            choices = " or ".join(f"{n}.{setting}" for n in list(wanted)[:3])
            raise PatchlightError(f"'--set {setting}' does not say which {whose or noun} it is for; write {choices}")
        if name and name not in wanted:
            raise PatchlightError(f"'--set {setting}' is for '{name}', which was not asked; {nearest(name, wanted)}")
        wanted[name or next(iter(wanted))][key] = _value(text.strip())
    return wanted


def read_class(word: str, vit: Anatomy) -> int:
    """The index of a class given by name or, unless a class is called so, by number."""
    from patchlight.core.targets import class_index

    named = any(word.casefold() == label.casefold() for label in vit.labels or ())
    return class_index(word if named or not word.lstrip("-").isdigit() else int(word), vit.outcomes, vit.labels)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
