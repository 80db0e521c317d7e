"""Localisation metrics: the pointing game, segmentation scores, and boxes around the highest region of a map.

The object is the union of the boxes of an image, or its mask. An image without an object has no value.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from patchlight.anatomy.opened import Anatomy
from patchlight.core.resize import Upsampling
from patchlight.core.statistics import tie_ends
from patchlight.core.targets import top_classes
from patchlight.metrics.base import Measure, Measured, Sums, on_grid, reasons_where, register_metric

Share = Annotated[float, Field(gt=0, le=1)]
Threshold = Annotated[float, Field(ge=0, le=1, description="The highest region is where the map is at least this.")]
Iou = Annotated[float, Field(gt=0, le=1, description="The smallest IoU that counts as a hit.")]
MaxArea = Annotated[
    Share | None, Field(description="Images whose object covers at least this share are skipped; None keeps all.")
]
Pixels = Annotated[float, Field(ge=0)]
Region = Annotated[
    Literal["boxes", "masks"], Field(description="The annotation that is used if both are given; None: boxes.")
]
CellUnit = Annotated[
    Literal["pixel", "patch"],
    Field(description="What is counted: pixels of the upsampled map, or patches at least half covered by the object."),
]
Tie = Literal["seeded", "first", "any"]
Components = Annotated[
    Literal["largest", "all"],
    Field(
        description="The box is the bounding box of the largest 8-connected component of the highest region, or the "
        "best of the bounding boxes of all components."
    ),
]

STEPS = 101
"""Thresholds 0, .01, …, 1 of the sweep."""
_CHEFER = "Chefer et al., CVPR 2021"
_CHOE = "Choe et al., CVPR 2020"


def box_region(ask: Measure) -> Tensor:
    """The union of each image's boxes as pixels [B,H,W]: rows int(ymin) to int(ymax) - 1, columns likewise."""
    assert ask.boxes is not None
    height, width = ask.size
    most = max(1, *(len(box) for box in ask.boxes))
    boxes = torch.stack([F.pad(box, (0, 0, 0, most - len(box))) for box in ask.boxes]).to(ask.maps.device).long()
    xmin, ymin, xmax, ymax = boxes[..., None].unbind(2)
    rows, columns = (torch.arange(side, device=boxes.device) for side in (height, width))
    inside_rows, inside_columns = (rows >= ymin) & (rows < ymax), (columns >= xmin) & (columns < xmax)
    return (inside_rows[..., None] & inside_columns[:, :, None]).any(1)


def _object(ask: Measure, region: Region | None, max_area: float | None) -> tuple[Tensor, dict[int, str]]:
    """The object's pixels [B,H,W], and why some images have no valid object."""
    if ask.boxes is not None and region != "masks":
        pixels = box_region(ask)
        absent = {i: "it has no boxes" for i, box in enumerate(ask.boxes) if len(box) == 0}
        empty = "its boxes contain no pixel"
    else:
        assert ask.masks is not None
        pixels, absent, empty = ask.masks == 1, {}, "its mask shows no object"
    area = pixels.double().mean(_cell_dims(pixels))
    reasons = reasons_where(area == 0, empty)
    if max_area is not None:
        reasons |= {
            int(i): f"the object covers {float(area[i]):.0%} of it, not less than max_area ({max_area:.0%})"
            for i in (area >= max_area).nonzero().flatten()
        }
    return pixels, reasons | absent


def _cell_dims(maps: Tensor) -> tuple[int, ...]:
    """All dimensions except the first."""
    return tuple(range(1, maps.ndim))


def _grow(pixels: Tensor, distance: float) -> Tensor:
    """Dilate pixels [B,H,W] by a disc, in each frame or slice by itself."""
    reach = int(distance)
    if reach == 0:
        return pixels
    line = torch.arange(-reach, reach + 1, device=pixels.device)
    disc = (line[:, None] ** 2 + line**2 <= distance**2).float()[None, None]
    planes = pixels.reshape(-1, 1, *pixels.shape[-2:]).float()
    return F.conv2d(planes, disc, padding=reach).view(pixels.shape) > 0.5


_POINTING: dict[str, Mapping[str, Any]] = {
    "tis": {"tie": "first", "tolerance": 0.0, "max_area": 0.5},
    "original": {"tie": "first", "tolerance": 15.0, "max_area": None},
    "quantus": {"tie": "any", "tolerance": 0.0, "max_area": None},
}


