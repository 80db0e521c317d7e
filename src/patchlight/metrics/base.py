"""The registry of metrics, and `evaluate`: how far maps can be trusted, one number (and a curve) per image.

A metric is a function of a `Measure`: the model, a batch of images, their maps, the classes asked about, annotations.
It returns `Measured` values. What it means for a data set is a function of sums over images, so that means, micro
averages and their bootstrap intervals have one form.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_type_hints, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchlight.ablation import Ablation, Count, Precision
from patchlight.anatomy import Anatomy, wrap
from patchlight.attribution import Attribution
from patchlight.engine import Progress, compute
from patchlight.errors import PatchlightError, nearest
from patchlight.registry import checked, resolve, type_name
from patchlight.registry import parameters as method_parameters
from patchlight.statistics import bootstrap_weights, percentiles
from patchlight.targets import Score, Target, Targets, predicted, resolve_targets

Unit = Literal["pixel", "patch", "token"]
"""What is taken away at a time: pixels, patches of pixels, or patch tokens, which are really removed."""
Upsampling = Literal["nearest", "bilinear", "bicubic"]
TargetClass = Literal["given", "label", "predicted"]
"""The class the map explains, the true one, or the model's own prediction."""
Explainer = Callable[[Anatomy, Tensor, Targets, int], Tensor]
"""From a model, images [B,C,H,W], their classes and a seed to maps [B,h,w]."""
Sums = Mapping[str, Tensor]


class UndefinedMetric(UserWarning):
    """A value that does not exist for an image, or says little, with the reason."""


@dataclass(frozen=True)
class Measure:
    """What a metric is given. `maps` [B,h,w] are finite, float32 or wider, on the model's device.

    `targets` are the classes asked about, one per image; `labels` [B] the true ones; `boxes` one [n,4] tensor per
    image (xmin, ymin, xmax, ymax) and `masks` [B,H,W] (1 object, 0 background, -1 not labelled), both on the canvas the
    model sees. `again` explains other images or another model as the maps were explained.
    """

    vit: Anatomy
    images: Tensor
    maps: Tensor
    targets: Targets
    labels: Tensor | None = None
    boxes: Sequence[Tensor] | None = None
    masks: Tensor | None = None
    again: Explainer | None = None
    seed: int = 0
    how: Mapping[str, Any] = field(default_factory=dict)
    shared: dict[Any, Any] = field(default_factory=dict)
    """What metrics of one call keep for each other."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """What metrics keep for the batches to come."""
    fresh: bool = False
    """Whether the maps are what `again` makes of these images, classes and seed."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images."""
        return self.images.shape[-2], self.images.shape[-1]

    @property
    def ablation(self) -> Ablation:
        return Ablation(self.vit, self.images, fine=True, **self.how)

    def once(self, key: Any, function: Callable[[], Any]) -> Any:
        """`function()`, computed by the first metric that asks for `key`."""
        if key not in self.shared:
            self.shared[key] = function()
        return self.shared[key]

    def anew(self, vit: Anatomy, images: Tensor, targets: Targets, seed: int) -> Tensor:
        """Maps [n,h,w] of other images, or of another model, explained as these were."""
        return _explained(self.again, vit, images, targets, seed)

    def logits(self) -> Tensor:
        """The clean images' logits [B,C], in the precision the variants are scored in."""
        key = ("logits", *sorted(self.how.items()))
        logits: Tensor = self.once(key, lambda: self.ablation.logits(_Whole(torch.arange(len(self.images)))))
        return logits

    def of(self, which: TargetClass) -> Targets:
        """The classes given, the true ones, or the model's own prediction."""
        if which == "label" and self.labels is not None:
            return Targets(self.labels[:, None].cpu())
        if which == "label" and "told" not in self.kept:
            self.kept["told"] = True
            warnings.warn(
                "the true classes are not known (give labels=), so the classes explained count as true",
                UndefinedMetric,
                stacklevel=2,
            )
        if which == "predicted":
            rounded = self.ablation.rounds
            return predicted(self.once("clean", lambda: self.vit.logits(self.images)) if rounded else self.logits())
        return self.targets

    def upsampled(self, mode: Upsampling = "bilinear") -> Tensor:
        """The maps at the images' size [B,H,W]."""
        if tuple(self.maps.shape[-2:]) == self.size:
            return self.maps
        align = None if mode == "nearest" else False
        return F.interpolate(self.maps[:, None], self.size, mode=mode, align_corners=align)[:, 0]

    def on_grid(self) -> Tensor:
        """The maps on the patch grid [B,h,w]; finer ones are averaged over each patch."""
        if tuple(self.maps.shape[-2:]) == tuple(self.vit.grid):
            return self.maps
        return F.adaptive_avg_pool2d(self.maps[:, None], self.vit.grid)[:, 0]

    def ranks(self, unit: Unit = "pixel", mode: Upsampling = "bilinear", lowest_first: bool = False) -> Tensor:
        """The place of each pixel [B,H,W] or patch [B,h,w] in falling order of the map, 0 the highest.

        Ties are ordered by one permutation, drawn from the seed.
        """

        def make() -> Tensor:
            maps = self.upsampled(mode) if unit == "pixel" else self.on_grid()
            return ranked(-maps if lowest_first else maps, self.seed)

        ranks: Tensor = self.once(("ranks", unit, mode, lowest_first), make)
        return ranks


