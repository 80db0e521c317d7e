"""`python -m tools.models`: walk every name of timm, and write docs/models.md and docs/models.csv of what opens.

Names are grouped by structure: every one is built without weights, and of each structure the smallest is built with
them, wrapped, probed, and compared with timm's own features. It takes about ten minutes on one core.
"""

from __future__ import annotations

import csv
import gc
import inspect
import io
import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

import patchlight as pl
from patchlight.anatomy.families import read_anatomy
from patchlight.anatomy.names import STAGED, module_of, why_not
from patchlight.anatomy.opened import Anatomy

DOCS = Path(__file__).parent.parent / "docs"
CLASSES = 7


@dataclass(frozen=True)
class Row:
    """What is known of one name: how it opens (plain, staged, refused; failed or unwalked while the table is made),
    its image and grid, what can be done with it, and on which model of its structure that was seen."""

    module: str
    kind: str
    name: str
    opens: str
    image: str = ""
    grid: str = ""
    prefix: str = ""
    pooling: str = ""
    blocks: str = ""
    tokens: str = ""
    attention: str = ""
    seen_on: str = ""
    reason: str = ""


FIELDS = tuple(Row.__dataclass_fields__)


def without_weights(name: str) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, num_classes=CLASSES).eval()


def small(name: str) -> nn.Module:
    """A model of the name's structure, with two blocks of a plain one and one for each stage, where it takes that."""
    torch.manual_seed(0)
    given = options(name)
    while True:
        try:
            return timm.create_model(name, num_classes=CLASSES, **given).eval()
        except Exception:
            if not given:
                raise
            given = {key: value for key, value in given.items() if key != next(reversed(given))}


def options(name: str) -> dict[str, Any]:
    """Options that make a model of this name small, out of those its class accepts; the most reliable first."""
    config = timm.get_pretrained_cfg(name)
    if module_of(name) in STAGED:
        free = config is not None and not config.fixed_input_size and "halo" not in name  # whose blocks must fit
        return {"pretrained_cfg_overlay": {"input_size": (3, 128, 128)}} if free else {}
    taken = inspect.signature(type(without_weights(name))).parameters
    sizes: dict[str, Any] = {"depth": 2, "img_size": 64, "patch_size": 16, "embed_dim": 96, "num_heads": 4}
    sizes["local_up_to_layer"] = 1
    if "sapiens2" in name:
        sizes["num_kv_heads"] = (4, 2)
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values())
    return {key: value for key, value in sizes.items() if key in taken or anything}


def structure(model: nn.Module) -> tuple[Any, ...]:
    """What two models share that are opened alike: the kinds of module in them, and how their heads read."""
    kinds = tuple(sorted({type(m).__qualname__ for m in model.modules()}))
    plain = ("global_pool", "num_prefix_tokens", "pool_include_prefix", "rope_mixed", "dynamic_img_size")
    flags = tuple(str(value) for key in plain if isinstance(value := getattr(model, key, None), str | int | None))
    return type(model).__name__, kinds, flags


def read(name: str, model: nn.Module) -> Anatomy:
    """The anatomy of a model without weights: grid, prefix and pooling, unprobed."""
    vit = read_anatomy(model, {"name": name})
    assert vit is not None, name
    if hasattr(vit, "look"):
        vit.look()
    return vit


def sized(row: Row, vit: Anatomy) -> Row:
    def cross(sides: tuple[int, ...]) -> str:
        return "x".join(map(str, sides))

    return replace(
        row,
        image=cross(vit.preprocess.size),
        grid=cross(vit.grid),
        prefix=str(vit.prefix),
        pooling=vit.pooling,
        blocks=str(vit.depth),
    )


def probed(name: str) -> dict[str, str]:
    """What the probe of a small model of this structure shows, after its features were compared with timm's."""
    vit = pl.wrap(small(name), name=name)
    if vit.hierarchical:
        same_features(vit)
    dropped = "yes" if vit.can_drop is None else vit.can_drop
    seen = "yes" if vit.attention is None and vit.depth else vit.attention or "no blocks are opened"
    return {"tokens": dropped, "attention": seen, "opens": "staged" if vit.hierarchical else "plain"}


def same_features(vit: Anatomy) -> None:
    """Hold a stage's tokens against the feature map that timm itself gives for it, where it does."""
    model: Any = vit.model
    if not hasattr(model, "forward_intermediates"):
        return
    images = torch.randn(1, vit.channels, *vit.preprocess.size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = vit.run(vit.embed(images), stop=vit.stage_end)[:, vit.prefix :].mT.unflatten(2, vit.grid)
        given = {"indices": [vit.stage], "norm": False, "intermediates_only": True}  # type: ignore[attr-defined]
        (theirs,) = model.forward_intermediates(images, **given)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-4)


