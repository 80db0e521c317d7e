"""Runs that several modules read: the small recipe, and one in two shards, whole, and with another method."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchlight.bench import local
from patchlight.bench.local import RunOptions, run
from patchlight.bench.plan import Shard
from patchlight.bench.recipe import Recipe, parse
from tests.bench.small import pictures, recipe

SHARED = """\
name = "shared"
batch_size = 2
models.Pocket = "pocket"
data = {{kind = "folder", path = "{path}"}}

[methods]
GenAtt = "genatt"
Random = "random"
{more}
[metrics]
Ins = {{metric = "insertion", steps = 2}}
Del = {{metric = "deletion", steps = 2, scale = 100, digits = 1}}

[published.Pocket]
metrics = ["Ins", "Del"]
GenAtt = [0.5, nan]
"""
MORE = 'Rollout = {method = "rollout", fusion = "max"}\n'


class Shared:
    """Folders of runs of the recipe `text`: `first` and `second` half, `whole`, and with another `method`."""

    def __init__(self, folder: Path) -> None:
        self.images = pictures(folder / "jane doe" / "pictures")
        self.first, self.second, self.whole, self.method = (folder / name for name in "abcd")

    def text(self, more: str = "", images: Path | None = None) -> str:
        return SHARED.format(path=(images or self.images).as_posix(), more=more)

    def recipe(self, more: str = "", images: Path | None = None) -> Recipe:
        return parse(self.text(more, images))


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six small pictures; never write beside them."""
    return pictures(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the small recipe that nothing disturbed; never write into it."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(recipe(images), out)
    return out


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    made = Shared(tmp_path_factory.mktemp("shared"))
    with pytest.MonkeyPatch.context() as patch:
        for out, shard, size in ((made.first, Shard(1, 2), 1), (made.second, Shard(2, 2), 2)):
            patch.setattr(local, "MOST", size)  # units of the two are cut differently
            run(made.recipe(), out, RunOptions(text=made.text(), shard=shard))
        run(made.recipe(), made.whole, RunOptions(text=made.text()))
        other = made.text(MORE).replace('Random = "random"\n', "")
        run(parse(other), made.method, RunOptions(text=other))
    return made