@dataclass(frozen=True)
class _Whole:
    """The images themselves, as variants."""

    owner: Tensor

    def tokens(self, vit: Anatomy, images: Tensor, embedded: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        return embedded[self.owner[part].to(embedded.device)], None


def ranked(maps: Tensor, seed: int = 0) -> Tensor:
    """The place of each cell of maps [B,h,w] in falling order, 0 the highest; ties by a permutation from the seed."""
    flat = maps.flatten(1)
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(flat.shape[1], generator=generator).to(flat.device)
    order = shuffled[flat[:, shuffled].argsort(dim=1, descending=True, stable=True)]
    places = torch.arange(flat.shape[1], device=flat.device, dtype=torch.int32).expand_as(order)
    return places.new_empty(flat.shape).scatter_(1, order, places).view(maps.shape)


@dataclass(frozen=True)
class Measured:
    """What a metric found on a batch: `values` [B], `curve` [B,P] over `x` [P], and where a value does not exist, why.

    `parts` are per-image columns [B,...] whose sums over images make the data set's number (`Metric.combine`).
    """

    values: Tensor
    curve: Tensor | None = None
    x: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """A registered metric.

    `needs`: annotations it reads, of labels, boxes and masks ("boxes or masks": either). `again`: it explains anew, so
    it needs a method and not only maps. `combine`: the data set's number from the sums of `parts` over images; without
    it, the mean of the values. `words`: by preset, a paper's own words for the values of a setting. `quick`: settings
    for a cheap run.
    """

    name: str
    function: Callable[..., Measured]
    paper: str
    higher_is_better: bool | Callable[[Mapping[str, Any]], bool]
    bounds: tuple[float, float] | Callable[[Mapping[str, Any]], tuple[float, float]] = (0.0, 1.0)
    aliases: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    again: bool = False
    cost: str = "no forward"
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    words: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    combine: Callable[[Sums], Tensor] | None = None
    ablates: bool = False

    @cached_property
    def summary(self) -> str:
        return (inspect.getdoc(self.function) or "").split("\n")[0]

    @cached_property
    def parameters(self) -> dict[str, tuple[inspect.Parameter, Any]]:
        hints = get_type_hints(self.function, include_extras=True)
        own = list(inspect.signature(self.function).parameters.items())[1:]
        return {key: (p, hints.get(key, Any)) for key, p in own} | (_HOW if self.ablates else {})

    def limits(self, settings: Mapping[str, Any]) -> tuple[float, float]:
        return self.bounds(settings) if callable(self.bounds) else self.bounds

    def rises(self, settings: Mapping[str, Any]) -> bool:
        """Whether higher is better under these settings."""
        return self.higher_is_better(settings) if callable(self.higher_is_better) else self.higher_is_better


def _option(name: str, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)


_HOW: dict[str, tuple[inspect.Parameter, Any]] = {
    "chunk": (_option("chunk", None), Count | None),
    "precision": (_option("precision", "auto"), Precision),
    "compile": (_option("compile", False), bool),
}


@dataclass(frozen=True)
class MetricInfo:
    """A line of the metric table."""

    name: str
    aliases: tuple[str, ...]
    paper: str
    higher_is_better: bool
    bounds: tuple[float, float]
    needs: tuple[str, ...]
    cost: str
    summary: str
    settings: dict[str, str]
    presets: tuple[str, ...]


_METRICS: dict[str, Metric] = {}
_ALIASES: dict[str, str] = {}


def metric(name: str, **about: Any) -> Callable[[Callable[..., Measured]], Callable[..., Measured]]:
    """Register a metric: a function of a Measure whose keyword arguments, typed and with defaults, are its settings."""

    def register(function: Callable[..., Measured]) -> Callable[..., Measured]:
        needs = frozenset(about.pop("needs", ()))
        entry = Metric(name, function, needs=needs, **about)
        for key in (name, *entry.aliases):
            if key in _METRICS or key in _ALIASES:
                raise PatchlightError(f"a metric called '{key}' is registered already")
        _METRICS[name] = entry
        _ALIASES.update(dict.fromkeys(entry.aliases, name))
        return function

    return register


def registered() -> dict[str, Metric]:
    """All metrics by name, the bundled ones loaded."""
    from patchlight.metrics import load_bundled

    load_bundled()
    return _METRICS


def metrics() -> list[MetricInfo]:
    """All metrics: name, paper, direction, bounds, annotations needed, cost and settings."""
    rows = []
    for name, entry in sorted(registered().items()):
        defaults = {k: p.default for k, (p, _) in entry.parameters.items()}
        settings = {k: f"{type_name(t)} = {p.default!r}" for k, (p, t) in entry.parameters.items()}
        rows.append(
            MetricInfo(
                name,
                entry.aliases,
                entry.paper,
                entry.rises(defaults),
                entry.limits(defaults),
                (*sorted(entry.needs), *(("a method",) if entry.again else ())),
                entry.cost,
                entry.summary,
                settings,
                tuple(entry.presets),
            )
        )
    return rows


@dataclass(frozen=True)
class MetricRequest:
    """A metric as asked: entry and settings resolved."""

    asked: str
    metric: Metric
    settings: dict[str, Any]


def resolve_metric(asked: str, settings: Mapping[str, Any] | None = None) -> MetricRequest:
    """Read a metric's name and settings, or say what is wrong with them.

    A setting `metric` names the metric, and `asked` is then a free label: one metric can be asked with several fills.
    """
    given = dict(settings or {})
    name = str(given.pop("metric", asked))
    known = registered()
    entry = known.get(_ALIASES.get(name, name))
    if entry is None:
        raise PatchlightError(f"no metric is called '{name}'; {nearest(name, [*known, *_ALIASES])}")
    values = {key: p.default for key, (p, _) in entry.parameters.items()}
    preset = given.pop("preset", None)
    if preset is not None:
        if preset not in entry.presets:
            hint = nearest(str(preset), entry.presets) if entry.presets else "it has none"
            raise PatchlightError(f"'{entry.name}' has no preset '{preset}'; {hint}")
        values |= entry.presets[preset]
    words = entry.words.get(str(preset), {})
    for key, value in given.items():
        if key not in entry.parameters:
            hint = nearest(key, [*entry.parameters, "preset"])
            raise PatchlightError(f"'{entry.name}' has no setting '{key}'; {hint}")
        said = words.get(key, {}).get(value, value) if isinstance(value, str) else value
        values[key] = checked(entry.name, key, said, entry.parameters[key][1])
    return MetricRequest(asked, entry, values)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A metric's verdict on every image. `values` [B] float64 is NaN where it does not exist, and `reasons` say why.

    `mean` is the data set's number: the mean of the values that exist, or the metric's own micro average.
    """

    metric: str
    values: Tensor
    higher_is_better: bool
    bounds: tuple[float, float]
    curve: Tensor | None = None
    x: Tensor | None = None
    reasons: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    combine: Callable[[Sums], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def count(self) -> int:
        """Images whose value exists."""
        return int(self.values.isfinite().sum())

    @property
    def mean(self) -> float:
        return float(self.resampled(torch.ones(1, len(self), dtype=torch.float64))[0])

    def resampled(self, weights: Tensor) -> Tensor:
        """The data set's number [S] when image i counts weights[s,i] times."""
        return resample(self.values, self.parts, self.combine, weights)

    def interval(self, confidence: float = 0.95, samples: int = 1000, seed: int = 0) -> tuple[float, float]:
        """A bootstrap interval of `mean` over images."""
        return percentiles(self.resampled(bootstrap_weights(len(self), samples, seed)), confidence)

    @staticmethod
    def joined(parts: Sequence[Evaluation]) -> Evaluation:
        """The evaluations of one metric, with the same settings, on several batches of images as one."""
        curves = [part.curve for part in parts if part.curve is not None]
        return replace(
            parts[0],
            values=torch.cat([part.values for part in parts]),
            curve=torch.cat(curves) if curves else None,
            reasons=tuple(reason for part in parts for reason in part.reasons),
            parts={key: torch.cat([part.parts[key] for part in parts]) for key in parts[0].parts},
        )

    def __repr__(self) -> str:
        low, high = self.interval()
        left_out = f", {len(self) - self.count} undefined" if self.count < len(self) else ""
        better = "higher" if self.higher_is_better else "lower"
        return (
            f"<{self.metric} {self.mean:.4g} [{low:.4g}, {high:.4g}] of {self.count} image(s){left_out}; "
            f"{better} is better>"
        )


def resample(
    values: Tensor, parts: Mapping[str, Tensor], combine: Callable[[Sums], Tensor] | None, weights: Tensor
) -> Tensor:
    """The data set's number [S] under weights [S,B] of the images; images without a value do not count."""
    weights = weights * values.isfinite()
    if combine is None:
        return (weights @ values.nan_to_num()) / weights.sum(1)
    sums = {key: torch.tensordot(weights, part.double().nan_to_num(), 1) for key, part in parts.items()}
    return combine(sums)


@overload
def evaluate(
    vit: Anatomy | nn.Module, images: Any, maps: Any, metric: str = ..., target: Target = ..., **options: Any
) -> Evaluation: ...
@overload
def evaluate(
    vit: Anatomy | nn.Module,
    images: Any,
    maps: Any,
    metric: Sequence[str] | Mapping[str, Mapping[str, Any]],
    target: Target = ...,
    **options: Any,
) -> dict[str, Evaluation]: ...
@torch.inference_mode(False)
def evaluate(
    vit: Anatomy | nn.Module,
    images: Any,
    maps: Any,
    metric: str | Sequence[str] | Mapping[str, Mapping[str, Any]] = "ins-del",
    target: Target = None,
    *,
    labels: Any = None,
    boxes: Sequence[Any] | None = None,
    masks: Any = None,
    seed: int = 0,
    batch_size: int = 16,
    progress: Progress | None = None,
    **settings: Any,
) -> Evaluation | dict[str, Evaluation]:
    """Measure maps of images: an Attribution, an array [B,h,w], a method's name, or a callable that explains.

    A callable takes (vit, images [B,C,H,W], targets, seed), as an `Explainer` does, and gives maps [B,h,w].

    `metric`: a name, a list, or a dict of names and settings (a setting `metric` makes the name a free label); the
    latter two give a dict. `target`: the class asked about; by default the one an Attribution explains, else the
    prediction. `labels` are the true classes (default: the target), `boxes` one [n,4] per image and `masks` [B,H,W]
    on the canvas the model sees (`patchlight.data` makes them). Further keywords are the metric's settings.

    >>> pl.evaluate(vit, images, att, metric="deletion", preset="rise").mean      # doctest: +SKIP
    """
    vit = wrap(vit)
    if not isinstance(seed, int):
        raise PatchlightError(f"seed {seed!r} is a {type(seed).__name__}; give an integer")
    requests = _requests(metric, settings)
    if isinstance(images, Tensor) or not isinstance(images, Sequence) or isinstance(images, str):
        images = vit.batch(images)
    count = len(images)
    if count == 0:
        raise PatchlightError("no images were given; give a tensor, PIL image(s) or path(s)")
    scores, again, explained = _maps(maps, count, vit, seed)
    targets = resolve_targets(target, count, vit.classes, vit.labels) or explained
    if targets is not None and targets.count != 1:
        raise PatchlightError(f"maps of {targets.count} classes an image were given; a metric measures one at a time")
    for request in requests:
        _check_needs(request, again, {"labels": labels, "boxes": boxes, "masks": masks})
    truth = _labels(labels, count, vit) if labels is not None else None
    canvas = _masks(masks, count, vit) if masks is not None else None
    frames = _boxes(boxes, count, vit) if boxes is not None else None
    found: list[list[Measured]] = [[] for _ in requests]
    undefined: dict[int, str] = {}
    kept: dict[Any, Any] = {}
    for begin in range(0, count, batch_size):
        part = slice(begin, min(begin + batch_size, count))
        batch = vit.batch(images[part])
        chosen = targets[part] if targets is not None else predicted(vit.logits(batch))
        own = scores[part].to(vit.device) if scores is not None else _explained(again, vit, batch, chosen, seed)
        own, bad = _finite(own, begin)
        undefined |= bad
        given = Measure(
            vit,
            batch,
            own,
            chosen,
            truth[part] if truth is not None else None if target is None else chosen.index[:, 0],
            frames[part] if frames is not None else None,
            canvas[part].to(vit.device) if canvas is not None else None,
            again,
            seed,
            kept=kept,
            fresh=scores is None,
        )
        for results, request in zip(found, requests, strict=True):
            how = {key: request.settings[key] for key in _HOW} if request.metric.ablates else {}
            own_settings = {k: v for k, v in request.settings.items() if k not in how}
            results.append(request.metric.function(replace(given, how=how), **own_settings))
        if progress is not None:
            progress(part.stop, count)
    together = {
        request.asked: _evaluation(request, results, undefined)
        for request, results in zip(requests, found, strict=True)
    }
    return together[metric] if isinstance(metric, str) else together


def _requests(
    metric: str | Sequence[str] | Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]
) -> list[MetricRequest]:
    if isinstance(metric, str):
        return [resolve_metric(metric, settings)]
    if not metric:
        raise PatchlightError("no metric was named; give a name, a list of names, or a dict of names and settings")
    if isinstance(metric, Mapping):
        return [resolve_metric(name, {**settings, **own}) for name, own in metric.items()]
    return [resolve_metric(name, settings) for name in dict.fromkeys(metric)]


