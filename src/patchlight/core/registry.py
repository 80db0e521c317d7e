"""Registries of methods, metrics, rules, compositions and kinds of data: names, aliases, presets and typed settings."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, cached_property, wraps
from textwrap import shorten
from types import NoneType, UnionType
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import TypeAdapter, ValidationError

from patchlight.core.errors import PatchlightError, nearest
from patchlight.core.plugins import load_installed
from patchlight.core.targets import Target

Settings = Mapping[str, Any]


class Named(Protocol):
    """An entry of a registry."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...


N = TypeVar("N", bound=Named)
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")


class Registry(Mapping[str, N], Generic[N]):
    """Entries of one kind (`noun`) by name; the modules `rooms`, imported on first use, register the bundled ones."""

    def __init__(self, noun: str, rooms: Sequence[str] = ()) -> None:
        self.noun = noun
        self._rooms = tuple(rooms)
        self._entries: dict[str, N] = {}
        self._aliases: dict[str, str] = {}

    def add(self, entry: N) -> N:
        """Register an entry; a name in use is refused, unless the same function is defined again."""
        old = self._entries.get(entry.name)
        replaced = () if old is None or not _redefines(entry, old) else (old.name, *old.aliases)
        for key in (entry.name, *entry.aliases):
            if key not in replaced and (key in self._entries or key in self._aliases):
                raise PatchlightError(f"a {self.noun} called '{key}' is already registered")
        for alias in replaced[1:]:
            del self._aliases[alias]
        self._entries[entry.name] = entry
        self._aliases.update(dict.fromkeys(entry.aliases, entry.name))
        return entry

    def remove(self, name: str) -> None:
        """Remove an entry and its aliases."""
        entry = self.find(name)
        for alias in entry.aliases:
            del self._aliases[alias]
        del self._entries[entry.name]

    def find(self, name: str) -> N:
        """The entry with a name or alias; an error with the closest names if there is none."""
        entry = self.lookup(name)
        if entry is None:
            raise PatchlightError(f"no {self.noun} is called '{name}'; {nearest(name, [*self, *self._aliases])}")
        return entry

    def lookup(self, name: str) -> N | None:
        """The entry with a name or alias, or None."""
        self._load()
        return self._entries.get(self._aliases.get(name, name))

    def _load(self) -> None:
        for room in self._rooms:  # cheap after the first time; waits for an import in another thread
            importlib.import_module(room)
        load_installed()

    def __getitem__(self, name: str) -> N:
        self._load()
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        self._load()
        return len(self._entries)


def _redefines(entry: Named, old: Named) -> bool:
    """Whether the same function is defined again, as in a notebook cell or an edited file."""
    new, before = (getattr(each, "function", None) for each in (entry, old))
    if new is None or before is None or new is before or "<locals>" in new.__qualname__:
        return False
    return (new.__module__, new.__qualname__) == (before.__module__, before.__qualname__)


class TableRow(Protocol):
    """A row of a table: its text by column heading."""

    def cells(self) -> dict[str, str]: ...


T = TypeVar("T", bound=TableRow)


class TableList(list[T]):
    """A list that is shown as a table in notebooks."""

    def _repr_html_(self) -> str:
        from patchlight.core.drawing import table_html

        lines = [row.cells() for row in self]
        return table_html(list(lines[0]) if lines else [], [list(line.values()) for line in lines])


@dataclass(frozen=True)
class Setting:
    """A setting: a keyword argument of a registered function, with the text of its line under `Args:`."""

    name: str
    kind: Any
    default: Any
    text: str = ""

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.kind)

    def checked(self, value: Any, owner: str) -> Any:
        """Validate a value; errors name the function `owner`."""
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            problems = error.errors()
            reason = problems[0]["msg"] if len(problems) == 1 else f"give {describe_type(self.kind)}"
            text = shorten(repr(value), 200)  # a tensor takes many lines
            raise PatchlightError(f"setting {self.name}={text} of '{owner}' is not valid: {reason}") from error

    def __str__(self) -> str:
        return f"{describe_type(self.kind)} = {self.default!r}"


@cache
def settings_of(function: Callable[..., Any]) -> Mapping[str, Setting]:
    """The settings of a function: all its parameters except the first."""
    hints, lines = get_type_hints(function, include_extras=True), split_docstring(function)[1]
    settings = {}
    for p in list(inspect.signature(function).parameters.values())[1:]:
        kind = hints.get(p.name, Any)
        settings[p.name] = Setting(p.name, kind, p.default, lines.get(p.name) or _description(kind))
    return settings


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function check its arguments, except the first and a target, against their types.

    Arrays and tensors are accepted as numbers and lists.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        for name, setting in settings_of(function).items():
            if name in bound.arguments and setting.kind not in (Any, Target):
                value = bound.arguments[name]
                plain = value.tolist() if hasattr(value, "tolist") else value
                bound.arguments[name] = setting.checked(plain, function.__qualname__.partition(".")[0])
        return function(*bound.args, **bound.kwargs)

    return checked


def _description(kind: Any) -> str:
    """The description in a type or one of its parts, as in `Annotated[float, Field(description=…)]`."""
    descriptions = (getattr(field_info, "description", None) for field_info in getattr(kind, "__metadata__", ()))
    return next(filter(None, descriptions), None) or next(filter(None, map(_description, get_args(kind))), "")


@cache
def split_docstring(function: Callable[..., Any]) -> tuple[str, Mapping[str, str]]:
    """A Google-style docstring without its section `Args:`, and the text of that section by argument."""
    text = inspect.getdoc(function) or ""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", text, re.MULTILINE)
    if section is None:
        return text, {}
    lines = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section[1], re.MULTILINE)
    rest = text[: section.start()] + text[section.end() :]
    return rest.strip(), {name: " ".join(line.split()) for name, line in lines}


