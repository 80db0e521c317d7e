"""`patchlight demo` and `patchlight explain`: from paths to pictures, raw scores and a table of predictions."""

from __future__ import annotations

import hashlib
import itertools
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    read_class,
    read_settings,
    say,
)
from patchlight.cli.complete import complete_methods, one_of
from patchlight.cli.options import AsJson, Force, ModelOptions, Seed, Settings, command
from patchlight.core.errors import NotFinite, PatchlightError
from patchlight.core.extras import EXTRAS

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from patchlight.anatomy.base import Anatomy
    from patchlight.core.attribution import Attribution
    from patchlight.report.explanations import ImageSection
    from patchlight.study.faithfulness import Trial

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
BATCH, TABLE_ROWS = 16, 50


@command
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the figures; an earlier demo's are replaced.")] = Path("demo"),
    as_json: AsJson = False,
) -> None:
    """Explain the bundled photographs with the bundled model, and write two figures."""
    with progress("loading the model"):
        from patchlight.zoo import pocket

        photos = [pocket.PHOTOS / about["file"] for about in json.loads((pocket.PHOTOS / "photos.json").read_text())]
        vit = ModelOptions().load()
    items = [Item(photo, None, None) for photo in photos if photo.name != TWO_CLASSES]
    done = _run(Task(items, out / "patchlight-demo.png", DEMO_METHODS), lambda: vit)
    done.written.append(str(_two_classes(vit, pocket.PHOTOS / TWO_CLASSES, out / "patchlight-two-classes.png")))
    _report(done, as_json)
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
    _check_paths(paths)
    names = _expanded(method.split(","))
    wanted = read_settings(names, settings or [])
    if explainer is not None:
        _add_explainer(wanted, explainer)
    _check_settings(wanted, score)
    figure, folder = (None, None) if report is not None and out is None else _destination(paths, out)
    task = Task(
        items=_plan(paths, folder, save),
        figure=figure,
        methods=wanted,
        target=target,
        against=against,
        score=score,
        seed=seed,
        batch_size=batch_size,
        force=force,
        report=_report_path(report),
        command=command_line(context),
        optional=frozenset(names) - {name.strip() for name in method.split(",")},
    )
    _check_outputs(task)
    done = _run(task, model.load)
    _report(done, as_json)
    if done.errors:
        raise typer.Exit(SOME_FAILED)


@dataclass(frozen=True)
class Item:
    """An image to explain, where its picture and its raw scores go, and what a report calls it."""

    path: Path
    picture: Path | None
    maps: Path | None
    name: str = ""


@dataclass(frozen=True)
class Task:
    """A checked request."""

    items: list[Item]
    figure: Path | None
    methods: dict[str, dict[str, Any]]
    target: str | None = None
    against: str | None = None
    score: str | None = None
    seed: int = 0
    batch_size: int | None = None
    force: bool = False
    report: Path | None = None
    command: str = ""
    """The words at the command line that ask for the same."""
    optional: frozenset[str] = frozenset()
    """Methods that were not named themselves, and are left out where a model does not support them."""


@dataclass(frozen=True)
class Done:
    """What became of a task."""

    model: str
    task: Task
    images: list[dict[str, Any]]
    errors: list[dict[str, str]]
    warnings: list[str]
    written: list[str]


def _two_classes(vit: Anatomy, photo: Path, path: Path) -> Path:
    """The same photograph, explained for either of the animals on it."""
    from patchlight.core.drawing import figure
    from patchlight.engine import explain as engine_explain

    figure(photo, engine_explain(vit, photo, TWO_METHODS, target=[["dog", "cat"]]), vit=vit, path=path)
    return path


@dataclass(frozen=True)
class _Read:
    item: Item
    tensor: Tensor
    picture: Image


def _add_explainer(wanted: dict[str, dict[str, Any]], explainer: Path) -> None:
    """Hand a trained explainer to the methods that take one."""
    from patchlight.methods.requests import resolve

    takers = [name for name in wanted if "explainer" in resolve(name).settings]
    if not takers:
        raise PatchlightError(f"--explainer is for methods diffmask and vit-shapley, and {', '.join(wanted)} was asked")
    for name in takers:
        wanted[name]["explainer"] = str(explainer)


def _check_settings(wanted: dict[str, dict[str, Any]], score: str | None) -> None:
    from patchlight.methods.requests import resolve

    for name, own in wanted.items():
        resolve(name, own, score)  # type: ignore[arg-type]


