"""The data of recipes and command-line options: kind, path and selection of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import torch
from pydantic import Field

from patchlight.core.errors import PatchlightError
from patchlight.core.recipes import PositiveInt, Spec
from patchlight.data import KINDS, Data, open_data, read_list


class DataSpec(Spec):
    """A data set and a selection of its images.

    Attributes:
        kind: The kind, as in `open_data`.
        path: The path, as in `open_data`.
        options: Options, as in `open_data`.
        list: A text file with one name or index per line. Default: all images in the order of the data set.
        skip: Skip this many of the first images.
        every: Then keep every n-th image.
        images: Use this many of the remaining images.
        pick: Pick them evenly "spread", the "first", or at "random" (seeded).
        stands_for: The kind in the recipe, if the user replaced it.
    """

    kind: str
    path: str = ""
    options: dict[str, Any] = Field(default_factory=dict)
    list: str | None = None
    skip: Annotated[int, Field(strict=True, ge=0)] = 0
    every: Annotated[int, Field(strict=True, ge=1)] = 1
    images: PositiveInt | None = None
    pick: Literal["spread", "first", "random"] = "spread"
    stands_for: str = ""

    @property
    def meaning(self) -> dict[str, Any]:
        """The options that are not paths."""
        hints = get_type_hints(KINDS.find(self.kind).function)
        return {name: value for name, value in self.options.items() if Path not in get_args(hints.get(name))}

    def at(self, place: str) -> DataSpec:
        """The data at `DIR` or `KIND:DIR`; the options and the list of images are dropped for another kind."""
        kind, path = kind_and_path(place)
        if kind == "" or KINDS.find(kind) is KINDS.lookup(self.kind):
            return self.model_copy(update={"path": path})
        return self.model_copy(
            update={"kind": kind, "path": path, "options": {}, "list": None, "stands_for": self.kind}
        )

    def with_list(self, file: str) -> DataSpec:
        """The same data with the images that a file lists, instead of this selection."""
        return self.model_copy(update={"list": file, "skip": 0, "every": 1, "images": None})

    def check_path(self) -> None:
        """Raise an error if the path is missing."""
        if not self.path and not KINDS.find(self.kind).made_up:
            raise PatchlightError(
                f"the recipe needs '{self.kind}' data; name its folder with --images FOLDER (and --data KIND)"
            )

    def open(self, **options: Any) -> Data:
        """Open the complete data set with these additional options."""
        self.check_path()
        return open_data(self.kind, self.path, **{**self.options, **options})

    def select_indices(self, names: Sequence[str], seed: int = 0) -> Sequence[int]:
        """The indices of the selected images among the `names` of the data set."""
        listed = range(len(names)) if self.list is None else read_list(self.list, names)
        eligible = listed[self.skip :: self.every]
        if not eligible:
            skipped = f" after the first {self.skip}" if listed else ""
            raise PatchlightError(f"there are no images in '{self.list or self.path}'{skipped}")
        count = len(eligible) if self.images is None else min(self.images, len(eligible))
        if self.pick == "random" and count < len(eligible):
            sampled = torch.randperm(len(eligible), generator=torch.Generator().manual_seed(seed))[:count]
            return [eligible[i] for i in sorted(sampled.tolist())]
        reach = len(eligible) if self.pick == "spread" else count
        return [eligible[i * reach // count] for i in range(count)]


def kind_and_path(place: str) -> tuple[str, str]:
    """`KIND:DIR` as kind and path; the kind of a plain `DIR` is empty."""
    kind, _, path = place.partition(":")
    return (kind, path) if KINDS.lookup(kind) is not None and ":" in place else ("", place)
