"""Alternating timing, and tables with the command, machine and date that made them."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def medians(tasks: dict[str, Callable[[], object]], repeats: int = 5) -> dict[str, float]:
    """Median seconds of each task. Tasks alternate `repeats` times after one warm-up, so drift affects all equally."""
    return {name: statistics.median(values) for name, values in _timed(tasks, repeats).items()}


def minima(tasks: dict[str, Callable[[], object]], repeats: int = 5) -> dict[str, float]:
    """Minimum seconds of each task, measured in the same way: its cost on an idle machine."""
    return {name: min(values) for name, values in _timed(tasks, repeats).items()}


def _timed(tasks: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for round_ in range(repeats + 1):
        for name, task in tasks.items():
            _settle()
            begin = time.perf_counter()
            task()
            _settle()
            if round_:
                times[name].append(time.perf_counter() - begin)
    return times


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine(cpu: bool = False) -> str:
    if torch.cuda.is_available() and not cpu:
        return f"one {torch.cuda.get_device_name()}"
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return f"{torch.get_num_threads()} threads of {model}"


def record(
    name: str, title: str, header: list[str], rows: list[list[str]], command: str = "", cpu: bool = False
) -> None:
    """Print a table, and write it to results/ with its command and machine; `cpu` if it always runs on a CPU."""
    command = command or f"python -m benchmarks {name}"
    lines = [
        f"# {title}",
        "",
        f"`{command}`, {machine(cpu)}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}.",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]
    print("\n".join(lines))
    RESULTS.mkdir(exist_ok=True)
    suffix = "-accelerator" if torch.cuda.is_available() and not cpu else ""
    (RESULTS / f"{name}{suffix}.md").write_text("\n".join(lines), encoding="utf-8")
