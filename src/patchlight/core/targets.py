"""What is explained: the class (or pair of classes) of each image, and the number that is made of its logits."""

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
    """Labels that are whole, sentences say: a comma in one does not stand between two names of a class."""


Target = Label | tuple[Label, Label] | Sequence[Any] | Tensor | None
ScoreName = Literal["logit", "probability", "cosine"]
Score = ScoreName | Callable[[Tensor], Tensor]
Kind = Literal["softmax", "sigmoid", "binary", "cosine", "none"]


@dataclass(frozen=True)
class Outputs:
    """How logits [...,C] are read.

    `kind` says what probabilities are: "softmax" over the classes, a "sigmoid" each, "binary" (one output y that speaks
    for label 1 and, as -y, for label 0), "cosine" ((1 + cos) / 2: a similarity between 0 and 1, each class by itself),
    or "none" (numbers such as activations or regressions). Where logits are `scale` * cosine + `bias`, these say so.
    """

    kind: Kind = "softmax"
    scale: float | None = None
    bias: float = 0.0

    @property
    def independent(self) -> bool:
        """Whether each class is a yes or no by itself."""
        return self.kind in ("sigmoid", "binary")

    def outcomes(self, classes: int) -> int:
        """How many classes can be asked about, of so many outputs."""
        return 2 if self.kind == "binary" else classes

    def no_probability(self, classes: int) -> str | None:
        """Why there are no probabilities; None where there are."""
        if self.kind == "none":
            return "its outputs are plain numbers and no probabilities"
        if self.kind == "softmax" and classes == 1:
            return "a softmax over one class is always 1; ask about two or more"
        return None

    def no_accuracy(self, classes: int) -> str | None:
        """Why no class can be the right one; None where one can."""
        if self.kind == "none":
            return "its outputs are plain numbers, of which none is the right one"
        if self.outcomes(classes) == 1:
            return "its one class is always the predicted one"
        return None

    def no_cosine(self) -> str | None:
        """Why the logits are made of no cosines; None where they are."""
        return "its logits are made of no cosines" if self.scale is None else None

    def no_divergence(self, classes: int) -> str | None:
        """Why there is no distribution to compare by KL; None where there is."""
        if self.kind == "cosine":
            return "its classes are similarities, each by itself, and no distribution"
        return self.no_probability(classes)


@dataclass(frozen=True)
class Targets:
    """Class indices [B,T]; `against` holds the class each is contrasted with, where pairs were asked for.

    `several` says whether the user asked for more than one class an image, which adds an axis to the result.
    """

    index: Tensor
    against: Tensor | None = None
    several: bool = False

    def __getitem__(self, rows: slice | Tensor) -> Targets:
        """The targets of some images; indices may repeat."""
        return Targets(self.index[rows], None if self.against is None else self.against[rows], self.several)

    def part(self, begin: int, length: int, of: int | None) -> Targets:
        """The targets of `length` images from `begin` on, where there are `of` images, or one row stands for all."""
        return self[begin : begin + length] if of is not None else self.repeat(length)

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
        """The t-th class of each image alone."""
        against = None if self.against is None else self.against[:, t : t + 1]
        return Targets(self.index[:, t : t + 1], against, self.several)

    def repeat(self, times: int) -> Targets:
        """The same targets for `times` batches of the same images, one after another."""
        against = None if self.against is None else self.against.repeat(times, 1)
        return Targets(self.index.repeat(times, 1), against, self.several)


