"""The faithfulness test of one image: remove patches in the order of each map, and compare with random orders.

The numbers are those of the metric `ins-del` over patches. This test also gives the curves, the model's outputs at each
step, an effect size, a rank among the maps shown, and a sentence.
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
"""A map is better than random if at most this share of random orders does as well."""
STIRS = 0.02
"""The score must move by this much during the test (an unbounded output: by this share of its size), or the test is
inconclusive."""
MEDIUM, LARGE = 0.1, 0.3
"""Effects of at least this size are called medium and large; smaller ones are called small."""
EffectSize = Literal["small", "medium", "large"]
Quantity = Literal["probability", "similarity", "output"]


@dataclass(frozen=True)
class Curves:
    """Curves of several removal orders.

    Attributes:
        orders: Patches in the order of removal [B,N].
        insertion: The score of the target [B,P] while patches are shown; of a contrast, the difference of both scores.
        deletion: The same while patches are removed.
        logits: The model's outputs [B,P,C] during the deletion.
        insertion_areas: Areas under the insertion curves [B].
        deletion_areas: Areas under the deletion curves [B].
    """

    orders: Tensor
    insertion: Tensor
    deletion: Tensor
    logits: Tensor
    insertion_areas: Tensor
    deletion_areas: Tensor

    @property
    def scores(self) -> Tensor:
        """Insertion minus deletion [B]."""
        return self.insertion_areas - self.deletion_areas


@dataclass(frozen=True)
class Faithfulness:
    """The result of the faithfulness test for one map.

    Attributes:
        curves: The curves of the map.
        random_score: Mean score of the random orders.
        beaten: How many random orders have a lower score.
        randoms: Number of random orders.
        spread: Range of the target's score during the test, over the map and all random orders.
        conclusive: Whether the model's output changed enough for any comparison.
        quantity: What the scores are, in words, such as "difference of probabilities".
        rank: Rank among the maps shown, 1 is best; 0 if the map was tested alone.
        shown: Number of maps shown.
    """

    curves: Curves
    random_score: float
    beaten: int
    randoms: int
    spread: float
    conclusive: bool
    quantity: str
    rank: int = 0
    shown: int = 0

    @property
    def score(self) -> float:
        """Insertion minus deletion."""
        return float(self.curves.scores[0])

    @property
    def better(self) -> bool:
        """Whether the map is better than random, at 5 %."""
        return self.conclusive and _is_rare(self.randoms - self.beaten, self.randoms)

    @property
    def effect(self) -> float:
        """The effect size: how far the map's score is above the random mean, as a share of `spread`.

        0 is random, and a negative value is worse than random. For example, 0.25 means that the gap between the
        insertion and the deletion curve is wider than that of random orders by a quarter of the score's range.
        """
        return (self.score - self.random_score) / self.spread if self.spread > 0 else 0.0

    @property
    def size(self) -> EffectSize:
        """The effect in a word: small (below 0.1 in magnitude), medium (below 0.3) or large."""
        magnitude = abs(self.effect)
        return "small" if magnitude < MEDIUM else "medium" if magnitude < LARGE else "large"

    @property
    def words(self) -> str:
        """The result in one or two sentences: comparison with random, effect size, and rank."""
        if not self.conclusive:
            return "Inconclusive: the model's output hardly changes, whatever is removed."
        worse = "Worse" if _is_rare(self.beaten, self.randoms) else "No better"
        unclear = "Not clearly better" if self.beaten > self.randoms / 2 else worse
        rank = f" Rank {self.rank} of {self.shown} among the methods shown." if self.shown > 1 else ""
        return (
            f"{'Better' if self.better else unclear} than random here: it beats {self.beaten} of {self.randoms} random "
            f"orders. Effect: {self.size} ({self.effect:+.2f}; {self.quantity}, insertion minus deletion: "
            f"{self.score:.3g} against {self.random_score:.3g} for random).{rank}"
        )


@dataclass(frozen=True, eq=False)
class Trial:
    """The faithfulness test of one image about one target.

    Attributes:
        vit: The model.
        image: The preprocessed image [1,C,H,W].
        targets: The class, or a pair of classes for a contrast.
        steps: Number of removals of equally many patches.
        unit: "patch" paints patches with `fill`; "token" removes their tokens from the sequence.
        fill: What is painted.
        randoms: Number of random orders that a map is compared with.
        seed: Seed of the random orders.
        chunk: Variants per forward pass.
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
        """The score of the class: its probability, or its logit if the model has no probabilities."""
        return "probability" if self.vit.outputs.no_probability(self.vit.classes) is None else "logit"

    @property
    def quantity(self) -> Quantity:
        """What the curves show for one class; a similarity is (1 + cosine) / 2."""
        if self.score == "logit":
            return "output"
        return "similarity" if self.vit.outputs.kind == "cosine" else "probability"

    @property
    def quantity_words(self) -> str:
        """What the curves show, for axes, tables and sentences; for a contrast, a difference."""
        one, several = {
            "probability": ("probability", "probabilities"),
            "similarity": ("similarity ((1 + cosine) / 2)", "similarities ((1 + cosine) / 2)"),
            "output": ("output", "outputs"),
        }[self.quantity]
        return one if self.targets.against is None else f"difference of {several}"

    def curves(self, maps: Tensor) -> Curves:
        """Insertion and deletion curves in the orders of maps [B,h,w]."""
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
        """Curves of the random orders, without logits to save memory."""
        generator = torch.Generator().manual_seed(self.seed)
        curves = self.curves(torch.rand(self.randoms, *self.vit.grid, generator=generator))
        return replace(curves, logits=curves.logits.new_empty(len(curves.logits), 0, 0))

    def of(self, scores: Tensor) -> Faithfulness:
        """Test one map [h,w]; `run_trial` also ranks several."""
        curves, random = self.curves(scores[None]), self.random
        values = torch.cat([curves.deletion, curves.insertion, random.deletion, random.insertion])
        size = float(values.abs().max()) if self.quantity == "output" else 1.0
        spread = float(values.max() - values.min())
        return Faithfulness(
            curves,
            random_score=float(random.scores.mean()),
            beaten=int((random.scores < float(curves.scores[0])).sum()),
            randoms=len(random.scores),
            spread=spread,
            conclusive=spread >= STIRS * size > 0,
            quantity=self.quantity_words,
        )


