"""The explained class (or pair of classes) of each image, and its score, which is computed from the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.core.errors import PatchlightError, nearest

Label = int | str


class UnsplitLabels(list[str]):
    """Labels that may contain commas (for example, sentences); other labels are lists of names."""


Target = Label | tuple[Label, Label] | Sequence[Any] | Tensor | None
ScoreName = Literal["logit", "probability", "cosine"]
Score = ScoreName | Callable[[Tensor], Tensor]
Kind = Literal["softmax", "sigmoid", "binary", "cosine", "paired", "none"]


@dataclass(frozen=True)
class Outputs:
    """The meaning of logits [...,C].

    Args:
        kind: How probabilities are computed: "softmax" over the classes, "sigmoid" for each class, "binary" (one
            output: y for label 1 and -y for label 0), "cosine" ((1 + cos) / 2 for each class), "paired" (the logits of
            Q scores are followed by their Q probabilities), or "none" (plain numbers, such as activations or
            regressions).
        scale: Set if logits are `scale` * cosine + `bias`.
        bias: See `scale`.
    """

    kind: Kind = "softmax"
    scale: float | None = None
    bias: float = 0.0

    @property
    def independent(self) -> bool:
        """Whether probabilities are sigmoids, not a softmax over the classes."""
        return self.kind in ("sigmoid", "binary")

    def outcomes(self, classes: int) -> int:
        """The number of classes that can be explained, given the number of outputs."""
        return 2 if self.kind == "binary" else classes // 2 if self.kind == "paired" else classes

    def no_probability(self, classes: int) -> str | None:
        """Why there are no probabilities; None if there are."""
        if self.kind == "none":
            return "its outputs are plain numbers, not probabilities"
        if self.kind == "softmax" and classes == 1:
            return "a softmax over one class is always 1; give at least two classes"
        return None

    def no_accuracy(self, classes: int) -> str | None:
        """Why there is no accuracy; None if there is."""
        if self.kind == "none":
            return "its outputs are plain numbers, not classes"
        if self.kind == "paired":
            return "a question has no true class"
        if self.outcomes(classes) == 1:
            return "it has only one class, which is always predicted"
        return None

    def no_cosine(self) -> str | None:
        """Why there are no cosines; None if there are."""
        return "its logits are not computed from cosines" if self.scale is None else None

    def no_divergence(self, classes: int) -> str | None:
        """Why there is no distribution for the KL divergence; None if there is."""
        if self.kind == "cosine":
            return "its classes are separate similarities, not a distribution"
        if self.kind == "paired":
            return "its scores are answers to separate questions, not a distribution"
        return self.no_probability(classes)


@dataclass(frozen=True)
class Targets:
    """The explained classes of a batch of images.

    Args:
        index: Class indices [B,T].
        against: The classes [B,T] that they are contrasted with, or None.
        several: Whether each image has a list of classes, which adds an axis to the result.
    """

    index: Tensor
    against: Tensor | None = None
    several: bool = False

    def __getitem__(self, rows: slice | Tensor) -> Targets:
        """The targets of some images; indices may repeat."""
        return self._map(lambda classes: classes[rows])

    def part(self, begin: int, length: int, count: int | None) -> Targets:
        """The targets of `length` images from `begin`; if `count` is None, the one row is repeated."""
        return self[begin : begin + length] if count is not None else self.repeat(length)

    @staticmethod
    def concat(parts: Sequence[Targets]) -> Targets:
        """The targets of several batches of images as one."""
        against = [part.against for part in parts if part.against is not None]
        index = torch.cat([part.index for part in parts])
        return Targets(index, torch.cat(against) if against else None, parts[0].several)

    @property
    def count(self) -> int:
        return self.index.shape[1]

    def column(self, t: int) -> Targets:
        """Only the t-th class of each image."""
        return self._map(lambda classes: classes[:, t : t + 1])

    def repeat(self, times: int) -> Targets:
        """The same targets for `times` batches of the same images, one after another."""
        return self._map(lambda classes: classes.repeat(times, 1))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Targets:
        return Targets(change(self.index), None if self.against is None else change(self.against), self.several)


def resolve_targets(target: Target, batch: int | None, classes: int, labels: Sequence[str] | None) -> Targets | None:
    """Resolve a user's target to class indices; None (the prediction) stays None.

    Args:
        target: An index or label name for all images; a list, array or tensor with one class per image; a list of
            lists or [B,T] with several; a tuple (a, b) for a against b; or a list of such tuples, one per image.
        batch: The number of images; None if it is not known, which gives one row.
        classes: The number of classes.
        labels: The names of the classes.
    """
    if target is None:
        return None
    target = _plain(target)

    def index(value: Any) -> int:
        return class_index(value, classes, labels)

    if isinstance(target, int | str):
        return Targets(torch.full((batch or 1, 1), index(target)))
    if isinstance(target, tuple):
        a, b = _pair(target)
        return Targets(torch.full((batch or 1, 1), index(a)), torch.full((batch or 1, 1), index(b)))
    if not isinstance(target, list):
        raise PatchlightError(f"target {target!r} is a {type(target).__name__}; give a class index or a label name")
    if batch is None:
        raise PatchlightError(
            f"target is a list of {len(target)} classes, one per image, but the number of images of a stream is not "
            "known; give a list of images, or one class for all"
        )
    if len(target) != batch:
        raise PatchlightError(f"target has length {len(target)} but there are {batch} images; give one class per image")
    if all(isinstance(r, tuple) for r in target):
        pairs = [_pair(r) for r in target]
        return Targets(torch.tensor([[index(a)] for a, _ in pairs]), torch.tensor([[index(b)] for _, b in pairs]))
    if all(isinstance(r, list) for r in target):
        lengths = sorted({len(r) for r in target})
        if len(lengths) != 1 or lengths[0] == 0:
            raise PatchlightError(f"target names {lengths} classes per image; give the same number (>= 1) for each")
        return Targets(torch.tensor([[index(v) for v in r] for r in target]), several=True)
    return Targets(torch.tensor([[index(r)] for r in target]))


def _plain(value: Any) -> Any:
    """Convert arrays, tensors and numbers of numpy and torch to Python's, also inside lists and tuples."""
    if isinstance(value, Tensor):
        integral = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    else:
        integral = not isinstance(value, np.ndarray) or value.dtype.kind not in "bfc"
    if not integral:
        raise PatchlightError(f"target has dtype {value.dtype}; give class indices as integers")
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(each) for each in value]
    return value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value


