"""`python -m tools.dist`: build wheel and source archive into dist/, and check what is in them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "patchlight"
LARGEST = 15_000_000
STRANGE = {"tests", "tools", "benchmarks", "docs", ".github", ".ci", ".venv", "__pycache__"}
"""Folders of which nothing may be in them."""


def build(out: Path) -> tuple[Path, Path]:
    """The wheel, made from the source archive as pip would make it, and that archive."""
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    (wheel,), (archive,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, archive


def contents(file: Path) -> set[str]:
    """The files in a wheel; of a source archive, without the folder that all are in."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            return set(wheel.namelist())
    with tarfile.open(file) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def wrong(file: Path) -> Iterator[str]:
    """What is not as it should be: size, what is missing, what is too much."""
    if file.stat().st_size > LARGEST:
        yield f"{file.name} has {file.stat().st_size} bytes; at most {LARGEST} are meant to be"
    found = contents(file)
    above = PACKAGE.parent if file.suffix == ".whl" else ROOT
    meant = {
        path.relative_to(above).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    yield from (f"{file.name} lacks {name}" for name in sorted(meant - found))
    for name in sorted(found - meant):
        parts = PurePosixPath(name).parts
        if STRANGE & set(parts) or parts[0] == "patchlight":
            yield f"{file.name} has {name}, which is no part of the package"


def main() -> None:
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    files = build(out)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], check=True)
    found = [sentence for file in files for sentence in wrong(file)]
    for file in files:
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1e6:.1f} MB, {len(contents(file))} files")
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
