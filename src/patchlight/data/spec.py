"""The images as options and recipes name them: a kind, a place, and which of them."""

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
    """The images: kind, path and options for `open_data`, and which of them.

    `list` is a text file of names or indices, one per line; without it, all images in the data set's own order. The
    other keys choose among these: the first `skip` are left out, then every `every`-th is taken, and of the rest
    `images` are picked `spread` evenly, `first`, or at `random` (seeded). `stands_for` is the recipe's kind in whose
    place the user gave this one.
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
        """The options that are no paths: not where the data are, but what is read of them."""
        hints = get_type_hints(KINDS.find(self.kind).function)
        return {name: value for name, value in self.options.items() if Path not in get_args(hints.get(name))}

    def at(self, given: str) -> DataSpec:
        """The data at `DIR` or `KIND:DIR`. Another kind has neither these options nor this list of images."""
        kind, path = kind_and_path(given)
        if kind == "" or KINDS.find(kind) is KINDS.lookup(self.kind):
            return self.model_copy(update={"path": path})
        return self.model_copy(
            update={"kind": kind, "path": path, "options": {}, "list": None, "stands_for": self.kind}
        )

    def with_list(self, file: str) -> DataSpec:
        """The images that a file lists, in place of those this chooses."""
        return self.model_copy(update={"list": file, "skip": 0, "every": 1, "images": None})

    def check_given(self) -> None:
        """Refuse data of which nobody has said where they are."""
        if not self.path and not KINDS.find(self.kind).made_up:
            raise PatchlightError(
                f"the recipe needs '{self.kind}' data; name its folder with --images FOLDER (and --data KIND)"
            )

    def open(self, **options: Any) -> Data:
        """The whole data set, with these options besides its own."""
        self.check_given()
        return open_data(self.kind, self.path, **{**self.options, **options})

    def chosen(self, names: Sequence[str], seed: int = 0) -> Sequence[int]:
        """The indices of the images to use, out of all `names` of the data set.

        All that `list`, `skip` and `every` leave are used where `images` is not given, or is larger.
        """
        every = range(len(names)) if self.list is None else read_list(self.list, names)
        listed = every[self.skip :: self.every]
        left = len(listed)
        if left < 1:
            skipped = f" behind the first {self.skip}" if every else ""
            raise PatchlightError(f"there are no images in '{self.list or self.path}'{skipped}")
        count = left if self.images is None else min(self.images, left)
        if self.pick == "random" and count < left:
            drawn = torch.randperm(left, generator=torch.Generator().manual_seed(seed))[:count]
            return [listed[i] for i in sorted(drawn.tolist())]
        reach = left if self.pick == "spread" else count
        return [listed[i * reach // count] for i in range(count)]


def kind_and_path(given: str) -> tuple[str, str]:
    """`KIND:DIR` as kind and path; the kind of a plain `DIR` is empty."""
    kind, _, path = given.partition(":")
    return (kind, path) if KINDS.lookup(kind) is not None and ":" in given else ("", given)
