"""A served model with its images, queues, jobs and caches."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import timeit
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar, cast, get_args, get_origin

import torch
from cachetools import LRUCache, cachedmethod
from torch import Tensor

from patchlight import __version__
from patchlight.anatomy.heads import Texts
from patchlight.anatomy.opened import Anatomy
from patchlight.core.attribution import Attribution
from patchlight.core.errors import NoClassifier, PatchlightError, Unsupported, collect_warnings
from patchlight.core.paths import command_without_folders, remove_folders
from patchlight.core.registry import Setting
from patchlight.core.targets import Targets, class_index, cosines
from patchlight.engine import explain
from patchlight.evidence.fills import Painted, describe_fill
from patchlight.evidence.rules import RULES
from patchlight.methods.base import GROUPS, Ablates
from patchlight.methods.requests import MethodInfo, Request, list_methods, refusal, resolve
from patchlight.study.catalogue import RECOMMENDED
from patchlight.study.faithfulness import Faithfulness, Trial
from patchlight.web import schemas
from patchlight.web.asking import check_word, default_index, question_of, with_default_question
from patchlight.web.images import MOST_BYTES, ImageStore, StoredImage, bundled_photos
from patchlight.web.jobs import JobStore, WorkQueue

COMPOSED = ("fullgrad-plus.libra", "decompx.plus", "decompx.skipplus", "ixg.plus.libra", "ixg.skipplus")
"""Names with a composition or a rule that are listed besides the registry's names."""
COMPARED = ("genatt", "decompx.skipplus", "posterior", "random")
"""The methods that are compared with `auto` at the start, if they work on the model."""
CHUNK = 0.2
"""Seconds of a chunk of variants, roughly: how long cancelled work still runs."""
QUICK, SLOW = 60.0, 900.0
"""Time limits of a piece of work, in seconds."""


def with_default_texts(error: NoClassifier) -> Anatomy:
    """Give an image-text model without classes the labels of the bundled photographs as sentences."""
    vit: Anatomy = error.vit
    if not _takes_texts(vit):
        raise error
    labels = dict.fromkeys(photo.label for photo in bundled_photos())
    return vit.ask(Texts([f"a photo of a {label}" for label in labels]))


def _takes_texts(vit: Anatomy) -> bool:
    return not vit.task and type(vit).encode_texts is not Anatomy.encode_texts


