"""The numeric tests as other processors would run them, and the margins they leave: `python -m tests.cpus`.

Each setting makes torch, oneDNN and MKL choose other kernels, which add up in another order. A tolerance must leave a
factor of five to the largest error over all of them, with one thread and with two.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FACTOR = 5
SHOWN = 20
NUMERIC = (
    "tests/literal",
    "tests/methods",
    "tests/metrics",
    "tests/anatomy",
    "tests/evidence",
)
OLDEST = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
SETTINGS: dict[str, dict[str, str]] = {
    "native": {},
    "AVX2 for torch": {"ATEN_CPU_CAPABILITY": "avx2"},
    "plain torch": {"ATEN_CPU_CAPABILITY": "default"},
    "SSE for all": OLDEST,
    "AVX2 for all": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
}
"""The environment of each setting; `native` is whatever this processor has."""


def run(setting: str, threads: int, margins: Path, tests: Iterable[str]) -> bool:
    """Whether the tests hold under one setting; what they found is added to `margins`."""
    # two workers on two cores even where each has two threads: these must sleep, not spin, while they wait
    own = {
        "PATCHLIGHT_MARGINS": str(margins),
        "PATCHLIGHT_TEST_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-m", "not slow and not accelerator"]
    done = subprocess.run(
        [*command, *tests], env=os.environ | SETTINGS[setting] | own, stdout=subprocess.PIPE, text=True
    )
    told = done.stdout.splitlines()
    failed = [line for line in told if line.startswith(("FAILED", "ERROR"))]
    said = "holds" if done.returncode == 0 else f"{len(failed)} failed"
    print(f"{setting}, {threads} thread{'s'[: threads > 1]}: {said}, {time.monotonic() - began:.0f} s", flush=True)
    print("\n".join(failed or told) + "\n" if done.returncode else "", end="", flush=True)
    return done.returncode == 0


def tightest(margins: Path) -> list[tuple[float, dict[str, Any]]]:
    """Each comparison with limit / error where that was smallest over all settings, the smallest first."""
    worst: dict[tuple[str, str], tuple[float, dict[str, Any]]] = {}
    for line in margins.read_text().splitlines():
        row = json.loads(line)
        margin = row["limit"] / row["error"] if row["error"] else float("inf")
        key = row["test"], row["place"]
        if key not in worst or margin < worst[key][0]:
            worst[key] = margin, row
    return sorted(worst.values(), key=lambda pair: pair[0])


def main(tests: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        margins = Path(folder) / "margins.jsonl"
        margins.touch()
        held = [run(setting, threads, margins, tests or NUMERIC) for setting in SETTINGS for threads in (1, 2)]
        rows = tightest(margins)
    print("\n| margin | error | limit | comparison |\n|---|---|---|---|")
    for margin, row in rows[:SHOWN]:
        print(f"| {margin:.1f} | {row['error']:.1e} | {row['limit']:.1e} | {row['test']}, {row['place']} |")
    under = sum(margin < FACTOR for margin, _ in rows)
    print(f"\n{len(rows)} comparisons, {under} with a margin under {FACTOR}; {held.count(False)} settings failed")
    return int(under > 0 or not all(held))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
