"""What the commands share: the way they answer and fail, progress, and how settings and images are read."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from patchlight.core.errors import AssumedPreprocess, PatchlightError, nearest
from patchlight.core.files import finite_or_none
from patchlight.core.progress import bar

if TYPE_CHECKING:
    from rich.console import Console


WIDE = 160
SOME_FAILED = 3
_ABOUT_ANSWERS = ("as_json", "debug", "force")
"""Options that change how a command answers, and not what."""


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


@contextlib.contextmanager
def progress(words: str) -> Iterator[Callable[..., None]]:
    """A bar on stderr while something is under way, silent where nobody watches, and the function that changes it."""
    with bar(words) as shown:
        yield functools.partial(shown.update, shown.task_ids[0])


@contextlib.contextmanager
def showing_warnings() -> Iterator[None]:
    """Warnings are lines on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", AssumedPreprocess)
        warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
        yield


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


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A plain table on stdout."""
    from rich.table import Table

    table = Table(*headings, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def split_names(words: str | None) -> list[str]:
    """Names that are separated by commas."""
    return [name.strip() for name in (words or "").split(",") if name.strip()]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
