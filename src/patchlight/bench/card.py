"""The data card of an exported run: what was measured, with what, under which licence, and how to build on it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from patchlight.bench.manifest import Manifest
from patchlight.bench.tables import markdown_table

OURS = "Apache-2.0"
"""The licence of Patchlight itself."""
UNKNOWN = "unknown; whoever exported the run did not say"
FILES = [
    [
        "`units/*.parquet`",
        "a row for each image, method and metric: model, image, target (the class explained), method, metric, value, "
        "note (why it does not exist, or is worth little), error, curve, parts (of micro averages), explain_seconds "
        "(of a pass that shared_by methods have in common), measure_seconds, and cell (the hash of all that the value "
        "depends on)",
    ],
    [
        "`maps/*.safetensors`",
        "the maps at patch resolution, [images, h, w], with the names of images and classes in the header",
    ],
    ["`images.csv`", "the names of the images and the hashes of their contents; the images themselves are not here"],
    ["`recipe.toml`", "the recipe as it was run"],
    ["`manifest.json`", "all that Patchlight needs to go on with it"],
]


def card(
    manifest: Manifest,
    values: int,
    listing: Sequence[tuple[str, str, str]],
    licence: str | None = None,
    data_licence: str | None = None,
) -> str:
    """The card as Markdown; `listing` has model, method and name of each pair of files."""
    recipe, images = manifest.resolved, manifest.images.names
    resolved = recipe.model_dump(mode="json", exclude_defaults=True)
    version = manifest.versions.get("patchlight", "?")
    model, method, _ = listing[0]
    lines = [
        f"# {recipe.name}: explanations of Vision Transformers, measured",
        "",
        *([recipe.paper, ""] if recipe.paper else []),
        f"{values} values: {len(recipe.models)} model(s), {len(recipe.methods)} method(s), {len(recipe.metrics)} "
        f"metric(s), {len(images)} image(s); the class explained is the {recipe.target}, the seed {recipe.seed}"
        + (", with the recipe's quick settings." if manifest.quick else "."),
        "",
        *(f"- Note: {note}." for note in manifest.notes),
        *([""] if manifest.notes else []),
        "## What is here",
        "",
        *markdown_table(["file", "what it holds"], FILES),
        "",
        *markdown_table(["model", "method", "files"], [[own, name, f"`{file}`"] for own, name, file in listing]),
        "",
        "File names end with the beginning of the SHA-256 of what is in them.",
        "",
        "## How to read it",
        "",
        "```python",
        "import patchlight as pl",
        "",
        'run = pl.bench.open("public")  # this folder',
        "run.frame()  # pandas; run.table() for pyarrow",
        f"run.maps({json.dumps(model)}, {json.dumps(method)})",
        "```",
        "",
        '`pandas.read_parquet("public/units")` reads the same without Patchlight.',
        "",
        "## How to add a method",
        "",
        f"With the same Patchlight ({version}), images and weights, nothing is measured twice: add the method to "
        "`[methods]` of a copy of recipe.toml, and",
        "",
        "```",
        "patchlight bench run recipe.toml --data DIR --out mine --from public",
        "```",
        "",
        "takes every value that is here from here (`--weights FILE` says where weights are). `patchlight bench compare "
        "public mine` shows both side by side.",
        "",
        "## Licences",
        "",
        f"- These values and maps: {licence or UNKNOWN}.",
        f"- The images they were made from, which are not here: {data_licence or UNKNOWN}.",
        f"- Patchlight: {OURS}.",
        "",
        "## What it was made with",
        "",
        *markdown_table(["what", "version or hash"], _made_with(manifest)),
        "",
        "## The recipe as it was run",
        "",
        "```json",
        json.dumps(resolved, indent=1, ensure_ascii=False),
        "```",
        "",
    ]
    if manifest.recipe:
        lines += ["## The recipe as it was written", "", "```toml", manifest.recipe.rstrip(), "```", ""]
    return "\n".join(lines)


def _made_with(manifest: Manifest) -> list[list[str]]:
    """Versions, the hashes of code, models and class names, and the device."""
    device = f"{manifest.device}, {manifest.threads} threads, {manifest.chunk} variants at once"
    return [
        *([name, own] for name, own in sorted(manifest.versions.items())),
        ["code of Patchlight", manifest.code],
        ["device", device],
        *([f"model {label}, as it was loaded", digest] for label, digest in manifest.models.items()),
        ["class names of the data", manifest.classes],
    ]
