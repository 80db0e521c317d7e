"""`python -m tools.versions [lowest] [highest]`: a short list of tests with the ends of the ranges of pyproject.toml.

An environment for each end lies in .venv-lowest and .venv-highest: the wheel, and every requirement at its lower bound,
or the newest that its range allows. `--python` selects the Python.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tools import dist

ENDS = ("lowest", "highest")
EXTRAS = ("hf", "bench", "web")
TESTED = (
    "test_zoo.py",
    "test_package.py",
    "test_engine.py",
    "core/test_targets.py",
    "cli/test_doctor.py",
    "cli/test_cli.py",
)
CONTRACT = ("methods/test_contract.py", "(vit or hf or torchvision or swin) and (genatt or tis or tokentm or plus)")
PINNED = "not told_without_torch"
"""Not the tests of the table of names, which is made with the timm that is pinned."""
SHOWN = ("torch", "torchvision", "timm", "transformers", "numpy", "scipy", "pillow", "pydantic", "typer", "matplotlib")


def requirements() -> list[str]:
    """What the package requires, and for models of transformers, recipes and the page."""
    project = tomllib.loads((dist.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = (one for extra in EXTRAS for one in project["optional-dependencies"][extra])
    return list(dict.fromkeys([*project["dependencies"], *extras]))


def lower(requirement: str) -> str:
    """
    >>> lower("transformers>=4.46.1,<6")
    'transformers==4.46.1'
    """
    return re.sub(r">=([\w.]+).*", r"==\1", requirement)


def test_tools() -> list[str]:
    """pytest and hypothesis, as they are pinned."""
    pins = (dist.ROOT / "requirements-dev.txt").read_text(encoding="utf-8").split()
    return [pin for pin in pins if pin.startswith(("pytest==", "hypothesis=="))]


def prepared(end: str, python: str, wheel: Path) -> Path:
    """The environment of that end, with everything in it: its interpreter."""
    home = dist.ROOT / f".venv-{end}"
    own = home / "bin" / "python"
    if own.exists() and _version(str(own)) != _version(python):
        shutil.rmtree(home)
    if not own.exists():
        subprocess.run([python, "-m", "venv", str(home)], check=True)
    wanted = [lower(one) for one in requirements()] if end == "lowest" else ["--upgrade", *requirements()]
    pip = [str(own), "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-compile"]
    subprocess.run([*pip, *wanted, *test_tools()], check=True)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", str(wheel)], check=True)
    return own


def tested(python: Path) -> bool:
    """Whether the short list passes there."""
    code = f"from importlib.metadata import version; print(*(f'{{n}} {{version(n)}}' for n in {SHOWN!r}), sep=', ')"
    print(_version(str(python)), subprocess.check_output([str(python), "-c", code], text=True).strip(), flush=True)
    words = [str(python), "-m", "pytest", "-m", "not slow and not page and not accelerator", "-p", "no:cacheprovider"]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    file, chosen = CONTRACT
    runs = [*(f"tests/{name}" for name in TESTED), "-k", PINNED], [f"tests/{file}", "-k", chosen]
    codes = [subprocess.run([*words, *run], cwd=dist.ROOT, env=alone).returncode for run in runs]
    return not any(codes)


def _version(python: str) -> str:
    return subprocess.check_output([python, "--version"], text=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Tests with the lowest and highest versions of what is required.")
    parser.add_argument("ends", nargs="*", metavar="END", help="lowest, highest; both by default")
    parser.add_argument("--python", default=sys.executable)
    asked = parser.parse_args()
    if set(asked.ends) - set(ENDS):
        parser.error(f"give {' or '.join(ENDS)}")
    with tempfile.TemporaryDirectory() as out:
        wheel, _ = dist.build(Path(out))
        failed = [end for end in asked.ends or ENDS if not tested(prepared(end, asked.python, wheel))]
    if failed:
        raise SystemExit(f"failed with the {' and '.join(failed)} versions")


if __name__ == "__main__":
    main()
