"""Recipes: TOML files that are checked against a schema; errors name the line.

Bundled recipes are in `recipes/`, in a folder for each command: `bench/`, `diffmask/` and `shapley/`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from patchlight.core.errors import PatchlightError, nearest

R = TypeVar("R", bound=BaseModel)
Keys = tuple[str, ...]
KINDS = ("bench", "diffmask", "shapley")
"""The commands that take recipes."""
DEEPEST = 16
"""The maximum depth of nested tables and lists; recipes need five."""
Int64 = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
PositiveInt = Annotated[int, Field(strict=True, ge=1)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Spec(BaseModel):
    """A part of a recipe that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class OpenSpec(BaseModel):
    """A part of a recipe whose other keys are settings."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    def changed(self, **changes: Any) -> Self:
        """A copy with other values."""
        try:
            return type(self).model_validate({**self.model_dump(), **changes})
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise PatchlightError(f"setting {key}={first['input']!r} is not valid: {first['msg']}") from error

    def __reduce__(self) -> Any:
        return type(self).model_validate, (self.model_dump(),)  # without cached values


def short_for(key: str) -> Any:
    """A validator that accepts a plain string as the value of a key."""
    return model_validator(mode="before")(lambda value: {key: value} if isinstance(value, str) else value)


def bundled_recipes(kind: str = "bench") -> dict[str, Traversable]:
    """The bundled recipes of the command `patchlight KIND`, by name."""
    files = (resources.files("patchlight") / "recipes" / kind).iterdir()
    return dict(sorted((file.name.removesuffix(".toml"), file) for file in files if file.name.endswith(".toml")))


def find_recipe(recipe: str | Path, kind: str = "bench") -> Traversable:
    """The file of a recipe: the name of a bundled one, or a path that ends with .toml or contains a slash."""
    bundled = bundled_recipes(kind)
    is_path = isinstance(recipe, Path) or recipe.endswith(".toml") or "/" in recipe or os.sep in recipe
    if not is_path and str(recipe) in bundled:
        return bundled[str(recipe)]
    if is_path and os.path.exists(recipe):
        return Path(recipe)
    name = Path(recipe).name.removesuffix(".toml")
    problem = f"no recipe at '{recipe}'" if is_path else f"no bundled recipe is called '{recipe}'"
    other = next((k for k in KINDS if k != kind and name in bundled_recipes(k)), None)
    if other is not None:
        raise PatchlightError(f"{problem} for `patchlight {kind}`; that is a recipe of `patchlight {other}`")
    raise PatchlightError(f"{problem}; {nearest(name, [*bundled, *(file.name for file in Path().glob('*.toml'))])}")


def read_text(recipe: str | Path, kind: str = "bench") -> str:
    """The text of a recipe: see `find_recipe`."""
    try:
        return find_recipe(recipe, kind).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PatchlightError(f"'{recipe}' cannot be read as a recipe: {reason}") from error


def parse_as(kind: type[R], text: str, where: str) -> R:
    """Parse TOML as a recipe of a kind; errors call the recipe `where`."""
    try:
        content = tomllib.loads(text)
        if _depth(content) > DEEPEST:
            raise RecursionError
    except ValueError as error:  # not TOML, or a number with thousands of digits
        line = re.search(r"at line (\d+)", str(error))
        number = line[1] if line else text.count("\n") + 1
        raise PatchlightError(f"{where}, line {number}: not TOML: {str(error).split(' (at')[0]}") from error
    except RecursionError as error:
        raise PatchlightError(f"{where} is nested too deeply; use at most {DEEPEST} levels") from error
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        # report a misspelt section rather than the missing one that results from it
        first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        keys = tuple(str(key) for key in first["loc"])
        raise at_line(text, where, keys, _describe_error(kind, first, keys)) from error


def at_line(text: str, where: str, keys: Keys, sentence: object) -> PatchlightError:
    """An error about a value, with the line of its key or of the table that contains it."""
    lines = key_lines(text)
    line = next((lines[keys[:end]] for end in range(len(keys), 0, -1) if keys[:end] in lines), 1)
    return PatchlightError(f"{where}, line {line}: {sentence}")


def _depth(value: Any) -> int:
    """The depth of nested tables and lists."""
    values = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(each) for each in values if isinstance(each, dict | list)), default=0)


def _describe_error(kind: type[BaseModel], error: Any, keys: Keys) -> str:
    name = ".".join(keys)
    if error["type"] == "missing":
        return f"'{name}' is missing"
    if error["type"] == "extra_forbidden":
        return f"there is no key '{name}'; {nearest(keys[-1], _sibling_keys(kind, keys))}"
    return f"'{name}': {error['msg']}, not {error['input']!r}"


def _sibling_keys(kind: type[BaseModel], keys: Keys) -> Iterable[str]:
    """The valid keys at the position of the last key."""
    for key in keys[:-1]:
        field = kind.model_fields.get(key)
        parts = () if field is None else (field.annotation, *get_args(field.annotation))
        kind = next((part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)), kind)
    return kind.model_fields


_HEADER = re.compile(r"^\s*\[\[?\s*(.+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_WORD = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")


def key_lines(text: str) -> dict[Keys, int]:
    """The line, from 1, of every table and key of a TOML text, except keys in inline tables."""
    lines: dict[Keys, int] = {}
    table: Keys = ()
    quotes_open = ""
    for number, line in enumerate(text.splitlines(), 1):
        if not quotes_open:
            key, header = _KEY.match(line), _HEADER.match(line)
            if key:
                lines.setdefault((*table, *_words(key.group(1))), number)
            elif header:
                table = _words(header.group(1))
                lines.setdefault(table, number)
        for quotes in ('"""', "'''"):
            if line.count(quotes) % 2 and quotes_open in ("", quotes):
                quotes_open = "" if quotes_open else quotes
    return lines


def _words(key: str) -> Keys:
    return tuple(word.strip("\"'") for word in _WORD.findall(key))
