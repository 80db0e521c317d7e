"""What a row depends on: each thing is changed in turn, and the row is made again; nothing changed, and it is kept."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from patchlight.bench import unit as unit_room
from patchlight.bench.local import run
from patchlight.bench.plan import plan, source_digest
from patchlight.bench.recipe import parse
from patchlight.bench.rows import ResultRow
from patchlight.methods.base import METHODS
from patchlight.zoo import pocket
from tests.bench.small import pictures
from tests.registries import restored

RECIPE = """\
name = "keys"
target = "prediction"
seed = {seed}
models.M = {model}
models.N = {{name = "pocket", preprocess = {{crop_pct = 0.5}}}}
data = {{kind = "files", path = "{images}"}}
methods.A = {method}
methods.B = "rawatt"
metrics.S = {metric}
metrics.T = {{metric = "sparseness", shift = "none"}}
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


@own_passes("users-own", paper="none", ignores_class=True)
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


Depends = Callable[[Mapping[str, str]], bool]


def everything(row: Mapping[str, str]) -> bool:
    return True


def of_model(row: Mapping[str, str]) -> bool:
    return row["model"] == "M"


def of_method(row: Mapping[str, str]) -> bool:
    return row["method"] == "A"


def of_metric(row: Mapping[str, str]) -> bool:
    return row["metric"] == "S"


def of_both(row: Mapping[str, str]) -> bool:
    return of_method(row) or of_metric(row)


CHANGES: dict[str, tuple[Callable[[World], Callable[[], None]], Depends]] = {
    "the weights file": (weights_file, of_model),
    "the weights in a transformers folder": (hf_weights, of_model),
    "the configuration in a transformers folder": (hf_config, of_model),
    "the processor in a transformers folder": (hf_processor, of_model),
    "the bundled model": (bundled_model, everything),
    "an explainer": (explainer, of_method),
    "the bundled explainer": (bundled_explainer, of_method),
    "what a users method and metric share": (users("x + 1", "x + 2"), of_both),
    "a constant of a users method": (users("SCALE = 1.0", "SCALE = 2.0"), of_method),
    "a table of a users method": (users('"a": [1, 2]', '"a": [1, 2, 3]'), of_method),
    "a closure of a users method": (users("made(2.0)", "made(4.0)"), of_method),
    "a default of a users method": (users("by=3.0", "by=5.0"), of_method),
    "a class of a users method": (users("x - 2", "x - 3"), of_method),
    "a field of a class of a users method": (users("offset = 0.5", "offset = 0.75"), of_method),
    "a users metric": (users("given.maps.mean((1, 2))", "given.maps.amax((1, 2))"), of_metric),
    "the choice of targets": (source("study/run.py", r"index\[:, 0\]", "index[:, -1]"), everything),
    "the code of a method": (source("methods/attention.py", "relu", "abs"), everything),
    "the code of a unit": (source("bench/unit.py", "Resources", "Resource"), everything),
    "the code of the tables": (source("bench/tables.py", "tied", "tieds"), lambda row: False),
    "the code of the report": (source("bench/html.py", "leader", "leaders"), lambda row: False),
    "the code of the statistics": (source("bench/statistics.py", "ties and", "ties or"), lambda row: False),
    "one picture": (one_picture, lambda row: row["image"] == "1.png"),
    "a setting of the method": (part("method", '{method = "genatt", start = 2}'), of_method),
    "the method": (part("method", '"rollout"'), of_method),
    "a setting of the metric": (part("metric", '{metric = "sparseness", preset = "quantus"}'), of_metric),
    "the preprocessing": (part("model", '{name = "pocket", preprocess = {crop_pct = 0.25}}'), of_model),
    "the seed": (seed, everything),
    "nothing": (lambda w: lambda: None, lambda row: False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_exactly_what_depends_on_it_is_measured_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: set[tuple[str, str, str, str]] = set()

    def listened(**fields: Any) -> ResultRow:  # what is measured is seen where it is, not in a summary
        measured.add((fields["model"], fields["image"], fields["method"], fields["metric"]))
        return ResultRow(**fields)

    monkeypatch.setattr(unit_room, "ResultRow", listened)
    begin, depends = CHANGES[name]
    with world(tmp_path) as w:
        change = begin(w)

        def run_now() -> set[tuple[str, str, str, str]]:
            measured.clear()
            recipe = parse(RECIPE.format(images=w.images.as_posix(), seed=w.seed, **w.parts))
            assert not run(recipe, tmp_path / "run").failures
            return set(measured)

        every = run_now()
        assert len(every) == 2 * 2 * 2 * 2
        change()
        named = ("model", "image", "method", "metric")
        assert run_now() == {row for row in every if depends(dict(zip(named, row, strict=True)))}


def test_a_key_is_the_same_in_another_process(tmp_path: Path) -> None:
    """Sets have another order there."""
    script = (
        "import sys\nfrom tests.bench.test_keys import OWN, own_code\nown_code(OWN.format())\n"
        "from patchlight.bench.plan import plan\nfrom patchlight.bench.recipe import parse\n"
        "print(plan(parse(sys.argv[1])).groups[0].key)"
    )
    parts = {"model": '"pocket"', "method": '"users-own"', "metric": '{metric = "users-metric"}'}
    with world(tmp_path) as w:
        own_code(OWN.format())
        text = RECIPE.format(images=w.images.as_posix(), seed=0, **parts)
        key = plan(parse(text)).groups[0].key
    done = subprocess.run(
        [sys.executable, "-c", script, text],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )
    assert done.stdout.strip() == key
    assert len(key) == 16
