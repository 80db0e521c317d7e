"""The faithfulness test of one image: patches are removed in the order of its maps, and in random orders.

The numbers are those of the metric `ins-del` over patches; here they come with the curves, what the model says at each
step, and a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.targets import Targets
from patchlight.evidence.ablation import Unit
from patchlight.evidence.fills import Fill
from patchlight.metrics.base import Measure, MeasuredScore
from patchlight.metrics.deletion import Removal, check_tokens, count_cells, measured, removed_logits, scored, thresholds

CHANCE = 0.05
"""How often a random order may do as well as a map that is called better than random."""
STIRS = 0.02
"""The model must be moved by as much, or no order can be told from another; an output, by that share of its size."""


@dataclass(frozen=True)
class Curves:
    """Orders of removal [B,N], the patch removed first at the front, and what the model says on the way.

    `insertion` and `deletion` [B,P] are of the class asked about (of a pair, the difference); `logits` [B,P,C] are
    those of the deletion; the areas and `scores` (insertion less deletion) [B].
    """

    orders: Tensor
    insertion: Tensor
    deletion: Tensor
    logits: Tensor
    insertion_areas: Tensor
    deletion_areas: Tensor

    @property
    def scores(self) -> Tensor:
        return self.insertion_areas - self.deletion_areas


@dataclass(frozen=True)
class Truth:
    """What the test says of one map; `beaten` of the `randoms` random orders do worse."""

    curves: Curves
    beaten: int
    randoms: int
    better: bool
    words: str

    @property
    def score(self) -> float:
        return float(self.curves.scores[0])


@dataclass(frozen=True, eq=False)
class Trial:
    """The test of one image [1,C,H,W] about one class, or pair of classes.

    `steps` removals, each of as many patches; `unit`: patches are painted with the `fill`, or their tokens really
    removed; `randoms` random orders, drawn from the seed, are what a map is compared with.
    """

    vit: Anatomy
    image: Tensor
    targets: Targets
    steps: int = 16
    unit: Unit = "patch"
    fill: Fill = "image-mean"
    randoms: int = 20
    seed: int = 0
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.unit == "token":
            check_tokens(self.vit, left=0)

    @property
    def removed(self) -> Tensor:
        """How many patches are removed at each step [P], from none to all."""
        return thresholds(self.vit.grid[0] * self.vit.grid[1], self.steps, first=True)

    @property
    def score(self) -> MeasuredScore:
        """What is read of the class: its probability, or where there is none its logit."""
        return "probability" if self.vit.outputs.no_probability(self.vit.classes) is None else "logit"

    @property
    def quantity(self) -> Literal["probability", "similarity", "output"]:
        """What the curves are of, in a word; a similarity is (1 + cosine) / 2."""
        if self.score == "logit":
            return "output"
        return "similarity" if self.vit.outputs.kind == "cosine" else "probability"

    def curves(self, maps: Tensor) -> Curves:
        """Insertion and deletion in the orders of maps [B,h,w]."""
        count = len(maps)
        ask = Measure(
            self.vit,
            self.image.expand(count, -1, -1, -1),
            maps.to(self.image),
            self.targets.repeat(count),
            seed=self.seed,
            ablation_settings={"chunk": self.chunk},
        )
        assert self.removed[-1] == count_cells(ask, self.unit)

        def side(insert: bool) -> tuple[Tensor, Tensor, Tensor]:
            logits = removed_logits(ask, self.removed, insert, Removal(self.fill, self.unit))
            curve = scored(logits, ask.targets, ask, self.score)
            return logits.float().cpu(), curve.double().cpu(), measured(curve, self.removed).values.double().cpu()

        _, inserted, insertion_areas = side(insert=True)
        logits, deleted, deletion_areas = side(insert=False)
        orders = ask.ranks(self.unit).flatten(1).argsort(1).cpu()
        return Curves(orders, inserted, deleted, logits, insertion_areas, deletion_areas)

    @cached_property
    def random(self) -> Curves:
        """Those of random orders; their logits, which may be many, are not kept."""
        generator = torch.Generator().manual_seed(self.seed)
        found = self.curves(torch.rand(self.randoms, *self.vit.grid, generator=generator))
        return replace(found, logits=found.logits.new_empty(len(found.logits), 0, 0))

    def of(self, scores: Tensor) -> Truth:
        """What the test says of a map [h,w]."""
        curves = self.curves(scores[None])
        random = self.random.scores
        mine = float(curves.scores[0])
        beaten = int((random < mine).sum())
        all_values = torch.cat([curves.deletion, curves.insertion, self.random.deletion, self.random.insertion])
        size = float(all_values.abs().max()) if self.quantity == "output" else 1.0
        stirred = float(all_values.max() - all_values.min()) >= STIRS * size > 0
        better = stirred and _rarely(len(random) - beaten, len(random))
        return Truth(curves, beaten, len(random), better, self._words(curves, beaten, stirred, better))

    def _words(self, curves: Curves, beaten: int, stirred: bool, better: bool) -> str:
        digits = ".3g" if self.quantity == "output" else ".2f"
        numbers = f"{float(curves.scores[0]):{digits}} against {float(self.random.scores.mean()):{digits}}"
        count = len(self.random.scores)
        if not stirred:
            return "Nothing can be told here: the model says nearly the same whatever is removed."
        if better:
            return f"Better than random here: it beats {beaten} of {count} random orders ({numbers} on average)."
        worse = "Worse" if _rarely(beaten, count) else "No better"
        how = "Not clearly better" if beaten > count / 2 else worse
        return f"{how} than random here: it beats {beaten} of {count} random orders ({numbers} on average)."


def _rarely(others: int, count: int) -> bool:
    """Whether a random order stands so near to the end of `count` others, with so many beyond, by chance alone."""
    return (1 + others) / (1 + count) <= CHANCE


def truths(trial: Trial, maps: Mapping[str, Tensor]) -> dict[str, Truth]:
    """What the test says of each of several maps [h,w]."""
    return {name: trial.of(scores) for name, scores in maps.items()}


def sanity_words(similarity: float) -> str:
    """What the similarity of a map to those of a model with randomised weights means.

    >>> sanity_words(0.05)
    'Depends on what the model has learnt: with random weights the map is another one (similarity 0.05).'
    """
    if math.isnan(similarity):
        return "No similarity can be computed: the map is constant."
    number = f"(similarity {similarity:.2f})"
    if similarity <= 0.3:
        return f"Depends on what the model has learnt: with random weights the map is another one {number}."
    much = "hardly" if similarity > 0.7 else "in part"
    return f"With random weights the map changes {much} {number}: what stays is not what was learnt."