def resolve_targets(target: Target, batch: int | None, classes: int, labels: Sequence[str] | None) -> Targets | None:
    """Read a user's target; None stays None (the prediction is explained).

    An int or a label name is one class for all images; a list, array or tensor of length B is one per image; a list
    of lists or [B,T] is several per image; a tuple (a, b) explains a against b in every image, and a list of such
    tuples is a pair per image. Where `batch` is None, not known beforehand, one row stands for every image.
    """
    if target is None:
        return None
    target = _plain(target)

    def one(value: Any) -> int:
        return class_index(value, classes, labels)

    if isinstance(target, int | str):
        return Targets(torch.full((batch or 1, 1), one(target)))
    if isinstance(target, tuple):
        a, b = _pair(target)
        return Targets(torch.full((batch or 1, 1), one(a)), torch.full((batch or 1, 1), one(b)))
    if not isinstance(target, list):
        raise PatchlightError(f"target {target!r} is a {type(target).__name__}; give a class index or a label name")
    if batch is None:
        raise PatchlightError(
            f"target is a list of {len(target)}, one per image, but how many images come is not known beforehand; "
            f"give a list of images, or one class for all"
        )
    if len(target) != batch:
        raise PatchlightError(f"target has length {len(target)} but there are {batch} images; give one class per image")
    if all(isinstance(r, tuple) for r in target):
        pairs = [_pair(r) for r in target]
        index = torch.tensor([[one(a)] for a, _ in pairs])
        return Targets(index, torch.tensor([[one(b)] for _, b in pairs]))
    if all(isinstance(r, list) for r in target):
        lengths = sorted({len(r) for r in target})
        if len(lengths) != 1 or lengths[0] == 0:
            raise PatchlightError(f"target names {lengths} classes per image; give the same number (>= 1) for each")
        return Targets(torch.tensor([[one(v) for v in r] for r in target]), several=True)
    return Targets(torch.tensor([[one(r)] for r in target]))


def _plain(value: Any) -> Any:
    """Arrays, tensors and numbers of numpy and torch as lists and numbers of Python, inside lists and tuples too."""
    if isinstance(value, Tensor):
        whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    else:
        whole = not isinstance(value, np.ndarray) or value.dtype.kind not in "bfc"
    if not whole:
        raise PatchlightError(f"target has dtype {value.dtype}; give class indices as integers")
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(each) for each in value]
    return value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value


def read_class(word: str, classes: int, labels: Sequence[str] | None) -> int:
    """The index of a class given by name or, unless a class is called so, by number."""
    named = any(word.casefold() == label.casefold() for label in labels or ())
    return class_index(word if named or not word.lstrip("-").isdigit() else int(word), classes, labels)


def class_index(value: Any, classes: int, labels: Sequence[str] | None) -> int:
    """The index of a class given as an index or a label name (a whole label, or one of its comma-separated names)."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PatchlightError(f"target {value!r} is a {type(value).__name__}; give a class index or a label name")
    if isinstance(value, int):
        if not 0 <= value < classes:
            raise PatchlightError(f"target {value} is out of range; this model has classes 0 to {classes - 1}")
        return value
    if not labels:
        raise PatchlightError(f"target '{value}' is a name but this model has no labels; give an index, or load labels")
    word = value.strip().casefold()
    exact = [i for i, label in enumerate(labels) if label.casefold() == word]
    parts = [[label] if isinstance(labels, UnsplitLabels) else label.split(",") for label in labels]
    named = exact or [i for i, names in enumerate(parts) if word in (n.strip().casefold() for n in names)]
    if len(named) == 1:
        return named[0]
    if named:
        found = "; ".join(f"{i} = {labels[i]}" for i in named[:5])
        raise PatchlightError(f"label '{value}' names {len(named)} classes ({found}); give the index")
    names = [name.strip() for each in parts for name in each]
    raise PatchlightError(f"no class is called '{value}'; {nearest(value, names)}")


def _pair(target: tuple[Any, ...]) -> tuple[Any, Any]:
    if len(target) != 2:
        raise PatchlightError(
            f"target {target!r} is a tuple of {len(target)}; a tuple is a pair (a, b), which explains a against b, and "
            f"a list is one class per image"
        )
    return target[0], target[1]


def top_classes(logits: Tensor, outputs: Outputs) -> Targets:
    """The model's own prediction, the largest output; of a binary one, label 1 where it is positive."""
    if outputs.kind == "binary":
        return Targets((logits > 0).long().cpu())
    return Targets(logits.argmax(1, keepdim=True).cpu())