def read_class(word: str, classes: int, labels: Sequence[str] | None) -> int:
    """The index of a class from text: its name, or else its number."""
    named = any(word.casefold() == label.casefold() for label in labels or ())
    return class_index(word if named or not word.lstrip("-").isdigit() else int(word), classes, labels)


def class_index(value: Any, classes: int, labels: Sequence[str] | None) -> int:
    """The index of a class from an index or a name: a full label, or one of its comma-separated names."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PatchlightError(f"target {value!r} is a {type(value).__name__}; give a class index or a label name")
    if isinstance(value, int):
        if not 0 <= value < classes:
            raise PatchlightError(f"target {value} is out of range; this model has classes 0 to {classes - 1}")
        return value
    if not labels:
        raise PatchlightError(f"target '{value}' is a name but this model has no labels; give an index, or labels=")
    word = value.strip().casefold()
    exact = [i for i, label in enumerate(labels) if label.casefold() == word]
    parts = [[label] if isinstance(labels, UnsplitLabels) else label.split(",") for label in labels]
    matching = exact or [i for i, names in enumerate(parts) if word in (n.strip().casefold() for n in names)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        matches = "; ".join(f"{i} = {labels[i]}" for i in matching[:5])
        raise PatchlightError(f"label '{value}' names {len(matching)} classes ({matches}); give the index")
    names = [name.strip() for row in parts for name in row]
    raise PatchlightError(f"no class is called '{value}'; {nearest(value, names)}")


def _pair(target: tuple[Any, ...]) -> tuple[Any, Any]:
    if len(target) != 2:
        raise PatchlightError(
            f"target {target!r} is a tuple of {len(target)}; give a pair (a, b) to explain a against b, or a list with "
            "one class per image"
        )
    return target[0], target[1]


def top_classes(logits: Tensor, outputs: Outputs) -> Targets:
    """The predicted classes: the largest output; for a binary output, label 1 if it is positive."""
    if outputs.kind == "binary":
        return Targets((logits > 0).long().cpu())
    if outputs.kind == "paired":
        logits = logits[:, : logits.shape[1] // 2]
    return Targets(logits.argmax(1, keepdim=True).cpu())


def probabilities(logits: Tensor, outputs: Outputs) -> Tensor:
    """The probability of every class [...,C]; for a binary output 1 - p and p."""
    _check_probable(logits, outputs)
    if outputs.kind == "cosine":
        return (1 + cosines(logits, outputs)) / 2
    if outputs.kind == "paired":
        return logits[..., logits.shape[-1] // 2 :]
    return _with_both_labels(logits, outputs).sigmoid() if outputs.independent else logits.softmax(-1)


def log_probabilities(logits: Tensor, outputs: Outputs) -> Tensor:
    """The logarithm of `probabilities`."""
    _check_probable(logits, outputs)
    if outputs.kind in ("cosine", "paired"):
        return probabilities(logits, outputs).clamp_min(0).log()
    return F.logsigmoid(_with_both_labels(logits, outputs)) if outputs.independent else logits.log_softmax(-1)


def cosines(logits: Tensor, outputs: Outputs) -> Tensor:
    """The cosines that logits are computed from."""
    if outputs.scale is None:
        raise PatchlightError("these logits are not computed from cosines; score='logit' explains them as they are")
    return (logits - outputs.bias) / outputs.scale


def kl_divergence(clean: Tensor, other: Tensor, outputs: Outputs) -> Tensor:
    """KL(p_clean || p_other) [...] from logits [...,C]; independent classes are summed."""
    reason = outputs.no_divergence(clean.shape[-1])
    if reason is not None:
        raise PatchlightError(f"this model has no distribution to compare by KL: {reason}; 'deletion' works")
    if outputs.independent:
        clean, other = (torch.cat([-logits, logits], -1) for logits in (clean, other))
        outputs = Outputs("sigmoid")
    log_p, log_q = (log_probabilities(logits, outputs) for logits in (clean, other))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _check_probable(logits: Tensor, outputs: Outputs) -> None:
    reason = outputs.no_probability(logits.shape[-1])
    if reason is not None:
        raise PatchlightError(f"this head has no probabilities: {reason}; score='logit' works")


def _with_both_labels(values: Tensor, outputs: Outputs) -> Tensor:
    """The values -y and y of labels 0 and 1 for a binary output y; other outputs unchanged."""
    return torch.cat([-values, values], -1) if outputs.kind == "binary" else values


SCORES = "give 'logit', 'probability', 'cosine' or a function of the logits"


def target_scores(logits: Tensor, targets: Targets, score: Score, outputs: Outputs) -> Tensor:
    """The explained scores [B,T]: logits, probabilities, cosines, or the result of a function of the logits.

    A binary output y has the score y for label 1 and -y for label 0. A pair has the score s_a - s_b.
    """
    if callable(score):
        values = score(logits)
        if not isinstance(values, Tensor):
            kind = type(values).__name__
            raise PatchlightError(f"the score function returned a {kind}; return a tensor [B] or one value per logit")
        if values.ndim == 1 and values.shape[0] == logits.shape[0]:
            if targets.against is not None or targets.several:
                raise PatchlightError("a score function with one value per image [B] cannot explain several classes")
            return values[:, None].expand(-1, targets.count)
        if values.shape != logits.shape:
            raise PatchlightError(
                f"the score function returned shape {list(values.shape)} for logits {list(logits.shape)}; return [B] "
                "or one value per logit"
            )
        values = _with_both_labels(values, outputs)
    elif score == "logit":
        values = _with_both_labels(logits, outputs)
    elif score == "probability":
        values = probabilities(logits, outputs)
    elif score == "cosine":
        values = cosines(logits, outputs)
    else:
        raise PatchlightError(f"unknown score {score!r}; {SCORES}")
    picked = values.gather(1, targets.index.to(values.device))
    if targets.against is not None:
        picked = picked - values.gather(1, targets.against.to(values.device))
    return picked