def walk(module: str) -> list[Row]:
    """A row for every name of a timm module."""
    rows: dict[str, Row] = {}
    alike: dict[tuple[Any, ...], list[tuple[int, str]]] = {}
    for name in timm.list_models(module=module):
        row = Row(module, "", name, "refused", reason=why_not(name, module) or "")
        if not row.reason:
            model = without_weights(name)
            try:
                vit = read(name, model)
                row = sized(replace(row, kind=type(model).__name__, opens=""), vit)
                pixels = math.prod(vit.preprocess.size) if vit.hierarchical else 1
                size = sum(p.numel() for p in model.parameters()) * pixels
                alike.setdefault(structure(model), []).append((size, name))
            except pl.PatchlightError as error:
                row = replace(row, kind=type(model).__name__, reason=str(error))
        rows[name] = row
    for group in alike.values():
        name = min(group)[1]
        told(f"{module}: {name} stands for {len(group)} names")
        try:
            shown = probed(name)
        except pl.PatchlightError as error:
            shown = {"opens": "refused", "reason": str(error)}
        except Exception as error:  # a finding: it must become a refusal or be mended
            shown = {"opens": "failed", "reason": f"{type(error).__name__}: {error}"}
        for _, other in group:
            rows[other] = replace(rows[other], seen_on=name, **shown)
        gc.collect()
    return list(rows.values())


def told(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def as_csv(rows: Iterable[Row]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(FIELDS)
    writer.writerows([getattr(row, field) for field in FIELDS] for row in rows)
    return out.getvalue()


def from_csv(text: str) -> list[Row]:
    return [Row(**line) for line in csv.DictReader(io.StringIO(text))]


def seeded(rows: Iterable[Row]) -> dict[str, Row]:
    """A row for every name of the installed timm: those given, what is refused by its kind, and what waits."""
    known = {row.name: row for row in rows}
    every = ((module, name) for module in timm.list_modules() for name in timm.list_models(module=module))
    waiting = {name: Row(module, "", name, "unwalked", reason=why_not(name, module) or "") for module, name in every}
    waiting = {name: replace(row, opens="refused") if row.reason else row for name, row in waiting.items()}
    return {name: known.get(name, row) for name, row in waiting.items()}


def as_markdown(rows: Sequence[Row]) -> str:
    """A line for every timm module and class that is opened alike, and one for each reason not to."""
    opened = [row for row in rows if row.opens in ("plain", "staged")]
    waiting = [row for row in rows if row.opens == "unwalked"]
    lines = [
        "# Models of timm",
        "",
        f"{len(opened)} of the {len(rows)} model names of timm {timm.__version__} can be opened; the others are "
        "refused, with the reason. [models.csv](models.csv) lists every name with its image size, grid, prefix "
        "tokens, pooling and blocks. Its column `seen_on` is the smallest model of the same structure, which was built "
        "and probed: its parts were compared with the full forward and, for models with stages, with timm's own "
        "features. The tables are generated by `python -m tools.models` (`python -m tools.models MODULE` for some of "
        "timm's modules).",
        "",
        "A *plain* model has blocks over one grid. A *staged* model is opened at a stage (`stage=`, by default the "
        "second-to-last): its feature map is explained, and for Swin, SwinV2, PVTv2 and Twins also its blocks. *Tokens "
        "dropped*: patches can really be removed. *Attention*: methods that read attention matrices work; if not, they "
        "are refused, and the other methods work.",
        "",
        "| timm module | class | names | opens | grids | prefix | pooling | tokens dropped | attention |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in opened:
        groups.setdefault((row.module, row.kind, row.opens, row.tokens, row.attention), []).append(row)
    for (module, kind, opens, tokens, attention), group in sorted(groups.items()):
        grids, prefixes, poolings = (
            _few({getattr(row, key) for row in group}) for key in ("grid", "prefix", "pooling")
        )
        cells = (module, kind, len(group), opens, grids, prefixes, poolings, _dash(tokens), _dash(attention))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "## Refused", "", "| why | timm modules | names |", "|---|---|---|"]
    reasons: dict[str, list[Row]] = {}
    for row in rows:
        if row.opens in ("refused", "failed"):
            reasons.setdefault(row.reason.partition(" (timm's ")[0].partition(";")[0], []).append(row)
    for reason, group in sorted(reasons.items()):
        lines.append(f"| {reason} | {', '.join(sorted({row.module for row in group}))} | {len(group)} |")
    if waiting:
        modules = ", ".join(sorted({row.module for row in waiting}))
        lines += ["", f"Not walked yet, though listed as names that open: {len(waiting)} names of {modules}."]
    return "\n".join(lines) + "\n"


def _few(values: set[str]) -> str:
    def by_size(value: str) -> tuple[list[int], str]:
        return [int(side) for side in value.split("x") if side.isdigit()], value

    found = sorted(values, key=by_size)
    return ", ".join(found) if len(found) <= 4 else f"{found[0]} to {found[-1]}"


def _dash(reason: str) -> str:
    return reason if reason == "yes" else "no" if not reason else f"no: {reason}"


def write(rows: Iterable[Row]) -> None:
    ordered = sorted(rows, key=lambda row: (row.module, row.name))
    (DOCS / "models.csv").write_text(as_csv(ordered), encoding="utf-8")
    (DOCS / "models.md").write_text(as_markdown(ordered), encoding="utf-8")


def table() -> list[Row]:
    """The table as it lies there."""
    file = DOCS / "models.csv"
    return from_csv(file.read_text(encoding="utf-8")) if file.exists() else []


def main(modules: Sequence[str]) -> None:
    """Walk some modules (all, where none is named), and put what was found into the table after each."""
    rows = seeded(table())
    for module in modules or timm.list_modules():
        rows |= {row.name: row for row in walk(module)}
        write(rows.values())
    print(f"wrote {DOCS / 'models.md'} and models.csv")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
