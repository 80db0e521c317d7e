"""What the commands share: errors and exit codes, everything that is printed, progress, settings and checks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from patchlight.core.errors import UNSAFE, AssumedPreprocess, PatchlightError, escape, nearest
from patchlight.core.files import finite_or_none
from patchlight.core.progress import bar

if TYPE_CHECKING:
    from patchlight.anatomy.opened import Anatomy
    from patchlight.methods.requests import Request

WIDE = 160
SOME_FAILED = 3
_PRESENTATION = ("as_json", "debug", "force")
"""Options that change how a command answers, not what it computes."""


def show(line: str = "") -> None:
    """Print a line on stdout."""
    print(escape(line))


def show_text(text: str) -> None:
    """Print a text of several lines on stdout as it is."""
    print(escape(text, keep="\n\t"), end="")


def say(line: str) -> None:
    """Print a line on stderr."""
    print(escape(line), file=sys.stderr)


def print_json(value: Any) -> None:
    """Print a value as JSON. NaN and infinity, which JSON does not have, become null."""
    text = json.dumps(finite_or_none(value), indent=1, ensure_ascii=False, default=str, allow_nan=False)
    print(UNSAFE.sub(lambda match: match[0] if match[0] == "\n" else f"\\u{ord(match[0]):04x}", text))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print a plain table on stdout, with its full width unless stdout is a terminal."""
    from rich.console import Console
    from rich.table import Table

    if title:
        show(title)
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(escape(heading), overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else WIDE).print(table)


@contextlib.contextmanager
def progress(words: str) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, if that is a terminal, and a function that updates it."""
    with bar(escape(words)) as shown:

        def update(description: str | None = None, **changes: Any) -> None:
            words = None if description is None else escape(description)
            shown.update(shown.task_ids[0], description=words, **changes)

        yield update


@contextlib.contextmanager
def showing_warnings() -> Iterator[None]:
    """Print warnings as lines on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", AssumedPreprocess)
        warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
        yield


@contextlib.contextmanager
def answering(as_json: bool, debug: bool, options: Collection[str] = ()) -> Iterator[None]:
    """Turn errors into one sentence and an exit code; with `debug` they are raised.

    Args:
        as_json: Whether the sentence is also printed as JSON.
        debug: Whether errors are raised.
        options: Names of the command's options. The sentence calls them by their flags.
    """
    try:
        yield
        sys.stdout.flush()
    except (PatchlightError, MemoryError, OSError) as error:
        if debug or isinstance(error, BrokenPipeError):
            raise
        _fail(name_flags(" ".join(str(error).split()), options) or type(error).__name__, 2, as_json)
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            raise
        reason = " ".join(str(error).split())
        _fail(f"unexpected {type(error).__name__}: {reason} (--debug shows the traceback)", 1, as_json)


def _fail(sentence: str, code: int, as_json: bool) -> None:
    try:
        if as_json:
            print_json({"error": sentence})
        sys.stdout.flush()
    except OSError:  # stdout is full; without this, Python reports that again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    say(f"error: {sentence}")
    raise typer.Exit(code)


def name_flags(sentence: str, options: Collection[str]) -> str:
    """A sentence with Python's keywords replaced by the flags of the command line.

    >>> name_flags("give target=… or score='logit'", ["target", "score"])
    'give --target or --score logit'
    """
    if not options:
        return sentence
    words = "|".join(map(re.escape, options))

    def flag(match: re.Match[str]) -> str:
        value = (match[2] or "").strip("'\"")
        return f"--{match[1].replace('_', '-')}" + (f" {value}" if value not in ("", "…", "True") else "")

    return re.sub(rf"(?<!setting )(?<![\w.'-])({words})=('[^']*'|\"[^\"]*\"|…|True|\d+)?", flag, sentence)


def command_line(context: typer.Context) -> str:
    """The command that is running, as it can be typed: every option that does not have its default."""
    words = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name in _PRESENTATION or value == parameter.get_default(context) or value in (None, (), []):
            continue
        option = [] if parameter.param_type_name == "argument" else [max(parameter.opts, key=len)]
        for one in value if isinstance(value, list | tuple) else [value]:
            words += option if one is True else [*option, str(one)]
    return shlex.join(["patchlight", str(context.command.name), *words])