def _is_rare(others: int, count: int) -> bool:
    """Whether at most `CHANCE` of `count` random orders would be at least as extreme, given `others` that are."""
    return (1 + others) / (1 + count) <= CHANCE


def rank_results(results: Mapping[str, Faithfulness]) -> dict[str, Faithfulness]:
    """The same results with their ranks by score among each other; equal scores share a rank."""
    return {
        name: replace(
            result, rank=1 + sum(other.score > result.score for other in results.values()), shown=len(results)
        )
        for name, result in results.items()
    }


def run_trial(trial: Trial, maps: Mapping[str, Tensor]) -> dict[str, Faithfulness]:
    """Test several maps [h,w] and rank them."""
    return rank_results({name: trial.of(scores) for name, scores in maps.items()})


def sanity_words(similarity: float) -> str:
    """A sentence about the similarity of a map to the maps of a model with randomised weights.

    >>> sanity_words(0.05)
    'Depends on what the model has learnt: random weights give a different map (similarity 0.05).'
    """
    if math.isnan(similarity):
        return "No similarity can be computed: the map is constant."
    number = f"(similarity {similarity:.2f})"
    if similarity <= 0.3:
        return f"Depends on what the model has learnt: random weights give a different map {number}."
    change = "hardly changes" if similarity > 0.7 else "changes only in part"
    return f"With random weights the map {change} {number}: the part that stays was not learnt."
