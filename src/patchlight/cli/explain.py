"""`patchlight demo` and `patchlight explain`: from paths to pictures, raw scores and a table of predictions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchlight.cli import common
from patchlight.cli.options import ModelOptions, QuestionOptions, command
from patchlight.core.errors import PatchlightError
from patchlight.core.extras import EXTRAS

if TYPE_CHECKING:
    from patchlight.core.attribution import Attribution
    from patchlight.report.files import WrittenFiles

DEMO_METHODS: dict[str, dict[str, Any]] = {
    "diffmask": {},
    "vit-cx": {},
    "tis": {"samples": 128},
    "decompx.skipplus": {},
    "tokentm": {},
    "random": {},
}
"""A method of each of the five papers, and the random baseline."""
READING = "Red patches support dog, blue patches support cat."
TABLE_ROWS = 50


@command
def demo(
    out: Path = Path("demo"),
    open_it: bool = False,
    as_json: bool = False,
) -> None:
    """Explain bundled photographs with the bundled model, and write two pictures."""
    with common.progress("loading the model") as update:
        from patchlight.engine import explain
        from patchlight.methods.requests import resolve
        from patchlight.report.files import ExplainTask, ImageFile, write_explanations
        from patchlight.zoo import pocket

        vit = ModelOptions().load()
        photo, first = pocket.PHOTOS / "dog-and-cat.jpg", out / "patchlight-two-classes.png"
        _draw_contrast(explain(vit, photo, target="dog", against="cat"), photo, first)
        cards = json.loads((pocket.PHOTOS / "photos.json").read_text())
        items = [ImageFile(pocket.PHOTOS / card["file"]) for card in cards if card["file"] != photo.name]
        requests = [resolve(name, settings) for name, settings in DEMO_METHODS.items()]
        update(description="explaining", total=len(items))
        task = ExplainTask(items, requests, out / "patchlight-demo.png")
        done = write_explanations(task, vit, common.say, lambda count: update(completed=count))
    done.written.insert(0, str(first))
    _print(done, common.used_methods(requests, vit), {"methods": DEMO_METHODS}, as_json)
    if open_it:
        typer.launch(str(first))
    if as_json:
        return
    absent = EXTRAS["web"].missing()
    install = f" (first: pip install 'patchlight[web]', for {', '.join(absent)})" if absent else ""
    common.show()
    common.show(f"Look at {first} first: {READING}")
    common.show(f"{done.written[1]} compares {len(DEMO_METHODS) - 1} methods and random maps on other photographs.")
    common.show()
    common.show("Try next:")
    common.show(f"  {common.program()} explain photo.jpg     explain your own photograph")
    common.show(f"  {common.program()} serve --open          the same on a web page{install}")
    common.show(f"  {common.program()} methods               all methods, and which to use")


def _draw_contrast(att: Attribution, photo: Path, path: Path) -> None:
    """Draw a photograph and its map, large and with a sentence on how to read it."""
    from matplotlib.figure import Figure

    from patchlight.core.images import open_image

    figure = Figure(figsize=(12, 6.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.imshow(open_image(photo))
    left.set_axis_off()
    left.set_title("the photograph", fontsize=16)
    att.plot(right, image=photo).title.set_fontsize(16)
    figure.suptitle(f"Why dog and not cat? {READING}", fontsize=17)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


@command
def explain(
    *,
    context: typer.Context,
    paths: Annotated[list[str], typer.Argument(metavar="PATH")],
    method: str = "auto",
    model: ModelOptions,
    question: QuestionOptions,
    target: str | None = None,
    against: str | None = None,
    out: str | None = None,
    settings: list[str] | None = None,
    unit: str | None = None,
    explainer: Path | None = None,
    save: str | None = None,
    report: str | None = None,
    score: str | None = None,
    seed: int = 0,
    batch_size: Annotated[int | None, typer.Option(min=1)] = None,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Explain images: which patches support a class. Writes pictures and prints predictions.

    With --report, pictures are written only if --out is given.
    """
    common.check_images(paths)
    if report is not None and Path(report).suffix.lower() not in (".html", ".htm"):
        raise PatchlightError(f"'{report}' is not an HTML file; the name of a report ends in .html")
    if against is not None and target is None:
        raise PatchlightError("--against needs --target, the class it is contrasted with")
    names = expand_groups(common.split_names(method))
    by_name = common.read_settings(names, settings or [])
    from patchlight.methods.requests import resolve
    from patchlight.report.files import ExplainTask, destination, plan_files, plan_inputs, write_explanations

    if explainer is not None:
        if not explainer.is_dir():
            raise PatchlightError(f"no folder at '{explainer}' (--explainer)")
        words = f"--explainer is for the methods diffmask and vit-shapley, not for {', '.join(by_name)}"
        _add_setting(by_name, "explainer", str(explainer), words)
    if unit is not None:
        _add_setting(
            by_name, "unit", unit, f"--unit is for methods that hide parts, such as occlusion, not for {method}"
        )
    requests = [resolve(name, own, score) for name, own in by_name.items()]  # type: ignore[arg-type]
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
        common.command_line(context),
        optional=frozenset(names) - set(common.split_names(method)),
    )
    model.check(target, against)
    task.check_outputs()
    with common.progress("loading the model") as update:
        vit = model.load()
        task = replace(task, heads=question.heads(vit.task))
        if vit.layout.inputs != "images":
            task = replace(task, items=plan_inputs(paths, folder, save))
            task.check_outputs()
        update(description="explaining", total=len(task.items))
        done = write_explanations(task, vit, common.say, lambda count: update(completed=count))
    methods_used = common.used_methods((request for request in requests if request.label in done.methods), vit)
    options = {"methods": {name: by_name[name] for name in methods_used}, "score": score, "seed": seed}
    _print(done, methods_used, options, as_json)
    if done.log.errors:
        raise typer.Exit(common.SOME_FAILED)


