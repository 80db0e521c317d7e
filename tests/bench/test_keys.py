"""What a row depends on: each thing is changed in turn, and the row is made again; nothing changed, and it is kept."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from patchlight.bench.local import run
from patchlight.bench.plan import source_digest
from patchlight.bench.recipe import parse
from patchlight.methods.base import METHODS
from patchlight.zoo import pocket
from tests.bench.small import pictures
from tests.registries import restored

RECIPE = """\
name = "keys"
target = "prediction"
seed = 0
models.M = {model}
data = {{kind = "folder", path = "{images}", images = 2}}
methods.A = {method}
metrics.S = {metric}
"""
OWN = """\
from functools import partial

import torch

from patchlight.metrics.base import Measured, register_metric
from patchlight.metrics.base import METRICS
from patchlight.methods.base import Ask, own_passes

SCALE = 1.0
TABLE = {{"a": [1, 2]}}


def helper(x):
    return x + 1


class Helper:
    offset = 0.5

    def shift(self, x):
        return x - 2


def made(factor):
    def scaled(x, by=3.0):
        return x * factor * by

    return scaled


inner = made(2.0)


@own_passes("users-own", paper="none", agnostic=True)
def own(ask: Ask, power: float = 1.0) -> torch.Tensor:
    ramp = torch.arange(ask.vit.grid[0] * ask.vit.grid[1]).view(1, *ask.vit.grid).float()
    maps = inner(Helper().shift(helper(ramp)) * SCALE) + Helper.offset * len(TABLE["a"])
    return maps.expand(len(ask.images), -1, -1) if 1 in {{1, 2}} and "x" in {{"x", "y", "z"}} else maps


if "users-metric" in METRICS:
    METRICS.remove("users-metric")


@register_metric("users-metric", paper="none", higher_is_better=True)
def measured(given) -> Measured:
    return Measured(helper(given.maps.mean((1, 2))))
"""


class World:
    """A folder with a model, images and a user's own code, and the recipe that uses them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.images = pictures(folder / "images", 2)
        self.parts = {"model": '"pocket"', "method": '"genatt"', "metric": '{metric = "sparseness"}'}
        self.seed, self.patch = 0, pytest.MonkeyPatch()

    def run(self) -> tuple[int, int]:
        """Values that were kept, and all there are."""
        text = RECIPE.format(images=self.images.as_posix(), **self.parts).replace("seed = 0", f"seed = {self.seed}")
        summary = run(parse(text), self.folder / "run")
        assert not summary.failures, summary.failures
        return summary.before, summary.values

    def model(self, **about: str) -> None:
        self.parts["model"] = "{" + ", ".join(f'{key} = "{value}"' for key, value in about.items()) + "}"


@contextmanager
def world(folder: Path) -> Iterator[World]:
    made = World(folder)
    with restored():
        try:
            yield made
        finally:
            made.patch.undo()
            source_digest.cache_clear()


def nudged(path: Path, name: str = "", by: float = 1e-3) -> None:
    """One number of a safetensors file is moved a little."""
    tensors = load_file(path)
    key = name or next(k for k, v in tensors.items() if v.is_floating_point() and v.numel() > 8)
    tensors[key].view(-1)[-1] += by
    save_file(tensors, path)


def own_code(text: str) -> None:
    """Register a user's own method and metric, as a notebook's cell would."""
    if "users-own" in METHODS:
        METHODS.remove("users-own")
    module = ModuleType("users_own")
    exec(compile(text, "<cell>", "exec"), module.__dict__)


def hf_folder(w: World) -> Path:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=3, **size))
    folder = w.folder / "hf"
    model.save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    w.model(name=f"hf:{folder.as_posix()}")
    return folder


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    changed = re.sub(old, new, text)
    assert changed != text, f"'{old}' is not in {path.name}"
    path.write_text(changed, encoding="utf-8")


def weights_file(w: World) -> Callable[[], None]:
    path = w.folder / "weights.safetensors"
    save_file({k: v.float() for k, v in load_file(pocket.WEIGHTS).items()}, path)
    w.model(name="pocket", weights=path.as_posix())
    return lambda: nudged(path)


def hf_weights(w: World) -> Callable[[], None]:
    folder = hf_folder(w)
    return lambda: nudged(folder / "model.safetensors")


def hf_config(w: World) -> Callable[[], None]:
    folder = hf_folder(w)
    return lambda: edited(folder / "config.json", r'"layer_norm_eps": [^,]+', '"layer_norm_eps": 0.01')


def hf_processor(w: World) -> Callable[[], None]:
    folder = hf_folder(w)
    return lambda: edited(folder / "preprocessor_config.json", r'"image_std": \[\s*0\.5', '"image_std": [0.25')