def _maps(maps: Any, count: int, vit: Anatomy, seed: int) -> tuple[Tensor | None, Explainer | None, Targets | None]:
    """The maps [B,h,w] where they are given, a way to make them anew where there is one, and the classes explained."""
    if isinstance(maps, str):
        return None, explainer(maps), None
    if isinstance(maps, Attribution):
        if maps.scores.ndim != 3:
            raise PatchlightError("this attribution explains several classes an image; measure them one at a time")
        own = Targets(maps.target[:, None], None if maps.against is None else maps.against[:, None])
        return _checked_maps(maps.scores, count, vit), _explainer_of(maps), own
    if callable(maps):
        return None, maps, None
    try:
        tensor = maps if isinstance(maps, Tensor) else torch.as_tensor(np.asarray(maps))
    except (TypeError, ValueError) as error:
        raise PatchlightError(
            f"maps are a {type(maps).__name__}; give an Attribution, an array [B,h,w], a method's name or a callable"
        ) from error
    return _checked_maps(tensor, count, vit), None, None


def _checked_maps(maps: Tensor, count: int, vit: Anatomy) -> Tensor:
    if maps.ndim != 3 or len(maps) != count:
        raise PatchlightError(f"maps have shape {list(maps.shape)}; {count} images take maps of shape [{count}, h, w]")
    (h, w), (height, width) = maps.shape[-2:], vit.preprocess.size
    if maps.is_complex():
        raise PatchlightError(f"maps are of type {maps.dtype}; give real numbers")
    if (h, w) != tuple(vit.grid) and (h < vit.grid[0] or h * width != w * height or h > height):
        grid = "x".join(map(str, vit.grid))
        raise PatchlightError(
            f"maps are {h}x{w}, which does not cover {height}x{width} images; give them on the patch grid ({grid}), "
            f"at image size, or at a resolution of the same proportions between"
        )
    return maps if maps.dtype in (torch.float32, torch.float64) else maps.float()


