"""`patchlight demo` and `patchlight explain`: from paths to pictures, raw scores and a table of predictions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchlight.cli.common import (
    SOME_FAILED,
    command_line,
    console,
    print_json,
    program,
    progress,
    read_settings,
    say,
    split_names,
)
from patchlight.cli.complete import complete_methods, one_of
from patchlight.cli.options import AsJson, Force, ModelOptions, Seed, Settings, command
from patchlight.core.errors import PatchlightError
from patchlight.core.extras import EXTRAS

if TYPE_CHECKING:
    from patchlight.report.files import WrittenFiles

DEMO_METHODS: dict[str, dict[str, Any]] = {
    "diffmask": {},
    "vit-cx": {},
    "tis": {"samples": 128},
    "decompx.skipplus": {},
    "tokentm": {},
    "random": {},
}
"""A method of each of the five papers, and what none may fall behind."""
TWO_METHODS = ("genatt", "tokentm", "ixg.plus.libra")
TWO_CLASSES = "dog-and-cat.jpg"
TABLE_ROWS = 50


@command
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the figures; an earlier demo's are replaced.")] = Path("demo"),
    as_json: AsJson = False,
) -> None:
    """Explain the bundled photographs with the bundled model, and write two figures."""
    with progress("loading the model") as show:
        from patchlight.engine import explain
        from patchlight.methods.requests import resolve
        from patchlight.report.files import ExplainTask, ImageFile, write_explanations
        from patchlight.report.pictures import figure
        from patchlight.zoo import pocket

        photos = [pocket.PHOTOS / about["file"] for about in json.loads((pocket.PHOTOS / "photos.json").read_text())]
        vit = ModelOptions().load()
        items = [ImageFile(photo) for photo in photos if photo.name != TWO_CLASSES]
        requests = [resolve(name, own) for name, own in DEMO_METHODS.items()]
        show(description="explaining", total=len(items))
        task = ExplainTask(items, requests, out / "patchlight-demo.png")
        done = write_explanations(task, vit, say, lambda count: show(completed=count))
    two, photo = out / "patchlight-two-classes.png", pocket.PHOTOS / TWO_CLASSES
    figure(photo, explain(vit, photo, TWO_METHODS, target=[["dog", "cat"]]), vit=vit, path=two)
    done.written.append(str(two))
    _print(done, {"methods": DEMO_METHODS, "score": None, "seed": 0}, as_json)
    if not as_json:
        print(f"Your own image: {program()} explain photo.jpg --method genatt,rollout --out explained.png")
        absent = EXTRAS["web"].missing()
        first = f", after pip install 'patchlight[web]', which brings {', '.join(absent)}" if absent else ""
        print(f"In a browser: {program()} serve, and open the address that it prints{first}")


@command
def explain(
    *,
    context: typer.Context,
    paths: Annotated[list[str], typer.Argument(help="Images, or folders of images.", metavar="PATH...")],
    method: Annotated[
        str,
        typer.Option(
            help="Names, separated by commas (`patchlight methods`); or inside, or all.",
            autocompletion=complete_methods,
        ),
    ] = "genatt",
    model: ModelOptions,
    target: Annotated[str | None, typer.Option(help="Class to explain, a name or index; else the prediction.")] = None,
    against: Annotated[str | None, typer.Option(help="Class that the target is contrasted with.")] = None,
    out: Annotated[str | None, typer.Option(help="A file for one figure, or a folder for one per image.")] = None,
    settings: Settings = None,
    explainer: Annotated[
        Path | None, typer.Option(help="Folder of a trained explainer: diffmask, vit-shapley.")
    ] = None,
    save: Annotated[str | None, typer.Option(help="Folder for the raw scores, one attribution per method.")] = None,
    report: Annotated[
        str | None,
        typer.Option(help="A file for a report to hand on: HTML with the maps, their test, and how they were made."),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            help="What is explained: logit, probability or cosine.",
            autocompletion=one_of("logit", "probability", "cosine"),
        ),
    ] = None,
    seed: Seed = 0,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images at once; by default what memory allows.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Explain images: which patches speak for a class. Writes pictures and prints predictions.

    With --report the maps are tested too, by removing patches in their order, and pictures are written only with --out.
    """
    missing = next((path for path in paths if not Path(path).exists()), None)
    if missing is not None:
        raise PatchlightError(f"no image or folder at '{missing}'")
    if report is not None and Path(report).suffix.lower() not in (".html", ".htm"):
        raise PatchlightError(f"'{report}' is no report; its name must end in .html")
    names = expand_groups(method.split(","))
    own = read_settings(names, settings or [])
    from patchlight.methods.requests import resolve
    from patchlight.report.files import ExplainTask, destination, plan_files, write_explanations

    if explainer is not None:
        _add_explainer(own, explainer)
    requests = [resolve(name, each, score) for name, each in own.items()]  # type: ignore[arg-type]
    figure, folder = (None, None) if report is not None and out is None else destination(paths, out)
    task = ExplainTask(
        plan_files(paths, folder, save),
        requests,
        figure,
        None if report is None else Path(report),
        target,
        against,
        seed,
        batch_size,
        force,
        command_line(context),
        optional=frozenset(names) - set(split_names(method)),
    )
    task.check_outputs()
    with progress("loading the model") as show:
        vit = model.load()
        show(description="explaining", total=len(task.items))
        done = write_explanations(task, vit, say, lambda count: show(completed=count))
    used = {name: own[name] for name in done.methods}
    _print(done, {"methods": used, "score": score, "seed": seed}, as_json)
    if done.log.errors:
        raise typer.Exit(SOME_FAILED)


