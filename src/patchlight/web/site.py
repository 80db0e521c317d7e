"""A site: one model, what is asked about it, and what has been computed already."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

import torch
from torch import Tensor

from patchlight import __version__
from patchlight.anatomy.base import Anatomy
from patchlight.anatomy.heads import Texts
from patchlight.core.attribution import Attribution
from patchlight.core.errors import NoClassifier, PatchlightError, Unsupported, hearing
from patchlight.core.registry import Setting
from patchlight.core.targets import Targets, class_index, predicted
from patchlight.engine import explain
from patchlight.evidence.fills import Painted
from patchlight.methods.base import Ablates
from patchlight.methods.requests import MethodInfo, Request, list_methods, refusal, resolve
from patchlight.study.faithfulness import Trial
from patchlight.web.album import MOST_BYTES, MOST_PIXELS, Album, Held, bundled_photos
from patchlight.web.jobs import Board, Lane
from patchlight.web.schemas import MethodAsked, MethodFacts, ModelFacts, Predicted, Prediction, Question

V = TypeVar("V")
COMPOSED = ("decompx.skipplus", "ixg.plus.libra", "fullgrad-plus.libra", "ixg.skipplus")
"""Names with a composition or a rule behind them that are offered besides the registry's own."""
FIRST = ("genatt", "tokentm", "decompx.skipplus", "posterior", "random")
"""The methods that are chosen to begin with, of those that work on the model."""
CHUNK = 0.2
"""Seconds that a chunk of variants takes, about: how long cancelled work goes on."""
QUICK, SLOW = 60.0, 900.0
"""Seconds that a piece of work may take."""


def begun_with_sentences(found: NoClassifier) -> Anatomy:
    """An image-text model without classes, asked about what is on the bundled photographs; others can be typed."""
    vit: Anatomy = found.vit
    if _is(vit, "encode_texts"):
        raise found
    labels = dict.fromkeys(photo.label for photo in bundled_photos())
    return vit.ask(Texts([f"a photo of a {label}" for label in labels]))


class Kept(Generic[V]):
    """What was computed last, by a key; at most `most`."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable) -> V | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: V) -> V:
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value

    def clear(self) -> None:
        with self._lock:
            self._values.clear()

    def once(self, key: Hashable, make: Callable[[], V]) -> V:
        found = self.get(key)
        return self.put(key, make()) if found is None else found


@dataclass(frozen=True, eq=False)
class Asked:
    """A question that was understood: the model with its classes, the image, and the classes asked about."""

    vit: Anatomy
    held: Held
    targets: Targets
    logits: Tensor
    key: tuple[Hashable, ...]

    @property
    def index(self) -> int:
        return int(self.targets.index[0, 0])

    @property
    def against(self) -> int | None:
        return None if self.targets.against is None else int(self.targets.against[0, 0])

    def said(self, logits: Tensor, most: int) -> list[Predicted]:
        """What the model says, of logits [V,C]: the first classes, and those asked about."""
        quantity = quantity_of(self.vit)
        values = self.vit.probabilities(logits) if quantity == "probability" else logits
        if quantity == "cosine":
            values = (logits - self.vit.outputs.bias) / (self.vit.outputs.scale or 1.0)
        values = values.double().cpu()
        top = values.nan_to_num(-math.inf).topk(min(most, values.shape[1]), 1).indices.tolist()
        asked = [self.index, *([] if self.against is None else [self.against])]

        def prediction(row: list[float], i: int) -> Prediction:
            return Prediction(index=i, label=self.vit.label(i), value=finite(row[i]))

        return [
            Predicted(
                predictions=[prediction(row, i) for i in first],
                asked=[prediction(row, i) for i in asked],
                quantity=quantity,
            )
            for row, first in zip(values.tolist(), top, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Made:
    """A map that was made, what it took, and what was said about it."""

    found: Attribution
    seconds: float
    warning: str


def check_setting(setting: Setting, value: Any) -> None:
    """Refuse what a stranger may not say: paths, how much is computed at once, and numbers beyond reason."""
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


def quantity_of(vit: Anatomy) -> Any:
    """What is told of a class."""
    if vit.probable:
        return "probability"
    return "cosine" if vit.outputs.kind == "cosine" else "output"


def finite(value: float) -> float | None:
    """A number as JSON knows it, with the digits that float32 has."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


