"""`patchlight recommend`: compare methods on your own images within a time budget."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from patchlight.cli import common
from patchlight.cli.options import ModelOptions, command
from patchlight.core.errors import PatchlightError


@command
def recommend(
    *,
    images: Path | None = None,
    data: str | None = None,
    listed: str | None = None,
    budget: str = "10m",
    out: Path | None = None,
    method: str | None = None,
    metric: str | None = None,
    resume: bool = False,
    worth: Annotated[float, typer.Option(min=0.0)] = 0.01,
    model: ModelOptions,
    settings: list[str] | None = None,
    seed: int = 0,
    as_json: bool = False,
) -> None:
    """Compare methods on your images within a time budget, and recommend the most faithful one.

    No labels are needed. The verdict names equally good and cheaper methods, and how certain it is.
    """
    start = time.monotonic()
    if images is None:
        raise PatchlightError("no images were given; name a folder or an image with --images PATH")
    common.check_images([images])
    from patchlight.data import KINDS, open_images
    from patchlight.methods.requests import resolve
    from patchlight.metrics.base import resolve_metric
    from patchlight.study.recommend.run import earlier_run, seconds_of
    from patchlight.study.recommend.run import recommend as race
    from patchlight.study.recommend.work import Clock

    seconds = seconds_of(budget)
    names = {"method": common.split_names(method), "metric": common.split_names(metric)}
    selection = _with_settings(names, settings or [])
    for noun, resolver in (("method", resolve), ("metric", resolve_metric)):
        for name, own in (selection[noun] or {}).items():
            resolver(name, own)
    if data is not None:
        KINDS.find(data)
    model.check()
    earlier_run(out, resume)
    vit = model.load()
    verdict = race(
        vit,
        open_images([images], data, vit.labels, listed),
        budget=Clock(seconds, spent=time.monotonic() - start),
        methods=selection["method"],
        metrics=selection["metric"],
        seed=seed,
        worth=worth,
        out=out,
        resume=resume,
    )
    if as_json:
        common.print_json(json.loads(verdict.to_json()) | {"seconds": verdict.seconds})
    else:
        common.show_text(f"{verdict}\n")
    if out is not None:
        common.say(f"Wrote {out / 'verdict.html'}")
    if verdict.failed:
        raise typer.Exit(common.SOME_FAILED)


def _with_settings(names: dict[str, list[str]], settings: list[str]) -> dict[str, Any]:
    """Methods and metrics with their settings; None if none are named."""
    all_names = [*names["method"], *names["metric"]]
    if not all_names:
        if settings:
            raise PatchlightError(f"'--set {settings[0]}' needs a method or metric; name it with --method or --metric")
        return dict.fromkeys(names)
    by_name = common.read_settings(all_names, settings, "method", "method or metric")
    return {noun: {name: by_name[name] for name in chosen} or None for noun, chosen in names.items()}
