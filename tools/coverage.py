"""`python -m tools.coverage`: write docs/coverage.md and docs/coverage.csv, what opens of each library.

A small random model of each class of transformers and torchvision is wrapped, which probes it; open_clip's models are
built without weights; timm's rows summarise docs/models.csv, which `tools.models` makes. It takes about a minute.
"""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import torch
from torch import nn

import patchlight as pl
from patchlight.anatomy import hf_backbones
from patchlight.anatomy.families import read_anatomy
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import NoClassifier
from tests.pairs import OWN_TEXT, transformers_model
from tests.tiny_models import MODELS, UNBUILT, image_classifiers, preprocess, tiny
from tools.models import DOCS
from tools.models import table as timm_table


@dataclass(frozen=True)
class Row:
    """What is known of a class of models.

    Args:
        library: The library that defines it.
        model: Its class, or a family of names.
        names: How many names of the library it has; empty for a class.
        opens: With its blocks, with stages, as a feature map, or refused.
        grid: The axes of its grid.
        removal: Whether tokens can be dropped or hidden.
        reason: Why it is refused, or why tokens cannot be dropped.
    """

    library: str
    model: str
    names: str = ""
    opens: str = "refused"
    grid: str = ""
    removal: str = ""
    reason: str = ""


def opened(library: str, model: str, vit: Anatomy, names: str = "") -> Row:
    """The row of a model that opens."""
    how = "blocks" if not vit.hierarchical else "stages" if vit.depth else "feature map"
    axes = getattr(getattr(vit, "layout", None), "axes", ("row", "column"))
    removal = "drop" if vit.can_drop is None else "refused"
    return Row(library, model, names, how, " x ".join(axes), removal, vit.can_drop or "")


def wrapped(library: str, module: nn.Module, size: pl.Preprocess | None = None) -> Row:
    """The row of a small model, with the size of its images where it does not know that."""
    model = type(module).__name__
    try:
        return opened(library, model, pl.wrap(module, name="it", preprocess=size))
    except NoClassifier as error:
        return opened(library, model, error.vit)
    except pl.PatchlightError as error:
        return Row(library, model, reason=_reason(error))


def small(library: str) -> dict[str, Row]:
    """The rows of a library's small models, by class; the first of each class."""
    names = {type(tiny(name)).__name__: name for name, row in reversed(MODELS.items()) if row.library == library}
    return {kind: wrapped(library, tiny(name), preprocess(name)) for kind, name in reversed(names.items())}


def _reason(error: Exception) -> str:
    """The reason of a refusal, without the advice that follows."""
    return re.split(r"; |\. ", str(error))[0].removesuffix(".").removeprefix("it cannot be opened: ")


def of_transformers() -> list[Row]:
    """The image classifiers of transformers' own mapping, the other classes with small models, and its encoders."""
    built = small("transformers")
    missing = {name: Row("transformers", name, reason=f"not built: {why}") for name, why in UNBUILT.items()}
    classes = [*dict.fromkeys([*image_classifiers(), *built])]
    rows = [built[name] if name in built else missing[name] for name in classes]
    return rows + [wrapped("transformers", transformers_model(name)) for name in hf_backbones.supported()]


def of_torchvision() -> list[Row]:
    """The classifiers of torchvision: small transformers, and the smallest name of each other module."""
    from torchvision import models

    built = small("torchvision")
    seen: dict[str, list[tuple[int, str]]] = {}
    for name in models.list_models(module=models):
        size = min(weights.meta["num_params"] for weights in models.get_model_weights(name))
        seen.setdefault(models.get_model_builder(name).__module__, []).append((size, name))
    rows = []
    for _, names in sorted(seen.items()):
        model = models.get_model(min(names)[1], weights=None)
        row = built.get(type(model).__name__) or wrapped("torchvision", model)
        rows.append(replace(row, names=str(len(names))))
    return rows


