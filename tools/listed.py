"""`python -m tools.listed`: the table of names that the command line reads without torch, and the zoo's checksums."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

from patchlight.anatomy.load import list_models
from patchlight.cli.figure import figure_rows
from patchlight.cli.tables import method_rows, metric_rows
from patchlight.core import listed
from patchlight.data import KINDS
from patchlight.zoo import bundled


def made() -> dict[str, Any]:
    """The whole table, from the registries."""
    return {
        "sources": listed.sums(),
        "timm": metadata.version("timm"),
        "methods": method_rows(),
        "metrics": metric_rows(),
        "figures": figure_rows(),
        "data": sorted(KINDS),
        "models": list_models(),
    }


def text(table: dict[str, Any]) -> str:
    """The table as JSON, an entry a line, so that changes to different entries lie apart."""
    parts = []
    for key, value in table.items():
        if isinstance(value, dict):
            inside = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            parts.append(f"{json.dumps(key)}: {{\n{inside}\n}}")
        elif isinstance(value, list):
            inside = ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in value)
            parts.append(f"{json.dumps(key)}: [\n{inside}\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    listed.TABLE.write_text(text(made()), encoding="utf-8")
    bundled.SUMS.write_text(bundled.made_sums(), encoding="utf-8")
    print(f"wrote {listed.TABLE} and {bundled.SUMS}")
