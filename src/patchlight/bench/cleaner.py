"""Words and settings of a run without the paths of the machine it was made on."""

from __future__ import annotations

import itertools
import ntpath
import os
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from patchlight.bench.manifest import Manifest
from patchlight.bench.recipe import Recipe
from patchlight.bench.rows import Maps

QUOTED = re.compile(
    r"""(?P<begin>(?P<quote>['"])(?:\w\w+:)?)(?P<path>(?:/(?!/)|~|[A-Za-z]:[\\/]|\\\\)[^'"\n]*)(?P=quote)"""
)
"""A path of a machine in quotes, in which it may have spaces."""
PLAIN = re.compile(r"""(?<![\w./\\~])(?:(?:file:/*|~)?/[^\s'"/,;:()]+(?=/)|[A-Za-z]:\\|\\\\\w)[^\s'",;()]*""")
"""One among words, of two names at least."""


@dataclass(frozen=True)
class Cleaner:
    """Takes the paths of this machine out of words: of a path, its last name stays."""

    manifest: Manifest

    @cached_property
    def paths(self) -> list[str]:
        """Paths the run is known to have, of data and models, and those of this process; the longest first."""
        recipe = self.manifest.resolved
        given = [recipe.data.path, recipe.data.list or "", os.getcwd(), os.path.expanduser("~")]
        for model in recipe.models.values():
            given += [model.weights or "", model.labels or "", *model.similar_to]
        every = {*given, *(os.path.abspath(path) for path in given if path)}
        return sorted((path for path in every if absolute(path) and len(path) > 1), key=len, reverse=True)

    def words(self, text: str) -> str:
        """Words without paths of this machine."""
        for path in self.paths:
            text = re.sub(re.escape(path) + r"""(?![\w-])[^\s'",;:()]*""", lambda found: last(found[0]), text)
        text = QUOTED.sub(lambda found: f"{found['begin']}{last(found['path'])}{found['quote']}", text)
        return PLAIN.sub(lambda found: last(found[0]), text)

    def value(self, value: Any) -> Any:
        """Settings without such paths."""
        if isinstance(value, Mapping):
            return {key: self.value(own) for key, own in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(own) for own in value]
        if not isinstance(value, str):
            return value
        return last(value) if absolute(value) else self.words(value)

    @cached_property
    def models(self) -> dict[str, str]:
        """The labels of models, which may be their paths."""
        return _unlike(list(self.manifest.resolved.models), self.value)

    @cached_property
    def images(self) -> dict[str, str]:
        """The names of images: of paths, what is behind the folder they have in common."""
        names = self.manifest.images.names
        folders = [posixpath.dirname(name) for name in names if name.startswith("/")]
        common = posixpath.commonpath(folders).rstrip("/") + "/" if folders else "/"
        return _unlike(names, lambda name: name.removeprefix(common))

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe as it was run."""
        given = self.manifest.resolved.model_dump(mode="json")
        made = {key: self.value(own) for key, own in given.items() if key not in ("models", "published")}
        made["models"] = {self.models[label]: self.value(own) for label, own in given["models"].items()}
        made["published"] = {self.models.get(label, label): own for label, own in given["published"].items()}
        return Recipe.model_validate(made)

    def cleaned(self) -> Manifest:
        """The manifest without such paths."""
        told = self.manifest
        groups = (group.model_copy(update={"model": self.models[group.model]}) for group in told.groups)
        names = tuple(self.images.values())
        return told.model_copy(
            update={
                "resolved": self.recipe,
                "recipe": self.words(told.recipe),
                "notes": tuple(map(self.words, told.notes)),
                "groups": tuple(groups),
                "images": replace(told.images, names=names),
                "models": {self.models[label]: digest for label, digest in told.models.items()},
            }
        )

    def maps(self, maps: Maps) -> Maps:
        """Maps without such paths."""
        return replace(maps, images=[self.images[name] for name in maps.images], model=self.models[maps.model])

    def table(self, table: Any) -> Any:
        """Rows without such paths."""
        for column, change in (
            ("model", self.models.__getitem__),
            ("image", lambda name: self.images.get(name, name)),
            ("note", self.words),
            ("error", self.words),
        ):
            known = pc.unique(table[column])
            changed = pa.array([None if word is None else change(word) for word in known.to_pylist()], pa.string())
            own = changed.take(pc.index_in(table[column].combine_chunks(), known))
            table = table.set_column(table.column_names.index(column), column, own)
        return table


def absolute(path: str) -> bool:
    """Whether a path begins at the root of a machine, at somebody's home, or above the folder it is used in."""
    return path.startswith(("/", "~", "..")) or ntpath.isabs(path) or bool(ntpath.splitdrive(path)[0])


def last(path: str) -> str:
    """The last name of a path.

    >>> last("/home/jane/data/val/"), last("C:\\\\data\\\\val")
    ('val', 'val')
    """
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1].lstrip("~")


def _unlike(names: Sequence[str], change: Callable[[str], str]) -> dict[str, str]:
    """Every name changed; one that would then be another's gets a number."""
    taken: set[str] = set()
    found: dict[str, str] = {}
    for name in names:
        changed = own = change(name) or "unnamed"
        for number in itertools.count(2):
            if own not in taken:
                break
            own = f"{changed} ({number})"
        taken.add(own)
        found[name] = own
    return found
