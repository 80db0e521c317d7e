"""Random faults in the engine, the metrics and the studies, and whether their tests notice: `make mutants`.

A mutant is one changed operator, number, truth value or condition. Each runs against the tests of its module; those
that pass all of them survive and are listed with their line. The same seed and code give the same mutants.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "patchlight"
ROOMS = ("engine.py", "metrics", "study")
SECONDS = 240
"""A mutant whose tests take more CPU time, or ten times as long, is in an endless loop, and counts as killed."""
TESTS = {
    "engine.py": "test_engine.py",
    "metrics": "metrics/test_base.py metrics/test_perturbation.py metrics/test_contract.py",
    "metrics/quantities.py": "metrics/test_perturbation.py metrics/test_localisation.py metrics/test_complexity.py",
    "study": "study/test_compare.py study/test_ranking.py study/test_unusual_maps.py",
    "study/files.py": "cli/test_evaluate.py",
    "study/cost.py": "bench/test_estimate.py study/test_compare.py",
    "study/recommend": "study/test_verdict.py study/test_race.py study/test_recommend.py",
    "study/recommend/race.py": "study/test_race.py study/test_verdict.py",
    "study/recommend/verdict.py": "study/test_verdict.py",
    "study/recommend/words.py": "study/test_verdict.py",
    "study/recommend/decide.py": "study/test_verdict.py study/test_race.py",
}
"""Tests of a module or room; other modules have a file of tests that is called like them."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
}


@dataclass(frozen=True)
class Mutant:
    """One changed expression of a module."""

    path: Path
    line: int
    before: str
    after: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.before}  ->  {self.after}"


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions below a node, without annotations, messages and names of types."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.JoinedStr | ast.Assert):
                yield child
                yield from expressions(child)


def changed(node: ast.AST) -> ast.AST | None:
    """The faulty version of an expression; None if there is none."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            return ast.Compare(node.left, [SWAPS[type(op)]()], node.comparators)  # type: ignore[list-item]
        case ast.BoolOp() | ast.BinOp() if type(node.op) in SWAPS:
            swapped = type(node)(**dict(ast.iter_fields(node)))
            swapped.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
            return swapped
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            return node.operand
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            return ast.Constant(value + 1)
        case ast.IfExp():
            return ast.IfExp(node.test, node.orelse, node.body)
    return None


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a module."""
    text = path.read_text(encoding="utf-8")
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    data = text.encode()
    for node in expressions(ast.parse(text)):
        after = changed(node)
        if after is None or not isinstance(node, ast.expr) or node.end_lineno is None or node.end_col_offset is None:
            continue
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        words = ast.unparse(ast.fix_missing_locations(after))
        faulty = data[:begin] + f"({words})".encode() + data[end:]
        yield Mutant(path, node.lineno, " ".join(data[begin:end].decode().split()), words, faulty.decode())


def tests_of(path: Path) -> list[str]:
    """The test files of a module: its entry in `TESTS`, else the file that is called like it, else its room's entry."""
    place = path.relative_to(SOURCE)
    own = f"{place.parts[0]}/test_{place.stem}.py"
    near = next(str(each) for each in (place, *place.parents) if str(each) in TESTS)
    files = own if near != str(place) and (ROOT / "tests" / own).is_file() else TESTS[near]
    return [f"tests/{file}" for file in files.split()]


def is_killed(mutant: Mutant) -> bool:
    """Run the tests in a fork, which has torch already, on a copy of the package with the faulty module."""
    with tempfile.TemporaryDirectory() as folder:
        for source in SOURCE.rglob("*"):
            copy = Path(folder) / source.relative_to(SOURCE.parent)
            if source.is_file() and "__pycache__" not in source.parts:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.symlink_to(source) if source.suffix != ".py" else copy.write_bytes(source.read_bytes())
        (Path(folder) / mutant.path.relative_to(SOURCE.parent)).write_text(mutant.text, encoding="utf-8")
        child = os.fork()
        if not child:
            _run_tests(folder, tests_of(mutant.path))
        end = time.monotonic() + 10 * SECONDS
        while (state := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.05)
        return state[1] != 0


def _run_tests(folder: str, files: list[str]) -> None:
    """End the process with 0 if all tests pass."""
    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = folder  # of processes that tests start
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    code = 3
    try:
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not page", *files]))
    finally:
        os._exit(code)


def main() -> None:
    """Run random mutants and list the survivors; exit 1 if fewer than 90 % are killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="How many mutants to run.")
    parser.add_argument("--seed", type=int, default=0, help="Which ones are chosen.")
    parser.add_argument("--room", action="append", help=f"Only these: {', '.join(ROOMS)} or a module.")
    options = parser.parse_args()
    os.chdir(ROOT)
    paths = [SOURCE / room for room in options.room or ROOMS]
    files = sorted(file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path]))
    every = [mutant for file in files for mutant in mutants_of(file)]
    chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
    import hypothesis  # noqa: F401
    import pandas  # noqa: F401  # type: ignore[import-untyped]
    import scipy.stats  # noqa: F401
    import timm  # noqa: F401
    import torch

    torch.set_num_threads(1)
    survivors, sound = list[Mutant](), dict[tuple[str, ...], bool]()
    for number, mutant in enumerate(chosen, 1):
        begun = time.monotonic()
        tests = tuple(tests_of(mutant.path))
        if tests not in sound:
            sound[tests] = not is_killed(replace(mutant, text=mutant.path.read_text(encoding="utf-8")))
        if not sound[tests]:
            sys.exit(f"the unchanged code does not pass {' '.join(tests)}")
        killed = is_killed(mutant)
        survivors += [] if killed else [mutant]
        word = "killed" if killed else "SURVIVED"
        print(f"{number:3} {word:8} {time.monotonic() - begun:4.0f} s  {mutant}", flush=True)
    share = 1 - len(survivors) / max(1, len(chosen))
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed ({share:.0%}), {len(every)} possible")
    print("\n".join(f"survived: {mutant}" for mutant in survivors))
    sys.exit(share < 0.9)


if __name__ == "__main__":
    main()