@register_metric(
    "pointing-game", paper="Zhang et al., IJCV 2018", higher_is_better=True, needs={"boxes or masks"}, presets=_POINTING
)
def pointing_game(
    ask: Measure,
    max_area: MaxArea = 0.5,
    tolerance: Pixels = 0.0,
    tie: Tie = "seeded",
    upsampling: Upsampling = "bilinear",
    region: Region | None = None,
) -> Measured:
    """Whether the highest pixel of the map lies on the object: 1 or 0.

    The object is the union of all boxes, or the mask. Presets: `tis` (first maximum, objects below half the image),
    `original` (a tolerance of 15 pixels, all images), `quantus` (any maximum, all images).

    Args:
        tolerance: Distance from the object, in pixels, that still counts as a hit.
        tie: Which of several equal maxima counts: one chosen by the seed ("seeded"), the "first", or "any" that hits.
    """
    pixels, reasons = _object(ask, region, max_area)
    pixels = _grow(pixels, tolerance).flatten(1)
    maps = ask.upsampled(upsampling).flatten(1)
    if tie == "any":
        hits = (pixels & (maps == maps.amax(1, keepdim=True))).any(1)
    else:
        order = torch.arange(maps.shape[1])
        if tie == "seeded":
            order = torch.randperm(maps.shape[1], generator=torch.Generator().manual_seed(ask.seed))
        order = order.to(maps.device)
        highest = order[maps[:, order].argmax(1)]
        hits = pixels.gather(1, highest[:, None])[:, 0]
    return Measured(hits, reasons=reasons)


@register_metric(
    "energy-pointing",
    paper="Wang et al., CVPR-W 2020",
    higher_is_better=True,
    needs={"boxes or masks"},
    presets={"gridpg": {"negative": "drop", "max_area": None}},
)
def energy_pointing(
    ask: Measure,
    max_area: MaxArea = 0.5,
    negative: Literal["absolute", "drop"] = "absolute",
    upsampling: Upsampling = "bilinear",
    region: Region | None = None,
) -> Measured:
    """Share of the map that lies on the object.

        sum over the object of |map| / sum of |map|

    A map of zeros has the value of a constant map, the object's share of the image. Preset `gridpg` with the data
    `mosaic` is GridPG, or Focus if two cells show the class.

    Args:
        negative: Whether negative scores count by their absolute value ("absolute") or as 0 ("drop").
    """
    pixels, reasons = _object(ask, region, max_area)
    maps = ask.upsampled(upsampling).double()
    energy = maps.abs() if negative == "absolute" else maps.relu()
    energy = torch.where(energy.amax(_cell_dims(energy), keepdim=True) > 0, energy, torch.ones_like(energy))
    return Measured((energy * pixels).flatten(1).sum(1) / energy.flatten(1).sum(1), reasons=reasons)


def _no_objects(settings: Mapping[str, Any], vit: Anatomy) -> str | None:
    """Why a model has no detected objects; None if it has."""
    return None if vit.task == "detection" else f"it compares detected objects, and {vit.name} is not a detector"


@register_metric(
    "other-objects",
    paper="Zhao and Chan, ICLR 2023, our reading",
    higher_is_better=False,
    bounds=(0.0, 1.0),
    refuses=_no_objects,
    cost="no forward",
)
def other_objects(ask: Measure, upsampling: Upsampling = "bilinear") -> Measured:
    """Share of the map of a detection that lies on other objects of its class.

        sum of |map| over the other boxes, outside the detection's box / sum of |map|

    Other objects are detections of the same label with a score of at least 0.5 and an overlap with the box of less than
    half. An image without other objects has no value.
    """
    question: Any = ask.vit.question
    energy = ask.upsampled(upsampling).double().abs()
    values, reasons = energy.new_full((len(energy),), torch.nan), {}
    for i, index in enumerate(ask.targets.index[:, 0].tolist()):
        if not bool(question.others[index].any()):
            reasons[i] = "no other object of its class was detected"
            continue
        inside = (question.others[index] > question.regions[index]).to(energy.device)
        values[i] = (energy[i] * inside).sum() / energy[i].sum().clamp_min(torch.finfo(energy.dtype).tiny)
    return Measured(values, reasons=reasons)


def average_precision(scores: Tensor, positive: Tensor, counted: Tensor | None = None) -> Tensor:
    """AP [B] = sum_n (R_n - R_{n-1}) P_n over the distinct scores [B,N], highest first; NaN without a positive.

    Elements are skipped where `counted` [B,N] is False.
    """
    order = scores.argsort(1, descending=True)
    ordered = scores.gather(1, order)
    weight = torch.ones_like(ordered, dtype=torch.float64) if counted is None else counted.gather(1, order).double()
    hits = positive.gather(1, order).double() * weight
    precision = hits.cumsum(1) / weight.cumsum(1).clamp_min(1)
    return (hits * precision.gather(1, tie_ends(ordered))).sum(1) / hits.sum(1)