def program() -> str:
    """What to type for this program: `patchlight` if the shell finds this one, otherwise its path."""
    here, on_path = Path(sys.argv[0]), shutil.which("patchlight")
    if here.name == "__main__.py":
        return f"{Path(sys.executable).name} -m patchlight"
    if here.stem != "patchlight" or (on_path is not None and here.exists() and here.samefile(on_path)):
        return "patchlight"
    full = here.absolute()
    if not full.is_relative_to(Path.cwd()):
        return shlex.quote(str(full))
    near = str(full.relative_to(Path.cwd()))
    return shlex.quote(near if os.sep in near else os.path.join(os.curdir, near))


def read_settings(
    names: Sequence[str], settings: Sequence[str], noun: str = "method", owners: str = ""
) -> dict[str, dict[str, Any]]:
    """Settings by name: `--set name.key=value` belongs to that name, `key=value` to the only one.

    Args:
        names: The methods, metrics or other things that have settings.
        settings: The values of `--set`.
        noun: What one of the names is.
        owners: The same, if the names are of more than one kind.
    """
    by_name: dict[str, dict[str, Any]] = {name.strip(): {} for name in names if name.strip()}
    if not by_name:
        raise PatchlightError(f"no {noun} was named; `patchlight {noun}s` lists all names")
    for setting in settings:
        key, equals, text = setting.partition("=")
        name, _, key = key.strip().rpartition(".")
        if not equals or not key:
            raise PatchlightError(f"'--set {setting}' is not a setting; write {noun}.name=value or name=value")
        if not name and len(by_name) > 1:
            choices = " or ".join(f"{n}.{setting}" for n in list(by_name)[:3])
            raise PatchlightError(f"'--set {setting}' does not name its {owners or noun}; write {choices}")
        if name and name not in by_name:
            raise PatchlightError(f"'--set {setting}': '{name}' is not used here; {nearest(name, by_name)}")
        by_name[name or next(iter(by_name))][key] = _value(text.strip())
    return by_name


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def split_names(words: str | None) -> list[str]:
    """Names that are separated by commas."""
    return [name.strip() for name in (words or "").split(",") if name.strip()]


def check_images(paths: Iterable[str | Path]) -> None:
    """Refuse a path with no image or folder."""
    missing = next((path for path in paths if not os.path.exists(path)), None)
    if missing is not None:
        raise PatchlightError(f"no image or folder at '{missing}'")


def check_new(files: Iterable[Path | None], force: bool) -> None:
    """Refuse to replace a file without --force. Call this last, so that it hides no other mistake."""
    for file in files:
        if file is not None and (file.is_dir() or (file.exists() and not force)):
            raise PatchlightError(f"'{file}' already exists; choose another place, or give --force to replace it")


UsedMethods = Mapping[str, tuple[str, bool]]
"""By label, the name of a method and whether it ignores the class."""


def used_methods(requests: Iterable[Request], vit: Anatomy) -> UsedMethods:
    """The methods that requests come to on a model: the one that `auto` chose."""
    suited = [request.suited(vit) for request in requests]
    return {one.label: (one.name, one.ignores_class and one.name != "random") for one in suited}


def label_methods(methods: UsedMethods) -> dict[str, str]:
    """By label, how a table names a method: with what `auto` chose, and whether the class is ignored."""
    shown = {}
    for label, (name, ignores_class) in methods.items():
        notes = [name] * (label == "auto") + ["ignores the class"] * ignores_class
        shown[label] = f"{label} ({', '.join(notes)})" if notes else label
    return shown


def describe_methods(methods: UsedMethods) -> dict[str, Any]:
    """The same for JSON: the method behind each label, and the labels of methods that ignore the class."""
    ignoring = [label for label, (_, ignores_class) in methods.items() if ignores_class]
    return {"used": {label: name for label, (name, _) in methods.items()}, "ignores_class": ignoring}
