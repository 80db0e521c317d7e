"""The examples of README and docs run, and their links, commands and names exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

import patchlight as pl
from patchlight.cli import app
from patchlight.cli.explain import expand_groups
from patchlight.methods.requests import resolve
from patchlight.metrics.base import resolve_metric
from patchlight.report.figures import list_figures
from patchlight.web.app import create_app
from patchlight.web.serve import Server
from patchlight.web.service import ModelService
from patchlight.zoo import pocket
from tests.registries import restored

ROOT = Path(__file__).parents[1]


PAGES = (
    "methods",
    "data",
    "metrics",
    "benchmark",
    "sharing",
    "cluster",
    "heads",
    "heads-texts",
    "bags",
    "answers",
    "video",
    "detection",
    "segmentation",
    "own-models",
    "figures",
    "verdict",
    "shapley",
    "training",
    "page",
    "index",
    "faq",
    "agents",
)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page}.md" for page in PAGES)])
def test_python_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    shutil.copy(pocket.PHOTOS / "cat.jpg", tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    with restored():
        for block in blocks:
            exec(compile(block, page, "exec"), names)


def test_the_examples_of_the_api_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs its Python and shell blocks in order, with a server."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(python|sh)\n(.*?)```", page, re.DOTALL)
    assert {kind for kind, _ in blocks} == {"python", "sh"}
    shutil.copy(pocket.PHOTOS / "cat.jpg", tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    server = Server(ModelService(pl.load("pocket")))
    server.start()
    try:
        names: dict[str, object] = {"__name__": "example"}
        for kind, block in blocks:
            text = block.replace("http://127.0.0.1:8000/", server.url)
            if kind == "python":
                exec(compile(text, "docs/api.md", "exec"), names)
            elif shutil.which("curl"):
                done = subprocess.run(
                    ["bash", "-eo", "pipefail", "-c", text], capture_output=True, text=True, timeout=120
                )
                assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
    finally:
        server.stop()
    if shutil.which("curl"):
        assert "cat.jpg" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_table_of_routes_is_complete() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([A-Z]+ /api/[^`]*)` \|", page, re.MULTILINE))
    paths = create_app(ModelService(pl.load("pocket"))).openapi()["paths"]
    routes = {f"{verb.upper()} {re.sub('{[a-z]+}', '{id}', path)}" for path, verbs in paths.items() for verb in verbs}
    assert documented == routes


def test_the_table_of_figures_is_complete() -> None:
    lines = [line for line in (ROOT / "docs" / "figures.md").read_text(encoding="utf-8").splitlines() if "|" in line]
    rows = [
        f"| {' | '.join([f'`{one.name}`', one.paper, one.shows, ', '.join(one.needs)])} |" for one in list_figures()
    ]
    assert lines[2:] == rows, "docs/figures.md: the table differs from list_figures()"


WRITTEN = (
    "docs/reference/",
    "docs/gallery.md",
    "docs/results/index.md",
    "docs/results/speed.md",
    "docs/contributing.md",
)
"""Pages that `make docs` generates or moves; it checks the links to them itself."""
EVERY = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", EVERY, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        target = (page.parent / link).resolve()
        written = target.is_relative_to(ROOT) and target.relative_to(ROOT).as_posix().startswith(WRITTEN)
        assert link.startswith("http") or written or target.exists(), f"{page.name} links to {link}"


FENCE = re.compile(r"^(?P<before>.*)\n```(?P<kind>.*)\n(?P<text>(?:.*\n)*?)```$", re.MULTILINE)
SHOWN = ("toml", "json", "text", "bibtex", "{toctree}", "{contributing}")
"""Kinds of blocks that are not run, or (the last) become cells when the documentation is built."""


@pytest.mark.parametrize("page", EVERY, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_block_runs_or_says_why_not(page: Path) -> None:
    """Python runs in a test above, cells when the documentation is built; commands are checked below."""
    name = page.relative_to(ROOT).as_posix()
    run = ["README.md", "docs/api.md", "CONTRIBUTING.md", *(f"docs/{one}.md" for one in PAGES)]
    for block in FENCE.finditer(page.read_text(encoding="utf-8")):
        kind = block["kind"].split(" ")[0]
        if kind in ("", "{code-cell}", "sh") or kind in SHOWN or block["before"].startswith("<!-- not run: "):
            continue
        assert kind == "python", (
            f"{name}: a block of '{kind}' is not run; state the reason in a comment above, <!-- not run: … -->"
        )
        assert name in run, f"{name} has an example that no test runs; add <!-- not run: … --> above it"


def _options(command: Any) -> set[str]:
    return {word for one in command.params for word in (*one.opts, *one.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("page", EVERY, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_commands_have_the_words_they_are_shown_with(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^(?:pip install .* && )?patchlight (.*)$", text, re.MULTILINE):
        words = re.sub(r"[\[\]…]", "", line.partition(" #")[0]).split()
        command: Any = typer.main.get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        wrong = {word.partition("=")[0] for word in words if word.startswith("--")} - _options(command)
        assert not wrong - {"--version", "--install-completion"}, f"patchlight {line}: {sorted(wrong)}"


@pytest.mark.parametrize("page", EVERY, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_names_in_words_and_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"\bpl\.(\w+)", text)) <= set(pl.__all__)
    for option, names in re.findall(r"--(method|metric) ([a-z][^\s`]*)", text):
        if "positive-gradient" not in names:  # a plugin's
            for name in expand_groups(names.split(",")) if option == "method" else names.split(","):
                resolve(name) if option == "method" else resolve_metric(name)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


def test_the_index_for_assistants_leads_to_pages() -> None:
    """llms.txt names a title, a summary and pages that exist; the guide ends in a report with a faithfulness test."""
    lines = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# Patchlight"
    assert lines[2].startswith("> ")
    links = [link for line in lines for link in re.findall(r"\]\(([^)]+)\)", line)]
    assert len(links) > 8
    assert not [link for link in links if not (ROOT / "docs" / link).is_file()]
    assert "--report" in (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
