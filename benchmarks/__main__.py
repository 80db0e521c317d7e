"""`python -m benchmarks [NAME…]`: run the named benchmarks, or all."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main() -> None:
    here = Path(__file__).parent
    names = sys.argv[1:] or sorted(p.stem.removeprefix("bench_") for p in here.glob("bench_*.py"))
    for name in names:
        importlib.import_module(f"benchmarks.bench_{name}").main()


if __name__ == "__main__":
    main()
