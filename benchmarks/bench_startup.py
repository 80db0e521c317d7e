"""What starting costs: CPU seconds of commands in fresh processes, minus those of importing torch (and timm).

`PATCHLIGHT_BEFORE=FOLDER` names the `src` folder of another version, whose times go into a column of their own.
"""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import patchlight
from benchmarks.common import record
from patchlight.zoo.pocket import PHOTOS

REPEATS = 2
HERE = str(Path(patchlight.__file__).parents[1])
PHOTO = str(PHOTOS / "dog.jpg")
PROGRAM = ("-m", "patchlight")
TIMM = ("--model", "vit_tiny_patch16_224", "--no-pretrained")
STEPS = ("--method", "genatt", "--set", "ins-del.steps=4")
PLAN = ("tis-table-1", "--quick", "--model", "pocket", "--images", str(PHOTOS), "--data", "files", "--limit", "2")
COMMANDS: dict[str, tuple[str, ...]] = {
    "import torch": ("-c", "import torch"),
    "import torch, timm": ("-c", "import torch, timm"),
    "pl.load('pocket')": ("-c", "import patchlight as pl; pl.load('pocket')"),
    "patchlight explain dog.jpg": (*PROGRAM, "explain", PHOTO, "--out", "{folder}/a{run}.png"),
    "patchlight evaluate --images dog.jpg, 4 steps": (*PROGRAM, "evaluate", "--images", PHOTO, *STEPS),
    "patchlight doctor": (*PROGRAM, "doctor"),
    "patchlight serve, until it is ready": (*PROGRAM, "serve", "--port", "0"),
    "patchlight bench plan tis-table-1 --model pocket": (*PROGRAM, "bench", "plan", *PLAN, "--target", "prediction"),
    "patchlight bench list": (*PROGRAM, "bench", "list"),
    "patchlight methods, first time": (*PROGRAM, "methods"),
    "patchlight methods": (*PROGRAM, "methods"),
    "patchlight explain dog.jpg, a model of timm": (*PROGRAM, "explain", PHOTO, *TIMM, "--out", "{folder}/b{run}.png"),
    "patchlight serve, a model of timm": (*PROGRAM, "serve", *TIMM, "--port", "0"),
}


def cpu_seconds(arguments: tuple[str, ...], source: str, cache: str) -> float:
    """CPU seconds of one Python process; infinite if it fails. A server is stopped as soon as it prints its address."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATCHLIGHT_CACHE": cache, "PYTHONPATH": source}
    environment["PYTHONPYCACHEPREFIX"] = f"{Path(cache).parents[1]}/compiled"  # once, as in an installation
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    words = [sys.executable, *arguments]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stderr is not None
        ready = any("http://" in line for line in run.stderr)
        if ready:
            run.kill()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds if ready or run.returncode == 0 else math.inf


def least_seconds(sources: dict[str, str]) -> dict[tuple[str, str], float]:
    """By source and command, the least CPU seconds of several runs in turn."""
    times: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for run in range(REPEATS):
            for name, words in COMMANDS.items():
                for source, path in sources.items():
                    arguments = tuple(
                        word.replace("{folder}", f"{folder}/{source}").replace("{run}", str(run)) for word in words
                    )
                    cache = f"{folder}/{source}/{f'{run}' if name.startswith('patchlight methods') else 'cache'}"
                    seconds = cpu_seconds(arguments, path, cache)
                    times[source, name] = min(times.get((source, name), math.inf), seconds)
    return times


def main() -> None:
    """Time every command, here and in the version before."""
    before = os.environ.get("PATCHLIGHT_BEFORE")
    times = least_seconds({"now": HERE} | ({"before": before} if before else {}))
    torch, timm = times["now", "import torch"], times["now", "import torch, timm"]
    rows = []
    for name in COMMANDS:
        seconds = times["now", name]
        over = seconds - (timm if "timm" in name else torch)
        row = [f"`{name}`", f"{seconds:.2f}", f"{over:+.2f}"]
        if before:
            row.insert(1, "–" if math.isinf(times["before", name]) else f"{times['before', name]:.2f}")
        rows.append(row)
    header = [
        "command",
        *(["before, CPU s"] if before else []),
        "CPU s",
        "minus `import torch` (with timm: minus both)",
    ]
    record("startup", "Start-up time: CPU seconds of a fresh process", header, rows, cpu=True)


if __name__ == "__main__":
    main()
