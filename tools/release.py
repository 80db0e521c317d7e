"""`python -m tools.release`: whether all is ready for a release, and what to type then. It uploads and tags nothing."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

from patchlight import __version__
from tools import dist


def git(*words: str) -> str:
    """What git answers."""
    done = subprocess.run(["git", *words], cwd=dist.ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def file_versions() -> dict[str, str]:
    """The version in each file that contains it."""
    changes = re.search(r"^## \[(\d\S*)\] - \d{4}-\d\d-\d\d$", _read("CHANGELOG.md"), re.MULTILINE)
    cited = re.search(r"^version: (\S+)$", _read("CITATION.cff"), re.MULTILINE)
    return {
        "src/patchlight/__init__.py": __version__,
        "CHANGELOG.md": changes[1] if changes else "none",
        "CITATION.cff": cited[1] if cited else "none",
    }


def release_dates() -> dict[str, str]:
    """The release date in each file that contains it."""
    changes = re.search(r"^## \[\d\S*\] - (\d{4}-\d\d-\d\d)$", _read("CHANGELOG.md"), re.MULTILINE)
    cited = re.search(r"^date-released: (\S+)$", _read("CITATION.cff"), re.MULTILINE)
    return {"CHANGELOG.md": changes[1] if changes else "none", "CITATION.cff": cited[1] if cited else "none"}


def unreleased() -> str:
    """The changelog's entries for later versions."""
    found = re.search(r"^## \[Unreleased\]$(.*?)(?=^## |\Z)", _read("CHANGELOG.md"), re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def obstacles() -> Iterator[str]:
    """Why this tree is not to be released."""
    changed = git("status", "--porcelain")
    if changed:
        yield f"the tree is not clean:\n{changed}"
    versions = file_versions()
    if len(set(versions.values())) > 1:
        yield f"versions differ: {versions}"
    days = release_dates()
    if len(set(days.values())) > 1:
        yield f"days of the release differ: {days}"
    if unreleased():
        yield f"CHANGELOG.md has changes under [Unreleased]; they belong under [{__version__}]"
    if f"v{__version__}" in git("tag", "--list").split():
        yield f"there is a tag v{__version__} already"


def main() -> None:
    found = list(obstacles())
    if found:
        raise SystemExit("\n".join(found))
    dist.main()
    print(f"""
All is ready for Patchlight {__version__}; nothing was tagged or uploaded. What remains is to be typed:
  make test-all test-versions
  git tag -a v{__version__} -m "Patchlight {__version__}"
  git push origin v{__version__}
  twine upload dist/*""")


def _read(name: str) -> str:
    return (dist.ROOT / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