def explainer(name: str, settings: Mapping[str, Any] | None = None, score: Score | None = None) -> Explainer:
    """A registered method as an Explainer."""
    request = resolve(name, settings, score)

    def again(vit: Anatomy, images: Tensor, targets: Targets, seed: int) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compute(vit, images, [request], targets, seed)[1][0][:, 0]

    return again


def _explainer_of(maps: Attribution) -> Explainer | None:
    """How an attribution was made; None where its method is not registered here or its score was a callable."""
    try:
        entry = resolve(maps.method)
    except PatchlightError:
        return None
    settings = dict(maps.settings)
    if "level" in method_parameters(entry.method, entry.combine):
        settings["level"] = maps.level
    score = maps.score if maps.score in ("logit", "probability") else None
    return None if score is None else explainer(maps.method, settings, score)  # type: ignore[arg-type]


def _explained(again: Explainer | None, vit: Anatomy, images: Tensor, targets: Targets, seed: int) -> Tensor:
    assert again is not None
    maps = again(vit, images, targets, seed)
    if not isinstance(maps, Tensor):
        raise PatchlightError(f"the callable gave a {type(maps).__name__}; it must give a tensor [B,h,w]")
    return _checked_maps(maps.detach(), len(images), vit).to(vit.device)


def _finite(maps: Tensor, first: int) -> tuple[Tensor, dict[int, str]]:
    """Maps without NaN, and the images that had one; constant maps are told."""
    flat = maps.flatten(1)
    broken = (~flat.isfinite()).any(1)
    bad = {first + int(i): "the map holds NaN or infinite values" for i in broken.nonzero().flatten()}
    dead = ((flat.amax(1) == flat.amin(1)) & ~broken).nonzero().flatten()
    if len(dead) and flat.shape[1] > 1:
        names = ", ".join(str(first + int(i)) for i in dead[:8])
        warnings.warn(
            f"the map of image {names} is constant: its order is a seeded draw, and its value that of a random map",
            UndefinedMetric,
            stacklevel=3,
        )
    return torch.where(broken[:, None, None], 0, maps), bad