def _expanded(names: Sequence[str]) -> list[str]:
    """`all` is every method, `inside` every one that reads the model's inside; other names stand for themselves."""
    if not {"all", "inside"} & {name.strip() for name in names}:
        return list(names)
    from patchlight.methods.base import METHODS, Ablates

    inside = [name for name, method in METHODS.items() if not isinstance(method, Ablates) and name != "random"]
    groups = {"all": list(METHODS), "inside": inside}
    return list(dict.fromkeys(one for name in names for one in groups.get(name.strip(), [name.strip()])))


def _destination(paths: Sequence[str], out: str | None) -> tuple[Path | None, Path | None]:
    """The one figure's file, or the folder for one picture per image."""
    from patchlight.core.drawing import figure_format
    from patchlight.core.drawing.pictures import FORMATS
    from patchlight.core.images import SUFFIXES

    if out is None:
        alone = len(paths) == 1 and not Path(paths[0]).is_dir()
        return (Path(f"{Path(paths[0]).stem}-explained.png"), None) if alone else (None, Path("explained"))
    path = Path(out)
    unknown = path.suffix[1:].isalpha() and path.suffix.lower() not in {*FORMATS, *SUFFIXES}
    if unknown and not out.endswith(("/", "\\")) and not path.is_dir():
        raise PatchlightError(f"'{out}' is no figure ({', '.join(FORMATS)}); a folder's name ends with '/'")
    if out.endswith(("/", "\\")) or path.is_dir() or path.suffix.lower() not in {*FORMATS, *SUFFIXES}:
        return None, path
    figure_format(path)
    return path, None


def _report_path(report: str | None) -> Path | None:
    """The file of a report."""
    if report is None:
        return None
    if Path(report).suffix.lower() not in (".html", ".htm"):
        raise PatchlightError(f"'{report}' is no report; its name must end in .html")
    return Path(report)


def _check_paths(paths: Sequence[str]) -> None:
    """Refuse a path that leads nowhere, before anything slow is imported."""
    for path in paths:
        if not Path(path).exists():
            raise PatchlightError(f"no image or folder at '{path}'")


def _plan(paths: Sequence[str], folder: Path | None, save: str | None) -> list[Item]:
    """Every image once, with output names that mirror the folders and never collide."""
    from patchlight.core.images import list_images

    images: dict[Path, tuple[Path, Path]] = {}
    outputs = [Path(o).resolve() for o in (folder, save) if o is not None]
    for given in map(Path, paths):
        if not given.is_dir():
            images.setdefault(given.resolve(), (given, Path(given.name)))
            continue
        below = [o for o in outputs if o != given.resolve() and o.is_relative_to(given.resolve())]
        for path in list_images(given):
            if not any(path.resolve().is_relative_to(o) for o in below):
                within = path.relative_to(given)
                images.setdefault(path.resolve(), (path, within if len(paths) == 1 else given.resolve().name / within))
    if not images:
        raise PatchlightError(f"no images in '{paths[0]}' besides earlier output")
    items = []
    shared = Counter(within for _, within in images.values())
    for (path, within), name in zip(images.values(), _distinct([w for _, w in images.values()]), strict=True):
        picture = folder / name.with_name(f"{name.name}.png") if folder is not None else None
        called = str(within if shared[within] == 1 else path)
        items.append(Item(path, picture, Path(save) / name if save is not None else None, called))
    return items


def _distinct(names: Sequence[Path]) -> list[Path]:
    """Names without their suffix where that is enough to tell them apart, else with it, else numbered."""
    stems = Counter(name.with_suffix("") for name in names)
    taken: set[Path] = set()
    chosen = []
    for name in names:
        short = name.with_suffix("") if stems[name.with_suffix("")] == 1 else name
        tries = itertools.chain([short], (name.with_name(f"{name.name}-{n}") for n in itertools.count(2)))
        chosen.append(next(t for t in tries if t not in taken))
        taken.add(chosen[-1])
    return chosen


def _check_outputs(task: Task) -> None:
    """Refuse, before any work is done, what cannot be written or would replace something."""
    from patchlight.core.drawing.pictures import MAX_ROWS
    from patchlight.core.files import check_writable

    if task.figure is not None and len(task.items) > MAX_ROWS:
        raise PatchlightError(
            f"one figure of {len(task.items)} images cannot be read (at most {MAX_ROWS}); "
            f"give a folder instead of '{task.figure}' for one picture per image"
        )
    files = (task.figure, task.report, *(item.picture for item in task.items))
    pictures = [p for p in files if p is not None]
    folders = [item.maps / method for item in task.items if item.maps is not None for method in task.methods]
    for path in {p.parent: p for p in (*pictures, *folders)}.values():
        check_writable(path)
    sources = {item.path.resolve() for item in task.items}
    eaten = next((p for p in pictures if p.resolve() in sources), None)
    if eaten is not None:
        raise PatchlightError(f"'{eaten}' is one of the images; choose another place for it")
    there = [p for p in (*pictures, *folders) if p.exists()]
    if there and not task.force:
        more = f" (and {len(there) - 1} more of the outputs)" if len(there) > 1 else ""
        raise PatchlightError(f"'{there[0]}' exists already{more}; choose another place, or --force to replace it")


