"""What starting costs: CPU seconds of commands in fresh processes, minus those of importing torch (and timm)."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import record
from patchlight.zoo.pocket import PHOTOS

REPEATS = 3
PHOTO = str(PHOTOS / "dog.jpg")
LOAD = "import patchlight as pl; pl.load('pocket')"
TIMM = "import patchlight as pl; pl.load('vit_tiny_patch16_224', pretrained=False)"
COMMANDS = {
    "import torch": ("-c", "import torch"),
    "import torch, timm": ("-c", "import torch, timm"),
    "pl.load('pocket')": ("-c", LOAD),
    "pl.explain(pl.load('pocket'), 'dog.jpg')": (
        "-c",
        f"import patchlight as pl; pl.explain(pl.load('pocket'), {PHOTO!r})",
    ),
    "patchlight explain dog.jpg": ("-m", "patchlight", "explain", PHOTO, "--out", "{folder}/{run}.png"),
    "patchlight doctor": ("-m", "patchlight", "doctor"),
    "patchlight methods, first time": ("-m", "patchlight", "methods"),
    "patchlight methods": ("-m", "patchlight", "methods"),
    "patchlight bench list": ("-m", "patchlight", "bench", "list"),
    "pl.load('vit_tiny_patch16_224', pretrained=False)": ("-c", TIMM),
}


def cpu_seconds(arguments: tuple[str, ...], cache: str) -> float:
    """CPU seconds of one Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATCHLIGHT_CACHE": cache}
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run every command in turn, several times, and keep the least of each."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for run in range(REPEATS):
            for name, words in COMMANDS.items():
                arguments = tuple(word.replace("{folder}", folder).replace("{run}", str(run)) for word in words)
                cache = Path(folder) / (f"{run}" if name.startswith("patchlight methods") else "cache")
                times[name].append(cpu_seconds(arguments, str(cache)))
    least = {name: min(values) for name, values in times.items()}
    torch, timm = least["import torch"], least["import torch, timm"]
    rows = [[f"`{name}`", f"{s:.2f}", f"{s - torch:+.2f}", f"{s - timm:+.2f}"] for name, s in least.items()]
    header = ["command", "CPU s", "minus `import torch`", "minus `import torch, timm`"]
    record("startup", "Start-up time", header, rows, cpu=True)


if __name__ == "__main__":
    main()