def filter_settings(function: Callable[..., Any], settings: Settings) -> dict[str, Any]:
    """The settings that the function takes."""
    return {key: settings[key] for key in settings_of(function) if key in settings}


@dataclass(frozen=True)
class Entry:
    """A registered function.

    Args:
        name: The name of the entry.
        function: The function; its keyword arguments are the settings.
        paper: The source.
        aliases: Other names.
        presets: Settings by the name of a preset.
        quick: Settings of a cheap run, for tests and quick benchmarks.
    """

    name: str
    function: Callable[..., Any]
    _: KW_ONLY
    paper: str = ""
    aliases: tuple[str, ...] = ()
    presets: Mapping[str, Settings] = field(default_factory=dict)
    quick: Settings = field(default_factory=dict)

    @cached_property
    def summary(self) -> str:
        return self.text.split("\n")[0]

    @property
    def text(self) -> str:
        """The docstring of the function without its section `Args:`."""
        return split_docstring(self.function)[0]

    def preset(self, name: Any) -> Settings:
        """The settings of a preset; empty for None."""
        if name is None:
            return {}
        if name not in self.presets:
            hint = nearest(str(name), self.presets) if self.presets else "it has none"
            raise PatchlightError(f"'{self.name}' has no preset '{name}'; {hint}")
        return self.presets[name]


def make_decorator(
    registry: Registry[N], kind: Callable[Concatenate[str, Callable[..., Any], P], N]
) -> Callable[Concatenate[str, P], Callable[[F], F]]:
    """A decorator that registers functions as entries of a kind; its keywords are the fields of the entry."""

    def decorator(name: str, /, *args: P.args, **fields: P.kwargs) -> Callable[[F], F]:
        def register(function: F) -> F:
            registry.add(kind(name, function, *args, **fields))
            return function

        return register

    decorator.__doc__ = f"""Register a function as a {registry.noun}; its typed keyword arguments are the settings.

    Args:
        name: The name.
        args: Fields of `{kind.__name__}`.
        fields: Fields of `{kind.__name__}`, such as paper, aliases and presets.
    """
    return decorator


def resolve_settings(
    owner: str, settings: Mapping[str, Setting], start: Settings, changes: Settings, also: Sequence[str] = ()
) -> dict[str, Any]:
    """The checked values of all settings: defaults, overridden by `start`, then by `changes`.

    Errors name `owner`; their hints also suggest the keywords `also`.
    """
    values = {key: setting.default for key, setting in settings.items()} | dict(start)
    for key, value in changes.items():
        if key not in settings:
            raise PatchlightError(f"'{owner}' has no setting '{key}'; {_near_setting(key, settings, also)}")
        values[key] = settings[key].checked(value, owner)
    return values


def _near_setting(key: str, settings: Mapping[str, Setting], also: Sequence[str]) -> str:
    """The closest settings, or all of them if none is close."""
    hint = nearest(key, [*settings, *also])
    return hint if hint.startswith("did") or not settings else f"its settings: {', '.join(settings)}"


Selection = str | Sequence[str] | Mapping[str, Mapping[str, Any] | str]
"""A name, a list of names, a dict of names and settings, or a dict of labels and names."""


def resolve_all(
    selection: Selection | Sequence[R],
    settings: Settings,
    kind: type[R],
    noun: str,
    resolve: Callable[[str, Settings], R],
) -> list[R]:
    """Resolve a selection of methods or metrics (`noun`) with common settings; requests are returned unchanged."""
    if isinstance(selection, list | tuple) and selection and all(isinstance(each, kind) for each in selection):
        return list(selection)
    advice = f"give a name, a list of names, or a dict of names and settings, {{label: {{'{noun}': name, …}}}}"
    if isinstance(selection, str):
        return [resolve(selection, settings)]
    if isinstance(selection, Mapping) and all(isinstance(value, Mapping | str) for value in selection.values()):
        named = {label: {noun: value} if isinstance(value, str) else value for label, value in selection.items()}
        labelled = {label: {**settings, **value} for label, value in named.items()}
    elif isinstance(selection, Sequence) and all(isinstance(name, str) for name in selection):
        labelled = {str(name): dict(settings) for name in selection}
    else:
        raise PatchlightError(f"{noun} {selection!r} is not a {noun}; {advice}")
    if not labelled:
        raise PatchlightError(f"no {noun} was named; {advice}")
    return [resolve(label, values) for label, values in labelled.items()]


def describe_type(kind: Any) -> str:
    """A type in words: "int >= 1 or 'all' or (int >= 1, int >= 1) or None"."""
    origin, inside = get_origin(kind), get_args(kind)
    if hasattr(kind, "__metadata__"):
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        limits = [m for field_info in kind.__metadata__ for m in getattr(field_info, "metadata", ())]
        bounds = [f"{sign} {getattr(m, name)}" for m in limits for name, sign in signs.items() if hasattr(m, name)]
        return " ".join([describe_type(kind.__origin__), " and ".join(bounds)]).strip()
    if origin is Literal:
        return " | ".join(map(repr, inside))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(describe_type, inside)))
    if origin in (list, Sequence) or (origin is tuple and inside[-1] is Ellipsis):
        return f"list of {describe_type(inside[0])}"
    if origin is tuple:
        return f"({', '.join(map(describe_type, inside))})"
    return "None" if kind is NoneType else kind.__name__ if isinstance(kind, type) else str(kind)
