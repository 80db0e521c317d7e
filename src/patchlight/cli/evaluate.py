"""`patchlight evaluate` and `patchlight metrics`: how far maps can be trusted, and what there is to measure it with."""

from __future__ import annotations

import contextlib
import csv
import io
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from patchlight.cli.common import (
    SOME_FAILED,
    AsJson,
    Debug,
    Device,
    Labels,
    Model,
    Seed,
    Settings,
    Stage,
    Weights,
    answering,
    console,
    load_model,
    print_json,
    progress,
    read_class,
    read_settings,
    say,
)
from patchlight.errors import PatchlightError, nearest

if TYPE_CHECKING:
    from patchlight.anatomy import Anatomy
    from patchlight.attribution import Attribution
    from patchlight.data import Batch, Data
    from patchlight.metrics import Evaluation

BATCH = 64
Saved = Mapping[str, Mapping[str, Path]]
"""Folders of saved attributions by image and method."""


def evaluate(
    maps: Annotated[
        Path | None, typer.Argument(help="What `patchlight explain … --save` wrote.", metavar="[MAPS_DIR]")
    ] = None,
    images: Annotated[Path | None, typer.Option(help="The images: a folder, or one image.")] = None,
    metric: Annotated[str, typer.Option(help="Names, separated by commas (`patchlight metrics`).")] = "ins-del",
    method: Annotated[
        str | None, typer.Option(help="Methods to explain with first; with MAPS_DIR, those of its methods to measure.")
    ] = None,
    model: Model = "pocket",
    weights: Weights = None,
    labels: Labels = None,
    stage: Stage = None,
    target: Annotated[
        str | None, typer.Option(help="Class asked about, a name or index, or 'label'; else what the maps explain.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Kind of data set at --images, for its labels, boxes and masks.", metavar="KIND")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Preset of every metric, such as tis.")] = None,
    settings: Settings = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="File for one line per image and metric.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    batch_size: Annotated[int, typer.Option(min=1, help="Images at once.")] = 16,
    force: Annotated[bool, typer.Option("--force", help="Replace existing output.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure explanations: saved maps, or methods that explain the images first."""
    with answering(as_json, debug):
        if images is None:
            raise PatchlightError("no images were given; name their folder with --images FOLDER")
        if maps is None and method is None:
            raise PatchlightError("nothing to measure; give a folder of saved maps, or --method NAME")
        if not images.exists():
            raise PatchlightError(f"no image or folder at '{images}'")
        _check_csv(csv_file, force)
        metrics = [name.strip() for name in metric.split(",") if name.strip()]
        methods = [name.strip() for name in (method or "").split(",") if name.strip()]
        own = read_settings([*metrics, *(methods if maps is None else [])], settings or [], "metric")
        wanted = {name: {"preset": preset, **own[name]} if preset else own[name] for name in metrics}
        _check_names(wanted, {name: own[name] for name in methods} if maps is None else {})
        with progress("loading the model") as bar:
            vit = load_model(model, weights, labels, device, stage)
            shown = _open(data, images, vit)
            if maps is not None:
                saved = _find(maps, shown.names)
                methods = methods or sorted({name for each in saved.values() for name in each})
                shown = _with_maps(shown, saved, methods, maps)
            else:
                saved = None
            task = Task(wanted, {name: own.get(name, {}) for name in methods}, target, seed, batch_size, saved)
            bar.update(bar.task_ids[0], description="measuring", total=len(shown) * len(methods))
            done = _run(task, vit, shown, lambda n: bar.advance(bar.task_ids[0], n))
        _report(done, as_json)
        if csv_file is not None:
            _write_csv(done, csv_file)
        if done.errors:
            raise typer.Exit(SOME_FAILED)


@dataclass(frozen=True)
class Task:
    """A checked request; `saved` are the maps to measure, else the methods explain."""

    metrics: dict[str, dict[str, Any]]
    methods: dict[str, dict[str, Any]]
    target: str | None
    seed: int
    batch_size: int
    saved: Saved | None


@dataclass(frozen=True)
class Done:
    """What was found: by method, the names of its images and the evaluation of every metric."""

    model: str
    task: Task
    names: dict[str, list[str]] = field(default_factory=dict)
    found: dict[str, dict[str, Evaluation]] = field(default_factory=dict)
    errors: list[dict[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def fail(self, name: str, sentence: str) -> None:
        self.errors.append({"image": name, "error": sentence})
        say(f"failed: {sentence}")

    def warn(self, words: str) -> None:
        if words not in self.warnings:
            self.warnings.append(words)
            say(f"warning: {words}")


def _check_csv(path: Path | None, force: bool) -> None:
    from patchlight.files import check_writable

    if path is None:
        return
    check_writable(path.parent)
    if path.is_dir() or (path.exists() and not force):
        raise PatchlightError(f"'{path}' exists already; choose another file, or --force to replace it")


def _check_names(metrics: Mapping[str, Mapping[str, Any]], methods: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse an unknown metric, method or setting before anything is loaded."""
    from patchlight.metrics.base import resolve_metric
    from patchlight.registry import resolve

    for name, own in metrics.items():
        resolve_metric(name, own)
    for name, own in methods.items():
        resolve(name, own)


def _open(kind: str | None, path: Path, vit: Anatomy) -> Data:
    """The images with what is known of them; a plain folder tells nothing but its images."""
    from patchlight.data import Data, Sample, open_data
    from patchlight.images import list_images, open_image

    if kind is not None:
        named = {"classes": vit.labels} if kind == "folder" and vit.labels else {}
        return open_data(kind, path, **named)
    root = path if path.is_dir() else path.parent
    names = [p.relative_to(root).as_posix() for p in (list_images(path) if path.is_dir() else [path])]
    return Data(path.name, names, lambda name: Sample(name, open_image(root / name)))


def _find(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Path]]:
    """The attributions saved below a folder by image and method; `explain` leaves out a suffix nobody needs."""
    if not folder.is_dir():
        raise PatchlightError(f"no folder of maps at '{folder}'; `patchlight explain … --save {folder}` writes one")
    found: dict[str, dict[str, Path]] = {}
    for about in sorted(folder.rglob("attribution.json")):
        image = about.parent.parent.relative_to(folder).as_posix()
        found.setdefault(image, {})[about.parent.name] = about.parent
    if not found:
        raise PatchlightError(f"no maps in '{folder}'; `patchlight explain … --save {folder}` writes them")
    saved = {}
    stems = Counter(_stem(name) for name in names)
    for name in names:
        keys = (name, _stem(name)) if stems[_stem(name)] == 1 else (name,)
        match = next((found.pop(key) for key in keys if key in found), None)
        if match is not None:
            saved[name] = match
    if not saved:
        first = next(iter(found))
        raise PatchlightError(
            f"no map in '{folder}' is of an image in --images: '{first}' is not; {nearest(first, names)}"
        )
    return saved | found


def _stem(name: str) -> str:
    return Path(name).with_suffix("").as_posix()


def _with_maps(data: Data, saved: Mapping[str, Any], methods: Sequence[str], folder: Path) -> Data:
    """The images that have maps; a method without any map is refused."""
    known = sorted({name for each in saved.values() for name in each})
    unknown = next((name for name in methods if name not in known), None)
    if unknown is not None:
        raise PatchlightError(f"no map in '{folder}' is by '{unknown}'; {nearest(unknown, known)}")
    return data.select([i for i, name in enumerate(data.names) if name in saved])


def _run(task: Task, vit: Anatomy, data: Data, advance: Callable[[int], None]) -> Done:
    """Batch by batch: one batch of images and maps is all that is held at a time."""
    from patchlight.data import batches
    from patchlight.metrics import Evaluation

    done = Done(vit.name, task, {name: [] for name in task.methods})
    parts: dict[str, dict[str, list[Evaluation]]] = {m: {k: [] for k in task.metrics} for m in task.methods}
    foreign = data.labels is not None and len(data.labels) != max(vit.classes, 2)
    if foreign:
        done.warn(f"the labels of {data.name} are not the classes of {vit.name}, and are left out")
    for orphan in sorted(set(task.saved or ()) - set(data.names)):
        done.fail(orphan, f"the maps of '{orphan}' have no image in --images")
    for loaded in batches(data, vit, BATCH):
        batch = replace(loaded, labels=None) if foreign else loaded
        for name, sentence in batch.failures:
            done.fail(name, sentence)
        if batch.names:
            for method, rows, maps in _maps(task, vit, batch, done):
                names = [batch.names[i] for i in rows]
                _tell_constant(done, method, maps, names)
                for metric, evaluation in _measure(task, vit, batch, rows, maps).items():
                    parts[method][metric].append(evaluation)
                    _tell(done, method, metric, evaluation, names)
                done.names[method].extend(names)
                advance(len(batch.names) + len(batch.failures))
    for method, own in parts.items():
        done.found[method] = {metric: Evaluation.joined(each) for metric, each in own.items() if each}
    if not any(done.found.values()):
        raise PatchlightError(f"nothing could be measured: {done.errors[0]['error']}")
    return done


def _maps(task: Task, vit: Anatomy, batch: Batch, done: Done) -> Iterator[tuple[str, list[int], Attribution]]:
    """By method: which images of the batch have a map, and the maps."""
    from patchlight.attribution import Attribution
    from patchlight.cli.explain import joined
    from patchlight.engine import explain

    if task.saved is None:
        with _quiet():
            made = explain(vit, batch.images, task.methods, _target(task, vit, batch), seed=task.seed)
        for method, maps in made.items():
            yield method, list(range(len(batch.names))), maps
        return
    for method in task.methods:
        rows: list[int] = []
        each: list[Attribution] = []
        for i, name in enumerate(batch.names):
            folder = task.saved[name].get(method)
            try:
                if folder is None:
                    raise PatchlightError(f"there is no map of '{name}' by '{method}'")
                one = Attribution.load(folder)
                if one.model != vit.name:
                    done.warn(f"the maps are of {one.model}, but are measured on {vit.name}")
                if each and one.scores.shape != each[0].scores.shape:
                    raise PatchlightError(
                        f"the map in '{folder}' has shape {list(one.scores.shape)}, those before it "
                        f"{list(each[0].scores.shape)}; measure maps of one size at a time"
                    )
                rows.append(i)
                each.append(one)
            except PatchlightError as error:
                done.fail(name, str(error))
        if rows:
            yield method, rows, joined(each)


def _target(task: Task, vit: Anatomy, batch: Batch) -> Any:
    """The class asked about; `label` is the true one of each image."""
    if task.target is None:
        return None
    if task.target == "label" and "label" not in (vit.labels or ()):
        if batch.labels is None:
            raise PatchlightError("--target label needs the images' labels; name the kind of data with --data")
        return batch.labels
    return read_class(task.target, vit)


def _measure(task: Task, vit: Anatomy, batch: Batch, rows: list[int], maps: Attribution) -> dict[str, Evaluation]:
    from patchlight.metrics import evaluate as measure

    target = _target(task, vit, batch)
    if target is batch.labels and target is not None:
        target = target[rows]
    with _quiet():
        return measure(
            vit,
            batch.images[rows],
            maps,
            task.metrics,
            target,
            labels=None if batch.labels is None else batch.labels[rows],
            boxes=None if batch.boxes is None else [batch.boxes[i] for i in rows],
            masks=None if batch.masks is None else batch.masks[rows],
            seed=task.seed,
            batch_size=task.batch_size,
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings, which number the images of a batch: `_tell` names them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _tell(done: Done, method: str, metric: str, evaluation: Evaluation, names: Sequence[str]) -> None:
    for name, reason in zip(names, evaluation.reasons, strict=True):
        if reason:
            done.warn(f"{metric} of {method} has no value for '{name}': {reason}")


def _tell_constant(done: Done, method: str, maps: Attribution, names: Sequence[str]) -> None:
    flat = maps.scores.flatten(1)
    dead = (flat.amax(1) == flat.amin(1)).nonzero().flatten().tolist()
    if dead:
        more = f" and of {len(dead) - 1} more" if len(dead) > 1 else ""
        done.warn(f"the map of '{names[dead[0]]}'{more} by {method} is constant; it is ordered by a seeded draw")


def _rows(done: Done) -> Iterator[dict[str, Any]]:
    for method, own in done.found.items():
        for metric, evaluation in own.items():
            low, high = evaluation.interval()
            yield {
                "method": method,
                "metric": metric,
                "mean": _number(evaluation.mean),
                "interval": [_number(low), _number(high)],
                "higher_is_better": evaluation.higher_is_better,
                "images": evaluation.count,
                "undefined": len(evaluation) - evaluation.count,
                "settings": evaluation.settings,
                "values": {
                    name: _number(value)
                    for name, value in zip(done.names[method], evaluation.values.tolist(), strict=True)
                },
            }


def _number(value: float) -> float | None:
    return None if value != value else round(value, 6)


def _report(done: Done, as_json: bool) -> None:
    """A line per method and a column per metric, or everything as JSON."""
    task = done.task
    if as_json:
        about = {"model": done.model, "target": task.target, "seed": task.seed}
        print_json(about | {"results": list(_rows(done)), "errors": done.errors, "warnings": done.warnings})
        return
    measured = [(method, own) for method, own in done.found.items() if own]
    headings = [f"{name} {_arrow(one.higher_is_better)}" for name, one in measured[0][1].items()]
    counts = {len(done.names[method]) for method, _ in measured}
    title = f"{done.model}, {' to '.join(map(str, sorted({min(counts), max(counts)})))} image(s), mean [95 % interval]"
    table = Table("method", *headings, title=title, title_justify="left", title_style="bold")
    for method, own in measured:
        table.add_row(method, *(_cell(one) for one in own.values()))
    console().print(table)
    if done.errors:
        print(f"{len(done.errors)} failed; the means are over the others")


def _arrow(higher: bool) -> str:
    return "↑" if higher else "↓"


def _cell(evaluation: Evaluation) -> str:
    if evaluation.count == 0:
        return "no value"
    low, high = evaluation.interval()
    left_out = len(evaluation) - evaluation.count
    undefined = f", {left_out} undefined" if left_out else ""
    return f"{evaluation.mean:.4g} [{low:.4g}, {high:.4g}]{undefined}"


def _write_csv(done: Done, path: Path) -> None:
    from patchlight.files import write_whole

    text = io.StringIO()
    lines = csv.writer(text)
    lines.writerow(["image", "method", "metric", "value", "reason"])
    for method, own in done.found.items():
        for metric, one in own.items():
            for name, value, reason in zip(done.names[method], one.values.tolist(), one.reasons, strict=True):
                lines.writerow([name, method, metric, "" if value != value else repr(value), reason])
    write_whole(path, text.getvalue().encode())
    say(f"Wrote {path}")


def metrics(
    name: Annotated[str | None, typer.Argument(help="One metric, to see its settings.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the metrics, or the settings of one."""
    with answering(as_json, debug):
        with progress("loading the metrics"):
            from patchlight.metrics import metrics as table
            from patchlight.metrics.base import resolve_metric

            rows = table()
        if name is not None:
            entry = resolve_metric(name).metric
            rows = [row for row in rows if row.name == entry.name]
        if as_json:
            print_json([asdict(row) for row in rows])
        elif name is not None:
            _describe(rows[0], entry)
        else:
            _list(rows)


def _list(rows: Sequence[Any]) -> None:
    table = Table("metric", "better", "needs", "paper", "cost", "what it says", box=None, pad_edge=False)
    for row in rows:
        better = "higher" if row.higher_is_better else "lower"
        table.add_row(row.name, better, ", ".join(row.needs), row.paper, row.cost, row.summary)
    console().print(table)
    say("`patchlight metrics NAME` tells more")


def _describe(row: Any, entry: Any) -> None:
    import inspect

    low, high = row.bounds
    better = "higher" if row.higher_is_better else "lower"
    print(f"{row.name}  ({row.paper}; {row.cost}; {better} is better, from {low:g} to {high:g})")
    if row.aliases:
        print(f"also called {', '.join(row.aliases)}")
    if row.needs:
        print(f"needs {' and '.join(row.needs)}")
    print(inspect.getdoc(entry.function) or "")
    print("\nSettings:")
    for key, words in row.settings.items():
        print(f"  {key}: {words}")
    if row.presets:
        print(f"  preset: {', '.join(row.presets)}")