def _add_setting(settings: dict[str, dict[str, Any]], key: str, value: str, refusal: str) -> None:
    """Set a value for the methods that have this setting; refused if none has it."""
    from patchlight.methods.requests import resolve

    takers = [name for name in settings if key in resolve(name).settings]
    if not takers:
        raise PatchlightError(refusal)
    for name in takers:
        settings[name][key] = value


def expand_groups(names: Sequence[str]) -> list[str]:
    """Names of methods, with `all` and `inside` replaced by the methods they stand for."""
    if not {"all", "inside"} & set(names):
        return list(names)
    from patchlight.methods.base import METHODS, Ablates

    inside = [name for name, method in METHODS.items() if not isinstance(method, Ablates) and name != "random"]
    groups = {"all": list(METHODS), "inside": inside}
    return list(dict.fromkeys(one for name in names for one in groups.get(name, [name])))


def _print(done: WrittenFiles, methods_used: common.UsedMethods, options: dict[str, Any], as_json: bool) -> None:
    """Print the predictions as a table and the files written, or everything as JSON."""
    errors = [{"path": path, "error": sentence} for path, sentence in done.log.errors]
    if as_json:
        results = {"images": done.images, "errors": errors, "warnings": done.log.warnings, "written": done.written}
        common.print_json({"model": done.model, **options, **common.describe_methods(methods_used), **results})
        return
    from patchlight.core.drawing import describe_prediction, short
    from patchlight.core.drawing.pictures import percent

    rows = []
    for image in done.images[:TABLE_ROWS]:
        words = [
            describe_prediction((p["label"], p.get("probability", p.get("score"))), "probability" in p)
            for p in image["predictions"]
        ]
        explained = short(image["target"]["label"])
        if "against" in image:
            explained += f" against {short(image['against']['label'])}"
        rows.append((Path(image["path"]).name, words[0], ", ".join(words[1:]), explained))
    if rows:
        common.print_table(
            ("image", "prediction", "runners-up", "explained class"), rows, f"Predictions of {done.model}"
        )
        common.show(f"Explained by {', '.join(common.label_methods(methods_used).values())}.")
    if len(done.images) > TABLE_ROWS:
        common.show(f"{len(done.images) - TABLE_ROWS} more images are not shown; --json lists all.")
    for image in done.images[:TABLE_ROWS]:
        shares = [f"{percent(share)} by {name}" for name, share in image.get("inside", {}).items()]
        if shares:
            region = f"{image['place']} of {image['target']['label']}"
            common.show(f"Share of the positive scores inside the {region}: {', '.join(shares)}.")
    answers = (image["words"] for image in done.images[:TABLE_ROWS] if image.get("words"))
    for gains in dict.fromkeys(", ".join(f"{each['word']} {each['gain']:z.1f}" for each in words) for words in answers):
        common.show(f"The image adds, in nats: {gains}. Words with 0.0 follow from the question alone.")
    if errors:
        paths = [result["path"] for result in (*errors, *done.images)]
        noun = "images" if len(set(paths)) == len(paths) else "explanations"  # an image may have several questions
        common.show(f"{len(errors)} of {len(paths)} {noun} failed.")
    if 1 <= len(done.written) <= 3:
        common.show(f"Wrote {' and '.join(done.written)}")
    elif done.written:
        common.show(f"Wrote {len(done.written)} files, from {done.written[0]} to {done.written[-1]}")