def bundled_model(w: World) -> Callable[[], None]:
    copy = w.folder / "pocket.safetensors"
    shutil.copy(pocket.WEIGHTS, copy)
    w.patch.setattr(pocket, "WEIGHTS", copy)
    return lambda: nudged(copy, by=0.125)


def explainer(w: World) -> Callable[[], None]:
    from patchlight.trained.diffmask import DiffMask

    folder = w.folder / "gates"
    shutil.copytree(DiffMask.shipped, folder)
    w.parts["method"] = f'{{method = "diffmask", explainer = "{folder.as_posix()}"}}'
    return lambda: nudged(folder / "gates.safetensors", "beta")


def bundled_explainer(w: World) -> Callable[[], None]:
    from patchlight.trained.diffmask import DiffMask

    folder = w.folder / "gates"
    shutil.copytree(DiffMask.shipped, folder)
    w.parts["method"] = '"diffmask"'
    w.patch.setattr(DiffMask, "shipped", folder)
    return lambda: nudged(folder / "gates.safetensors", "beta")


def users(old: str, new: str) -> Callable[[World], Callable[[], None]]:
    def begin(w: World) -> Callable[[], None]:
        text = OWN.format()
        assert old in text
        own_code(text)
        w.parts |= {"method": '"users-own"', "metric": '{metric = "users-metric"}'}
        return lambda: own_code(text.replace(old, new))

    return begin


