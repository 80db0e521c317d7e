"""Registries: things that are known by a name, such as methods, metrics, rules, compositions and kinds of data.

One place for names and aliases, presets and typed settings, the nearest name of a misspelt one, and removal.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from fnmatch import fnmatch
from functools import cache, cached_property
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

Settings = Mapping[str, Any]


class Named(Protocol):
    """What a registry can hold."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...


N = TypeVar("N", bound=Named)
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")


class Registry(Mapping[str, N], Generic[N]):
    """Things of one kind by name; `rooms` are the modules that register the bundled ones, imported on first use."""

    def __init__(self, noun: str, rooms: Sequence[str] = ()) -> None:
        self.noun = noun
        self._rooms = tuple(rooms)
        self._entries: dict[str, N] = {}
        self._aliases: dict[str, str] = {}

    def add(self, entry: N) -> N:
        """Register under name and aliases, which must be free, or of the same function before it was redefined."""
        old = self._entries.get(entry.name)
        replaced = () if old is None or not _redefines(entry, old) else (old.name, *old.aliases)
        for key in (entry.name, *entry.aliases):
            if key not in replaced and (key in self._entries or key in self._aliases):
                raise PatchlightError(f"a {self.noun} called '{key}' is registered already")
        for alias in replaced[1:]:
            del self._aliases[alias]
        self._entries[entry.name] = entry
        self._aliases.update(dict.fromkeys(entry.aliases, entry.name))
        return entry

    def remove(self, name: str) -> None:
        """Take one out again, with its aliases."""
        entry = self.find(name)
        for alias in entry.aliases:
            del self._aliases[alias]
        del self._entries[entry.name]

    def find(self, name: str) -> N:
        """The one of that name or alias; else an error that says which names are near."""
        entry = self.lookup(name)
        if entry is None:
            raise PatchlightError(f"no {self.noun} is called '{name}'; {nearest(name, [*self, *self._aliases])}")
        return entry

    def lookup(self, name: str) -> N | None:
        """The one of that name or alias, where there is one."""
        self._load()
        return self._entries.get(self._aliases.get(name, name))

    def _load(self) -> None:
        for room in self._rooms:  # a look-up each once they are there; another thread's import is waited for
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
    """Whether a notebook's cell, or a file that was mended, defines the same function once more."""
    new, before = (getattr(one, "function", None) for one in (entry, old))
    if new is None or before is None or new is before or "<locals>" in new.__qualname__:
        return False
    return (new.__module__, new.__qualname__) == (before.__module__, before.__qualname__)


class TableRow(Protocol):
    """A line of a table: its words by the headings they stand under."""

    def cells(self) -> dict[str, str]: ...


T = TypeVar("T", bound=TableRow)


class TableList(list[T]):
    """A list that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        from patchlight.core.drawing import table_html

        lines = [one.cells() for one in self]
        return table_html(list(lines[0]) if lines else [], [list(line.values()) for line in lines])


@dataclass(frozen=True)
class Setting:
    """A keyword argument of a registered function: its name, type, default, and what its line under `Args:` says."""

    name: str
    kind: Any
    default: Any
    text: str = ""

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.kind)

    def checked(self, value: Any, owner: str) -> Any:
        """A value of this type, or one sentence about why it is none."""
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            found = error.errors()
            reason = found[0]["msg"] if len(found) == 1 else f"give {describe_type(self.kind)}"
            raise PatchlightError(f"setting {self.name}={value!r} of '{owner}' is not valid: {reason}") from error

    def __str__(self) -> str:
        return f"{describe_type(self.kind)} = {self.default!r}"


@cache
def settings_of(function: Callable[..., Any]) -> Mapping[str, Setting]:
    """The settings of a function: all its parameters but the first."""
    hints, lines = get_type_hints(function, include_extras=True), split_docstring(function)[1]
    own = list(inspect.signature(function).parameters.values())[1:]
    kinds = {p.name: hints.get(p.name, Any) for p in own}
    return {p.name: Setting(p.name, k := kinds[p.name], p.default, lines.get(p.name) or _description(k)) for p in own}


def _description(kind: Any) -> str:
    """What a type itself says of its values, as `Annotated[float, Field(description=…)]`; a part of it may."""
    own = (getattr(one, "description", None) for one in getattr(kind, "__metadata__", ()))
    return next(filter(None, own), None) or next(filter(None, map(_description, get_args(kind))), "")


@cache
def split_docstring(function: Callable[..., Any]) -> tuple[str, Mapping[str, str]]:
    """A Google-style docstring without its section `Args:`, and that section's text for each argument."""
    text = inspect.getdoc(function) or ""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", text, re.MULTILINE)
    if section is None:
        return text, {}
    lines = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section[1], re.MULTILINE)
    rest = text[: section.start()] + text[section.end() :]
    return rest.strip(), {name: " ".join(line.split()) for name, line in lines}


