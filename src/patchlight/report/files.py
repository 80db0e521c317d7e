"""Explanations of image files, as written by `patchlight explain`: pictures, raw scores, and a report."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from patchlight.anatomy.heads import Box
from patchlight.anatomy.opened import Anatomy
from patchlight.core.attribution import Attribution, Attributions
from patchlight.core.drawing import figure_format
from patchlight.core.drawing.heat import outlined, seen
from patchlight.core.drawing.pictures import FORMATS, MAX_ROWS
from patchlight.core.errors import PatchlightError
from patchlight.core.files import check_writable, write_atomic
from patchlight.core.images import SUFFIXES, list_images
from patchlight.core.resize import to_cells
from patchlight.core.targets import Target, Targets, read_class
from patchlight.methods.requests import Request, check_supported, refusal
from patchlight.report.explanations import Explained, ImageSection, describe_run, report_html, section_of
from patchlight.report.pictures import figure
from patchlight.study.faithfulness import Trial, run_trial
from patchlight.study.files import ExplainedFile, ExplainOptions, FileLog, explain_files

if TYPE_CHECKING:
    from patchlight.anatomy.heads import Head

LARGE = 560
"""Least width or height of the large map of a report, in pixels."""


@dataclass(frozen=True)
class ImageFile:
    """An image to explain, the files for its picture and raw scores, and its name in a report."""

    path: Path
    picture: Path | None = None
    maps: Path | None = None
    name: str = ""

    def numbered(self, number: int) -> ImageFile:
        """The files of one of several questions about the image."""
        picture = None if self.picture is None else self.picture.with_stem(f"{self.picture.stem}-{number}")
        maps = None if self.maps is None else self.maps.with_name(f"{self.maps.name}-{number}")
        return ImageFile(self.path, picture, maps, f"{self.name} ({number})")


@dataclass(frozen=True)
class ExplainTask:
    """Images to explain and the files to write.

    Attributes:
        items: The images.
        requests: The methods.
        figure: A file for one figure of all images.
        report: A file for an HTML report.
        target: The class to explain, a name or an index; by default the prediction.
        against: The class that the target is contrasted with.
        seed: Seed of methods that sample.
        batch_size: Images per batch.
        force: Whether to replace existing output.
        command: The command line that does the same.
        optional: Methods that are skipped if the model does not support them.
        heads: The questions to explain for every image. Default: the question of the model.
    """

    items: Sequence[ImageFile]
    requests: Sequence[Request]
    figure: Path | None = None
    report: Path | None = None
    target: str | None = None
    against: str | None = None
    seed: int = 0
    batch_size: int | None = None
    force: bool = False
    command: str = ""
    optional: frozenset[str] = frozenset()
    heads: Sequence[Head] = ()

    def check_outputs(self) -> None:
        """Raise an error, before any work, if output cannot be written or would replace a file."""
        if self.figure is not None and len(self.items) > MAX_ROWS:
            raise PatchlightError(
                f"one figure has at most {MAX_ROWS} images, and {len(self.items)} were given; name a folder instead of "
                f"'{self.figure}' for one picture per image"
            )
        files = (self.figure, self.report, *(item.picture for item in self.items))
        pictures = [path for path in files if path is not None]
        folders = [item.maps / r.label for item in self.items if item.maps is not None for r in self.requests]
        for path in {path.parent: path for path in (*pictures, *folders)}.values():
            check_writable(path)
        sources = {item.path.resolve() for item in self.items}
        overwritten = next((path for path in pictures if path.resolve() in sources), None)
        if overwritten is not None:
            raise PatchlightError(f"'{overwritten}' is one of the images; choose another file for the output")
        existing = [path for path in (*pictures, *folders) if path.exists()]
        if existing and not self.force:
            more = f" (and {len(existing) - 1} more of the outputs)" if len(existing) > 1 else ""
            message = f"'{existing[0]}' already exists{more}; choose another place, or give --force to replace it"
            raise PatchlightError(message)

    def classes(self, vit: Anatomy) -> Target:
        """The target as `explain` takes it."""
        if self.target is None:
            if self.against is not None:
                raise PatchlightError("--against needs --target, the class it is contrasted with")
            return None
        texts = [text for text in (self.target, self.against) if text is not None]
        if vit.question is not None:  # each image has labels of its own
            classes: list[Any] = [int(text) if text.isdigit() else text for text in texts]
        else:
            classes = [read_class(text, vit.outcomes, vit.labels) for text in texts]
        return classes[0] if self.against is None else (classes[0], classes[1])


@dataclass(frozen=True)
class WrittenFiles:
    """The result of a task: the methods, a record per image, and the files written."""

    model: str
    methods: list[str]
    log: FileLog
    images: list[dict[str, Any]] = field(default_factory=list)
    written: list[str] = field(default_factory=list)


def destination(paths: Sequence[str], out: str | None) -> tuple[Path | None, Path | None]:
    """The file of the one figure, or the folder for one picture per image."""
    if out is None:
        alone = len(paths) == 1 and not Path(paths[0]).is_dir()
        return (Path(f"{Path(paths[0]).stem}-explained.png"), None) if alone else (None, Path("explained"))
    path, pictures = Path(out), {*FORMATS, *SUFFIXES}
    folder = out.endswith(("/", "\\")) or path.is_dir()
    if not folder and path.suffix[1:].isalpha() and path.suffix.lower() not in pictures:
        raise PatchlightError(f"'{out}' is not a figure file ({', '.join(FORMATS)}); end the name of a folder with '/'")
    if folder or path.suffix.lower() not in pictures:
        return None, path
    figure_format(path)
    return path, None


def plan_files(paths: Sequence[str], folder: Path | None, save: str | None) -> list[ImageFile]:
    """Every image once, with distinct output names that mirror the folders."""
    images: dict[Path, tuple[Path, Path]] = {}
    outputs = [Path(o).resolve() for o in (folder, save) if o is not None]
    for source in map(Path, paths):
        if not source.is_dir():
            images.setdefault(source.resolve(), (source, Path(source.name)))
            continue
        below = [o for o in outputs if o != source.resolve() and o.is_relative_to(source.resolve())]
        for path in list_images(source):
            if not any(path.resolve().is_relative_to(o) for o in below):
                within = path.relative_to(source)
                images.setdefault(path.resolve(), (path, within if len(paths) == 1 else source.resolve().name / within))
    if not images:
        raise PatchlightError(f"no images in '{paths[0]}' besides earlier output")
    items = []
    shared = Counter(within for _, within in images.values())
    for (path, within), name in zip(images.values(), _distinct([w for _, w in images.values()]), strict=True):
        picture = folder / name.with_name(f"{name.name}.png") if folder is not None else None
        called = str(within if shared[within] == 1 else name if path.is_absolute() else path)
        items.append(ImageFile(path, picture, Path(save) / name if save is not None else None, called))
    return items


def plan_inputs(paths: Sequence[str], folder: Path | None, save: str | None) -> list[ImageFile]:
    """Every path as one input, a folder as the frames of one video."""
    items = []
    for source, name in zip(paths, _distinct([Path(Path(path).name) for path in paths]), strict=True):
        picture = None if folder is None else folder / f"{name}.png"
        items.append(ImageFile(Path(source), picture, None if save is None else Path(save) / name, str(name)))
    return items


def _distinct(names: Sequence[Path]) -> list[Path]:
    """Names without suffix if these are distinct, else with suffix, else numbered."""
    stems = Counter(name.with_suffix("") for name in names)
    taken: dict[Path, None] = {}
    for name in names:
        short = name.with_suffix("") if stems[name.with_suffix("")] == 1 else name
        tries = itertools.chain([short], (name.with_name(f"{name.name}-{n}") for n in itertools.count(2)))
        taken[next(t for t in tries if t not in taken)] = None
    return list(taken)


def _explain_each(
    questions: Sequence[Anatomy], paths: list[Path], options: ExplainOptions, log: FileLog
) -> Iterator[ExplainedFile]:
    """Yield the images of each question. Of detections, an image without one has no later ones and is skipped."""
    for question in questions:
        explained_paths = []
        for file in explain_files(question, paths, options, log):
            explained_paths.append(file.path)
            yield file
        if isinstance(question.question, Box):
            paths = explained_paths


def write_explanations(
    task: ExplainTask, vit: Anatomy, say: Callable[[str], None], advance: Callable[[int], None]
) -> WrittenFiles:
    """Explain the images and write the files of the task.

    `say` is called with each message, and `advance` with the number of images done.
    """
    if task.report is not None and vit.layout.inputs != "images":
        raise PatchlightError(f"a report draws pictures, and {vit.name} takes {vit.layout.inputs}; leave out --report")
    questions = [vit.ask(head) for head in task.heads]
    if not questions:
        questions = [vit.ask(vit.default_question()) if vit.task and vit.head is None else vit]
    vit, requests = questions[0], []
    for request in task.requests:
        reason = refusal(request, vit)
        if reason is not None and request.label in task.optional:
            say(f"skipped '{request.label}': {reason}")
            continue
        check_supported(request, vit)
        requests.append(request)
    result = WrittenFiles(vit.name, [request.label for request in requests], FileLog(say))
    items = {item.path: item for item in task.items}
    options = ExplainOptions(requests, task.classes(vit), task.seed, task.batch_size)
    rows: list[ExplainedFile] = []
    sections: list[ImageSection] = []
    first: tuple[Mapping[str, Attribution], Trial] | None = None
    numbers = {} if len(questions) == 1 else Counter[Path]()
    for file in _explain_each(questions, list(items), options, result.log):
        item = items[file.path]
        if len(questions) > 1:
            numbers[file.path] += 1
            item = item.numbered(numbers[file.path])
        file = _outline_regions(file)
        result.images.append(_write(file, item, task, file.vit or vit, result.written))
        if task.figure is not None:
            rows.append(file)
        if task.report is not None:
            section, trial = _test(file, item.name, file.vit or vit, task.seed)
            sections.append(section)
            first = first or (file.maps, trial)
        advance(len(result.images) + len(result.log.errors))
    if task.figure is not None and rows:
        _draw(rows, vit, task.figure)
        result.written.append(str(task.figure))
    if task.report is not None and first is not None:
        # the section of an image reports its constant maps
        warnings = [words for words in result.log.warnings if "the map of image" not in words]
        left_out = [sentence for _, sentence in result.log.errors]
        page = report_html(sections, describe_run(*first, task.command, warnings, left_out))
        write_atomic(task.report, page.encode(errors="backslashreplace"))
        result.written.append(str(task.report))
    return result


def _draw(rows: Sequence[ExplainedFile], vit: Anatomy, path: Path) -> None:
    """Write a figure of maps over the pictures that they explain, or of other inputs by their axes.

    The map of a box or region alone is drawn three times: complete, inside and outside.
    """
    rows = _inside_and_outside(rows[0]) if len(rows) == 1 else rows
    first = next(iter(rows[0].maps.values()))  # questions about one model are drawn together
    same: dict[str, Any] = {"head": first.head, "weights": first.weights}
    maps = {name: Attribution.concat([replace(file.maps[name], **same) for file in rows]) for name in rows[0].maps}
    pictures = [file.picture for file in rows if file.picture is not None]
    if not pictures:
        Attributions(maps).figure(path)
        return
    figure(pictures, maps, predictions=[file.predictions[0] for file in rows], vit=vit, path=path)


def _outline_regions(file: ExplainedFile) -> ExplainedFile:
    """The file, with the boxes or regions in question drawn on its picture."""
    if file.picture is None or file.vit is None:
        return file
    return replace(file, picture=outlined(file.picture, _regions(file.vit)))


def _regions(vit: Anatomy) -> Sequence[Tensor]:
    """The regions in question [H,W]."""
    return () if vit.question is None else vit.question.regions


def _inside_and_outside(file: ExplainedFile) -> list[ExplainedFile]:
    """The file, and its maps once inside and once outside of the region in question."""
    if file.vit is None or file.picture is None or not _regions(file.vit):
        return [file]
    region, rows = _regions(file.vit)[0].float(), [file]
    for name, part in (("inside", region), ("outside", 1 - region)):
        maps = {}
        for label, att in file.maps.items():
            low = att.scores.amin().clamp(min=0)  # the darkest colour of a map without negative scores
            maps[label] = replace(att, scores=low + (att.scores - low) * to_cells(part, att.grid, att.extent))
        words: Any = [name]
        rows.append(replace(file, maps=maps, predictions=words))
    return rows


def _test(file: ExplainedFile, name: str, vit: Anatomy, seed: int) -> tuple[ImageSection, Trial]:
    """The section of an image in a report, and the test of its maps."""
    att = next(iter(file.maps.values()))
    picture = outlined(seen(file.path, vit.preprocess.size, vit.preprocess, LARGE), _regions(vit))
    against = None if att.against is None else att.against[:, None]
    trial = Trial(vit, file.tensor, Targets(att.target[:, None], against), seed=seed)
    tests = run_trial(trial, file.maps)
    digest = hashlib.sha256(file.path.read_bytes()).hexdigest()
    return section_of(Explained(name, picture, file.predictions, file.maps, trial, tests, sha256=digest)), trial


def _write(file: ExplainedFile, item: ImageFile, task: ExplainTask, vit: Anatomy, written: list[str]) -> dict[str, Any]:
    """Write the files of one image; return its record."""
    att = next(iter(file.maps.values()))
    saved = {}
    if item.maps is not None:
        saved = {name: str(each.save(item.maps / name, force=task.force)) for name, each in file.maps.items()}
    if item.picture is not None:
        _draw([file], vit, item.picture)
        written.append(str(item.picture))
    written.extend(saved.values())
    number, picture = "probability" if vit.probable else "score", item.picture or task.figure
    record: dict[str, Any] = {
        "path": str(item.path),
        "predictions": [{"label": label, number: round(value, 6)} for label, value in file.predictions],
        "target": {"index": int(att.target[0]), "label": att.labels[0]},
        "picture": None if picture is None else str(picture),
        "maps": saved,
    }
    question = vit.question
    if question is not None and question.regions:
        region, record["place"] = question.regions[0], "box" if "boxes" in question.annotations else "region"
        shares = {name: round(float(each.inside(region)[0]), 4) for name, each in file.maps.items()}
        record["inside"] = {name: share for name, share in shares.items() if share == share}
    if att.words:
        record["words"] = [
            {"word": each.word, "probability": round(each.probability, 6), "gain": round(each.gain, 6)}
            for each in att.words[0]
        ]
    if att.against is not None:
        record["against"] = {"index": int(att.against[0]), "label": att.against_names[0]}
    return record
