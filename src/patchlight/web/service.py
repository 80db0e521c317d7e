"""One model that is served: questions about it, its caches, its images, queues and jobs."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

import torch
from cachetools import LRUCache, cachedmethod
from torch import Tensor

from patchlight import __version__
from patchlight.anatomy.heads import Texts
from patchlight.anatomy.opened import Anatomy
from patchlight.core.attribution import Attribution
from patchlight.core.errors import NoClassifier, PatchlightError, Unsupported, collect_warnings
from patchlight.core.registry import Setting
from patchlight.core.targets import Targets, class_index, cosines, top_classes
from patchlight.engine import explain
from patchlight.evidence.fills import Painted, describe_fill
from patchlight.methods.base import Ablates
from patchlight.methods.requests import MethodInfo, Request, list_methods, refusal, resolve
from patchlight.study.faithfulness import Trial
from patchlight.web import schemas
from patchlight.web.images import MOST_BYTES, MOST_PIXELS, ImageStore, StoredImage, bundled_photos
from patchlight.web.jobs import JobStore, WorkQueue

COMPOSED = ("decompx.skipplus", "ixg.plus.libra", "fullgrad-plus.libra", "ixg.skipplus")
"""Names with a composition or a rule behind them that are offered besides the registry's own."""
FIRST = ("genatt", "tokentm", "decompx.skipplus", "posterior", "random")
"""The methods that are chosen to begin with, of those that work on the model."""
CHUNK = 0.2
"""Seconds that a chunk of variants takes, about: how long cancelled work goes on."""
QUICK, SLOW = 60.0, 900.0
"""Seconds that a piece of work may take."""


def with_default_texts(error: NoClassifier) -> Anatomy:
    """An image-text model without classes, asked about what is on the bundled photographs; others can be typed."""
    vit: Anatomy = error.vit
    if not _takes_texts(vit):
        raise error
    labels = dict.fromkeys(photo.label for photo in bundled_photos())
    return vit.ask(Texts([f"a photo of a {label}" for label in labels]))


def _takes_texts(vit: Anatomy) -> bool:
    return type(vit).encode_texts is not Anatomy.encode_texts


@dataclass(frozen=True, eq=False)
class ResolvedQuestion:
    """The model with its classes, the image, its logits, and the classes asked about; `key` identifies these."""

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
        """What the model says, of logits [V,C]: the first classes, and those asked about."""
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
    """A map, the seconds it took, and the warnings about it."""

    attribution: Attribution
    seconds: float
    warning: str


def is_quick(request: Request) -> bool:
    """Whether a method takes a few passes, and no more."""
    sampled = {"samples", "steps", "points"} & set(request.settings)
    return not isinstance(request.method, Ablates) and not sampled


def check_setting(setting: Setting, value: Any) -> None:
    """Refuse what a client may not set: paths, how much is computed at once, and numbers beyond reason."""
    free = isinstance(value, str) and value != setting.default and value not in _choices(setting.kind)
    if free or setting.name in ("chunk", "compile", "precision"):
        raise PatchlightError(f"the setting '{setting.name}' cannot be {value!r} here; use Python or the command line")
    if isinstance(value, bool) and not isinstance(setting.default, bool):
        raise PatchlightError(f"the setting '{setting.name}' cannot be {str(value).lower()}; give a number")
    usual = setting.default if isinstance(setting.default, int | float) else 0
    most = max(4 * abs(usual), 0 if setting.name == "grid" else 256)  # of a grid, memory takes the square
    if isinstance(value, int | float) and not -most <= value <= most:
        raise PatchlightError(f"{setting.name} {value} is too much here; at most {most:g} are taken")


def _choices(kind: Any) -> set[Any]:
    """The words that a type knows."""
    if get_origin(kind) is Literal:
        return set(get_args(kind))
    return {word for part in get_args(kind) for word in _choices(part)}


def quantity_of(vit: Anatomy) -> schemas.Quantity:
    """What the numbers of the classes are."""
    if vit.probable:
        return "probability"
    return "cosine" if vit.outputs.kind == "cosine" else "output"