def filter_settings(function: Callable[..., Any], settings: Settings) -> dict[str, Any]:
    """Those of the settings that the function takes."""
    return {key: settings[key] for key in settings_of(function) if key in settings}


@dataclass(frozen=True)
class Entry:
    """A registered function: what it is called, whose it is, and settings that have a name (`presets`).

    `quick`: settings for a cheap run, used by tests and quick benchmarks.
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
        """The function's docstring without its arguments, which `Setting.text` has."""
        return split_docstring(self.function)[0]

    def preset(self, name: Any) -> Settings:
        """The settings of a preset; none for None."""
        if name is None:
            return {}
        if name not in self.presets:
            hint = nearest(str(name), self.presets) if self.presets else "it has none"
            raise PatchlightError(f"'{self.name}' has no preset '{name}'; {hint}")
        return self.presets[name]


def make_decorator(
    registry: Registry[N], kind: Callable[Concatenate[str, Callable[..., Any], P], N]
) -> Callable[Concatenate[str, P], Callable[[F], F]]:
    """The decorator that registers a function as an entry of a kind; the entry's fields are its keywords."""

    def decorator(name: str, /, *args: P.args, **about: P.kwargs) -> Callable[[F], F]:
        def register(function: F) -> F:
            registry.add(kind(name, function, *args, **about))
            return function

        return register

    return decorator


def resolve_settings(
    owner: str, known: Mapping[str, Setting], start: Settings, given: Settings, also: Sequence[str] = ()
) -> dict[str, Any]:
    """The values of all `known` settings: defaults, `start` over them, and what was given, each checked.

    `also` are further words of the caller, of which a wrong setting may be a misspelling.
    """
    values = {key: setting.default for key, setting in known.items()} | dict(start)
    for key, value in given.items():
        if key not in known:
            raise PatchlightError(f"'{owner}' has no setting '{key}'; {_near_setting(key, known, also)}")
        values[key] = known[key].checked(value, owner)
    return values


def _near_setting(key: str, known: Mapping[str, Setting], also: Sequence[str]) -> str:
    """The nearest settings; where none is near, all that there are, in their own order."""
    hint = nearest(key, [*known, *also])
    return hint if hint.startswith("did") or not known else f"its settings: {', '.join(known)}"


Selection = str | Sequence[str] | Mapping[str, Mapping[str, Any] | str]
"""A name, a list of names, or a dict of names and settings, or of free labels and names."""


def resolve_all(
    asked: Selection | Sequence[R], settings: Settings, kind: type[R], noun: str, resolve: Callable[[str, Settings], R]
) -> list[R]:
    """What was asked, each resolved from its name and settings (`settings` belong to all), if it is not yet."""
    if isinstance(asked, list | tuple) and asked and all(isinstance(one, kind) for one in asked):
        return list(asked)
    wanted = f"give a name, a list of names, or a dict of names and settings, {{label: {{'{noun}': name, …}}}}"
    if isinstance(asked, str):
        return [resolve(asked, settings)]
    if isinstance(asked, Mapping) and all(isinstance(own, Mapping | str) for own in asked.values()):
        named = {label: {noun: own} if isinstance(own, str) else own for label, own in asked.items()}
        labelled = {label: {**settings, **own} for label, own in named.items()}
    elif isinstance(asked, Sequence) and all(isinstance(name, str) for name in asked):
        labelled = {str(name): dict(settings) for name in asked}
    else:
        raise PatchlightError(f"{noun} {asked!r} is no {noun}; {wanted}")
    if not labelled:
        raise PatchlightError(f"no {noun} was named; {wanted}")
    return [resolve(label, own) for label, own in labelled.items()]


def describe_type(kind: Any) -> str:
    """A type in words: "int >= 1 or 'all' or None"."""
    origin, inside = get_origin(kind), get_args(kind)
    if hasattr(kind, "__metadata__"):
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        limits = [m for field_info in kind.__metadata__ for m in getattr(field_info, "metadata", ())]
        told = [f"{sign} {getattr(m, name)}" for m in limits for name, sign in signs.items() if hasattr(m, name)]
        return " ".join([describe_type(kind.__origin__), " and ".join(told)]).strip()
    if origin is Literal:
        return " | ".join(map(repr, inside))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(describe_type, inside)))
    if origin is list:
        return f"list of {describe_type(inside[0])}"
    return "None" if kind is NoneType else kind.__name__ if isinstance(kind, type) else str(kind)


def match_names(names: Iterable[str], pattern: str) -> list[str]:
    """The names with `pattern` in them, or like it where it has wildcards.

    >>> matching(["deit_tiny", "vit_tiny"], "deit*"), matching(["deit_tiny", "vit_tiny"], "vit")
    (['deit_tiny'], ['vit_tiny'])
    """
    wanted = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    return sorted({name for name in names if fnmatch(name, wanted)})
