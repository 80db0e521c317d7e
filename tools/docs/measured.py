"""Indexes of the measured tables: results and speed."""

from __future__ import annotations

from pathlib import Path

from tools.docs.words import as_markdown, table, toctree


def write(folder: Path) -> None:
    """Write the index of speed tables, and the contents of the results."""
    others = ("index", "speed", "pocket", "photographs")
    results = sorted(page.stem for page in (folder / "results").glob("*.md") if page.stem not in others)
    with (folder / "results" / "index.md").open("a", encoding="utf-8") as index:
        index.write("\n" + toctree(results))
    pages = sorted((folder / "benchmarks").glob("*.md"))
    titles = {page.stem: page.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for page in pages}
    rows = ((f"[{as_markdown(title)}](../benchmarks/{stem}.md)",) for stem, title in titles.items())
    text = (
        "# Speed\n\nTables measured by `make bench` and `python -m benchmarks.gpu`, each with its command, machine "
        "and date.\n\n" + table(("table",), rows) + "\n" + toctree(f"../benchmarks/{stem}" for stem in titles)
    )
    (folder / "results" / "speed.md").write_text(text, encoding="utf-8")
