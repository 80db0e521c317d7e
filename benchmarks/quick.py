"""Times every recipe with `--quick --limit 4` and small models: wall-clock and CPU seconds.

`python -m benchmarks.quick DATA [RECIPE…]`: DATA holds `imagenet-val-1000`, `pets-370` and `weights`; recipes go by
name, and all are run by default.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.common import record
from patchlight.core.recipes import bundled_recipes

MASKS = ("pets", "imagenet-s", "imagenet-segmentation")


def main() -> None:
    data, names = Path(sys.argv[1]), sys.argv[2:]
    rows = []
    for name, file in bundled_recipes("bench").items():
        recipe = tomllib.loads(file.read_text(encoding="utf-8"))
        if not names or name in names:
            with tempfile.TemporaryDirectory() as folder:
                options = stand_ins(recipe, data) + explainer(recipe, data, Path(folder))
                wall, cpu = timed("bench", "run", name, "--out", f"{folder}/run", "--quick", "--limit", "4", *options)
            rows.append([name, str(options.count("--model")), f"{wall:.0f}", f"{cpu:.0f}"])
            print(rows[-1], flush=True)
    if not names:
        record("quick", "Quick recipes", ["recipe", "models", "s", "CPU s"], rows, "python -m benchmarks.quick DATA")


def stand_ins(recipe: dict[str, Any], data: Path) -> list[str]:
    """At most two models, the first by `vit_tiny` (a lone DeiT by `deit_tiny`), and data with what the recipe reads."""
    first, *more = recipe["models"]
    name = recipe["models"][first]
    lone = not more and str(name if isinstance(name, str) else name["name"]).startswith("deit")
    small = ["deit_tiny_patch16_224"] if lone else ["vit_tiny_patch16_224", "deit_tiny_patch16_224"]
    options = []
    for label, model in zip([first, *more], small, strict=False):
        options += [
            "--model",
            f"{label}={model}",
            "--weights",
            str(data / "weights" / f"{model}_imagenet1k.safetensors"),
        ]
    if recipe["data"]["kind"] in MASKS:
        return [*options, "--images", f"{data / 'pets-370'}", "--data", "pets", "--target", "prediction"]
    return [*options, "--images", f"{data / 'imagenet-val-1000'}", "--data", "imagenet"]


def explainer(recipe: dict[str, Any], data: Path, folder: Path) -> list[str]:
    """Gates trained for two steps, for recipes with `diffmask`; not part of the time."""
    named = {label: m if isinstance(m, str) else m["method"] for label, m in recipe["methods"].items()}
    label = next((label for label, method in named.items() if method == "diffmask"), None)
    if label is None:
        return []
    model = "vit_tiny_patch16_224"
    weights = data / "weights" / f"{model}_imagenet1k.safetensors"
    images = data / "imagenet-val-1000" / "images"
    steps = ["--set", "steps=2", "--set", "batch_size=4"]
    timed(
        "diffmask",
        "train",
        "--out",
        folder / "gates",
        "--model",
        model,
        "--weights",
        weights,
        "--images",
        images,
        *steps,
    )
    return ["--set", f"{label}.explainer={folder / 'gates'}"]


def timed(*arguments: str | Path) -> tuple[float, float]:
    """Wall-clock and CPU seconds of a command, which must succeed."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([Path(sys.executable).with_name("patchlight"), *arguments], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - begin, cpu


if __name__ == "__main__":
    main()