def _run(task: Task, load: Callable[[], Anatomy]) -> Done:
    """Explain batch by batch: one batch of tensors and small pictures is all that is held at a time."""
    from patchlight.core.attribution import Attribution

    with progress("loading the model") as bar:
        vit = load()
        target = _target(task, vit)
        size = task.batch_size or BATCH
        bar.update(bar.task_ids[0], description="explaining", total=len(task.items))
        done = Done(vit.name, task, [], [], [], [])
        rows: list[tuple[_Read, dict[str, Attribution], tuple[str, float]]] = []
        report = _Report(task, vit)
        for begin in range(0, len(task.items), size):
            read = _read(task.items[begin : begin + size], vit, done.errors)
            if read:
                for one, maps, top in _explained(read, task, vit, target, done):
                    done.images.append(_finish(one, maps, top, task, vit, done.written))
                    if task.figure is not None:
                        rows.append((one, maps, top[0]))
                    if task.report is not None:
                        report.add(one, maps, top)
                        bar.update(bar.task_ids[0], completed=len(done.images))
            bar.update(bar.task_ids[0], completed=min(begin + size, len(task.items)))
        if task.figure is not None and rows:
            together = {name: Attribution.joined([maps[name] for _, maps, _ in rows]) for name in task.methods}
            _draw([one.picture for one, _, _ in rows], together, [top for _, _, top in rows], vit, task.figure)
            done.written.append(str(task.figure))
        if task.report is not None and report.sections:
            report.write(task.report, done.warnings, [failed["error"] for failed in done.errors])
            done.written.append(str(task.report))
    return done


class _Report:
    """The sections of a report, and how the maps in them were made."""

    def __init__(self, task: Task, vit: Anatomy) -> None:
        self.sections: list[ImageSection] = []
        self._task, self._vit = task, vit
        self._first: tuple[dict[str, Attribution], Trial] | None = None

    def add(self, one: _Read, maps: dict[str, Attribution], top: list[tuple[str, float]]) -> None:
        """Test an image's maps, and keep what the report shows of them."""
        from patchlight.core.targets import Targets
        from patchlight.metrics.base import on_grid
        from patchlight.report.explanations import Explained, section_of
        from patchlight.study.faithfulness import Trial, truths

        att = next(iter(maps.values()))
        against = None if att.against is None else att.against[:, None]
        trial = Trial(self._vit, one.tensor, Targets(att.target[:, None], against), seed=self._task.seed)
        found = truths(trial, {name: on_grid(att.scores, self._vit)[0] for name, att in maps.items()})
        file = hashlib.sha256(one.item.path.read_bytes()).hexdigest()
        image = Explained(one.item.name, one.picture, top, maps, trial, found, sha256=file)
        self.sections.append(section_of(image))
        self._first = self._first or (maps, trial)

    def write(self, path: Path, warnings: Sequence[str], left_out: Sequence[str]) -> None:
        from patchlight.core.files import write_whole
        from patchlight.report.explanations import made_by, report_html

        assert self._first is not None
        known = [words for words in warnings if "the map of image" not in words]  # its section says which one
        page = report_html(self.sections, made_by(*self._first, self._task.command, known, left_out))
        write_whole(path, page.encode(errors="backslashreplace"))


def _target(task: Task, vit: Anatomy) -> Any:
    """The target as `explain` takes it; with it, everything that depends on the model is checked."""
    from patchlight.methods.requests import check_supported, refusal, resolve

    for name, own in list(task.methods.items()):
        request = resolve(name, own, task.score)  # type: ignore[arg-type]
        if name in task.optional and refusal(request, vit) is not None:
            del task.methods[name]
            say(f"left out: '{name}', since {refusal(request, vit)}")
        else:
            check_supported(request, vit)
    if task.against is not None and task.target is None:
        raise PatchlightError("--against needs --target, the class it is contrasted with")
    if task.target is None:
        return None
    wanted = read_class(task.target, vit)
    return wanted if task.against is None else (wanted, read_class(task.against, vit))


