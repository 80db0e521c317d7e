"""`python -m tools.guard record|compare FOLDER`: whether a change of the engine left every number as it was.

`record` writes the maps of all methods, the values of all metrics, some output of the command line and a saved
attribution of small models to a folder; `compare` computes them again and prints each one that is not equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["COLUMNS"] = "200"  # the width of tables on the command line

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import patchlight as pl
from patchlight.cli import app
from patchlight.core.attribution_files import attribution_bytes
from patchlight.methods.base import METHODS
from patchlight.methods.requests import resolve
from patchlight.metrics.base import METRICS
from patchlight.zoo import pocket
from tests.families import build, images, randomise

Item = tuple[str, Tensor | str]
SCORED = "grad"
"""The method whose maps are measured, which works on every model."""
COMPOSED = ("decompx.skipplus", "genatt.rollout", "ixg.attnlrp", "ixg.plus.libra")
"""Methods with a composition or a rule, beside those of the registry."""


class Around(nn.Module):
    """A module of the user's own that holds a timm ViT."""

    def __init__(self) -> None:
        super().__init__()
        import timm

        small: dict[str, Any] = {"img_size": 64, "embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 0}
        self.body = timm.create_model("vit_tiny_patch16_224", **small)
        self.classifier = nn.Sequential(nn.Linear(48, 24), nn.GELU(), nn.Linear(24, 7))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.body(x))
        return logits


def _around() -> pl.Anatomy:
    return pl.wrap(randomise(Around()), name="around")


def _similar() -> pl.Anatomy:
    vit = build("hf-dinov2")
    return vit.ask(pl.heads.Similar(images(vit, 3, seed=7)))


MODELS: dict[str, Callable[[], pl.Anatomy]] = {
    "pocket": lambda: pl.load("pocket"),
    **{
        name: lambda name=name: build(name)  # type: ignore[misc]
        for name in ("vit", "deit-distilled", "swin", "eva02", "hf-vit", "hf-dinov2", "hf-clip", "torchvision")
    },
    "around": _around,
    "neurons": lambda: build("vit").ask(pl.heads.Neurons(2, [3, 17, 5])),
    "similar": _similar,
}
PHOTO = str(Path(pocket.__file__).parent / "photos")
COMMANDS = (
    "explain {photo} --model pocket --method genatt,tis --seed 0 --out {out}",
    "methods --model pocket",
    "metrics",
    "evaluate --images {photo} --model pocket --method genatt --metric deletion",
)


def items() -> Iterator[Item]:
    """Everything that is compared, by name."""
    for model, make in MODELS.items():
        torch.manual_seed(0)
        vit = make()
        batch = images(vit, 2)
        yield f"{model} logits", vit.logits(batch)
        yield f"{model} facts", repr((vit.grid, vit.prefix, vit.pooling, vit.heads, vit.depth, vit.width, vit.can_drop))
        for method in (*METHODS, *COMPOSED):
            yield from _map(f"{model} {method}", vit, batch, method)
        for metric in METRICS:
            yield from _value(f"{model} {metric}", vit, batch, metric)
    yield from _commands()


def _map(name: str, vit: pl.Anatomy, batch: Tensor, method: str) -> Iterator[Item]:
    try:
        att = pl.explain(vit, batch, method, progress=False, **resolve(method).method.quick)
    except pl.PatchlightError as error:
        yield name, str(error)
        return
    yield name, att.scores
    if method in ("genatt", SCORED):
        for file, data in attribution_bytes(att).items():
            yield f"{name} {file}", data.decode("latin-1")


def _value(name: str, vit: pl.Anatomy, batch: Tensor, metric: str) -> Iterator[Item]:
    height, width = vit.preprocess.size
    boxes = [[[2, 4, width // 2, height // 2 + 3]]] * len(batch)
    masks = torch.zeros(len(batch), height, width, dtype=torch.long)
    masks[:, 6 : height // 2, 4 : width // 2] = 1
    try:
        found = pl.evaluate(
            vit, batch, SCORED, metric, labels=[1, 2], boxes=boxes, masks=masks, progress=False, **METRICS[metric].quick
        )
    except pl.PatchlightError as error:
        yield name, str(error)
        return
    yield name, found.values
    if found.curve is not None:
        yield f"{name} curve", found.curve


def _commands() -> Iterator[Item]:
    photo = min(str(path) for path in Path(PHOTO).iterdir() if path.suffix in (".png", ".jpg"))
    for line in COMMANDS:
        with tempfile.TemporaryDirectory() as folder:
            words = [word.format(photo=photo, out=f"{folder}/out") for word in line.split()]
            result = CliRunner().invoke(app, words)
            text = result.output.replace(folder, "FOLDER").replace(PHOTO, "PHOTOS")
            yield f"patchlight {line}", f"exit code {result.exit_code}\n{text}"


def main() -> int:
    """Record or compare; the exit code is 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begun = time.perf_counter()
    found = dict(items())
    maps = {name: value.contiguous() for name, value in found.items() if isinstance(value, Tensor)}
    texts = {name: value for name, value in found.items() if isinstance(value, str)}
    print(f"{len(maps)} tensors and {len(texts)} texts in {time.perf_counter() - begun:.0f} s")
    if options.action == "record":
        options.folder.mkdir(parents=True, exist_ok=True)
        save_file(maps, options.folder / "maps.safetensors")
        (options.folder / "texts.json").write_text(json.dumps(texts, indent=1), encoding="utf-8")
        return 0
    before: dict[str, Any] = {
        **load_file(options.folder / "maps.safetensors"),
        **json.loads((options.folder / "texts.json").read_text(encoding="utf-8")),
    }
    lines = [f"{name}: {line}" for name in {**before, **found} if (line := _change(before.get(name), found.get(name)))]
    print("\n".join([*lines, f"{len(lines)} of {len(found)} differ"]))
    return 1 if lines else 0


def _change(old: Tensor | str | None, new: Tensor | str | None) -> str:
    """What changed; empty if both are equal to the bit."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return "" if isinstance(old, str) and old == new else f"was {old!r:.300}, is {new!r:.300}"
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"was {old.dtype} {list(old.shape)}, is {new.dtype} {list(new.shape)}"
    same = old.numpy().tobytes() == new.numpy().tobytes()
    return "" if same else f"differs by {float((old - new).abs().max()):.1e} (largest {float(old.abs().max()):.1e})"


if __name__ == "__main__":
    sys.exit(main())
