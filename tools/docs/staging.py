"""Collect the pages in one folder for Sphinx: docs/, and a few files from elsewhere.

Links that leave docs/ are changed to the place where their page is staged. A block `{contributing} NAME` becomes the
example of that name in CONTRIBUTING.md, as a cell that is executed.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SPEED = ROOT / "benchmarks" / "results"
ELSEWHERE = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "src/patchlight/zoo/POCKET.md": "results/pocket.md",
    "src/patchlight/zoo/photos/LICENSES.md": "results/photographs.md",
    "docs/results/README.md": "results/index.md",
}
"""Where files are staged, if not at their place under docs/."""
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.DOTALL | re.MULTILINE)
_EXAMPLE = re.compile(r"^```\{contributing\} ([\w-]+)\n```$", re.MULTILINE)
KERNEL = """---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  name: python3
  display_name: python3
---
"""


def staged_at(path: Path) -> Path | None:
    """Where a file is staged, relative to the staged folder, or None."""
    name = path.relative_to(ROOT).as_posix()
    if name in ELSEWHERE:
        return Path(ELSEWHERE[name])
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS)
    if name.startswith("benchmarks/results/"):
        return Path("benchmarks") / path.name
    return None


def sources() -> list[Path]:
    """Every file that is staged."""
    inside = [file for file in sorted(DOCS.rglob("*")) if file.is_file() and "__pycache__" not in file.parts]
    outside = [ROOT / name for name in ELSEWHERE if not name.startswith("docs/")]
    return [*inside, *sorted((ROOT / "benchmarks" / "results").glob("*.md")), *outside]


def relinked(text: str, source: Path) -> str:
    """The text of a page with links adapted to where it is staged."""
    target = staged_at(source)
    assert target is not None, source

    def turned(match: re.Match[str]) -> str:
        link, anchor = match[1], match[2] or ""
        path = Path(os.path.normpath(source.parent / link))
        if "://" in link or not path.is_relative_to(ROOT) or not path.exists():
            return match[0]  # elsewhere, or a page that is generated
        found = Path("results/speed.md") if path == SPEED else staged_at(path / "README.md" if path.is_dir() else path)
        if found is None:
            raise SystemExit(f"{source.name} links to {link}, which is not part of the documentation")
        return os.path.relpath(found, target.parent).replace(os.sep, "/") + anchor

    def outside(part: str) -> str:
        return _LINK.sub(turned, part)

    pieces, last = [], 0
    for fence in _FENCE.finditer(text):
        pieces += [outside(text[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*pieces, outside(text[last:])])


def pictured(text: str, source: Path) -> str:
    """The text of a page, with the descriptions of missing pictures in their place."""

    def shown(match: re.Match[str]) -> str:
        if (source.parent / match[2]).exists():
            return match[0]
        print(f"{source.name} shows {match[2]}, which is missing")
        return f"*{match[1]}*"

    return re.sub(r"!\[([^\]]*)\]\(([^)\s:]+)\)", shown, text)


def examples() -> dict[str, str]:
    """The examples of CONTRIBUTING.md by name."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return dict(re.findall(r"```python ([\w-]+)\n(.*?)```", text, re.DOTALL))


def expanded(text: str) -> str:
    """The text of a page with its examples as cells."""
    known = examples()
    return _EXAMPLE.sub(lambda match: f"```{{code-cell}} python3\n{known[match[1]]}```", text)


def plain_fences(text: str) -> str:
    """Code blocks with a name behind their language (`python layer-map`) as blocks of the language."""
    return re.sub(r"^```python [\w-]+$", "```python", text, flags=re.MULTILINE)


def stage(folder: Path) -> None:
    """Put every page and picture into `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    for source in sources():
        found = staged_at(source)
        assert found is not None, source
        target = folder / found
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".md":
            shutil.copyfile(source, target)
            continue
        text = pictured(source.read_text(encoding="utf-8"), source)
        text = relinked(plain_fences(expanded(text)), source)
        notebook = "{code-cell}" in text and not text.startswith("---\n")
        target.write_text(KERNEL + text if notebook else text, encoding="utf-8")