def _masks(ask: Measure) -> Tensor:
    """The masks [B,H,W]; without masks, the union of each image's boxes."""
    return box_region(ask).long() if ask.masks is None else ask.masks


def _object_pixels(
    ask: Measure, unlabelled: str = "leave-out", needs_background: bool = False
) -> tuple[Tensor, Tensor, dict[int, str]]:
    """The object's pixels and the counted pixels [B,N], and why some masks are not valid."""
    masks = _masks(ask).flatten(1)
    positive = masks == 1
    counted = masks >= 0 if unlabelled == "leave-out" else torch.ones_like(positive)
    full = ~(counted & ~positive).any(1) & needs_background
    reasons = reasons_where(full, "its mask shows nothing but the object")
    return positive, counted, reasons | reasons_where(~positive.any(1), "its mask shows no object")


@register_metric(
    "ap",
    paper="SkipPLUS, CVPR-W 2024",
    aliases=("seg-ap",),
    higher_is_better=True,
    needs={"boxes or masks"},
    presets={"skipplus": {"upsampling": "nearest", "unlabelled": "background"}},
)
def ap(
    ask: Measure,
    unit: CellUnit = "pixel",
    upsampling: Upsampling = "nearest",
    unlabelled: Literal["leave-out", "background"] = "leave-out",
) -> Measured:
    """Average precision of the map as a detector of the pixels or patches of the object.

        sum_n (R_n - R_{n-1}) P_n,   recall R_n and precision P_n at the n-th threshold

    The object is the mask, or the union of the boxes. Only the order of the scores counts, and equal scores count as
    one threshold. The expected value of a random map is the object's share of the image.

    Args:
        unlabelled: Whether pixels marked -1 are skipped, or are background (preset `skipplus`).
    """
    scores, positive, counted, reasons = _scored_cells(ask, unit, upsampling, unlabelled)
    return Measured(average_precision(scores, positive, counted), reasons=reasons)


def _scored_cells(
    ask: Measure, unit: str, upsampling: Upsampling, unlabelled: str = "leave-out"
) -> tuple[Tensor, Tensor, Tensor, dict[int, str]]:
    """The map, the object and the counted cells [B,N] in pixels or patches, and why some masks are not valid."""
    if unit == "pixel":
        return ask.upsampled(upsampling).flatten(1), *_object_pixels(ask, unlabelled, needs_background=True)
    masks = _masks(ask).double()
    labelled = torch.ones_like(masks) if unlabelled == "background" else (masks >= 0).double()
    share, labelled = (on_grid(part, ask.vit).flatten(1) for part in ((masks == 1).double(), labelled))
    counted = labelled > 0
    positive = counted & (share >= labelled / 2) & (share > 0)
    reasons = reasons_where(~(counted & ~positive).any(1), "its mask shows nothing but the object")
    reasons |= reasons_where(~positive.any(1), "its mask covers less than half of every patch")
    return ask.on_grid().flatten(1), positive, counted, reasons


def rank_accuracy(scores: Tensor, positive: Tensor, counted: Tensor) -> Tensor:
    """The share [B] of positives among the K highest scores [B,N], for K positives; ties count in proportion."""
    scores = torch.where(counted, scores.double(), -torch.inf)
    size = positive.sum(1, keepdim=True)
    edge = scores.sort(1, descending=True).values.gather(1, (size - 1).clamp_min(0))
    above, level = scores > edge, scores == edge
    room = (size - above.sum(1, keepdim=True)).double() * (level & positive).sum(1, keepdim=True)
    inside = (above & positive).sum(1, keepdim=True) + room / level.sum(1, keepdim=True)
    return (inside / size)[:, 0]


@register_metric(
    "relevance-rank",
    paper="Arras et al., Information Fusion 2022",
    aliases=("relevance-rank-accuracy",),
    higher_is_better=True,
    needs={"masks"},
    presets={"quantus": {"unit": "pixel", "upsampling": "bilinear"}},
)
def relevance_rank(ask: Measure, unit: CellUnit = "patch", upsampling: Upsampling = "nearest") -> Measured:
    """Share of the K highest patches that are on the object, where K is the object's number of patches.

    The value is 1 if the map ranks the whole object first. Patches with equal scores at rank K count in proportion; a
    constant map has the object's share of the image.
    """
    scores, positive, counted, reasons = _scored_cells(ask, unit, upsampling)
    return Measured(rank_accuracy(scores, positive, counted), reasons=reasons)