class ModelService:
    """One model in memory, its images, its queues and jobs.

    `python` and `cli` are the words that open the model elsewhere; empty where there are none.
    """

    def __init__(self, vit: Anatomy, python: str = "", cli: str = "") -> None:
        self.vit, self.python, self.cli = vit, python, cli
        self.images = ImageStore(vit)
        each = max(1, (os.cpu_count() or 2) // 2)
        self.quick, self.slow = WorkQueue("quick", 48, QUICK, each), WorkQueue("slow", 8, SLOW, each)
        self.files = WorkQueue("files", 8, SLOW, each)
        self.jobs = JobStore()
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        self._maps: LRUCache[Hashable, TimedMap] = LRUCache(256)
        self._trials: LRUCache[Hashable, Trial] = LRUCache(32)
        self._models: LRUCache[Hashable, Anatomy] = LRUCache(8)
        self._logits: LRUCache[Hashable, Tensor] = LRUCache(256)
        self.chunk = self._timed_chunk()
        self.quick.pool.submit(self._warm)

    def _warm(self) -> None:
        """Do once what the first visitor would wait for: the list of methods, and a pass."""
        image = torch.zeros(1, self.vit.channels, *self.vit.preprocess.size)
        with contextlib.suppress(PatchlightError), collect_warnings():
            works = {info.name for info in self._listed if info.supported}
            requests = [resolve(name) for name in FIRST if name in works]
            explain(self.vit, image, [one for one in requests if is_quick(one)], progress=False)

    def forget(self) -> None:
        """Compute everything again from now on: the model may have been trained meanwhile."""
        with self._lock:
            for cache in (self._maps, self._trials, self._models, self._logits):
                cache.clear()

    def close(self) -> None:
        """Stop the jobs, and wait for the threads: a process that ends while torch computes in one is aborted."""
        for job in self.jobs.values():
            job.control.stop.set()
        for queue in (self.quick, self.slow, self.files):
            queue.pool.shutdown(cancel_futures=True)

    def _timed_chunk(self) -> int | None:
        """Variants at once, such that a chunk takes CHUNK seconds; what an accelerator has room for is left to it."""
        vit = self.vit
        if vit.device.type == "cuda":
            return None
        image = torch.zeros(1, vit.channels, *vit.preprocess.size)
        vit.logits(image)
        times: list[float] = []
        while len(times) < 5 and sum(times) < 1:  # the least of several: a busy moment must not make chunks small
            begun = time.perf_counter()
            vit.logits(image)
            times.append(time.perf_counter() - begun)
        return int(max(1, min(64, CHUNK / min(times))))

    def resolve_question(self, question: schemas.Question, image: StoredImage | None = None) -> ResolvedQuestion:
        """The image and the classes of a question, or a sentence about what is wrong with them."""
        image = image or self.images.find(question.image)
        texts = None if question.texts is None else (tuple(question.texts), question.template)
        vit = self.vit if texts is None else self._with_texts(*texts)
        logits = self._image_logits(vit, image, texts)
        if not bool(logits.isfinite().all()):
            raise PatchlightError(f"{vit.name} gives NaN or infinity for this image, so nothing can be asked about it")
        index = int(top_classes(logits, vit.outputs).index[0, 0])
        if question.target is not None:
            index = class_index(question.target, vit.outcomes, vit.labels)
        targets = Targets(torch.tensor([[index]]))
        if question.against is not None:
            against = class_index(question.against, vit.outcomes, vit.labels)
            if against == index:
                raise PatchlightError(f"'{vit.label(index)}' cannot be contrasted with itself; choose another class")
            targets = Targets(targets.index, torch.tensor([[against]]))
        return ResolvedQuestion(vit, image, targets, logits, (image.id, texts, index, question.against))

    @cachedmethod(lambda self: self._models, lock=lambda self: self._lock)
    def _with_texts(self, texts: tuple[str, ...], template: str) -> Anatomy:
        if not _takes_texts(self.vit):
            raise Unsupported(f"{self.vit.name} has no text side, so its classes are its own; leave texts out")
        return (self.vit.bare or self.vit).ask(Texts(list(texts), template=template))

    @cachedmethod(
        lambda self: self._logits, key=lambda self, vit, image, texts: (image.id, texts), lock=lambda self: self._lock
    )
    def _image_logits(self, vit: Anatomy, image: StoredImage, texts: Hashable) -> Tensor:
        return vit.logits(image.tensor).float().cpu()

    @cachedmethod(
        lambda self: self._trials,
        key=lambda self, question, test: (*question.key, test.steps, test.unit, test.fill, test.randoms, test.seed),
        lock=lambda self: self._lock,
    )
    def trial(self, question: ResolvedQuestion, test: schemas.MeasureRequest) -> Trial:
        """The faithfulness test of a question; its random orders are computed once."""
        settings = (test.steps, test.unit, test.fill, test.randoms, test.seed)
        return Trial(question.vit, question.image.tensor, question.targets, *settings, self.chunk)

    def cached_map(self, question: ResolvedQuestion, request: Request, seed: int) -> TimedMap | None:
        with self._lock:
            return self._maps.get(_map_key(question, request, seed))

    def cache_map(self, question: ResolvedQuestion, request: Request, seed: int, found: TimedMap) -> None:
        with self._lock:
            self._maps[_map_key(question, request, seed)] = found

    def resolve_method(self, method: schemas.MethodRequest) -> Request | PatchlightError:
        """A method with its settings, and chunks that are short enough to be stopped in time; or what is wrong."""
        try:
            request = resolve(method.name, dict(method.settings))
            known = request.method.settings(request.composition)
            for key, value in method.settings.items():
                if key in known:
                    check_setting(known[key], value)
        except PatchlightError as error:
            return error
        if isinstance(request.method, Ablates) and self.chunk is not None:
            request = replace(request, settings={**request.settings, "chunk": self.chunk})
        return request

    @cached_property
    def _listed(self) -> list[MethodInfo]:
        """Every method, whether it works on this model, and what it costs."""
        found = {info.name: info for info in list_methods(self.vit)}
        for name in COMPOSED:
            base, *words = name.split(".")
            reason = refusal(resolve(name), self.vit)
            summary = f"{found[base].summary.rstrip('.')}, with {' and '.join(f'.{word}' for word in words)}"
            found[name] = replace(
                found[base], name=name, aliases=(), summary=summary, supported=reason is None, reason=reason or ""
            )
        return sorted(found.values(), key=lambda info: info.name)

    def methods(self) -> list[schemas.MethodFacts]:
        return [
            schemas.MethodFacts(**vars(info), quick=is_quick(resolve(info.name)), seconds=self.seconds.get(info.name))
            for info in self._listed
        ]

    def facts(self) -> schemas.ModelFacts:
        vit = self.vit
        works = {info.name for info in self._listed if info.supported}
        head = {} if vit.head is None else vit.head.about()
        templates = head.get("templates", [])
        return schemas.ModelFacts(
            name=vit.name,
            library=vit.library,
            image_size=vit.preprocess.size,
            grid=vit.grid,
            extent=(vit.extent[0], vit.extent[1]),
            depth=vit.depth,
            heads=vit.heads,
            prefix=vit.prefix,
            classes=vit.outcomes,
            labels=[vit.label(i) for i in range(vit.outcomes)],
            quantity=quantity_of(vit),
            takes_texts=_takes_texts(vit),
            texts=head["texts"] if len(templates) == 1 else [],
            template=templates[0] if len(templates) == 1 else "{}",
            no_tokens=vit.can_drop,
            fills=list(get_args(Painted)),
            fill_names={fill: describe_fill(fill) for fill in get_args(Painted)},
            photos=self.images.photos,
            image=self.images.photos[0].id if self.images.photos else None,
            methods=[name for name in FIRST if name in works] or sorted(works)[:4],
            python=self.python,
            cli=self.cli,
            bytes=MOST_BYTES,
            pixels=MOST_PIXELS,
            device=str(vit.device),
            version=__version__,
        )


R = TypeVar("R", bound=schemas.ExplainRequest)


class JobInput(Generic[R]):
    """What a job computes with: the request, its image, and its methods by name, each resolved or with its error."""

    def __init__(self, service: ModelService, request: R) -> None:
        self.service, self.request = service, request
        self.image = service.images.find(request.image)  # kept until the job is over, whatever is uploaded meanwhile
        self.methods = {method.name: service.resolve_method(method) for method in request.methods}

    @property
    def is_quick(self) -> bool:
        """Whether its maps take a few passes, and no more."""
        return all(is_quick(method) for method in self.methods.values() if isinstance(method, Request))

    @cached_property
    def question(self) -> ResolvedQuestion:
        return self.service.resolve_question(self.request, self.image)


def _map_key(question: ResolvedQuestion, request: Request, seed: int) -> Hashable:
    return (*question.key, request.name, repr(sorted(request.settings.items(), key=str)), seed)