def probabilities(logits: Tensor, outputs: Outputs) -> Tensor:
    """p of every class [...,C], as `outputs` says; a binary output gives 1 - p and p."""
    _check_probable(logits, outputs)
    if outputs.kind == "cosine":
        return (1 + cosines(logits, outputs)) / 2
    return _of_both_labels(logits, outputs).sigmoid() if outputs.independent else logits.softmax(-1)


def log_probabilities(logits: Tensor, outputs: Outputs) -> Tensor:
    """log p of every class [...,C], where `probabilities` are p."""
    _check_probable(logits, outputs)
    if outputs.kind == "cosine":
        return probabilities(logits, outputs).clamp_min(0).log()
    return F.logsigmoid(_of_both_labels(logits, outputs)) if outputs.independent else logits.log_softmax(-1)


def cosines(logits: Tensor, outputs: Outputs) -> Tensor:
    """The cosines that logits are made of."""
    if outputs.scale is None:
        raise PatchlightError("these logits are made of no cosines; score='logit' explains them as they are")
    return (logits - outputs.bias) / outputs.scale


def kl_divergence(clean: Tensor, other: Tensor, outputs: Outputs) -> Tensor:
    """KL(p_clean || p_other) [...] from logits [...,C]; summed over classes that are each a yes or no."""
    reason = outputs.no_divergence(clean.shape[-1])
    if reason is not None:
        raise PatchlightError(f"KL compares distributions over the classes of a model: {reason}; 'deletion' works")
    if outputs.independent:
        clean, other = (torch.cat([-logits, logits], -1) for logits in (clean, other))
        outputs = Outputs("sigmoid")
    log_p, log_q = (log_probabilities(logits, outputs) for logits in (clean, other))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _check_probable(logits: Tensor, outputs: Outputs) -> None:
    reason = outputs.no_probability(logits.shape[-1])
    if reason is not None:
        raise PatchlightError(f"this head gives no probabilities: {reason}; score='logit' works")


def _of_both_labels(values: Tensor, outputs: Outputs) -> Tensor:
    """What a binary output says about labels 0 and 1, -y and +y; of others the values themselves."""
    return torch.cat([-values, values], -1) if outputs.kind == "binary" else values


SCORES = "give 'logit', 'probability', 'cosine' or a callable of the logits"


def target_scores(logits: Tensor, targets: Targets, score: Score, outputs: Outputs) -> Tensor:
    """The explained number s [B,T]: a logit, probability or cosine, or what a callable makes of the logits.

    A binary output has two labels: 1 scores +y and 0 scores -y. A pair scores s_a - s_b.
    """
    if callable(score):
        values = score(logits)
        if not isinstance(values, Tensor):
            kind = type(values).__name__
            raise PatchlightError(f"the score callable gave a {kind}; it must give a tensor [B] or one value per logit")
        if values.ndim == 1 and values.shape[0] == logits.shape[0]:
            if targets.against is not None or targets.several:
                raise PatchlightError("a score callable that gives one value an image [B] has no classes to tell apart")
            return values[:, None].expand(-1, targets.count)
        if values.shape != logits.shape:
            raise PatchlightError(
                f"the score callable gave shape {list(values.shape)} for logits {list(logits.shape)}; "
                f"it must give [B] or one value per logit"
            )
        values = _of_both_labels(values, outputs)
    elif score == "logit":
        values = _of_both_labels(logits, outputs)
    elif score == "probability":
        values = probabilities(logits, outputs)
    elif score == "cosine":
        values = cosines(logits, outputs)
    else:
        raise PatchlightError(f"score {score!r} is not known; {SCORES}")
    picked = values.gather(1, targets.index.to(values.device))
    if targets.against is not None:
        picked = picked - values.gather(1, targets.against.to(values.device))
    return picked
