"""`patchlight evaluate`: measure explanations on images, as a table, JSON or CSV."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchlight.cli import common
from patchlight.cli.complete import complete_preset
from patchlight.cli.options import ModelOptions, command
from patchlight.core.errors import PatchlightError
from patchlight.core.files import check_writable, write_atomic

if TYPE_CHECKING:
    from patchlight.study.files import MeasuredFiles, SavedMaps


@command
def evaluate(
    *,
    maps: Annotated[Path | None, typer.Argument(metavar="MAPS")] = None,
    images: Path | None = None,
    metric: str | None = None,
    method: str | None = None,
    model: ModelOptions,
    target: str | None = None,
    data: str | None = None,
    listed: str | None = None,
    preset: Annotated[str | None, typer.Option(autocompletion=complete_preset)] = None,
    settings: list[str] | None = None,
    csv_file: Path | None = None,
    seed: int = 0,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Measure how faithful explanations are: of saved maps, or of methods that are run first."""
    if images is None:
        raise PatchlightError("no images were given; name a folder or an image with --images PATH")
    common.check_images([images])
    if maps is not None and not maps.is_dir():
        raise PatchlightError(f"no folder of maps at '{maps}'")
    metrics, methods = common.split_names(metric) or ["ins-del"], common.split_names(method)
    methods = methods or ([] if maps is not None else ["auto"])
    named = [*metrics, *(methods if maps is None else [])]
    by_name = common.read_settings(named, settings or [], "metric", "metric or method" if named != metrics else "")
    from patchlight.data import KINDS, open_images
    from patchlight.methods.requests import resolve
    from patchlight.metrics.base import resolve_metric
    from patchlight.study.compare import CHEAP
    from patchlight.study.cost import warn_if_long
    from patchlight.study.files import FileLog, MeasureTask, find_maps, measure_files

    common_settings = {name: {"preset": preset} for name in metrics} if preset else CHEAP if metric is None else {}
    task = MeasureTask(
        [resolve_metric(name, {**common_settings.get(name, {}), **by_name[name]}) for name in metrics],
        methods,
        [resolve(name, by_name[name]) for name in methods] if maps is None else [],
        target=target,
        seed=seed,
        batch_size=batch_size,
    )
    if data is not None:
        KINDS.find(data)
    model.check(None if target == "label" else target)
    if csv_file is not None:
        check_writable(csv_file.parent)
    common.check_new([csv_file], force)
    log = FileLog(common.say)
    with common.progress("loading the model") as update:
        vit = model.load()
        shown = open_images([images], data, vit.labels, listed)
        if maps is not None:
            saved, methods, shown = find_maps(maps, shown, methods, keep_others=listed is None)
            task = replace(task, saved=saved, methods=methods)
        warn_if_long(vit, len(shown), task.requests, task.metrics)
        update(description="measuring", total=len(shown) * len(methods))
        measured = measure_files(task, vit, shown, log, lambda count: update(advance=count))
    methods_used = common.used_methods(task.requests, vit) if maps is None else _saved_methods(task.saved or {})
    if as_json:
        results = {"model": vit.name, "target": target, "seed": seed, "results": measured.to_json()}
        errors = [{"image": name, "error": sentence} for name, sentence in log.errors]
        common.print_json(
            results | common.describe_methods(methods_used) | {"errors": errors, "warnings": log.warnings}
        )
    else:
        _print(measured, common.label_methods(methods_used), vit.name, len(log.errors))
    if csv_file is not None:
        write_atomic(csv_file, measured.to_csv().encode(errors="surrogateescape"))
        common.say(f"Wrote {csv_file}")
    if log.errors:
        raise typer.Exit(common.SOME_FAILED)


def _saved_methods(saved: SavedMaps) -> common.UsedMethods:
    """The methods of saved maps, as the first readable map of each says."""
    from patchlight.core.attribution import Attribution

    methods: dict[str, tuple[str, bool]] = {}
    for label, folder in ((label, folder) for of_image in saved.values() for label, folder in of_image.items()):
        if label not in methods:
            with contextlib.suppress(PatchlightError):  # it was reported as damaged
                att = Attribution.load(folder)
                methods[label] = att.method, att.ignores_class and att.method != "random"
    return methods


def _print(measured: MeasuredFiles, labels: Mapping[str, str], model: str, failed: int) -> None:
    """Print a line per method and a column per metric."""
    from patchlight.core.statistics import FEWEST
    from patchlight.core.text import plural

    by_method = {method: values for method, values in measured.evaluations.items() if values}
    headings = [f"{name} {one.arrow}" for name, one in next(iter(by_method.values())).items()]
    counts = {len(measured.names[method]) for method in by_method}
    images = plural(max(counts), "image") if len(counts) == 1 else f"{min(counts)} to {max(counts)} images"
    shown = {method: [str(len(measured.names[method]))] if len(counts) > 1 else [] for method in by_method}
    rows = [
        (labels.get(method, method), *shown[method], *(one.summary for one in own.values()))
        for method, own in by_method.items()
    ]
    columns = ("method", *(["images"] if len(counts) > 1 else []), *headings)
    common.print_table(columns, rows, f"{model}, {images}, mean [95 % interval]")
    if len(counts) > 1:
        common.show("Means of different images cannot be compared.")
    if min(one.count for own in by_method.values() for one in own.values()) < FEWEST:
        common.show(f"An interval needs at least {FEWEST} images with a value.")
    if failed:
        common.show(f"{failed} failed; the means are over the other images.")
