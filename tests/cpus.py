"""The numeric tests as other processors would run them: `python -m tests.cpus`.

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

FACTOR = 5
SHOWN = 20
NUMERIC = ("tests/literal", "tests/methods", "tests/metrics", "tests/anatomy", "tests/test_contract.py")
PLAIN = {"ATEN_CPU_CAPABILITY": "default"}
SETTINGS: dict[str, dict[str, str]] = {
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "default": PLAIN,
    "sse": PLAIN | {"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "all-avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
}
"""The environment of each setting; `native` is whatever this processor has."""


def run(setting: str, threads: int, margins: Path, tests: Iterable[str]) -> bool:
    """Whether the tests hold under one setting; what they found is added to `margins`."""
    own = {"PATCHLIGHT_MARGINS": str(margins), "PATCHLIGHT_TEST_THREADS": str(threads)}
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-n", str(2 // threads), "-m", "not slow and not accelerator", *tests]
    done = subprocess.run(command, env=os.environ | SETTINGS[setting] | own, capture_output=True, text=True)
    told = done.stdout.splitlines()
    print(f"{setting}, {threads} torch threads, {time.monotonic() - began:.0f} s: {told[-1]}", flush=True)
    for line in told:
        if line.startswith(("FAILED", "ERROR")):
            print(line)
    return done.returncode == 0


def tightest(margins: Path) -> list[tuple[float, dict[str, str | float]]]:
    """For each comparison limit / largest error over all settings, the smallest first."""
    worst: dict[tuple[str, str], dict[str, str | float]] = {}
    for line in margins.read_text().splitlines():
        row = json.loads(line)
        key = row["test"], row["place"]
        if key not in worst or row["error"] * worst[key]["limit"] > worst[key]["error"] * row["limit"]:
            worst[key] = row
    seen = [(float(r["limit"]) / float(r["error"]) if r["error"] else float("inf"), r) for r in worst.values()]
    return sorted(seen, key=lambda pair: pair[0])


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
