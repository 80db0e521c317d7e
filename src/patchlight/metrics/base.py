"""The registry of metrics, their input (`Measure`), their output (`Measured`), and the results (`Evaluation`).

The value of a data set is a function of sums over its images, so means, micro averages and their bootstrap intervals
are computed in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, UndefinedMetric, Unsupported, warn
from patchlight.core.frames import make_frame, stack_frames
from patchlight.core.layout import SETS
from patchlight.core.registry import (
    Entry,
    Registry,
    Setting,
    Settings,
    TableList,
    describe_type,
    make_decorator,
    resolve_settings,
    settings_of,
)
from patchlight.core.resize import Upsampling, to_cells, to_pixels
from patchlight.core.statistics import FEWEST, SIGNS, Mark, Resamples, percentiles
from patchlight.core.targets import Targets, top_classes
from patchlight.core.text import plural
from patchlight.evidence.ablation import ABLATION, Ablation, Unit

if TYPE_CHECKING:
    from pandas import DataFrame

TargetClass = Annotated[
    Literal["given", "label", "prediction"],
    Field(
        description="The class that is scored: the one the map explains, the true one, or the model's own prediction."
    ),
]
MeasuredScore = Annotated[
    Literal["auto", "probability", "logit", "cosine"],
    Field(
        description="The score of the class: its probability, its logit, or the cosine that the logit is computed "
        "from; 'auto' is the probability if the model has one, otherwise the logit."
    ),
]
MapFunction = Callable[[Anatomy, Tensor, Targets, int], Tensor]
"""Computes maps [B,h,w] from a model, images [B,C,H,W], their classes and a seed."""
Sums = Mapping[str, Tensor]
K = TypeVar("K")


@dataclass(frozen=True)
class Measure:
    """The input of a metric.

    Args:
        vit: The model.
        images: Preprocessed images [B,C,H,W].
        maps: Finite maps [B,h,w], float32 or wider, on the model's device.
        targets: The explained classes, one per image.
        labels: The true classes [B]; -1 if not known.
        boxes: Boxes [n,4] of each image (xmin, ymin, xmax, ymax) in preprocessed pixels.
        masks: Masks [B,H,W] in preprocessed pixels: 1 object, 0 background, -1 not labelled.
        method: Computes maps of other images, or of another model, as these were computed.
        seed: Random seed.
        ablation_settings: The settings chunk, precision and compile of a metric that ablates.
        protect: Whether the object in question is never removed.
        shared: A cache for the metrics of one call.
        clean: A cache of what depends only on the images, for the maps of all methods.
        kept: A cache for later batches.
        current: Whether `method` computed the maps, from these images, classes and seed.
        facts: Numbers [B] that the method reports for each image, by name.
    """

    vit: Anatomy
    images: Tensor
    maps: Tensor
    targets: Targets
    labels: Tensor | None = None
    boxes: Sequence[Tensor] | None = None
    masks: Tensor | None = None
    method: MapFunction | None = None
    seed: int = 0
    ablation_settings: Mapping[str, Any] = field(default_factory=dict)
    protect: bool = False
    shared: dict[Any, Any] = field(default_factory=dict)
    clean: dict[Any, Any] = field(default_factory=dict)
    kept: dict[Any, Any] = field(default_factory=dict)
    current: bool = False
    facts: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, ...]:
        """Height and width of the images; the length of other inputs along each axis of the grid."""
        return self.vit.geometry.size

    @property
    def ablation(self) -> Ablation:
        """The ablation that scores variants of these images."""
        return Ablation(self.vit, self.images, fine=True, **self.ablation_settings)

    def once(self, key: Any, function: Callable[[], Any]) -> Any:
        """`function()`, computed once per `key`."""
        return _once(self.shared, key, function)

    def explain(self, vit: Anatomy, images: Tensor, targets: Targets, seed: int) -> Tensor:
        """Compute maps [n,h,w] of other images or of another model, with the method and settings of these maps."""
        return apply_method(self.method, vit, images, targets, seed)

    def logits(self) -> Tensor:
        """The logits [B,C] of the clean images, in the precision in which variants are scored."""
        key = ("logits", *sorted(self.ablation_settings.items()))
        clean = _CleanImages(torch.arange(len(self.images)))
        logits: Tensor = _once(self.clean, key, lambda: self.ablation.logits(clean))
        return logits

    def of(self, target_class: TargetClass) -> Targets:
        """The explained classes, the true classes, or the predicted classes."""
        if target_class == "label":
            truth = torch.full((len(self.images),), -1) if self.labels is None else self.labels.cpu()
            unknown = truth < 0
            if bool(unknown.any()) and "warned" not in self.kept:
                self.kept["warned"] = True
                whose = "the true classes" if bool(unknown.all()) else "the true classes of some images"
                warn(f"{whose} are not known (give labels=), so the explained classes count as true", UndefinedMetric)
            if not bool(unknown.all()):
                return Targets(torch.where(unknown, self.targets.index[:, 0].cpu(), truth)[:, None])
        if target_class == "prediction":
            rounded = self.ablation.rounds
            logits = _once(self.clean, "full", lambda: self.vit.logits(self.images)) if rounded else self.logits()
            return top_classes(logits, self.vit.outputs)
        return self.targets

    def upsampled(self, upsampling: Upsampling = "bilinear") -> Tensor:
        """The maps at the size of the images [B,H,W]."""
        return to_pixels(self.maps, self.size, self.vit.extent, upsampling)

    def on_grid(self) -> Tensor:
        """The maps on the patch grid [B,h,w]; finer ones are averaged over each patch."""
        return on_grid(self.maps, self.vit)

    def in_units(self, unit: Unit, upsampling: Upsampling = "bilinear") -> Tensor:
        """The maps at the pixels [B,H,W], on the patch grid [B,h,w], or summed over the sets of a unit [B,U]."""
        if unit not in SETS:
            return self.upsampled(upsampling) if unit == "pixel" else self.on_grid()
        return self.on_grid().flatten(1)[:, self.vit.layout.members(unit).to(self.maps.device)].sum(-1)

    def ranks(
        self,
        unit: Unit = "pixel",
        upsampling: Upsampling = "bilinear",
        lowest_first: bool = False,
        reverse_ties: bool = False,
    ) -> Tensor:
        """The rank of each pixel [B,H,W], patch [B,h,w] or set [B,U] in descending order of the map; 0 is the highest.

        Ties are ordered by one permutation, sampled from the seed, or by its reverse (`reverse_ties`). A map, its
        positive multiples and its negative have the same ties. Protected cells come last.
        """

        def compute_ranks() -> Tensor:
            maps = self._order_values(upsampling) if unit == "pixel" else self.in_units(unit)
            maps = -maps if lowest_first else maps
            if self.protect:
                lowest = -torch.inf if maps.is_floating_point() else int(maps.min()) - 1
                maps = maps.masked_fill(self.protected(unit), lowest)
            return ranked(maps, self.seed, reverse_ties)

        key = ("ranks", unit, upsampling, lowest_first, reverse_ties, self.protect)
        ranks: Tensor = self.once(key, compute_ranks)
        return ranks

    def protected(self, unit: Unit) -> Tensor:
        """A mask of the pixels [B,H,W] or patches [B,h,w] that contain a part of the object in question."""
        assert self.vit.question is not None, "checked by MetricRequest.suited"
        pixels = self.vit.question.object_of(self.targets.index[:, 0]).to(self.maps.device)
        inside = pixels if unit == "pixel" else to_cells(pixels.double(), self.vit.grid, self.vit.extent) > 0
        if bool(inside.flatten(1).all(1).any()):
            raise PatchlightError("the protected object fills the image, so nothing can be removed")
        return inside

    def _order_values(self, upsampling: Upsampling) -> Tensor:
        """Values [B,H,W] with the order of the upsampled maps, in which ties are exact.

        Interpolation rounds differently at every pixel, which would order the pixels of a plateau by chance. So pixels
        beyond the outermost cell centres repeat the values at the centres, and a map with equal cells is interpolated
        in float64 and rounded to 2^-30 of its largest magnitude.
        """
        values, sides = self.upsampled(upsampling), self.maps.shape[1:]
        if upsampling == "nearest" or sides.numel() >= values[0].numel():
            return values
        axes = [
            to_pixels(torch.eye(cells, dtype=torch.float64)[..., None], (pixels, 1), (extent, 1), upsampling)[..., 0].T
            for cells, pixels, extent in zip(sides, self.size, self.vit.extent, strict=True)
        ]
        for dim, axis in enumerate(axes, 1):
            values = values.movedim(dim, 0)[_inside(axis).to(values.device)].movedim(0, dim)
        cells = self.maps.flatten(1).sort(1).values
        tied = (cells.diff(dim=1) == 0).any(1)
        if not bool(tied.any()):
            return values
        maps = self.maps[tied].cpu().double()
        largest = maps.flatten(1).abs().amax(1).view(-1, *[1] * len(axes))
        maps = maps / largest.clamp_min(torch.finfo(maps.dtype).tiny)
        for dim, axis in enumerate(axes[:-2], 1):
            maps = (maps.movedim(dim, -1) @ axis.T).movedim(-1, dim)
        exact = values.cpu().double()
        exact[tied.cpu()] = (axes[-2] @ maps @ axes[-1].T * 2**30).round()
        places: Tensor = exact.unique(return_inverse=True)[1]
        return places.to(values.device)  # integers, because MPS has no float64


def _once(cache: dict[Any, Any], key: Any, function: Callable[[], Any]) -> Any:
    if key not in cache:
        cache[key] = function()
    return cache[key]


@dataclass(frozen=True)
class _CleanImages:
    """The unchanged images, as variants."""

    owner: Tensor

    def tokens(self, vit: Anatomy, images: Tensor, embedded: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        return embedded[self.owner[part].to(embedded.device)], None


def on_grid(maps: Tensor, vit: Anatomy) -> Tensor:
    """Maps [B,h,w] on the patch grid; finer ones are averaged over each patch."""
    return to_cells(maps, vit.grid, vit.extent)


def _inside(weights: Tensor) -> Tensor:
    """Indices [P] of the pixels of an axis, clamped to the outermost cell centres.

    `weights` [P,cells] are the interpolation weights.
    """
    first, last = ((weights[:, end] > 1 - 1e-9) for end in (0, -1))
    low, high = (int(ends.int().cumprod(0).sum()) for ends in (first, last.flip(0)))
    return torch.arange(len(weights)).clamp(max(low - 1, 0), len(weights) - max(high, 1))


def ranked(maps: Tensor, seed: int = 0, reverse_ties: bool = False) -> Tensor:
    """The rank of each cell of maps [B,h,w] in descending order; 0 is the highest.

    Ties are ordered by a permutation sampled from the seed, or by its reverse.
    """
    flat = maps.flatten(1)
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(flat.shape[1], generator=generator).to(flat.device)
    shuffled = shuffled.flip(0) if reverse_ties else shuffled
    order = shuffled[flat[:, shuffled].argsort(dim=1, descending=True, stable=True)]
    places = torch.arange(flat.shape[1], device=flat.device, dtype=torch.int32).expand_as(order)
    return places.new_empty(flat.shape).scatter_(1, order, places).view(maps.shape)


@dataclass(frozen=True)
class Measured:
    """The result of a metric on a batch.

    Args:
        values: The values [B]. A value is ignored if `reasons` has an entry for its image.
        curve: The curves [B,P].
        x: The axis [P] of the curves.
        parts: Columns [B,...] whose sums over images give the value of the data set (`Metric.combine`).
        reasons: Why values are undefined, by index of the image.
    """

    values: Tensor
    curve: Tensor | None = None
    x: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)


def reasons_where(mask: Tensor, reason: str) -> dict[int, str]:
    """The same reason for every image that a mask [B] selects."""
    return dict.fromkeys(mask.nonzero().flatten().tolist(), reason)


PROTECT = Setting(
    "protect",
    bool,
    False,
    "Whether the object in question (a box, a region or a mask) is never removed, so that only its context counts.",
)


@dataclass(frozen=True, kw_only=True)
class Metric(Entry):
    """A registered metric.

    Args:
        higher_is_better: Whether higher values are better, or a function of the settings.
        bounds: The lowest and highest possible value, or a function of the settings.
        needs: The annotations that it reads: "labels", "boxes", "masks" or "boxes or masks".
        explains: Whether it explains images itself, so that it needs a method and not only maps.
        cost: The number of forward passes, in words.
        words: A paper's words for the values of a setting, by preset.
        combine: Computes the value of the data set from the sums of `parts` over images; None: the mean of the values.
        ablates: Whether it scores variants of the images.
        stochastic: Whether its values depend on the seed even if a map has no ties, or a function of the settings.
        refuses: Why a model cannot be measured with these settings; None if it can.
        protects: Whether it removes cells in an order, so that it has the setting `protect`.
    """

    paper: str = field()
    higher_is_better: bool | Callable[[Settings], bool] = field()
    bounds: tuple[float, float] | Callable[[Settings], tuple[float, float]] = (0.0, 1.0)
    needs: AbstractSet[str] = frozenset()
    explains: bool = False
    cost: str = "no forward"
    words: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    combine: Callable[[Sums], Tensor] | None = None
    ablates: bool = False
    stochastic: bool | Callable[[Settings], bool] = False
    refuses: Callable[[Settings, Anatomy], str | None] | None = None
    protects: bool = False

    @property
    def settings(self) -> dict[str, Setting]:
        """The settings by name."""
        shared = (ABLATION if self.ablates else {}) | ({PROTECT.name: PROTECT} if self.protects else {})
        return {**settings_of(self.function), **shared}

    def limits(self, settings: Settings) -> tuple[float, float]:
        """The lowest and highest value under these settings."""
        return self.bounds(settings) if callable(self.bounds) else self.bounds

    def rises(self, settings: Settings) -> bool:
        """Whether higher is better under these settings."""
        return self.higher_is_better(settings) if callable(self.higher_is_better) else self.higher_is_better

    def draws(self, settings: Settings) -> bool:
        """Whether its values depend on the seed under these settings, apart from ties."""
        return self.stochastic(settings) if callable(self.stochastic) else self.stochastic


@dataclass(frozen=True)
class MetricInfo:
    """A row of the metric table."""

    name: str
    aliases: tuple[str, ...]
    paper: str
    higher_is_better: bool
    bounds: tuple[float, float]
    needs: tuple[str, ...]
    cost: str
    summary: str
    settings: dict[str, str]
    setting_texts: dict[str, str]
    presets: tuple[str, ...]

    def cells(self) -> dict[str, str]:
        """The row by column heading."""
        return {
            "metric": self.name,
            "better": "higher" if self.higher_is_better else "lower",
            "needs": ", ".join(self.needs),
            "paper": self.paper,
            "cost": self.cost,
            "what it measures": self.summary,
            "settings": ", ".join(self.settings),
        }


_MODULES = "complexity deletion groups localisation perturbation robustness sanity subsets"
METRICS: Registry[Metric] = Registry("metric", [f"patchlight.metrics.{name}" for name in _MODULES.split()])
register_metric = make_decorator(METRICS, Metric)


def list_metrics() -> TableList[MetricInfo]:
    """List all metrics with their direction, bounds, annotations, cost and settings."""
    rows: TableList[MetricInfo] = TableList()
    for name, entry in METRICS.items():
        defaults = {key: setting.default for key, setting in entry.settings.items()}
        settings = {key: str(setting) for key, setting in entry.settings.items()}
        rows.append(
            MetricInfo(
                name,
                entry.aliases,
                entry.paper,
                entry.rises(defaults),
                entry.limits(defaults),
                (*sorted(entry.needs), *(("a method",) if entry.explains else ())),
                entry.cost,
                entry.summary,
                settings,
                {key: setting.text for key, setting in entry.settings.items()},
                tuple(entry.presets),
            )
        )
    return rows


@dataclass(frozen=True)
class MetricRequest:
    """A metric with resolved settings; `label` is the name of the result."""

    label: str
    metric: Metric
    settings: dict[str, Any]

    def suited(self, vit: Anatomy) -> MetricRequest:
        """The request for a model, with `score="auto"` resolved.

        Raises:
            Unsupported: The metric cannot be measured on the model.
        """
        settings = self.settings
        if settings.get("score") == "auto":
            settings = {**settings, "score": "logit" if vit.outputs.no_probability(vit.classes) else "probability"}
        reason = self.metric.refuses(settings, vit) if self.metric.refuses is not None else None
        if "boxes" in self.metric.needs and vit.layout.inputs != "images":
            reason = f"boxes are drawn on pictures, and {vit.name} takes {vit.layout.inputs}; metrics with masks work"
        if settings.get("protect"):
            reason = reason or _no_object(vit, settings)
        if reason is not None:
            raise Unsupported(f"'{self.metric.name}' cannot be measured on {vit.name}: {reason}")
        return replace(self, settings=settings)

    def of(self, measure: Measure) -> Measured:
        """Measure a batch."""
        ablation = {key: self.settings[key] for key in ABLATION} if self.metric.ablates else {}
        settings = {key: value for key, value in self.settings.items() if key not in ablation}
        measure = replace(measure, ablation_settings=ablation, protect=settings.pop("protect", False))
        measured: Measured = self.metric.function(measure, **settings)
        return measured


def lacking(quantity: str, vit: Anatomy) -> str | None:
    """Why a quantity cannot be computed from the outputs of a model; None if it can."""
    outputs, classes = vit.outputs, vit.classes
    if quantity == "accuracy":
        return outputs.no_accuracy(classes)
    if quantity == "kl":
        return outputs.no_divergence(classes)
    if quantity == "cosine":
        return outputs.no_cosine()
    return outputs.no_probability(classes) if quantity in ("probability", "nll") else None


def refuse_quantity(quantity: Callable[[Settings], str], advice: str) -> Callable[[Settings, Anatomy], str | None]:
    """The field `refuses` of a metric that computes the quantity which its settings name."""

    def refuses(settings: Settings, vit: Anatomy) -> str | None:
        reason = lacking(quantity(settings), vit)
        return None if reason is None else f"{reason}; {advice}"

    return refuses


no_score = refuse_quantity(lambda settings: str(settings["score"]), "score='logit' works")


def _no_object(vit: Anatomy, settings: Settings) -> str | None:
    """Why no object can be protected; None if one can."""
    if vit.question is None or not vit.question.annotations:
        return "protect=True needs a question about a box, a region or a mask; give head="
    return "protect=True needs unit='pixel', 'patch' or 'token'" if settings["unit"] in SETS else None


def resolve_metric(label: str, settings: Settings | None = None, options: Sequence[str] = ()) -> MetricRequest:
    """Resolve the name and settings of a metric.

    Args:
        label: Name of the result, and of the metric unless there is a setting `metric`.
        settings: The settings of the metric; `metric` and `preset` may be among them.
        options: Keywords of the caller. A wrong setting may be a misspelling of one.
    """
    settings = dict(settings or {})
    entry = METRICS.find(str(settings.pop("metric", label)))
    preset = settings.pop("preset", None)
    settings = {key: _translate(entry, preset, key, value) for key, value in settings.items()}
    values = resolve_settings(entry.name, entry.settings, entry.preset(preset), settings, ["preset", *options])
    return MetricRequest(label, entry, values)


def _translate(entry: Metric, preset: Any, key: str, value: Any) -> Any:
    """Translate a paper's word for the value of a setting; it is valid only with the preset of that paper."""
    if not isinstance(value, str) or key not in entry.settings:
        return value
    value = entry.words.get(str(preset), {}).get(key, {}).get(value, value)
    meant = {other: words[key][value] for other, words in entry.words.items() if value in words.get(key, {})}
    if meant and f"'{value}'" not in describe_type(entry.settings[key].kind):
        choices = " or ".join(f"{said!r} (preset '{other}')" for other, said in meant.items())
        raise PatchlightError(
            f"setting {key}={value!r} of '{entry.name}' belongs to its presets {', '.join(meant)}; without a preset "
            f"give {choices}"
        )
    return value


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The values of a metric for all images.

    `mean` is the value of the data set: the mean of the defined values, or the metric's micro average.

    Args:
        metric: The name of the metric.
        values: The values [B] in float64; NaN if undefined.
        higher_is_better: Whether higher values are better.
        bounds: The lowest and highest possible value.
        curve: The curves [B,P] of the images, if the metric has any.
        x: The axis [P] of the curves.
        reasons: Why a value is undefined, for each image; empty if it is defined.
        settings: The settings of the metric.
        parts: Columns [B,...] of a micro average.
        combine: Computes a micro average from the sums of `parts`.
    """

    metric: str
    values: Tensor
    higher_is_better: bool
    bounds: tuple[float, float]
    curve: Tensor | None = None
    x: Tensor | None = None
    reasons: Sequence[str] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    combine: Callable[[Sums], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def count(self) -> int:
        """Number of images that have a value."""
        return int(self.exist.sum())

    @property
    def left_out(self) -> dict[str, int]:
        """Number of images without a value, by reason."""
        return {"undefined": len(self) - self.count}

    @cached_property
    def mean(self) -> float:
        """The value of the whole data set; NaN if no image has a value."""
        if not self.count:
            return float("nan")
        return float(self.number(self.summed().sum(0, keepdim=True).double())[0])

    @property
    def exist(self) -> Tensor:
        """A mask [B] of the images that have a value."""
        return self.values.isfinite()

    def summed(self, images: Tensor | None = None) -> Tensor:
        """The columns [n,k] whose sums give the value of the data set, of all images or of those at these indices.

        They are 0 for images without a value, and in float64, or in float32 if that represents all sums exactly.
        """
        chosen = slice(None) if images is None else images
        values = self.values[chosen]
        if self.combine is None:
            columns = torch.stack([torch.ones_like(values), values], 1)
        else:
            bytes_only = all(part.dtype == torch.uint8 for part in self.parts.values())
            exact = torch.float32 if bytes_only and 255 * len(self) < 2**24 else torch.float64
            widths = [part.shape[1:].numel() for part in self.parts.values()]
            columns = torch.empty(len(values), sum(widths), dtype=exact)
            for room, part in zip(columns.split(widths, 1), self.parts.values(), strict=True):
                room.copy_(part[chosen].reshape(len(values), -1))
        return columns.nan_to_num_().mul_(values.isfinite()[:, None])

    def number(self, sums: Tensor) -> Tensor:
        """The value of the data set [S], from sums [S,k] of the columns `summed` over images."""
        if self.combine is None:
            return sums[:, 1] / sums[:, 0]
        shapes = [part.shape[1:] for part in self.parts.values()]
        columns = sums.split([shape.numel() for shape in shapes], 1)
        named = zip(self.parts, columns, shapes, strict=True)
        return self.combine({name: column.reshape(-1, *shape) for name, column, shape in named})

    def resampled(self, weights: Tensor) -> Tensor:
        """The value of the data set [S] if image i counts weights[s,i] times; images without a value do not count."""
        return self.number(weights @ self.summed().double())

    def interval(self, confidence: float = 0.95, samples: int = 1000, seed: int = 0) -> tuple[float, float]:
        """A bootstrap interval of `mean` over images; NaN with fewer than six values."""
        return intervals({"": self}, Resamples(len(self), samples, seed), confidence)[""]

    @staticmethod
    def concat(parts: Sequence[Evaluation]) -> Evaluation:
        """Join the evaluations of one metric, with the same settings, on several batches of images."""
        curves = [part.curve for part in parts if part.curve is not None]
        return replace(
            parts[0],
            values=torch.cat([part.values for part in parts]),
            curve=torch.cat(curves) if curves else None,
            reasons=tuple(reason for part in parts for reason in part.reasons),
            parts={key: torch.cat([part.parts[key] for part in parts]) for key in parts[0].parts},
        )

    @property
    def arrow(self) -> str:
        """↑ where higher is better, else ↓."""
        return "↑" if self.higher_is_better else "↓"

    @property
    def summary(self) -> str:
        """The mean, its interval, and the number of images without a value: "0.412 [0.38, 0.45], 2 undefined"."""
        return summaries({"": self})[""]

    def to_frame(self) -> DataFrame:
        """A pandas table with a row per image: image, metric, value, and the reason if there is no value."""
        images = range(len(self))
        reasons = self.reasons or ("",) * len(self)
        return make_frame({"image": images, "metric": self.metric, "value": self.values.numpy(), "reason": reasons})

    def _repr_html_(self) -> str:
        return Evaluations({self.metric: self})._repr_html_()

    def __repr__(self) -> str:
        undefined = "".join(f", {count} {why}" for why, count in self.left_out.items() if count)
        better = "higher" if self.higher_is_better else "lower"
        images = plural(self.count, "image")
        return f"<{self.metric} {self.mean:.4g}, mean of {images}{undefined}; {better} is better>"


class Evaluations(dict[str, Any]):
    """Evaluations by metric, or by method and metric if there are several methods; a dict that prints as a table."""

    def __init__(self, evaluations: Mapping[str, Any], by: Literal["metric", "method"] = "metric") -> None:
        super().__init__(evaluations)
        self.by = by

    @property
    def table(self) -> dict[str, dict[str, Evaluation]]:
        """Evaluations by method and metric; if there are no methods, under the empty name."""
        if self.by == "metric":
            return {"": dict(self)}
        return {method: {e.metric: e} if isinstance(e, Evaluation) else dict(e) for method, e in self.items()}

    def to_frame(self) -> DataFrame:
        """All tables joined, with the labels as `method` and `metric`."""
        parts = []
        for method, row in self.table.items():
            for metric, evaluation in row.items():
                part = evaluation.to_frame().assign(metric=metric)
                if self.by == "method":
                    part.insert(1, "method", method)
                parts.append(part)
        return stack_frames(parts)

    def _repr_html_(self) -> str:
        return evaluations_html(self.table)


def intervals(
    evaluations: Mapping[K, Evaluation], resamples: Resamples, confidence: float = 0.95
) -> dict[K, tuple[float, float]]:
    """The interval of each evaluation of the same images, from the same resamples."""
    enough = {key: e for key, e in evaluations.items() if e.count >= FEWEST}
    spread = dict(zip(enough, resamples.numbers([(e, e.exist) for e in enough.values()]), strict=True))
    nothing = (float("nan"), float("nan"))
    return {key: percentiles(spread[key], confidence) if key in spread else nothing for key in evaluations}


def all_intervals(evaluations: Mapping[K, Evaluation]) -> dict[K, tuple[float, float]]:
    """The interval of each evaluation; those with the same number of images share their resamples."""
    result: dict[K, tuple[float, float]] = {}
    for images in {len(e) for e in evaluations.values()}:
        same_length = {key: e for key, e in evaluations.items() if len(e) == images}
        result |= intervals(same_length, Resamples(images))
    return result


def summaries(evaluations: Mapping[K, Evaluation]) -> dict[K, str]:
    """For each evaluation, the mean, its interval, and the number of images without a value."""
    ends = all_intervals(evaluations)

    def describe(evaluation: Evaluation, low: float, high: float) -> str:
        if evaluation.count == 0:
            return "no value"
        interval = f" [{low:.4g}, {high:.4g}]" if low == low else ""
        undefined = "".join(f", {n} {why}" for why, n in evaluation.left_out.items() if n)
        return f"{evaluation.mean:.4g}{interval}{undefined}"

    return {key: describe(evaluation, *ends[key]) for key, evaluation in evaluations.items()}


def evaluations_html(
    table: Mapping[str, Mapping[str, Evaluation]],
    marks: Mapping[tuple[str, str], Mark] | None = None,
    caption: str = "",
    below: str = "",
) -> str:
    """An HTML table of means with intervals: a row per method and a column per metric, or without methods a row each.

    `marks` are, by method and metric, the best one (bold) and those that are tied with it.
    """
    from patchlight.core.drawing.notebook import Html, table_html

    texts = summaries({(method, name): evaluation for method, row in table.items() for name, evaluation in row.items()})
    if list(table) == [""]:
        better = {True: "higher", False: "lower"}
        rows = [
            [name, better[evaluation.higher_is_better], texts["", name], f"{evaluation.count} of {len(evaluation)}"]
            for name, evaluation in table[""].items()
        ]
        return table_html(["metric", "better", "mean [95 % interval]", "images"], rows, caption, below)
    arrows = {name: evaluation.arrow for row in table.values() for name, evaluation in row.items()}

    def cell(method: str, name: str) -> str | Html:
        text, mark = texts.get((method, name), ""), marks[method, name] if marks is not None else ""
        return Html(f"<b>{escape(text)}</b> {SIGNS[mark]}") if mark == "best" else f"{text} {SIGNS[mark]}".strip()

    body = [[method, *(cell(method, name) for name in arrows)] for method in table]
    return table_html(["method", *(f"{name} {arrow}" for name, arrow in arrows.items())], body, caption, below)


def checked_maps(maps: Tensor, count: int, vit: Anatomy) -> Tensor:
    """Convert maps [B,h,w] to float32 or wider, and raise an error if they do not fit the images."""
    if maps.ndim != 1 + len(vit.grid) or len(maps) != count:
        sides = ", ".join("hw" if len(vit.grid) == 2 else vit.axes)
        raise PatchlightError(
            f"maps have shape {list(maps.shape)}; {count} images take maps of shape [{count}, {sides}]"
        )
    if maps.is_complex():
        raise PatchlightError(f"maps are of type {maps.dtype}; give real numbers")
    maps = maps if maps.dtype in (torch.float32, torch.float64) else maps.float()
    if len(vit.grid) != 2:
        if tuple(maps.shape[1:]) not in (vit.grid, vit.geometry.size):
            raise PatchlightError(
                f"maps are {list(maps.shape[1:])}; give them on the grid {list(vit.grid)}, or at the size of the input "
                f"{list(vit.geometry.size)}"
            )
        return maps
    (h, w), (height, width) = maps.shape[-2:], vit.geometry.size
    if (h, w) != tuple(vit.grid) and (h < vit.grid[0] or h * width != w * height or h > height):
        grid = "x".join(map(str, vit.grid))
        raise PatchlightError(
            f"maps are {h}x{w}, which does not cover {height}x{width} images; give them on the patch grid ({grid}), "
            f"at image size, or at a resolution of the same proportions between"
        )
    return maps


def apply_method(method: MapFunction | None, vit: Anatomy, images: Tensor, targets: Targets, seed: int) -> Tensor:
    """Compute maps of images with a method, and check them."""
    assert method is not None
    maps = method(vit, images, targets, seed)
    if not isinstance(maps, Tensor):
        raise PatchlightError(f"the callable returned a {type(maps).__name__}; it must return a tensor [B,h,w]")
    return checked_maps(maps.detach(), len(images), vit).to(vit.device)
