"""Check that the files that come with Patchlight are intact: against `sums.txt` and pip's file list."""

from __future__ import annotations

import base64
import hashlib
from importlib import metadata
from pathlib import Path

from patchlight.zoo import ZOO

SUMS = ZOO / "sums.txt"
"""A SHA-256 and a file in each line, as `sha256sum` writes and checks them; `python -m tools.checksums` makes it."""


def checksum_lines() -> str:
    """The text of `sums.txt`: all data files of the folder."""
    files = sorted(path for path in ZOO.rglob("*") if path.suffix in (".safetensors", ".json", ".jpg", ".png"))
    return "".join(f"{_sum(path).hex()}  {path.relative_to(ZOO).as_posix()}\n" for path in files)


def expected() -> dict[Path, bytes]:
    """The SHA-256 of every known file: those of the bundled model, and of the package if pip installed it."""
    lines = (line.split("  ", 1) for line in SUMS.read_text(encoding="utf-8").splitlines())
    return _installed() | {ZOO / name: bytes.fromhex(value) for value, name in lines}


def damaged() -> list[str]:
    """The files that are missing or differ from the bundled ones."""
    home = ZOO.parent
    return [
        f"{path.relative_to(home).as_posix()} is {'another' if path.is_file() else 'missing'}"
        for path, value in expected().items()
        if not path.is_file() or _sum(path) != value
    ]


def _installed() -> dict[Path, bytes]:
    """The hashes that pip recorded for this folder; empty if the package runs from its source."""
    try:
        files = metadata.distribution("patchlight").files or ()
    except metadata.PackageNotFoundError:
        return {}
    hashes = {}
    for file in files:
        path = Path(str(file.locate())).resolve()
        if file.hash is not None and file.hash.mode == "sha256" and path.is_relative_to(ZOO.parent):
            hashes[path] = base64.urlsafe_b64decode(file.hash.value + "=" * (-len(file.hash.value) % 4))
    return hashes


def _sum(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()
