"""Questions about the output of a model that is not a classifier: what can be explained, and the current region."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.anatomy import heads
from patchlight.anatomy.heads.answer import VISUAL
from patchlight.anatomy.opened import Anatomy
from patchlight.core.attribution import Attribution
from patchlight.core.errors import PatchlightError
from patchlight.core.targets import top_classes
from patchlight.web import schemas

if TYPE_CHECKING:
    from patchlight.web.service import ModelService, ResolvedQuestion

PROMPT = "What is in the image?"
"""The default prompt of a vision-language model."""
SURE, FEW, MOST = 0.3, 3, 50
"""Detections with a score of at least SURE are listed, but at least the FEW highest and at most MOST."""
SMALLEST = 0.005
"""Smallest share of the image of a region that is listed."""
FINEST = 128
"""Maximum number of rows and columns of the region that a client draws."""
Frame = tuple[float, float, float, float]


def question_of(request: schemas.HeadRequest) -> heads.Question:
    """The question of a request."""
    fields = request.model_dump(exclude={"kind"}, exclude_none=True)
    if isinstance(request, schemas.BoxRequest):
        return heads.Box(**fields)
    if isinstance(request, schemas.AnswerRequest):
        return heads.Answer(**{**fields, "force": True})  # every word has a number; `check_word` refuses
    return heads.Mask(**fields) if isinstance(request, schemas.MaskRequest) else heads.Region(**fields)


def with_default_question(vit: Anatomy) -> Anatomy:
    """Return the model with its default question; a classifier is returned unchanged."""
    if not vit.task or vit.head is not None:
        return vit
    answers = vit.task == "answers"
    return vit.ask(heads.Answer(PROMPT, force=True) if answers else vit.default_question())


def check_word(vit: Anatomy, index: int) -> None:
    """Refuse a word of an answer with almost no gain from the image."""
    question = vit.question
    if isinstance(question, heads.Answer) and question.words and not question.words[index].gain > VISUAL:
        raise PatchlightError(
            f"The image has almost no effect on '{vit.label(index)}' (gain {question.words[index].gain:.2g} nats), so "
            "a map would not explain the word. Set force to compute it anyway."
        )


def default_index(vit: Anatomy, logits: Tensor) -> int:
    """The default target: the predicted class, the first label of a question, or the word with the largest gain."""
    words = getattr(vit.question, "words", ())
    if words:
        return max(range(len(words)), key=lambda i: words[i].gain)
    target = None if vit.question is None else vit.question.default_target()
    if target is None:
        return int(top_classes(logits, vit.outputs).index[0, 0])
    return target if isinstance(target, int) else 0


def choices(service: ModelService, request: schemas.AskedQuestion) -> schemas.ChoicesResult:
    """List what can be explained in an image, and the box or region of the current question."""
    image = service.images.find(request.image)
    bare: Any = service.vit.bare or service.vit
    result = schemas.ChoicesResult(frame=frame_of(bare, image.size))
    if bare.task == "detection":
        detections = bare.detections_of(bare.plain(image.tensor), image.size)[:MOST]
        result.detections = [
            schemas.DetectionChoice(index=i, box=each.box, label=each.label, score=each.score)
            for i, each in enumerate(detections)
            if each.score >= SURE or i < FEW
        ]
    if bare.task == "segmentation":
        classes = bare.scores_of(bare.plain(image.tensor))[0].argmax(0)
        result.areas = areas_of(classes.cpu().numpy(), bare.class_names, result.frame)
    resolved = service.resolve_question(request, image)
    question: Any = resolved.vit.question
    result.index = resolved.index
    if isinstance(question, heads.Region | heads.Mask) and question.regions:
        rows, columns = (min(side, FINEST) for side in bare.preprocess.size)
        shares = F.adaptive_avg_pool2d(question.regions[0].float()[None], (rows, columns))[0]
        result.mask = [[round(share, 3) for share in row] for row in shares.tolist()]
    if isinstance(question, heads.Box | heads.Boxes):
        marked = torch.stack([reference.box for reference in question.references]).float()
        result.boxes = [tuple(box) for box in bare.to_photograph(marked, image.size).tolist()]
    if isinstance(question, heads.Answer):
        result.answer, result.prompt = question.text, str(question.prompt)
        result.words = [
            schemas.WordChoice(word=each.word, probability=each.probability, gain=each.gain) for each in question.words
        ]
    return result


def areas_of(classes: Any, names: Sequence[str], frame: Frame) -> list[schemas.AreaChoice]:
    """The connected regions of predicted classes [h,w], sorted by size, without the smallest ones."""
    from scipy import ndimage

    left, top, right, bottom = frame
    areas: list[tuple[float, str, int, int]] = []
    for number in np.unique(classes).tolist():
        parts, count = ndimage.label(classes == number)
        for part in range(1, count + 1):
            inside = np.pad(parts == part, 1)  # below: the pixel farthest from the border
            row, column = np.unravel_index(ndimage.distance_transform_edt(inside).argmax(), inside.shape)
            x = left + (float(column) - 0.5) / classes.shape[1] * (right - left)
            y = top + (float(row) - 0.5) / classes.shape[0] * (bottom - top)
            areas.append((float(inside.sum()) / classes.size, names[number], max(0, int(x)), max(0, int(y))))
    largest = sorted(areas, reverse=True)[:MOST]
    return [schemas.AreaChoice(label=name, point=(x, y), share=s) for s, name, x, y in largest if s >= SMALLEST]


def frame_of(vit: Anatomy, size: tuple[int, int]) -> Frame:
    """The part of a photograph that the model sees, in its pixels: left, top, right, bottom."""
    part, resized, corner = vit.preprocess.framing(*size)
    height, width = vit.preprocess.size
    scale = [(part[i + 2] - part[i]) / resized[i] for i in (0, 1)]
    left, top = (part[i] + corner[i] * scale[i] for i in (0, 1))
    return left, top, left + width * scale[0], top + height * scale[1]


def share_inside(question: ResolvedQuestion, att: Attribution) -> float | None:
    """The share of a map's positive scores inside the box or region of its question; None if it has no region."""
    head = question.vit.question
    if head is None or not head.regions:
        return None
    share = float(att.inside(head.regions[question.index])[0])
    return share if share == share else None