def _check_needs(request: MetricRequest, again: Explainer | None, given: Mapping[str, Any]) -> None:
    if request.metric.again and again is None:
        raise PatchlightError(
            f"'{request.metric.name}' explains anew, so it needs a method: give an Attribution, a method's name or a "
            f"callable instead of maps"
        )
    needs = sorted(request.metric.needs)
    missing = [need for need in needs if all(given.get(one) is None for one in need.split(" or "))]
    if missing:
        first = missing[0].split(" or ")[0]
        raise PatchlightError(f"'{request.metric.name}' needs {' and '.join(missing)}; give {first}=… (or --data KIND)")


def _labels(labels: Any, count: int, vit: Anatomy) -> Tensor:
    targets = resolve_targets(labels, count, vit.classes, vit.labels)
    assert targets is not None
    return targets.index[:, 0]


def _masks(masks: Any, count: int, vit: Anatomy) -> Tensor:
    tensor = masks if isinstance(masks, Tensor) else torch.as_tensor(np.asarray(masks))
    if tuple(tensor.shape) != (count, *vit.preprocess.size):
        size = [count, *vit.preprocess.size]
        raise PatchlightError(f"masks have shape {list(tensor.shape)}; these images take masks of shape {size}")
    values = set(tensor.unique().tolist())
    if not values <= {-1, 0, 1}:
        raise PatchlightError(
            f"masks hold {sorted(values)[:5]}; give 1 for the object, 0 around it, -1 for not labelled"
        )
    return tensor.to(torch.int8)


