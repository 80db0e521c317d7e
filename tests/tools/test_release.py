"""What a release is made of agrees with itself: versions, changelog, citation, templates."""

from __future__ import annotations

import re
import tomllib

import pytest

from patchlight import __version__
from tools import dist, release, versions

ROOT = dist.ROOT


def test_versions_agree() -> None:
    assert set(release.file_versions().values()) == {__version__}
    assert len(set(release.release_dates().values())) == 1


def test_the_changelog_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    kinds = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_what_stops_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"status": " M README.md", "tag": f"v0.9.0\nv{__version__}"}
    monkeypatch.setattr(release, "git", lambda *words: answers[words[0]])
    monkeypatch.setattr(release, "file_versions", lambda: {"a": "1.0.0", "b": "0.9.0"})
    monkeypatch.setattr(release, "release_dates", lambda: {"a": "2026-01-01", "b": "2026-01-02"})
    monkeypatch.setattr(release, "unreleased", lambda: "- A thing.")
    told = list(release.obstacles())
    assert len(told) == 5
    assert "README.md" in told[0]
    answers.update(status="", tag="")
    monkeypatch.setattr(release, "file_versions", lambda: {"a": "1.0.0"})
    monkeypatch.setattr(release, "release_dates", lambda: {"a": "2026-01-01"})
    monkeypatch.setattr(release, "unreleased", lambda: "")
    assert list(release.obstacles()) == []


def test_what_is_unreleased_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    later = "## [Unreleased]\n\n- A thing.\n\n## [1.0.0] - 2026-01-01\n\n- Another.\n"
    monkeypatch.setattr(release, "_read", lambda name: later)
    assert release.unreleased() == "- A thing."
    monkeypatch.setattr(release, "_read", lambda name: later.replace("- A thing.\n\n", ""))
    assert release.unreleased() == ""


def test_pythons_are_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = [one.rpartition(" ")[2] for one in project["classifiers"] if re.search(r":: 3\.\d+$", one)]
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    assert f"python: {str(pythons).replace(chr(39), chr(34))}" in workflow
    assert project["requires-python"] == f">={pythons[0]}"


def test_lower_bounds_are_read() -> None:
    lowest = [versions.lower(one) for one in versions.requirements()]
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", one) for one in lowest), lowest
    assert {one.partition("=")[0] for one in lowest} >= {"torch", "timm", "transformers"}
    assert [pin.partition("=")[0] for pin in versions.test_tools()] == ["pytest", "hypothesis"]


def test_what_is_published_names_no_place_of_work() -> None:
    """Only the addresses of public pages stand in the files around the package."""
    files = [ROOT / "CITATION.cff", ROOT / "SECURITY.md", *(ROOT / ".github").rglob("*.*"), ROOT / "Makefile"]
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"index-url|/work/|/root/|@\w+\.\w+", text), file