def _read(items: Sequence[Item], vit: Anatomy, errors: list[dict[str, str]]) -> list[_Read]:
    """The images that can be read; the others are told and listed."""
    from patchlight.core.drawing.heat import seen
    from patchlight.core.images import open_image

    read = []
    for item in items:
        try:
            image = open_image(item.path)
            read.append(_Read(item, vit.batch(image), seen(image, vit.preprocess.size, vit.preprocess)))
        except (PatchlightError, MemoryError) as error:
            _fail(item, str(error) or f"'{item.path}' does not fit into memory", errors)
    return read


def _explained(
    read: list[_Read], task: Task, vit: Anatomy, target: Any, done: Done
) -> Iterator[tuple[_Read, dict[str, Attribution], list[tuple[str, float]]]]:
    """Each image with its maps and predictions; what the engine warns of is said once.

    Where a map is not finite, the images are explained one by one, and those that have none are told and listed.
    """
    import torch

    from patchlight.engine import explain as engine_explain

    batch = torch.cat([one.tensor for one in read])
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            maps = engine_explain(
                vit, batch, task.methods, target, score=task.score, seed=task.seed, batch_size=task.batch_size
            )
    except NotFinite as error:
        if len(read) == 1:
            _fail(read[0].item, f"'{read[0].item.path}': {error}", done.errors)
        else:
            for one in read:
                yield from _explained([one], task, vit, target, done)
        return
    for warning in caught:
        words = " ".join(str(warning.message).split())
        if issubclass(warning.category, UserWarning) and words not in done.warnings:
            done.warnings.append(words)
            say(f"warning: {words}")
    for i, (one, top) in enumerate(zip(read, vit.predict(batch, k=3), strict=True)):
        yield one, {name: att[i] for name, att in maps.items()}, top


def _fail(item: Item, sentence: str, errors: list[dict[str, str]]) -> None:
    errors.append({"path": str(item.path), "error": sentence})
    say(f"failed: {sentence}")


def _finish(
    one: _Read,
    maps: dict[str, Attribution],
    top: list[tuple[str, float]],
    task: Task,
    vit: Anatomy,
    written: list[str],
) -> dict[str, Any]:
    """Write what belongs to one image, and tell about it."""
    item, att = one.item, next(iter(maps.values()))
    saved = {}
    if item.maps is not None:
        saved = {name: str(att.save(item.maps / name, force=task.force)) for name, att in maps.items()}
    if item.picture is not None:
        _draw([one.picture], maps, [top[0]], vit, item.picture)
        written.append(str(item.picture))
    written.extend(saved.values())
    about = {
        "path": str(item.path),
        "predictions": [{"label": label, "probability" if vit.probable else "score": round(p, 6)} for label, p in top],
        "target": {"index": int(att.target[0]), "label": att.labels[0]},
        "picture": None if (item.picture or task.figure) is None else str(item.picture or task.figure),
        "maps": saved,
    }
    if att.against is not None:
        about["against"] = {"index": int(att.against[0]), "label": att.opposed[0]}
    return about


def _draw(
    pictures: list[Image], maps: dict[str, Attribution], top: list[tuple[str, float]], vit: Anatomy, path: Path
) -> None:
    from patchlight.core.drawing import figure

    figure(pictures, maps, predictions=top, vit=vit, path=path)


def _report(done: Done, as_json: bool) -> None:
    """The predictions as a table and the files written, or all of it as JSON."""
    task = done.task
    if as_json:
        about = {"model": done.model, "methods": task.methods, "score": task.score, "seed": task.seed}
        found = {"images": done.images, "errors": done.errors, "warnings": done.warnings, "written": done.written}
        print_json(about | found)
        return
    from rich.table import Table

    from patchlight.core.drawing import in_words, short

    table = Table(title=f"Predictions of {done.model}", title_justify="left", title_style="bold")
    for heading in ("image", "prediction", "then", "explained"):
        table.add_column(heading, overflow="fold")
    for image in done.images[:TABLE_ROWS]:
        words = [
            in_words((p["label"], p.get("probability", p.get("score"))), "probability" in p)
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
    if done.errors:
        print(f"{len(done.errors)} of {len(done.errors) + len(done.images)} images failed")
    if 1 <= len(done.written) <= 3:
        print(f"Wrote {' and '.join(done.written)}")
    elif done.written:
        print(f"Wrote {len(done.written)} files, from {done.written[0]} to {done.written[-1]}")
