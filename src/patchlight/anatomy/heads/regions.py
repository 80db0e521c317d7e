"""Questions about regions of a picture: why this class here, why nearer than there, why this mask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.anatomy.heads.question import Question
from patchlight.core.errors import PatchlightError
from patchlight.core.images import open_mask
from patchlight.core.registry import check_arguments
from patchlight.core.resize import to_pixels
from patchlight.core.targets import Outputs

if TYPE_CHECKING:
    from patchlight.anatomy.segmenters import PromptedAnatomy, SegmenterAnatomy

Statistic = Literal["mean", "sum", "max", "share"]


class Region(Question):
    r"""A score of a region R of the picture: of a class, or of depth.

    With Y_c the logits of class c at the output's own resolution, and R resized to it by area with sum 1:

    .. math:: s = \sum_p R_p Y_c(p) \qquad \text{removal reads} \sum_p R_p\, \mathrm{softmax}(Y(p))_c

    Models with queries read the mix of their masks in place of Y; depth models their depth. Boxes, points and masks are
    in pixels of the photograph, or of the tensor where a tensor is explained.

    Args:
        mask: The region: a file, PIL image, array or tensor of the photograph's size; nonzero is inside.
        box: The region: left, top, right and bottom.
        point: The region: x and y; the pixel there, or with `predicted` the component of its predicted class.
        predicted: Whether `point` selects all connected pixels of the same predicted class.
        label: The class, by name or number. Default: the most frequent prediction in the region.
        statistic: "mean", "sum" or "max" over the region, or "share", the share of it that is predicted as the class.
        against: What to subtract: another class, or for depth another region (mask, box or point).
        missed: Whether to explain a class that is not predicted in the region. The most frequent predicted class of the
            region is the second class: `against=1` contrasts the two.
    """

    tasks, annotations = ("segmentation", "depth"), ("masks",)
    numbers: Sequence[int] = (0,)

    @check_arguments
    def __init__(
        self,
        mask: Any = None,
        *,
        box: Sequence[float] | None = None,
        point: Sequence[float] | None = None,
        predicted: bool = False,
        label: str | int | None = None,
        statistic: Statistic = "mean",
        against: Any = None,
        missed: bool = False,
    ) -> None:
        given = [name for name, value in (("mask", mask), ("box", box), ("point", point)) if value is not None]
        if len(given) > 1:
            raise PatchlightError(f"a region is one of mask, box and point; {' and '.join(given)} were given")
        if predicted and point is None:
            raise PatchlightError("predicted=True needs point=(x, y), a pixel of the component")
        self.where = mask if mask is not None else box if box is not None else point
        self.predicted, self.label, self.statistic = predicted, label, statistic
        self.against, self.missed = against, missed
        self.labels = []

    def bound(self, vit: Any) -> Any:
        question = super().bound(vit)
        if vit.task == "depth" and (self.label is not None or self.predicted or self.statistic == "share"):
            raise PatchlightError(
                f"{vit.name} is a model for depth and has no classes; leave out label, predicted and statistic='share'"
            )
        if vit.task != "depth" and self.against is not None and not np.isscalar(self.against):
            raise PatchlightError(
                f"{vit.name} is a model for {vit.task}, so a region is contrasted with another class; two regions are "
                "compared in models for depth"
            )
        if vit.task == "depth" or self.against is not None:
            question.outputs = Outputs("none")
        return question

    def prepare(self, vit: SegmenterAnatomy, image: Tensor, size: tuple[int, int] | None) -> None:
        scores = vit.scores_of(vit.plain(image))[0].float()
        depth, best = vit.task == "depth", scores.argmax(0)
        if self.where is None and not depth:  # all that is predicted as the most frequent class
            label = int(best.flatten().mode().values) if self.label is None else vit.class_of(self.label)
            weights = (best == label).float()
            weights = torch.ones_like(weights) if self.missed and not bool(weights.any()) else weights
        else:
            region = torch.ones(vit.preprocess.size) if self.where is None else pixels_of(vit, self.where, size)
            weights = resized(region.to(scores), scores.shape[1:])
            if self.predicted:
                weights = _component(best, weights)
        if self.predicted or self.where is None:
            self.regions = [] if depth else [_in_input(weights, vit)]
        else:
            self.regions = [region]
        self.weights, self.other = weights, None
        if depth:
            self.labels = ["depth"]
            if self.against is not None:
                other = pixels_of(vit, self.against, size)
                self.other = resized(other.to(scores), scores.shape[1:])
                self.regions = [region, other]
                self.labels = ["depth against the other region"]
            return
        shares = torch.zeros(len(scores)).index_add(0, best.flatten().cpu(), weights.flatten().cpu())
        shares = shares / shares.sum()
        most = int(shares.argmax())
        number = most if self.label is None else vit.class_of(self.label)
        if shares[number] == 0 and not self.missed:
            raise PatchlightError(
                f"{vit.name} has no class '{vit.class_names[number]}' in this region: the largest share there is "
                f"{shares[most]:.0%} '{vit.class_names[most]}'; set missed=True to explain it anyway"
            )
        self.numbers = list(dict.fromkeys((number, most) if self.missed else (number,)))
        self.regions = list(self.regions) * len(self.numbers)
        self.rival = None if self.against is None else vit.class_of(self.against)
        ending = "" if self.rival is None else f" against {vit.class_names[self.rival]}"
        self.labels = [f"{vit.class_names[each]}{ending}" for each in self.numbers]
        self._scores_of = vit.scores_of

    def read(self, output: Any, rows: int) -> tuple[Tensor, Tensor]:
        if "predicted_depth" in output:
            value = self._over(output.predicted_depth, self.weights)
            value = value if self.other is None else value - self._over(output.predicted_depth, self.other)
            return value[:, None], value[:, None]
        scores = self._scores_of(output)
        if self.statistic == "share":
            best = scores.argmax(1)
            shares = torch.stack([self._over((best == each).to(scores), self.weights) for each in self.numbers], 1)
            return shares, shares
        first, second = scores, scores if "class_queries_logits" in output else scores.softmax(1)
        if self.rival is not None:
            first = first - scores[:, self.rival, None]
        logits, shares = (
            torch.stack([self._over(values[:, each], self.weights) for each in self.numbers], 1)
            for values in (first, second)
        )
        return logits, shares

    def _over(self, values: Tensor, weights: Tensor) -> Tensor:
        """The statistic [B] of values [B,h,w] over the region."""
        weights = weights.to(values)
        if self.statistic == "max":
            return values.masked_fill(weights == 0, -torch.inf).flatten(1).amax(1)
        total = (values * weights).sum((1, 2))
        return total if self.statistic == "sum" else total / weights.sum()

    def about(self) -> dict[str, Any]:
        return {
            "head": "Region",
            "region": _shown(self.where),
            "predicted": self.predicted,
            "label": self.label,
            "statistic": self.statistic,
            "against": _shown(self.against),
        }


class Mask(Question):
    """A mask of SAM: what makes this mask stay.

    The score is the mean logit of the mask over its pixels in the unchanged image. Methods that remove parts use the
    mean probability. The mask is the one with the highest predicted IoU.

    Args:
        points: One point (x, y), or several, in pixels of the photograph. Default: the centre.
    """

    tasks, annotations = ("masks",), ("masks",)

    @check_arguments
    def __init__(self, points: tuple[float, float] | Sequence[tuple[float, float]] | None = None) -> None:
        self.points = None if not points else np.asarray(points, dtype=float).reshape(-1, 2).tolist()
        self.labels = []

    def prepare(self, vit: PromptedAnatomy, image: Tensor, size: tuple[int, int] | None) -> None:
        height, width = vit.preprocess.size
        inside = [[width / 2, height / 2]]
        if self.points is not None:
            inside = [vit.in_input((x, y, x + 1, y + 1), size, "point")[:2].tolist() for x, y in self.points]
        self.places = image.new_tensor(inside)
        self.at = vit.at_points
        with torch.no_grad(), vit.steady():
            out = self.call(vit, image)
        self.number = int(out.iou_scores[0, 0].argmax())
        mask = (out.pred_masks[0, 0, self.number] > 0).float()
        if not bool(mask.any()):
            raise PatchlightError(f"{vit.name} predicts no mask at {self.points or 'the centre'}; give another point")
        self.weights, self.regions = mask / mask.sum(), [_in_input(mask, vit)]
        self.labels = [f"mask {self.number} of IoU {float(out.iou_scores[0, 0, self.number]):.2f}"]

    def call(self, vit: Any, images: Tensor) -> Any:
        return vit.at_points(vit.net, images, self.places.to(images))

    def read(self, output: Any, rows: int) -> tuple[Tensor, Tensor]:
        mask = output.pred_masks[:, 0, self.number]
        weights = self.weights.to(mask)
        logits, probabilities = ((values * weights).sum((1, 2)) for values in (mask, mask.sigmoid()))
        return logits[:, None], probabilities[:, None]

    def about(self) -> dict[str, Any]:
        return {"head": "Mask", "points": self.points}


def pixels_of(vit: Any, where: Any, size: tuple[int, int] | None) -> Tensor:
    """A region [H,W] in pixels of the model's input, from a mask, box or point of the photograph."""
    height, width = vit.preprocess.size
    if isinstance(where, tuple | list) and len(where) in (2, 4):
        box = where if len(where) == 4 else (where[0], where[1], where[0] + 1, where[1] + 1)
        left, top, right, bottom = vit.in_input(box, size, "point" if len(where) == 2 else "region").tolist()
        rows, columns = (torch.arange(side, dtype=torch.float32) for side in (height, width))
        inside = [
            (torch.minimum(side + 1, torch.tensor(end)) - torch.maximum(side, torch.tensor(begin))).clamp(min=0)
            for side, begin, end in ((rows, top, bottom), (columns, left, right))
        ]
        return inside[0][:, None] * inside[1]
    if isinstance(where, str | Path):
        where = open_mask(Path(where)).convert("L")
    mask = (torch.as_tensor(np.array(where)).squeeze() != 0).float()
    if mask.ndim != 2:
        raise PatchlightError(f"the mask of the region has shape {list(mask.shape)}; give one value per pixel")
    shown = size or (width, height)
    if tuple(mask.shape) != shown[::-1]:
        raise PatchlightError(
            f"the mask of the region is {mask.shape[1]} x {mask.shape[0]} pixels, and the image {shown[0]} x {shown[1]}"
        )
    if not bool(mask.any()):
        raise PatchlightError("the region is empty: its mask contains only zeros")
    return mask if size is None else vit.preprocess.mask(mask.int()).float()


def resized(region: Tensor, size: Sequence[int]) -> Tensor:
    """A region [H,W] at another resolution, by area."""
    if not bool((region > 0).any()):
        raise PatchlightError("nothing of the region you gave lies in the picture the model saw")
    return F.adaptive_avg_pool2d(region[None], (size[0], size[1]))[0]


def _component(best: Tensor, seed: Tensor) -> Tensor:
    """The pixels connected to the seed whose class is the same."""
    from scipy.ndimage import label

    row, column = divmod(int(seed.flatten().argmax()), seed.shape[1])
    numbers, _ = label((best == best[row, column]).cpu().numpy())
    return torch.as_tensor(numbers == numbers[row, column]).to(seed)


def _in_input(weights: Tensor, vit: Any) -> Tensor:
    """Which pixels [H,W] of the model's input lie at weights [h,w] above 0."""
    return to_pixels((weights > 0).float(), vit.preprocess.size, upsampling="nearest").cpu()


def _shown(value: Any) -> Any:
    """A box, point or class as it was given, the path of a mask, or "mask"."""
    if isinstance(value, tuple | list):
        return list(value)
    return value if value is None or isinstance(value, str | int) else str(value) if isinstance(value, Path) else "mask"
