"""`patchlight recommend`: which explanation to trust on one's own images, within a time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from patchlight.cli.common import SOME_FAILED, print_json, read_settings, say, split_names
from patchlight.cli.complete import complete_kind, complete_methods, complete_metrics
from patchlight.cli.options import AsJson, ImageList, ModelOptions, Seed, Settings, command
from patchlight.core.errors import PatchlightError


@command
def recommend(
    *,
    images: Annotated[Path | None, typer.Option(help="The images: a folder, or one image.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Kind of data set at --images, such as cifar10; without --images, the folder of the images.",
            metavar="KIND",
            autocompletion=complete_kind,
        ),
    ] = None,
    listed: ImageList = None,
    budget: Annotated[str, typer.Option(help="Time for everything, as 90s, 10m or 1h; loading counts.")] = "10m",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the verdict (JSON, text, HTML) and the finished cells.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Names, separated by commas; else all that work.", autocompletion=complete_methods),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Names, separated by commas, the first decides; else srg over two fills.",
            autocompletion=complete_metrics,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the cells in --out.")] = False,
    worth: Annotated[float, typer.Option(min=0.0, help="The smallest difference of scores that counts.")] = 0.01,
    model: ModelOptions,
    settings: Settings = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Race methods on your images: which explanation to trust, what is as good and cheaper, and how sure that is."""
    begun = time.monotonic()
    from patchlight.data import open_images
    from patchlight.study.recommend.run import recommend as race
    from patchlight.study.recommend.run import seconds_of
    from patchlight.study.recommend.work import Clock

    seconds = seconds_of(budget)
    if images is None and data is None:
        raise PatchlightError("no images were given; name their folder with --images FOLDER")
    path, kind = (images, data) if images is not None else (Path(str(data)), None)
    if not path.exists():
        raise PatchlightError(f"no image or folder at '{path}'")
    names = {noun: split_names(given) for noun, given in (("method", methods), ("metric", metrics))}
    asked = _asked(names, settings or [])
    vit = model.load()
    verdict = race(
        vit,
        open_images([path], kind, vit.labels, listed),
        budget=Clock(seconds, spent=time.monotonic() - begun),
        methods=asked["method"],
        metrics=asked["metric"],
        seed=seed,
        worth=worth,
        out=out,
        resume=resume,
    )
    if as_json:
        print_json(json.loads(verdict.to_json()) | {"seconds": verdict.seconds})
    else:
        print(verdict)
    if out is not None:
        say(f"Wrote {out / 'verdict.html'}")
    if verdict.failed:
        raise typer.Exit(SOME_FAILED)


def _asked(names: dict[str, list[str]], settings: list[str]) -> dict[str, Any]:
    """Methods and metrics with their settings; None where none were named."""
    every = [*names["method"], *names["metric"]]
    if not every:
        if settings:
            raise PatchlightError(
                f"'--set {settings[0]}' is for a method or metric that is named; give --methods or --metrics"
            )
        return dict.fromkeys(names)
    own = read_settings(every, settings, "method", "method or metric")
    return {noun: {name: own[name] for name in some} or None for noun, some in names.items()}
