"""Exceptions and warnings, the hints in their messages, and checks of arguments."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from fnmatch import fnmatch
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters and characters that change the direction of text, both unsafe in a terminal."""


class PatchlightError(ValueError):
    """Any wrong input. The message is one sentence: what went wrong, what was given and what to do."""

    def __init__(self, sentence: object = "") -> None:
        super().__init__(escape(str(sentence), keep="\n\t"))


class Unsupported(PatchlightError):
    """A method or metric that does not work on a model."""


class NoDetection(PatchlightError):
    """A detection number that an image does not have."""


class NoClassifier(PatchlightError):
    """A model without a classifier, opened without a head; `vit` is the model."""

    def __init__(self, sentence: str, vit: Any) -> None:
        super().__init__(sentence)
        self.vit = vit


class AssumedPreprocess(UserWarning):
    """The model does not specify its preprocessing, so the published one of its family is assumed."""


class NotFinite(PatchlightError):
    """A map that contains NaN or infinity."""


class DegenerateMap(UserWarning):
    """A map without information; the message has the reason and what to use instead."""


class ChangedModel(UserWarning):
    """Moving register neurons changed a prediction of the model."""


class NotCaptured(UserWarning):
    """A pass could not be captured as a CUDA graph and was computed step by step."""


class UndefinedMetric(UserWarning):
    """A metric has no meaningful value for an image; the message has the reason."""


class LongRun(UserWarning):
    """A call that will take more than a minute, with an estimate."""


class TrainingWarning(UserWarning):
    """Training fails in a known way; the message says what to change."""


class LogSkipped(UserWarning):
    """Part of a training was not logged; the message has the reason and what to change."""


class Cancelled(BaseException):
    """A watcher (`progress.watch`) stopped the work. A BaseException, so that error handlers do not catch it."""


_COLLECTED: ContextVar[list[str] | None] = ContextVar("collected", default=None)


@contextlib.contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect Patchlight's warnings of this thread in a list instead of showing them."""
    collected: list[str] = []
    before = _COLLECTED.set(collected)
    try:
        yield collected
    finally:
        _COLLECTED.reset(before)


def warn(words: str, category: type[Warning]) -> None:
    """Warn at the line of the user's code that called Patchlight."""
    collected = _COLLECTED.get()
    if collected is not None:
        collected.append(words)
        return
    frame = sys._getframe(1)
    line, outer = frame, frame.f_back
    while outer is not None:
        name = str(outer.f_globals.get("__name__", ""))
        if name.partition(".")[0] == "patchlight":
            line = outer
        outer = outer.f_back
    line = line.f_back or line
    while str(line.f_globals.get("__name__", "")).startswith("torch.") and line.f_back is not None:
        line = line.f_back  # a decorator of torch around `explain` or `evaluate`
    module = str(line.f_globals.get("__name__", "<unknown>"))
    registry = line.f_globals.setdefault("__warningregistry__", {})
    place = line.f_code.co_filename, line.f_lineno, module, registry
    warnings.warn_explicit(escape(words, keep="\n\t"), category, *place)


def escape_surrogates(name: str) -> str:
    r"""A file name as valid text: bytes that are not UTF-8 are escaped.

    >>> escape_surrogates("b\udcff.png")
    'b\\xff.png'
    """
    try:
        name.encode()
        return name
    except UnicodeEncodeError:
        with contextlib.suppress(UnicodeEncodeError):
            return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        return name.encode("utf-8", "backslashreplace").decode()  # JSON can contain surrogates that encode no byte


def escape(text: str, keep: str = "") -> str:
    r"""Text with control and bidirectional characters escaped, except those in `keep`.

    >>> escape("a\x1b[2J.png")
    'a\\x1b[2J.png'
    """
    return UNSAFE.sub(
        lambda match: match[0] if match[0] in keep else match[0].encode("unicode_escape").decode(),
        escape_surrogates(text),
    )


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint for an error message: the valid names that are closest to a wrong one.

    >>> nearest("genat", ["genatt", "rollout"])
    "did you mean 'genatt'?"
    """
    names = sorted(set(choices))
    folded = {name.casefold(): name for name in reversed(names)}
    close = [folded[c] for c in difflib.get_close_matches(word.casefold(), folded, cutoff=0.5)]
    if close:
        return f"did you mean {_join_names(close)}?"
    shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f"known names: {shown}" if names else "no names are known"


def match_names(names: Iterable[str], pattern: str) -> list[str]:
    """The names that contain a pattern, or match it if it has wildcards.

    >>> match_names(["deit_tiny", "vit_tiny"], "deit*"), match_names(["deit_tiny", "vit_tiny"], "vit")
    (['deit_tiny'], ['vit_tiny'])
    """
    wildcard = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    return sorted({name for name in names if fnmatch(name, wildcard)})


def integer(name: str, value: Any, least: int, most: int = 2**63 - 1) -> int:
    """Check an integer argument, which may be of numpy or torch, and return it as an int.

    >>> integer("batch_size", 4, 1)
    4
    """
    try:
        if "bool" in type(value).__name__ or "bool" in str(getattr(value, "dtype", "")):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise PatchlightError(f"{name} {value!r} is a {kind}; give an integer of at least {least}") from None
    if not least <= number <= most:
        limit = f"at least {least}" if number < least else f"at most {most}"
        raise PatchlightError(f"{name} {number} is not possible; give {limit}")
    return number


def check_keywords(function: Callable[P, R], advice: str = "") -> Callable[P, R]:
    """Make a function refuse unknown keywords; `advice` follows the hint of a similar name, or replaces it."""
    names = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_POSITIONAL]

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        wrong = next((key for key in kwargs if key not in names), None)
        if wrong is not None:
            hint = nearest(wrong, names)
            if advice:
                hint = f"{hint} {advice[:1].upper()}{advice[1:]}" if hint.startswith("did") else advice
            raise PatchlightError(f"'{function.__name__}' has no option '{wrong}'; {hint}")
        return function(*args, **kwargs)

    return checked


def _join_names(names: list[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " or " + quoted[-1]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if the message is empty.

    For a `ValidationError` of pydantic, this is the key and message of the first problem.
    """
    from pydantic_core import ValidationError  # imported here: this module is loaded by every command

    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        return " ".join(": ".join(filter(None, (".".join(map(str, problem["loc"])), problem["msg"]))).split())
    return (str(error).splitlines() or [type(error).__name__])[0]