def of_open_clip() -> list[Row]:
    """The names of open_clip, grouped by their image encoder; built without weights, with a small text encoder."""
    import open_clip

    rows: Counter[Row] = Counter()
    for name in open_clip.list_models():
        config = open_clip.get_model_config(name)
        vision = dict(config["vision_cfg"], timm_model_pretrained=False)
        kind = open_clip.model.CustomTextCLIP
        if "multimodal_cfg" in config:
            rows[Row("open_clip", "CoCa", reason=_refused_coca())] += 1
            continue
        with torch.device("meta"):
            model: Any = kind(config["embed_dim"], vision, OWN_TEXT)
        tower = type(getattr(model.visual, "trunk", model.visual)).__name__
        tower = f"timm's {tower}" if hasattr(model.visual, "trunk") else tower
        try:
            vit = read_anatomy(model, {"name": "it"})
            assert vit is not None, name
            rows[opened("open_clip", tower, vit)] += 1
        except pl.PatchlightError as error:
            rows[Row("open_clip", tower, reason=_reason(error))] += 1
    return [replace(r, names=str(count)) for r, count in sorted(rows.items(), key=str)]


def _refused_coca() -> str:
    """The reason why a CoCa is refused."""
    from patchlight.anatomy.open_clip import read_open_clip

    try:
        read_open_clip(type("CoCa", (nn.Module,), {})(), name="it")
    except pl.PatchlightError as error:
        return _reason(error)
    raise AssertionError("a CoCa is not refused any more; build one")


def of_timm() -> list[Row]:
    """The names of timm, grouped by module and class, or by why they are refused."""
    rows: Counter[Row] = Counter()
    for name in timm_table():
        if name.opens == "refused":
            rows[Row("timm", name.module, reason=re.split(r"; | \(timm's ", name.reason)[0])] += 1
            continue
        how = "blocks" if name.opens == "plain" else "stages" if name.attention == "yes" else "feature map"
        removal, reason = ("drop", "") if name.tokens == "yes" else ("refused", name.tokens)
        rows[Row("timm", f"{name.kind} ({name.module})", "", how, "row x column", removal, reason)] += 1
    return [replace(r, names=str(count)) for r, count in sorted(rows.items(), key=str)]


def as_csv(rows: Iterable[Row]) -> str:
    """The table as a file."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([[field.name for field in fields(Row)], *map(astuple, rows)])
    return out.getvalue()


def table() -> list[Row]:
    """The committed table."""
    with (DOCS / "coverage.csv").open(encoding="utf-8", newline="") as file:
        return [Row(**line) for line in csv.DictReader(file)]


def as_markdown(rows: Sequence[Row]) -> str:
    """The table as a page."""
    lines = [
        "# Which models open",
        "",
        "Every class of models that was tried. *Blocks*: opened with its blocks, over one grid. *Stages*: a "
        "hierarchical model, opened at a stage (`stage=`) with its blocks. *Feature map*: opened at the feature map of "
        "a stage, without blocks. *Removal*: whether tokens can be dropped. A refused model raises an error with the "
        "reason; other models can be [described by hand](own-models.md). `pl.list_methods(vit)` shows which methods "
        "work on a model.",
        "",
        "The table is generated by `python -m tools.coverage`, and [coverage.csv](coverage.csv) has the same rows. A "
        "small random model of each class of transformers and torchvision was wrapped, which compares its parts with "
        "its own forward. The models of open_clip were built without weights, so their rows are read and not compared. "
        "The rows of timm summarise [its own table](models.md).",
    ]
    for library in dict.fromkeys(row.library for row in rows):
        own = [row for row in rows if row.library == library]
        named = any(row.names for row in own)
        lines += ["", f"## {library}", "", f"| model |{' names |' if named else ''} opens | grid | removal | reason |"]
        lines.append("|" + "---|" * (6 if named else 5))
        for row in own:
            cells = [row.model, *([row.names] if named else []), row.opens, row.grid, row.removal, row.reason]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write both files."""
    warnings.simplefilter("ignore")
    rows = [*of_transformers(), *of_torchvision(), *of_open_clip(), *of_timm()]
    (DOCS / "coverage.csv").write_text(as_csv(rows), encoding="utf-8")
    (DOCS / "coverage.md").write_text(as_markdown(rows), encoding="utf-8")
    print(f"wrote {DOCS / 'coverage.md'} and coverage.csv: {len(rows)} rows")


if __name__ == "__main__":
    main()