def unit_range(maps: Tensor) -> Tensor:
    """Maps [B,h,w] scaled to [0, 1] in float64; a constant map becomes 0."""
    maps = maps.double()
    low, high = (end(_cell_dims(maps), keepdim=True) for end in (maps.amin, maps.amax))
    return (maps - low) / torch.where(high > low, high - low, 1)


def _foreground(ask: Measure) -> Tensor:
    """A mask [B,N] of the pixels where the upsampled map is above its mean."""
    maps = unit_range(ask.upsampled()).flatten(1)
    return maps > maps.mean(1, keepdim=True)


def _pixel_accuracy(sums: Sums) -> Tensor:
    return sums["correct"] / sums["labelled"]


@register_metric("pixel-accuracy", paper=_CHEFER, higher_is_better=True, needs={"masks"}, combine=_pixel_accuracy)
def pixel_accuracy(ask: Measure) -> Measured:
    """Share of labelled pixels that are classified correctly as object or background.

    A pixel is classified as object if the map is above its mean. The value of a data set is a micro average: correct
    pixels divided by labelled pixels, of all images.
    """
    positive, counted, reasons = _object_pixels(ask)
    correct = ((_foreground(ask) == positive) & counted).sum(1)
    parts = {"correct": correct.double(), "labelled": counted.sum(1).double()}
    return Measured(_pixel_accuracy(parts), parts=parts, reasons=reasons)


def _miou(sums: Sums) -> Tensor:
    """The mean IoU of background and object; one that does not occur is skipped."""
    occurs = sums["union"] > 0
    return (sums["intersection"] / sums["union"].clamp_min(1)).sum(-1) / occurs.sum(-1)


@register_metric("miou", paper=_CHEFER, higher_is_better=True, needs={"masks"}, combine=_miou)
def miou(ask: Measure) -> Measured:
    """Mean IoU of object and background, for the map thresholded at its mean.

    For a data set, intersections and unions are summed over all images before the division, as in Chefer et al.
    """
    positive, counted, reasons = _object_pixels(ask)
    above = _foreground(ask)
    shown = torch.stack([~above, above], 1) & counted[:, None]
    truth = torch.stack([~positive, positive], 1) & counted[:, None]
    parts = {"intersection": (shown & truth).sum(2).double(), "union": (shown | truth).sum(2).double()}
    return Measured(_miou(parts), parts=parts, reasons=reasons)


@register_metric("map", paper=_CHEFER, higher_is_better=True, needs={"masks"})
def two_channel_ap(ask: Measure) -> Measured:
    """Average precision of the map for the object and of its complement for the background.

    The map m is scaled to [0, 1], and m and 1 - m are concatenated to 2HW elements, so that (m, mask) and (1 - m,
    1 - mask) have the same value.
    """
    positive, counted, reasons = _object_pixels(ask, needs_background=True)
    maps = unit_range(ask.upsampled()).flatten(1)
    pairs = ((1 - maps, maps), (~positive, positive), (counted, counted))
    return Measured(average_precision(*(torch.cat(pair, 1) for pair in pairs)), reasons=reasons)


@register_metric("f1", paper=_CHEFER, higher_is_better=True, needs={"masks"})
def f1(ask: Measure) -> Measured:
    """F1 score of the object's pixels, for the map thresholded at its mean.

    2 TP / (2 TP + FP + FN)   for each image
    """
    positive, counted, reasons = _object_pixels(ask)
    above = _foreground(ask) & counted
    hits = (above & positive).sum(1).double()
    return Measured(2 * hits / (above.sum(1) + (positive & counted).sum(1)), reasons=reasons)


def heat_overlaps(
    maps: NDArray[np.float64], boxes: NDArray[np.float64], levels: NDArray[np.float64], components: Components
) -> NDArray[np.float64]:
    """At each level [T], the best IoU of a box around the highest region with one of an image's boxes [n,4].

    The region is where a map [H,W] in [0, 1] is at least the level. Its box is the bounding box of the largest
    8-connected component (the first of equal ones); with "all", every component has a box.
    """
    from scipy import ndimage

    structure = np.zeros((3, 3, 3), bool)
    structure[1] = True
    labels, count = ndimage.label(maps >= levels[:, None, None], structure)
    places = ndimage.find_objects(labels)
    spans = np.array([[s.start for s in place] + [s.stop for s in place] for place in places], float)
    spans = spans.reshape(-1, 6)
    level = spans[:, 0].astype(int)
    iou = _iou(spans[:, [2, 1, 5, 4]], boxes).max(1)
    best = np.zeros(len(levels))
    if components == "all":
        np.maximum.at(best, level, iou)
        return best
    size = np.bincount(labels.ravel(), minlength=count + 1)[1:]
    order = np.lexsort((-size, level))
    occupied, first = np.unique(level[order], return_index=True)
    best[occupied] = iou[order[first]]
    return best


