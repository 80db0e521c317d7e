"""Removes this machine's paths from text and settings, for reports and exports."""

from __future__ import annotations

import itertools
import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from patchlight.bench.manifest import Manifest
from patchlight.bench.recipe import Recipe
from patchlight.bench.rows import Maps
from patchlight.core.paths import is_absolute, last_name, remove_folders


@dataclass(frozen=True)
class PathRemover:
    """Replaces every absolute path of a run by its last name."""

    manifest: Manifest

    @cached_property
    def paths(self) -> list[str]:
        """Paths of data and models, the working directory and the home directory, longest first."""
        recipe = self.manifest.resolved
        paths = [recipe.data.path, recipe.data.list or "", os.getcwd(), os.path.expanduser("~")]
        for model in recipe.models.values():
            paths += [model.weights or "", model.labels or "", *model.similar_to]
        every = {*paths, *(os.path.abspath(path) for path in paths if path)}
        return sorted((path for path in every if is_absolute(path) and len(path) > 1), key=len, reverse=True)

    def text(self, text: str) -> str:
        """Text without absolute paths."""
        return remove_folders(text, self.paths)

    def value(self, value: Any) -> Any:
        """Settings without absolute paths."""
        if isinstance(value, Mapping):
            return {key: self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        if not isinstance(value, str):
            return value
        return last_name(value) if is_absolute(value) else self.text(value)

    @cached_property
    def models(self) -> dict[str, str]:
        """New labels of the models, whose labels may be paths."""
        return _distinct(list(self.manifest.resolved.models), self.value)

    @cached_property
    def images(self) -> dict[str, str]:
        """New names of the images: absolute names lose the folder that they have in common."""
        names = self.manifest.images.names
        folders = [posixpath.dirname(name) for name in names if name.startswith("/")]
        common = posixpath.commonpath(folders).rstrip("/") + "/" if folders else "/"
        return _distinct(names, lambda name: name.removeprefix(common))

    def clean_manifest(self) -> Manifest:
        """The manifest without absolute paths."""
        manifest = self.manifest
        recipe = manifest.resolved.model_dump(mode="json")
        clean = {key: self.value(item) for key, item in recipe.items() if key not in ("models", "published")}
        clean["models"] = {self.models[label]: self.value(item) for label, item in recipe["models"].items()}
        clean["published"] = {self.models.get(label, label): item for label, item in recipe["published"].items()}
        groups = (group.model_copy(update={"model": self.models[group.model]}) for group in manifest.groups)
        return manifest.model_copy(
            update={
                "resolved": Recipe.model_validate(clean),
                "recipe": self.text(manifest.recipe),
                "notes": tuple(map(self.text, manifest.notes)),
                "groups": tuple(groups),
                "images": replace(manifest.images, names=tuple(self.images.values())),
                "models": {self.models[label]: digest for label, digest in manifest.models.items()},
            }
        )

    def clean_maps(self, maps: Maps) -> Maps:
        """Maps without absolute paths."""
        return replace(maps, images=[self.images[name] for name in maps.images], model=self.models[maps.model])

    def clean_table(self, table: Any) -> Any:
        """Rows without absolute paths."""
        for column, change in (
            ("model", self.models.__getitem__),
            ("image", lambda name: self.images.get(name, name)),
            ("note", self.text),
            ("error", self.text),
        ):
            words = pc.unique(table[column])
            changed = pa.array([None if word is None else change(word) for word in words.to_pylist()], pa.string())
            values = changed.take(pc.index_in(table[column].combine_chunks(), words))
            table = table.set_column(table.column_names.index(column), column, values)
        return table


def _distinct(names: Sequence[str], change: Callable[[str], str]) -> dict[str, str]:
    """Every name changed; a duplicate gets a number."""
    taken: dict[str, str] = {}
    for name in names:
        changed = change(name) or "unnamed"
        candidates = itertools.chain([changed], (f"{changed} ({number})" for number in itertools.count(2)))
        taken[next(candidate for candidate in candidates if candidate not in taken)] = name
    return {name: changed for changed, name in taken.items()}