@dataclass(frozen=True, eq=False)
class ResolvedQuestion:
    """A question with its model, image and classes; `key` identifies them in the caches."""

    vit: Anatomy
    image: StoredImage
    targets: Targets
    logits: Tensor
    key: tuple[Hashable, ...]

    @property
    def index(self) -> int:
        return int(self.targets.index[0, 0])

    @property
    def against(self) -> int | None:
        return None if self.targets.against is None else int(self.targets.against[0, 0])

    def predictions(self, logits: Tensor, most: int) -> list[schemas.PredictResult]:
        """The `most` highest classes and the classes of the question, for logits [V,C]."""
        quantity = quantity_of(self.vit)
        values = self.vit.probabilities(logits) if quantity == "probability" else logits
        if quantity == "cosine" and self.vit.outputs.scale is not None:
            values = cosines(logits, self.vit.outputs)
        values = values.double().cpu()
        top = values.nan_to_num(-math.inf).topk(min(most, values.shape[1]), 1).indices.tolist()
        asked = [self.index, *([] if self.against is None else [self.against])]

        def prediction(row: list[float], i: int) -> schemas.Prediction:
            return schemas.Prediction(index=i, label=self.vit.label(i), value=row[i])

        return [
            schemas.PredictResult(
                predictions=[prediction(row, i) for i in first],
                asked=[prediction(row, i) for i in asked],
                quantity=quantity,
            )
            for row, first in zip(values.tolist(), top, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class TimedMap:
    """A map, its time in seconds, and the warnings about it."""

    attribution: Attribution
    seconds: float
    warning: str


def is_quick(request: Request) -> bool:
    """Whether a method takes only a few passes."""
    sampled = {"samples", "steps", "points"} & set(request.settings)
    return not isinstance(request.method, Ablates) and not sampled


def check_setting(setting: Setting, value: Any) -> None:
    """Refuse settings that a client may not choose: paths, memory and precision, and very large numbers."""
    free = isinstance(value, str) and value != setting.default and value not in _choices(setting.kind)
    if free or setting.name in ("chunk", "compile", "precision"):
        raise PatchlightError(f"The setting '{setting.name}' cannot be {value!r} here; use Python or the command line.")
    if isinstance(value, bool) and not isinstance(setting.default, bool):
        raise PatchlightError(f"The setting '{setting.name}' cannot be {str(value).lower()}; give a number.")
    usual = setting.default if isinstance(setting.default, int | float) else 0
    most = max(4 * abs(usual), 0 if setting.name == "grid" else 256)  # memory grows with the square of a grid
    if isinstance(value, int | float) and not -most <= value <= most:
        raise PatchlightError(f"{setting.name}={value} is too large here; the limit is {most:g}.")


def _choices(kind: Any) -> set[Any]:
    """The strings that a type allows."""
    if get_origin(kind) is Literal:
        return set(get_args(kind))
    return {word for part in get_args(kind) for word in _choices(part)}


def quantity_of(vit: Anatomy) -> schemas.Quantity:
    """What the values of the classes are."""
    return "probability" if vit.probable else "cosine" if vit.outputs.kind == "cosine" else "output"


class ModelService:
    """One model in memory with its images, queues, jobs and caches.

    `python` and `cli` load the same model elsewhere, if that is possible; folders are removed from them.
    """

    def __init__(self, vit: Anatomy, python: str = "", cli: str = "") -> None:
        self.vit = with_default_question(vit)
        self.python, self.cli = remove_folders(python), remove_folders(command_without_folders(cli))
        self.images = ImageStore(vit)
        each = max(1, (os.cpu_count() or 2) // 2)
        self.quick, self.slow = WorkQueue("quick", 48, QUICK, each), WorkQueue("slow", 8, SLOW, each)
        self.files = WorkQueue("files", 8, SLOW, each)
        self.jobs = JobStore()
        self.seconds: dict[str, float] = {}
        self.lock, self._preparing = threading.Lock(), threading.Lock()
        self.maps: LRUCache[Hashable, TimedMap] = LRUCache(256)
        self._trials: LRUCache[Hashable, Trial] = LRUCache(32)
        self._results: LRUCache[Hashable, Faithfulness] = LRUCache(256)
        self._models: LRUCache[Hashable, Anatomy] = LRUCache(8)
        self._prepared: LRUCache[Hashable, Anatomy] = LRUCache(32)
        self._logits: LRUCache[Hashable, Tensor] = LRUCache(256)
        self.chunk = self._timed_chunk()
        self.quick.pool.submit(self._warm)

    def _warm(self) -> None:
        """Do now what the first visitor would wait for: list the methods and run a pass."""
        image = torch.zeros(1, *self.vit.input_shape)
        with contextlib.suppress(PatchlightError), collect_warnings():
            explain(self.vit, image, [r for r in map(resolve, self.first_methods) if is_quick(r)], progress=False)

    @cached_property
    def auto(self) -> str:
        """The method that "auto" chooses for this model."""
        return resolve("auto").suited(self.vit).name

    @property
    def first_methods(self) -> list[str]:
        """The methods that the page starts with: that of "auto", and some to compare it with."""
        works = {info.name for info in self._listed if info.supported}
        return [self.auto, *(name for name in COMPARED if name in works - {self.auto})]

    def forget(self) -> None:
        """Clear the caches: the model may have been trained meanwhile."""
        with self.lock:
            for cache in (self.maps, self._trials, self._results, self._models, self._prepared, self._logits):
                cache.clear()

    def close(self) -> None:
        """Stop the jobs and wait for the threads: a process that ends while torch runs in one is aborted."""
        for job in self.jobs.values():
            job.control.stop.set()
        for queue in (self.quick, self.slow, self.files):
            queue.pool.shutdown(cancel_futures=True)

    def _timed_chunk(self) -> int | None:
        """Variants per chunk, so that a chunk takes about CHUNK seconds; None on an accelerator, which has its own."""
        vit = self.vit if self.vit.question is None else self.vit.bare or self.vit
        if vit.device.type == "cuda":
            return None
        image = torch.zeros(1, *vit.input_shape)
        vit.logits(image)
        seconds = min(timeit.repeat(lambda: vit.logits(image), number=1, repeat=3))
        return int(max(1, min(64, CHUNK / seconds)))

    def resolve_question(self, question: schemas.AskedQuestion, image: StoredImage | None = None) -> ResolvedQuestion:
        """Find the image, the classes and the logits of a question, or say what is wrong with it."""
        image = image or self.images.find(question.image)
        vit, key = self._question_model(question, image)
        logits = self._image_logits(vit, image, key)
        if not bool(logits.isfinite().all()):
            raise PatchlightError(f"{vit.name} gives NaN or infinity for this image, so it cannot be explained.")
        index = default_index(vit, logits)
        if question.target is not None:
            index = class_index(question.target, vit.outcomes, vit.labels)
            if not getattr(question.head, "force", False):
                check_word(vit, index)
        targets = Targets(torch.tensor([[index]]))
        if question.against is not None:
            against = class_index(question.against, vit.outcomes, vit.labels)
            if against == index:
                raise PatchlightError(f"'{vit.label(index)}' cannot be contrasted with itself; choose another class.")
            targets = Targets(targets.index, torch.tensor([[against]]))
        return ResolvedQuestion(vit, image, targets, logits, (image.id, key, index, question.against))

    def _question_model(self, question: schemas.AskedQuestion, image: StoredImage) -> tuple[Anatomy, Hashable]:
        """Return the model with the question of a request, and the key of the question in the caches."""
        if question.texts is not None and question.head is not None:
            raise PatchlightError("Give texts or head, not both.")
        if question.texts is not None:
            texts = (tuple(question.texts), question.template)
            return self._with_texts(*texts), texts
        if question.head is None and self.vit.question is None:
            return self.vit, None
        head = question.head
        if isinstance(head, schemas.AnswerRequest):
            head = head.model_copy(update={"force": False})
        return self._prepared_for(image, head), head

    @cachedmethod(lambda s: s._prepared, key=lambda _, image, head: (image.id, head), lock=lambda s: s.lock)
    def _prepared_for(self, image: StoredImage, head: schemas.HeadRequest | None) -> Anatomy:
        """The model with a question about its output, prepared for an image."""
        vit = self.vit if head is None else self.vit.ask(question_of(head))
        with self._preparing:  # the cache of an anatomy is not thread-safe
            prepared = vit.prepared(image.tensor, image.size)
        if prepared.outcomes == 0:
            raise PatchlightError(f"The answer of {vit.name} has no words; change the prompt.")
        return prepared

    @cachedmethod(lambda self: self._models, lock=lambda self: self.lock)
    def _with_texts(self, texts: tuple[str, ...], template: str) -> Anatomy:
        if not _takes_texts(self.vit):
            raise Unsupported(f"{self.vit.name} has no text encoder, so its classes are fixed; leave out texts.")
        return (self.vit.bare or self.vit).ask(Texts(list(texts), template=template))

    @cachedmethod(lambda s: s._logits, key=lambda _, vit, image, key: (image.id, key), lock=lambda s: s.lock)
    def _image_logits(self, vit: Anatomy, image: StoredImage, key: Hashable) -> Tensor:
        return vit.logits(image.tensor).float().cpu()

    @cachedmethod(lambda self: self._trials, key=lambda self, *args: _test_key(*args), lock=lambda self: self.lock)
    def trial(self, question: ResolvedQuestion, test: schemas.MeasureRequest) -> Trial:
        """The faithfulness test of a question; its random orders are computed once."""
        settings = (test.steps, test.unit, test.fill, test.randoms, test.seed)
        return Trial(question.vit, question.image.tensor, question.targets, *settings, self.chunk)

    @cachedmethod(lambda self: self._results, key=lambda _, *args: _result_key(*args), lock=lambda s: s.lock)
    def test_result(self, job: JobInput[schemas.MeasureRequest], name: str, att: Attribution) -> Faithfulness:
        """The faithfulness test of one map."""
        return self.trial(job.question, job.request).of(att)

    def resolve_method(self, method: schemas.MethodRequest) -> Request | PatchlightError:
        """A method with its settings, in chunks that can be cancelled in time; or what is wrong."""
        try:
            name = resolve(method.name, dict(method.settings)).suited(self.vit).name if method.name == "auto" else ""
            request = replace(resolve(name or method.name, dict(method.settings)), label=method.name)
            allowed = request.method.settings(request.composition)
            for key, value in method.settings.items():
                if key in allowed:
                    check_setting(allowed[key], value)
        except PatchlightError as error:
            return error
        if isinstance(request.method, Ablates) and self.chunk is not None:
            request = replace(request, settings={**request.settings, "chunk": self.chunk})
        return request

    @cached_property
    def _listed(self) -> list[MethodInfo]:
        """All methods, whether they work on this model, and what they cost: recommended ones first, then by group."""
        listed = {info.name: info for info in list_methods(self.vit)}
        for name in {self.auto, *COMPOSED} - set(listed):
            base, *words = name.split(".")
            parts = [f"{'backward rule' if word in RULES else 'composition'} {word}" for word in words]
            reason = refusal(resolve(name), self.vit)
            summary = f"{listed[base].summary.rstrip('.')}; {', '.join(parts)}."
            listed[name] = replace(
                listed[base], name=name, aliases=(), summary=summary, supported=reason is None, reason=reason or ""
            )
        first = {name: info for name in self._recommended if (info := listed.pop(name, None))}
        groups = list(GROUPS)
        return [*first.values(), *sorted(listed.values(), key=lambda info: (groups.index(info.group), info.name))]

    @cached_property
    def _recommended(self) -> dict[str, str]:
        """The purpose of each recommended method."""
        return {self.auto if name == "auto" else name: purpose for name, purpose in RECOMMENDED.items()}

    def methods(self) -> list[schemas.MethodFacts]:
        def facts(info: MethodInfo, request: Request) -> schemas.MethodFacts:
            ignores = (request.suited(self.vit) if info.supported else request).ignores_class
            purpose, seconds = self._recommended.get(info.name, ""), self.seconds.get(info.name)
            more = vars(info) | {"purpose": purpose, "seconds": seconds, "ignores_class": ignores}
            return schemas.MethodFacts(**more, quick=is_quick(request))

        return [facts(info, resolve(info.name)) for info in self._listed]

    def facts(self) -> schemas.ModelFacts:
        vit = self.vit
        head = {} if vit.head is None else vit.head.about()
        templates = head.get("templates", [])
        return schemas.ModelFacts(
            **{key: getattr(vit, key) for key in ("name", "library", "grid", "depth", "heads", "prefix")},
            image_size=vit.preprocess.size,
            extent=(vit.extent[0], vit.extent[1]),
            classes=vit.outcomes,
            labels=[vit.label(i) for i in range(vit.outcomes)],
            quantity=quantity_of(vit),
            task=vit.task,
            class_names=list(getattr(vit, "class_names", ())),
            takes_texts=_takes_texts(vit),
            texts=head["texts"] if len(templates) == 1 else [],
            template=templates[0] if len(templates) == 1 else "{}",
            no_tokens=vit.can_drop,
            fills=list(get_args(Painted)),
            fill_names={fill: describe_fill(fill) for fill in get_args(Painted)},
            photos=self.images.photos,
            image=self.images.photos[0].id if self.images.photos else None,
            **{key: getattr(self, key) for key in ("auto", "python", "cli")},
            methods=self.first_methods,
            bytes=MOST_BYTES,
            pixels=schemas.MOST_PIXELS,
            device=str(vit.device),
            version=__version__,
        )


R = TypeVar("R", bound=schemas.ExplainRequest | schemas.HideRequest)


class JobInput(Generic[R]):
    """The input of a job: the request, its image, and its methods by name, each resolved or with its error."""

    def __init__(self, service: ModelService, request: R) -> None:
        self.service, self.request = service, request
        self.image = service.images.find(request.image)  # kept until the job ends, whatever is uploaded meanwhile
        self.methods = {method.name: service.resolve_method(method) for method in request.methods}

    @property
    def queue(self) -> WorkQueue:
        """Where the maps are computed: methods that take many passes have a queue of their own."""
        quick = all(is_quick(method) for method in self.methods.values() if isinstance(method, Request))
        return self.service.quick if quick else self.service.slow

    @cached_property
    def question(self) -> ResolvedQuestion:
        return self.service.resolve_question(self.request, self.image)

    def map_key(self, name: str) -> Hashable:
        """Identifies the map of a method in the cache."""
        method = cast(Request, self.methods[name])
        settings = repr(sorted(method.settings.items(), key=str))
        return (*self.question.key, method.name, settings, self.request.seed)


def _result_key(job: JobInput[schemas.MeasureRequest], name: str, att: Attribution) -> Hashable:
    return job.map_key(name), _test_key(job.question, job.request)


def _test_key(question: ResolvedQuestion, test: schemas.MeasureRequest) -> Hashable:
    return (*question.key, test.steps, test.unit, test.fill, test.randoms, test.seed)