def _boxes(boxes: Sequence[Any], count: int, vit: Anatomy) -> list[Tensor]:
    if len(boxes) != count:
        raise PatchlightError(f"boxes are given for {len(boxes)} images, but there are {count}")
    height, width = vit.preprocess.size
    checked_boxes = []
    for i, given in enumerate(boxes):
        box = torch.as_tensor(given, dtype=torch.float64)
        if box.numel() % 4 or (box.ndim > 1 and box.shape[-1] != 4):
            raise PatchlightError(f"boxes of image {i} have shape {list(box.shape)}; give [n, 4]")
        box = box.reshape(-1, 4)
        low, high = box[:, :2], box[:, 2:]
        inside = (low >= 0).all() and (high[:, 0] <= width).all() and (high[:, 1] <= height).all()
        if not (inside and (high > low).all()):
            raise PatchlightError(
                f"a box of image {i} is {box.tolist()}; boxes are xmin, ymin, xmax, ymax inside {width}x{height}"
            )
        checked_boxes.append(box)
    return checked_boxes


def _evaluation(request: MetricRequest, found: Sequence[Measured], undefined: Mapping[int, str]) -> Evaluation:
    values = torch.cat([m.values.detach().double().cpu() for m in found])
    reasons = [""] * len(values)
    first = 0
    for m in found:
        for i, reason in m.reasons.items():
            reasons[first + i] = reason
            values[first + i] = float("nan")
        first += len(m.values)
    for i, reason in undefined.items():
        reasons[i] = reason
        values[i] = float("nan")
    for i in (~values.isfinite()).nonzero().flatten().tolist():
        reasons[i] = reasons[i] or "the value is not finite"
        values[i] = float("nan")
    missing = [i for i, reason in enumerate(reasons) if reason]
    if missing:
        warnings.warn(
            f"{request.asked}: no value for {len(missing)} of {len(values)} images, which do not count "
            f"(image {missing[0]}: {reasons[missing[0]]})",
            UndefinedMetric,
            stacklevel=3,
        )
    curves = [m.curve.detach().double().cpu() for m in found if m.curve is not None]
    curve = torch.cat(curves) if curves else None
    if curve is not None:
        curve[missing] = float("nan")
    return Evaluation(
        metric=request.metric.name,
        values=values,
        higher_is_better=request.metric.rises(request.settings),
        bounds=request.metric.limits(request.settings),
        curve=curve,
        x=found[0].x.double().cpu() if found[0].x is not None else None,
        reasons=tuple(reasons),
        settings=request.settings,
        parts={key: torch.cat([m.parts[key].detach().double().cpu() for m in found]) for key in found[0].parts},
        combine=request.metric.combine,
    )