def _add_explainer(methods: dict[str, dict[str, Any]], explainer: Path) -> None:
    """Hand a trained explainer to the methods that take one."""
    from patchlight.methods.requests import resolve

    takers = [name for name in methods if "explainer" in resolve(name).settings]
    if not takers:
        raise PatchlightError(
            f"--explainer is for methods diffmask and vit-shapley, and {', '.join(methods)} was asked"
        )
    for name in takers:
        methods[name]["explainer"] = str(explainer)


def expand_groups(names: Sequence[str]) -> list[str]:
    """`all` is every method, `inside` every one that reads the model's inside; other names stand for themselves."""
    if not {"all", "inside"} & {name.strip() for name in names}:
        return list(names)
    from patchlight.methods.base import METHODS, Ablates

    inside = [name for name, method in METHODS.items() if not isinstance(method, Ablates) and name != "random"]
    groups = {"all": list(METHODS), "inside": inside}
    return list(dict.fromkeys(one for name in names for one in groups.get(name.strip(), [name.strip()])))


def _print(done: WrittenFiles, about: dict[str, Any], as_json: bool) -> None:
    """The predictions as a table and the files written, or all of it as JSON."""
    errors = [{"path": path, "error": sentence} for path, sentence in done.log.errors]
    if as_json:
        told = {"images": done.images, "errors": errors, "warnings": done.log.warnings, "written": done.written}
        print_json({"model": done.model, **about, **told})
        return
    from rich.table import Table

    from patchlight.core.drawing import describe_prediction, short

    table = Table(title=f"Predictions of {done.model}", title_justify="left", title_style="bold")
    for heading in ("image", "prediction", "then", "explained"):
        table.add_column(heading, overflow="fold")
    for image in done.images[:TABLE_ROWS]:
        words = [
            describe_prediction((p["label"], p.get("probability", p.get("score"))), "probability" in p)
            for p in image["predictions"]
        ]
        explained = short(image["target"]["label"])
        if "against" in image:
            explained += f" against {short(image['against']['label'])}"
        table.add_row(Path(image["path"]).name, words[0], ", ".join(words[1:]), explained)
    if done.images:
        console().print(table)
    if len(done.images) > TABLE_ROWS:
        print(f"and {len(done.images) - TABLE_ROWS} more (--json lists all)")
    if errors:
        print(f"{len(errors)} of {len(errors) + len(done.images)} images failed")
    if 1 <= len(done.written) <= 3:
        print(f"Wrote {' and '.join(done.written)}")
    elif done.written:
        print(f"Wrote {len(done.written)} files, from {done.written[0]} to {done.written[-1]}")