def _iou(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """IoU [n,m] of boxes [n,4] and [m,4]."""
    low, high = np.maximum(a[:, None, :2], b[:, :2]), np.minimum(a[:, None, 2:], b[:, 2:])
    both: NDArray[np.float64] = (high - low).clip(0).prod(2)
    areas: NDArray[np.float64] = (a[:, 2:] - a[:, :2]).prod(1)[:, None] + (b[:, 2:] - b[:, :2]).prod(1)
    return np.divide(both, areas - both)


def _overlaps(
    ask: Measure, levels: NDArray[np.float64], components: Components, upsampling: Upsampling
) -> tuple[Tensor, dict[int, str]]:
    """The IoU [B,T] of the box around the highest region at each level, and the images without boxes."""
    assert ask.boxes is not None
    maps = unit_range(ask.upsampled(upsampling)).cpu().numpy()
    boxes = [box.cpu().numpy() for box in ask.boxes]

    def overlaps_of_image(i: int) -> NDArray[np.float64]:
        return heat_overlaps(maps[i], boxes[i], levels, components) if len(boxes[i]) else np.zeros(len(levels))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        overlaps = np.stack(list(pool.map(overlaps_of_image, range(len(maps)))))
    return torch.from_numpy(overlaps), {i: "it has no boxes" for i, box in enumerate(boxes) if len(box) == 0}


@register_metric("gt-known-loc", paper=_CHOE, higher_is_better=True, needs={"boxes"}, cost="no forward; 1 labelling")
def gt_known_loc(
    ask: Measure,
    threshold: Threshold = 0.2,
    iou: Iou = 0.5,
    components: Components = "largest",
    upsampling: Upsampling = "bilinear",
) -> Measured:
    """Whether the box around the map's highest region overlaps one of the image's boxes.

    The value is 1 if the IoU is at least `iou`, otherwise 0. The map is scaled to [0, 1].
    """
    overlaps, reasons = _overlaps(ask, np.array([threshold]), components, upsampling)
    return Measured(overlaps[:, 0] >= iou, reasons=reasons)


@register_metric(
    "top1-loc", paper=_CHOE, higher_is_better=True, needs={"boxes", "labels"}, cost="1 forward; 1 labelling"
)
def top1_loc(
    ask: Measure,
    threshold: Threshold = 0.2,
    iou: Iou = 0.5,
    components: Components = "largest",
    upsampling: Upsampling = "bilinear",
) -> Measured:
    """`gt-known-loc`, with the value 0 for images whose true label the model does not predict."""
    assert ask.labels is not None
    overlaps, reasons = _overlaps(ask, np.array([threshold]), components, upsampling)
    correct = top_classes(ask.vit.logits(ask.images), ask.vit.outputs).index[:, 0] == ask.labels.cpu()
    return Measured((overlaps[:, 0] >= iou) & correct, reasons=reasons)


def _max_box_acc(sums: Sums) -> Tensor:
    return (sums["hits"] / sums["images"][..., None, None]).amax(-1).mean(-1)


@register_metric(
    "max-box-acc",
    paper=_CHOE,
    aliases=("max-box-acc-v2",),
    higher_is_better=True,
    needs={"boxes"},
    cost="no forward; 101 labellings",
    presets={"choe": {"components": "all"}},
    combine=_max_box_acc,
)
def max_box_acc(ask: Measure, components: Components = "largest", upsampling: Upsampling = "bilinear") -> Measured:
    """MaxBoxAccV2: localisation accuracy at the best threshold, averaged over three IoUs.

    The IoUs are 0.3, 0.5 and 0.7; the thresholds 0, 0.01, …, 1. For a data set, the best threshold for each IoU is
    common to all images; for the value of one image it is chosen for that image, so the mean of these values is larger.
    Curve [B,101]: hits, averaged over the IoUs. Boxes are those of `gt-known-loc`; preset `choe` uses the boxes of all
    components, as in the authors' code.
    """
    levels = np.arange(STEPS) / (STEPS - 1)
    overlaps, reasons = _overlaps(ask, levels, components, upsampling)
    hits = (overlaps[:, None] >= torch.tensor([0.3, 0.5, 0.7], dtype=torch.float64)[:, None]).double()
    parts = {"hits": hits, "images": torch.ones(len(hits), dtype=torch.float64)}
    return Measured(_max_box_acc(parts), hits.mean(1), torch.from_numpy(levels), parts, reasons)