class Site:
    """One model in memory, its images, its lanes and jobs.

    `python` and `cli` are the words that open the model elsewhere; empty where there are none.
    """

    def __init__(self, vit: Anatomy, python: str = "", cli: str = "") -> None:
        self.vit, self.python, self.cli = vit, python, cli
        self.album = Album(vit)
        each = max(1, (os.cpu_count() or 2) // 2)
        self.quick, self.slow = Lane("quick", 48, QUICK, each), Lane("slow", 8, SLOW, each)
        self.files = Lane("files", 8, SLOW, each)
        self.jobs = Board()
        self.maps: Kept[Made] = Kept(256)
        self.trials: Kept[Trial] = Kept(32)
        self.seconds: dict[str, float] = {}
        self._asked: Kept[Anatomy] = Kept(8)
        self._logits: Kept[Tensor] = Kept(256)
        self._takes_texts = not _is(vit, "encode_texts")
        self._methods: list[MethodInfo] | None = None
        self.chunk = self._timed_chunk()
        self.quick.put(self._warm)

    def _warm(self) -> None:
        """Do once what the first visitor would wait for: the list of methods, and a pass."""
        self.methods()
        image = torch.zeros(1, self.vit.channels, *self.vit.preprocess.size)
        with contextlib.suppress(PatchlightError), hearing():
            requests = [resolve(name) for name in FIRST]
            works = [one for one in requests if self.is_quick(one) and refusal(one.suited(self.vit), self.vit) is None]
            explain(self.vit, image, works, progress=False)

    def forget(self) -> None:
        """Compute everything again from now on: the model may have been trained meanwhile."""
        for kept in (self.maps, self.trials, self._asked, self._logits):
            kept.clear()

    def close(self) -> None:
        """Stop what is under way, and let the threads go."""
        for work in self.jobs.all():
            work.stop.set()
        lanes = (self.quick, self.slow, self.files)
        for lane in lanes:
            lane.close()
        for lane in lanes:
            lane.join()

    def _timed_chunk(self) -> int | None:
        """Variants at once, such that a chunk takes CHUNK seconds; what an accelerator has room for is left to it."""
        vit = self.vit
        if vit.device.type == "cuda":
            return None
        image = torch.zeros(1, vit.channels, *vit.preprocess.size)
        vit.logits(image)
        times: list[float] = []
        while (
            len(times) < 5 and sum(times) < 1
        ):  # the least of several: a busy moment must not make chunks small for ever
            begun = time.perf_counter()
            vit.logits(image)
            times.append(time.perf_counter() - begun)
        return int(max(1, min(64, CHUNK / min(times))))

    def understood(self, question: Question, held: Held | None = None) -> Asked:
        """The image and the classes of a question, or a sentence about what is wrong with them."""
        held = held or self.album.find(question.image)
        vit = self._with_texts(question.texts, question.template)
        texts = None if question.texts is None else (tuple(question.texts), question.template)
        logits = self._logits.once((held.id, texts), lambda: vit.logits(held.tensor).float().cpu())
        if not bool(logits.isfinite().all()):
            raise PatchlightError(f"{vit.name} gives NaN or infinity for this image, so nothing can be asked about it")
        index = self._class(vit, question.target, predicted(logits, vit.outputs).index[0, 0])
        targets = Targets(torch.tensor([[index]]))
        if question.against is not None:
            against = self._class(vit, question.against)
            if against == index:
                raise PatchlightError(f"'{vit.label(index)}' cannot be contrasted with itself; choose another class")
            targets = Targets(targets.index, torch.tensor([[against]]))
        return Asked(vit, held, targets, logits, (held.id, texts, index, question.against))

    @staticmethod
    def _class(vit: Anatomy, index: int | None, default: Any = None) -> int:
        return int(default) if index is None else class_index(index, vit.outcomes, vit.labels)

    def _with_texts(self, texts: Sequence[str] | None, template: str) -> Anatomy:
        if texts is None:
            return self.vit
        if not self._takes_texts:
            raise Unsupported(f"{self.vit.name} has no text side, so its classes are its own; leave texts out")
        key = (tuple(texts), template)
        bare = self.vit.bare or self.vit
        return self._asked.once(key, lambda: bare.ask(Texts(list(texts), template=template)))

    def request(self, asked: MethodAsked) -> Request:
        """A method with its settings, and chunks that are short enough to be stopped in time."""
        request = resolve(asked.name, dict(asked.settings))
        known = request.method.settings(request.composition)
        for key, value in asked.settings.items():
            if key in known:
                check_setting(known[key], value)
        if isinstance(request.method, Ablates) and self.chunk is not None:
            request = resolve(asked.name, {**asked.settings, "chunk": self.chunk})
        return request

    def is_quick(self, request: Request) -> bool:
        """Whether a method takes a few passes, and no more."""
        drawn = {"samples", "steps", "points"} & set(request.settings)
        return not isinstance(request.method, Ablates) and not drawn

    def methods(self) -> list[MethodFacts]:
        """Every method, whether it works on this model, and what it costs."""
        if self._methods is None:
            found = list(list_methods(self.vit))
            for name in COMPOSED:
                base = next(info for info in found if info.name == name.split(".")[0])
                reason = refusal(resolve(name), self.vit)
                words = " and ".join(f".{word}" for word in name.split(".")[1:])
                summary = f"{base.summary.rstrip('.')}, with {words}"
                told = (base.paper, base.cost, summary, base.settings, reason is None, reason or "")
                found.append(MethodInfo(name, (), *told))
            self._methods = sorted(found, key=lambda info: info.name)
        return [
            MethodFacts(
                name=info.name,
                summary=info.summary,
                paper=info.paper,
                cost=info.cost,
                quick=self.is_quick(resolve(info.name)),
                seconds=self.seconds.get(info.name),
                supported=bool(info.supported),
                reason=info.reason,
                settings=info.settings,
            )
            for info in self._methods
        ]

    def facts(self) -> ModelFacts:
        vit = self.vit
        works = {method.name for method in self.methods() if method.supported}
        head = {} if vit.head is None else vit.head.about()
        templates = head.get("templates", [])
        return ModelFacts(
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
            takes_texts=self._takes_texts,
            texts=head["texts"] if len(templates) == 1 else [],
            template=templates[0] if len(templates) == 1 else "{}",
            no_tokens=vit.can_drop,
            fills=list(get_args(Painted)),
            photos=self.album.photos,
            image=self.album.photos[0].id if self.album.photos else None,
            methods=[name for name in FIRST if name in works] or sorted(works)[:4],
            python=self.python,
            cli=self.cli,
            bytes=MOST_BYTES,
            pixels=MOST_PIXELS,
            device=str(vit.device),
            version=__version__,
        )


def _is(vit: Anatomy, name: str) -> bool:
    """Whether a method of the anatomy is that of the base class."""
    return getattr(type(vit), name) is getattr(Anatomy, name)
