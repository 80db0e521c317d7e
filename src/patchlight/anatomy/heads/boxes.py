"""Questions about a detector: why this box and this label, and why an object was missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from patchlight.anatomy.heads.question import Question
from patchlight.core.errors import NoDetection, PatchlightError, Unsupported, integer
from patchlight.core.registry import check_arguments

if TYPE_CHECKING:
    from patchlight.anatomy.detectors import DetectorAnatomy

SIDES = ("left", "top", "right", "bottom")
BoxScore = Literal["match", "class", "logit", "box", "drise", "left", "top", "right", "bottom"]
OVERLAP = 0.05
"""The lowest IoU with which a query overlaps a box."""
SURE = 0.5
"""The lowest score of the other objects of the same class."""


@dataclass(frozen=True)
class Reference:
    """One detection in the unchanged image: box b*, class c*, query q*, and the output at the query.

    Args:
        box: Left, top, right and bottom [4], as parts of the model's input from 0 to 1.
        label: The number of the class.
        query: The number of the query.
        probabilities: The probabilities [C] at the query.
        query_box: The box [4] of the query.
    """

    box: Tensor
    label: int
    query: int
    probabilities: Tensor
    query_box: Tensor


class DetectionQuestion(Question):
    """A score of one or several detections, read from the boxes and classes of all queries.

    With p_q(c) the probability of class c at query q, b* and c* the explained box and class, and q* their query:

    - match: max_q IoU(b_q, b*) p_q(c*)
    - class: log p / (1 - p) of p_{q*}(c*)
    - box: IoU(b_{q*}, b*)

    By default, gradient methods use "class". Methods that remove parts use "match", or "class" if the object was
    missed. If the model selects its queries for every image, both use "match".
    """

    tasks, annotations = ("detection",), ("boxes",)
    references: Sequence[Reference] = ()
    others: Sequence[Tensor] = ()
    """The pixels [H,W] of other objects of each detection's class: sure detections that overlap its box by less."""
    score: BoxScore | None = None
    detector: Any = None

    def _about(self, **fields: Any) -> dict[str, Any]:
        """The fields that are given; and whether the selection of queries is held while gradients flow."""
        held = {"held": "selection"} if self.detector is not None and self.detector.selects else {}
        given = {key: value for key, value in fields.items() if value is not None}
        return {"head": type(self).__name__, **given, **held}

    def read(self, output: Any, rows: int) -> tuple[Tensor, Tensor]:
        probabilities = self.detector.probabilities_of(output)
        odds = self.detector.log_odds(output)
        boxes = corners(output.pred_boxes)
        pairs = [self._pair(reference, output, probabilities, odds, boxes) for reference in self.references]
        logits, removal_scores = zip(*pairs, strict=True)
        return torch.stack(logits, 1), torch.stack(removal_scores, 1)

    def _pair(
        self, held: Reference, output: Any, probabilities: Tensor, odds: Tensor, boxes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The score for gradients and the score for removal [rows] of one detection."""
        q, c, box = held.query, held.label, held.box.to(boxes)
        overlap = iou(boxes, box)
        match = (overlap * probabilities[..., c]).amax(1)
        score = self.score or ("match" if self.detector.selects else "class" if self.missed else None)
        if score == "match":
            return match, match
        if score == "drise":
            same = torch.cosine_similarity(probabilities, held.probabilities.to(probabilities), 2)
            objectness = getattr(output, "objectness_logits", None)
            similar = (overlap * same * (1 if objectness is None else objectness.sigmoid())).amax(1)
            return similar, similar
        if self.detector.selects:
            self._check_held(held, boxes)
        if score is None:
            return odds[:, q, c], match
        if score == "class":
            return odds[:, q, c], probabilities[:, q, c]
        if score == "logit":
            return self.detector.class_logits(output)[:, q, c], probabilities[:, q, c]
        value = overlap[:, q] if score == "box" else boxes[:, q, SIDES.index(score)]
        return value, value

    def _check_held(self, held: Reference, boxes: Tensor) -> None:
        """Refuse a changed image, in which another proposal is at this query."""
        far = (boxes[:, held.query].detach() - held.query_box.to(boxes)).abs().amax()
        if float(far) > 1e-3:
            raise Unsupported(
                f"the queries of {self.detector.name} are chosen anew for every image, so query {held.query} of a "
                "changed image is another one; score='match' works"
            )

    def hold(
        self, vit: DetectorAnatomy, output: Any, size: tuple[int, int] | None, chosen: list[tuple[Tensor, int, int]]
    ) -> None:
        """Hold boxes, classes and queries, and name them.

        Args:
            vit: The detector.
            output: Its plain output.
            size: Width and height of the photograph.
            chosen: Box [4], class and query of each.
        """
        probabilities, boxes = vit.probabilities_of(output)[0].detach(), corners(output.pred_boxes[0].detach())
        best, size_in = probabilities.max(1), vit.preprocess.size
        self.detector, self.references, self.labels, self.others = vit, [], [], []
        for box, label, query in chosen:
            alike = (best.indices == label) & (best.values >= SURE) & (iou(boxes, box.to(boxes)) < SURE)
            self.references.append(Reference(box.cpu(), label, query, probabilities[query].cpu(), boxes[query].cpu()))
            self.others.append(_pixels_in(vit.to_photograph(boxes[alike].cpu().float(), None), size_in))
            at = " ".join(f"{side:.0f}" for side in vit.to_photograph(box[None].cpu().float(), size)[0].tolist())
            self.labels.append(f"{vit.class_names[label]} at {at}")
        self.regions = [_pixels_in(box[None], size_in) for box in self.boxes_in_input()]

    def boxes_in_input(self) -> Tensor:
        """The boxes b* [Q,4] in pixels of the model's input."""
        boxes: Tensor = self.detector.to_photograph(torch.stack([held.box for held in self.references]).float(), None)
        return boxes


class Box(DetectionQuestion):
    """Why this box and this label: a detection, a query, or a box with a label.

    The default is the detection with the highest score in each image.

    Args:
        detection: Index of the detection, highest score first.
        query: Index of a query, instead of `detection`.
        box: Left, top, right and bottom in pixels of the photograph, instead of `detection`.
        label: The class. Default: the most probable one.
        score: "match", the largest product of overlap and probability over all queries; "class", the log-odds of the
            class at the query; "logit", its logit; "box", the overlap of the query's box; "left", "top", "right" or
            "bottom", a side of it; or "drise". Default: "class" for gradients, "match" for removal.
        missed: Explain why the object in `box` with `label` was missed. The predicted label of the query is the second
            class: `against=1` contrasts the two.
        threshold: Minimum score of a detection.

    Example:
        >>> question = pl.heads.Box(box=(12, 40, 180, 200), label="dog", missed=True)            # doctest: +SKIP
    """

    @check_arguments
    def __init__(
        self,
        detection: int | None = None,
        query: int | None = None,
        box: Sequence[float] | None = None,
        label: str | int | None = None,
        score: BoxScore | None = None,
        missed: bool = False,
        threshold: float = 0.0,
    ) -> None:
        given = [
            name for name, value in (("detection", detection), ("query", query), ("box", box)) if value is not None
        ]
        if len(given) > 1:
            raise PatchlightError(f"{' and '.join(given)} were given; give one of detection=, query= and box=")
        if missed and (box is None or label is None):
            raise PatchlightError(
                "missed=True needs the box and the label of the object that was missed; give box= and label="
            )
        if box is not None and len(box) != 4:
            raise PatchlightError(f"box has {len(box)} numbers; give left, top, right and bottom")
        self.detection = integer("detection", 0 if detection is None else detection, 0)
        self.query = None if query is None else integer("query", query, 0)
        self.box = None if box is None else tuple(box)
        self.label, self.score, self.missed = label, score, missed
        self.threshold = threshold
        self.labels = ["detection"]

    def prepare(self, vit: Any, image: Tensor, size: tuple[int, int] | None) -> None:
        output = vit.plain(image)
        probabilities, boxes = vit.probabilities_of(output)[0], corners(output.pred_boxes[0])
        label = None if self.label is None else vit.class_of(self.label)
        if self.box is not None:
            height, width = vit.preprocess.size
            given = vit.in_input(self.box, size) / torch.tensor([width, height, width, height])
            self.hold(vit, output, size, self._at_box(vit, given, label, probabilities, boxes))
            return
        if self.query is None:
            detections = detections_above(vit, output, size, self.threshold)
            if self.detection >= len(detections):
                limit = f" with a score of at least {self.threshold:g}" if self.threshold else ""
                raise NoDetection(
                    f"detection {self.detection} does not exist; {vit.name} has {len(detections)} detections{limit}"
                )
            query = detections[self.detection].query
        else:
            query = self.query
            if query >= len(boxes):
                raise PatchlightError(f"query {query} does not exist; {vit.name} has queries 0 to {len(boxes) - 1}")
        label = int(probabilities[query].argmax()) if label is None else label
        self.hold(vit, output, size, [(boxes[query], label, query)])

    def _at_box(
        self, vit: Any, box: Tensor, label: int | None, probabilities: Tensor, boxes: Tensor
    ) -> list[tuple[Tensor, int, int]]:
        """The box, the label and their query; for a missed object also the predicted label."""
        overlap = iou(boxes, box.to(boxes))
        if float(overlap.max()) < OVERLAP:
            raise PatchlightError(
                f"no query of {vit.name} overlaps the box you gave (largest IoU {float(overlap.max()):.2f}); give "
                "another box"
            )
        match = overlap[:, None] * (probabilities + (1e-3 if self.missed else 0))
        label = int(match.amax(0).argmax()) if label is None else label
        query = int(match[:, label].argmax())
        won = int(probabilities[query].argmax())
        return [(box, c, query) for c in dict.fromkeys((label, won) if self.missed else (label,))]

    def about(self) -> dict[str, Any]:
        return self._about(
            detection=self.detection if self.query is None and self.box is None else None,
            query=self.query,
            threshold=self.threshold or None,
            box=None if self.box is None else list(self.box),
            label=self.label,
            score=self.score,
            missed=self.missed,
        )


class Boxes(DetectionQuestion):
    """All detections of an image, one map for each.

    Args:
        threshold: The lowest score of a detection.
        top: At most this many, highest score first.
        score: As in `Box`.
    """

    @check_arguments
    def __init__(self, threshold: float = 0.5, top: int = 5, score: BoxScore | None = None) -> None:
        self.threshold, self.top, self.score = threshold, integer("top", top, 1), score
        self.labels = ["detection"]

    def prepare(self, vit: Any, image: Tensor, size: tuple[int, int] | None) -> None:
        output = vit.plain(image)
        detections = detections_above(vit, output, size, self.threshold)[: self.top]
        boxes = corners(output.pred_boxes[0])
        self.hold(vit, output, size, [(boxes[d.query], vit.class_names.index(d.label), d.query) for d in detections])

    def about(self) -> dict[str, Any]:
        return self._about(threshold=self.threshold, top=self.top, score=self.score)


def detections_above(vit: Any, output: Any, size: tuple[int, int] | None, threshold: float) -> list[Any]:
    """The detections whose score is at least the threshold, highest first; an error if there is none."""
    detections = vit.detections_of(output, size)
    if not detections[0].score >= threshold:
        raise PatchlightError(
            f"{vit.name} detects nothing with a score of at least {threshold:g} (the highest is {detections[0]}); "
            "lower the threshold"
        )
    return [each for each in detections if each.score >= threshold]


def _pixels_in(boxes: Tensor, size: Sequence[int]) -> Tensor:
    """The pixels [H,W] in any of the boxes [n,4], at least one for each."""
    inside = torch.zeros(*size)
    for left, top, right, bottom in boxes.round().int().tolist():
        inside[top : max(bottom, top + 1), left : max(right, left + 1)] = 1
    return inside


def corners(boxes: Tensor) -> Tensor:
    """Boxes [...,4] as centre and size to left, top, right, bottom."""
    half = boxes[..., 2:] / 2
    return torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], -1)


def iou(boxes: Tensor, box: Tensor) -> Tensor:
    """The IoU [...] of boxes [...,4] with one box [4]."""
    width, height = (
        (torch.minimum(boxes[..., i + 2], box[i + 2]) - torch.maximum(boxes[..., i], box[i])).clamp(min=0)
        for i in (0, 1)
    )
    inner = width * height
    areas = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1]) + (box[2] - box[0]) * (box[3] - box[1])
    return inner / (areas - inner).clamp_min(1e-9)