def source(name: str, old: str, new: str) -> Callable[[World], Callable[[], None]]:
    """A file of Patchlight's own."""

    def begin(w: World) -> Callable[[], None]:
        plan = sys.modules["patchlight.bench.plan"]
        home = Path(str(plan.__file__)).parents[1]
        copy = w.folder / "patchlight"
        shutil.copytree(home, copy, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors", "*.jpg"))
        w.patch.setattr(plan, "__file__", str(copy / "bench" / "plan.py"))
        forget: Any = plan.source_digest.cache_clear  # type: ignore[attr-defined]
        forget()

        def change() -> None:
            edited(copy / name, old, new)
            forget()

        return change

    return begin


def picture(w: World) -> Callable[[], None]:
    def change() -> None:
        for path in w.images.iterdir():
            with Image.open(path) as image:
                image.putpixel((0, 0), (1, 2, 3))
                image.save(path)

    return change


def one_picture(w: World) -> Callable[[], None]:
    def change() -> None:
        with Image.open(w.images / "1.png") as image:
            image.putpixel((0, 0), (1, 2, 3))
            image.save(w.images / "1.png")

    return change


def part(key: str, value: str) -> Callable[[World], Callable[[], None]]:
    return lambda w: lambda: w.parts.update({key: value})


def seed(w: World) -> Callable[[], None]:
    return lambda: setattr(w, "seed", 1)


CHANGES: dict[str, Callable[[World], Callable[[], None]]] = {
    "the weights file": weights_file,
    "the weights in a transformers folder": hf_weights,
    "the configuration in a transformers folder": hf_config,
    "the processor in a transformers folder": hf_processor,
    "the bundled model": bundled_model,
    "an explainer": explainer,
    "the bundled explainer": bundled_explainer,
    "a users method": users("x + 1", "x + 2"),
    "a constant of a users method": users("SCALE = 1.0", "SCALE = 2.0"),
    "a table of a users method": users('"a": [1, 2]', '"a": [1, 2, 3]'),
    "a closure of a users method": users("made(2.0)", "made(4.0)"),
    "a default of a users method": users("by=3.0", "by=5.0"),
    "a class of a users method": users("x - 2", "x - 3"),
    "a field of a class of a users method": users("offset = 0.5", "offset = 0.75"),
    "a users metric": users("given.maps.mean((1, 2))", "given.maps.amax((1, 2))"),
    "the choice of targets": source("bench/unit.py", r"index\[:, 0\]", "index[:, -1]"),
    "the code of a method": source("methods/attention.py", "relu", "abs"),
    "the pictures": picture,
    "a setting of the method": part("method", '{method = "genatt", start = 2}'),
    "the method": part("method", '"rawatt"'),
    "a setting of the metric": part("metric", '{metric = "sparseness", preset = "quantus"}'),
    "the preprocessing": part("model", '{name = "pocket", preprocess = {crop_pct = 0.5}}'),
    "the seed": seed,
}


def changed(name: str, folder: Path) -> None:
    """Assert that rows are kept while nothing changes, and made again once this has."""
    with world(folder) as w:
        change = CHANGES[name](w)
        assert w.run() == (0, 2)
        assert w.run() == (2, 2), "nothing has changed"
        change()
        assert w.run() == (0, 2), f"{name} has changed, and the row was kept"
        assert w.run() == (2, 2), "nothing has changed since"


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_dependency_makes_a_new_row(name: str, tmp_path: Path) -> None:
    changed(name, tmp_path)


@pytest.mark.parametrize(("name", "word"), [("tables", "tied"), ("html", "leader"), ("statistics", "tied")])
def test_the_reports_own_code_is_no_dependency(tmp_path: Path, name: str, word: str) -> None:
    with world(tmp_path) as w:
        change = source(f"bench/{name}.py", word, f"{word}s")(w)
        assert w.run() == (0, 2)
        change()
        assert w.run() == (2, 2)


WIDE = """\
name = "keys"
target = "prediction"
seed = 0
models.M = {model}
models.N = {{name = "pocket", preprocess = {{crop_pct = 0.5}}}}
data = {{kind = "files", path = "{images}"}}
methods.A = {method}
methods.B = "rawatt"
metrics.S = {metric}
metrics.T = {{metric = "sparseness", shift = "none"}}
"""
TOUCHES: dict[str, tuple[Callable[[World], Callable[[], None]], Callable[[Any], bool]]] = {
    "the weights file of one model": (weights_file, lambda row: row["model"] == "M"),
    "the bundled model": (bundled_model, lambda row: True),
    "a users method": (users("SCALE = 1.0", "SCALE = 2.0"), lambda row: row["method"] == "A"),
    "what a users method and metric share": (
        users("x + 1", "x + 2"),
        lambda row: row["method"] == "A" or row["metric"] == "S",
    ),
    "a users metric": (
        users("given.maps.mean((1, 2))", "given.maps.amax((1, 2))"),
        lambda row: row["metric"] == "S",
    ),
    "the bundled explainer": (bundled_explainer, lambda row: row["method"] == "A"),
    "a setting of a method": (part("method", '{method = "genatt", start = 2}'), lambda row: row["method"] == "A"),
    "a setting of a metric": (
        part("metric", '{metric = "sparseness", preset = "quantus"}'),
        lambda row: row["metric"] == "S",
    ),
    "the choice of targets": (source("bench/unit.py", r"index\[:, 0\]", "index[:, -1]"), lambda row: True),
    "the code of a method": (source("methods/attention.py", "relu", "abs"), lambda row: True),
    "one picture": (one_picture, lambda row: row["image"] == "1.png"),
    "the seed": (seed, lambda row: True),
    "nothing": (lambda w: lambda: None, lambda row: False),
}


@pytest.mark.parametrize("name", TOUCHES)
def test_exactly_what_depends_on_it_is_measured_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from patchlight.bench import unit as unit_room

    measured: set[tuple[str, str, str, str]] = set()
    original = unit_room._measured  # what is measured is found out where it is, not from what a summary says

    def listened(work: Any, *args: Any) -> Any:
        for row in original(work, *args):
            measured.add((row.model, row.image, row.method, row.metric))
            yield row

    monkeypatch.setattr(unit_room, "_measured", listened)
    change, depends = TOUCHES[name]
    with world(tmp_path) as w:
        begin = change(w)

        def run_wide() -> None:
            measured.clear()
            made = parse(WIDE.format(images=w.images.as_posix(), **w.parts).replace("seed = 0", f"seed = {w.seed}"))
            assert not run(made, tmp_path / "run").failures

        run_wide()
        every = set(measured)
        assert len(every) == 2 * 2 * 2 * 2
        begin()
        run_wide()
        named = ("model", "image", "method", "metric")
        assert measured == {row for row in every if depends(dict(zip(named, row, strict=True)))}


def test_a_key_is_the_same_in_another_process(tmp_path: Path) -> None:
    """Sets have another order there."""
    images = pictures(tmp_path / "images", 1)
    text = RECIPE.format(
        images=images.as_posix(), model='"pocket"', method='"users-own"', metric='{metric = "users-metric"}'
    )
    script = (
        "import sys\nfrom tests.bench.test_keys import OWN, own_code\nown_code(OWN.format())\n"
        "from patchlight.bench.plan import plan\nfrom patchlight.bench.recipe import parse\n"
        "print(plan(parse(sys.argv[1])).groups[0].key)"
    )
    keys = [
        subprocess.run(
            [sys.executable, "-c", script, text],
            check=True,
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": number},
        ).stdout
        for number in ("1", "2")
    ]
    assert keys[0] == keys[1]
    assert len(keys[0].strip()) == 16
