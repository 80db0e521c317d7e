"""The faithfulness test of one image: remove patches in the order of each map, and compare with random orders.

The numbers are those of the metric `ins-del` over patches. This test also gives the curves, the model's outputs at each
step, an effect size, a rank among the maps shown, what hiding a tenth of the patches does, and sentences about these.
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
from patchlight.core.attribution import Attribution
from patchlight.core.drawing.pictures import percent, short
from patchlight.core.targets import Targets, UnsplitLabels
from patchlight.evidence.fills import Fill
from patchlight.metrics.base import Measure, MeasuredScore, on_grid
from patchlight.metrics.deletion import (
    Removal,
    area_of_curve,
    check_tokens,
    class_scores,
    count_cells,
    removed_logits,
    thresholds,
)

CHANCE = 0.05
"""A map is better than random if at most this share of random orders does as well."""
STIRS = 0.02
"""The score must move by this much during the test (an unbounded output: by this share of its size), or the test is
inconclusive."""
MEDIUM, LARGE = 0.1, 0.3
"""Effects of at least this size are called medium and large; smaller ones are called small."""
HIDDEN = 0.1
"""The share of the patches whose hiding is described in words; fixed, so that the best step cannot be picked."""
HARDLY = 0.01
"""A score that changes by at most this much (an unbounded output: by this share of its size) "hardly changes"."""
LETTERS = 40
"""Longer labels are cut in sentences."""
EffectSize = Literal["small", "medium", "large"]
Quantity = Literal["probability", "similarity", "output"]
PLURALS: dict[Quantity, str] = {"probability": "probabilities", "similarity": "similarities", "output": "outputs"}


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
        spread: Range of the target's score during the test, over the maps shown and all random orders.
        conclusive: Whether the model's output changed enough for any comparison.
        quantity: What the scores are, in words, such as "difference of probabilities".
        rank: Rank among the maps shown, 1 is best; 0 if the map was tested alone.
        shown: Number of maps shown.
        baseline: Whether the map is that of the method `random`, which is never called better than random.
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
    baseline: bool = False

    @property
    def score(self) -> float:
        """Insertion minus deletion."""
        return float(self.curves.scores[0])

    @property
    def better(self) -> bool:
        """Whether the map is better than random, at 5 %."""
        return self.conclusive and not self.baseline and _is_rare(self.randoms - self.beaten, self.randoms)

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
        verdict = f"{'Better' if self.better else unclear} than random"
        verdict = "A random map, the baseline" if self.baseline else verdict
        return (
            f"{verdict} here: it beats {self.beaten} of {self.randoms} random orders. "
            f"Effect: {self.size} ({self.effect:+.2f}; {self.quantity}, insertion minus deletion: "
            f"{self.score:.3g} against {self.random_score:.3g} for random).{rank}"
        )


@dataclass(frozen=True)
class Hiding:
    """What hiding a map's strongest patches does to the score, compared with hiding as many random patches.

    `Trial.hiding` reads it off the step that is nearest to 10 % of the patches (at least one patch; of two steps that
    are equally near, the smaller).

    Attributes:
        step: Which step of the deletion curve this is.
        count: Number of hidden patches.
        before: The score with every patch visible.
        after: The score without the `count` strongest patches of the map.
        random_after: The score without `count` random patches, averaged over the random orders.
        label: The class, shortened.
        against: The class that it is contrasted with, shortened; empty if there is none.
        quantity: What the scores are, of one class.
    """

    step: int
    count: int
    before: float
    after: float
    random_after: float
    label: str
    against: str
    quantity: Quantity

    @property
    def words(self) -> str:
        """One sentence, such as "Hiding the 20 strongest patches lowers 'beagle' from 70 % to 12 %; …"."""
        hidden = "the strongest patch" if self.count == 1 else f"the {self.count} strongest patches"
        random = "a random one" if self.count == 1 else f"{self.count} random ones"
        if not all(map(math.isfinite, (self.before, self.after, self.random_after))):
            return f"Hiding {hidden} gives no finite score, so it cannot be compared with hiding {random}."
        score = self._score
        before, after, random_after = map(self._number, (self.before, self.after, self.random_after))
        change, random_change = self._change(self.after), self._change(self.random_after)
        strongest = f"{change}s {score} from {before} to {after}" if change else f"hardly changes {score} ({before})"
        several = "" if self.count > 1 else "s"
        chance = f"{random_change}{several} it to {random_after}" if random_change else f"hardly change{several} it"
        return f"Hiding {hidden} {strongest}; {random} {chance}."

    @property
    def _score(self) -> str:
        label = f"'{self.label}'"
        if self.against:
            return f"{label} minus '{self.against}' (difference of {PLURALS[self.quantity]})"
        return f"the similarity ((1 + cosine) / 2) to {label}" if self.quantity == "similarity" else label

    def _number(self, value: float) -> str:
        if self.quantity == "probability" and not self.against:
            return percent(value).replace("< ", "under ").replace("> ", "over ")
        return f"{value:.3g}" if self.quantity == "output" else f"{value:.2f}"

    def _change(self, after: float) -> Literal["lower", "raise", ""]:
        """The verb for the change from `before`; empty if the score hardly changes."""
        size = max(abs(self.before), abs(after)) if self.quantity == "output" else 1.0
        if abs(after - self.before) <= HARDLY * size:
            return ""
        return "lower" if after < self.before else "raise"


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
    unit: Literal["token", "patch", "pixel"] = "patch"
    fill: Fill = "image-mean"
    randoms: int = 20
    seed: int = 0
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.unit == "token":
            check_tokens(self.vit, remaining=0)

    @property
    def removed(self) -> Tensor:
        """How many patches are removed at each step [P], from none to all."""
        return thresholds(self.vit.cells, self.steps, first=True)

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
        words = self.quantity if self.targets.against is None else f"difference of {PLURALS[self.quantity]}"
        return f"{words} ((1 + cosine) / 2)" if self.quantity == "similarity" else words

    def curves(self, maps: Tensor) -> Curves:
        """Insertion and deletion curves in the orders of maps [B,h,w]."""
        ask = self._measure(maps)
        assert self.removed[-1] == count_cells(ask, self.unit)

        def side(insert: bool) -> tuple[Tensor, Tensor, Tensor]:
            logits = removed_logits(ask, self.removed, insert, Removal(self.fill, self.unit))
            curve = class_scores(logits, ask.targets, ask, self.score)
            return logits.float().cpu(), curve.double().cpu(), area_of_curve(curve, self.removed).values.double().cpu()

        _, inserted, insertion_areas = side(insert=True)
        logits, deleted, deletion_areas = side(insert=False)
        orders = ask.ranks(self.unit).flatten(1).argsort(1).cpu()
        return Curves(orders, inserted, deleted, logits, insertion_areas, deletion_areas)

    def _measure(self, maps: Tensor) -> Measure:
        count = len(maps)
        images, targets = self.image.expand(count, -1, -1, -1), self.targets.repeat(count)
        settings = {"chunk": self.chunk}
        return Measure(self.vit, images, maps.to(self.image), targets, seed=self.seed, ablation_settings=settings)

    @property
    def _random_maps(self) -> Tensor:
        return torch.rand(self.randoms, *self.vit.grid, generator=torch.Generator().manual_seed(self.seed))

    @cached_property
    def random(self) -> Curves:
        """Curves of the random orders, without logits to save memory."""
        curves = self.curves(self._random_maps)
        return replace(curves, logits=curves.logits.new_empty(len(curves.logits), 0, 0))

    def of(self, tested: Tensor | Attribution) -> Faithfulness:
        """Test one map [h,w], or the first of an attribution; `run_trial` also ranks several."""
        baseline = isinstance(tested, Attribution) and tested.method == "random"
        scores = on_grid(tested.scores, self.vit)[0] if isinstance(tested, Attribution) else tested
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
            baseline=baseline,
        )

    def hiding(self, result: Faithfulness) -> Hiding:
        """What hiding a tenth of the patches did in the test of a map, of which `of` returned the result."""
        step = self._hidden_step
        before, after = result.curves.deletion[0, [0, step]].tolist()
        return self._hiding(before, after, float(self.random.deletion[:, step].mean()))

    def hide(self, scores: Tensor) -> tuple[Hiding, list[int]]:
        """The same for a map [h,w] without the rest of the test, and the hidden patches, the strongest first.

        This takes one forward pass for the map and one for each random order.
        """
        count = self.removed[[self._hidden_step]]
        ask = self._measure(torch.cat([scores[None].to(self.image), self._random_maps.to(self.image)]))
        hidden = removed_logits(ask, count, False, Removal(self.fill, self.unit))
        full = self.vit.logits(self.image).to(hidden).expand(len(hidden), 1, -1)
        curves = class_scores(torch.cat([full, hidden], 1), ask.targets, ask, self.score).double().cpu()
        order = ask.ranks(self.unit)[0].flatten().argsort()[: int(count)]
        return self._hiding(float(curves[0, 0]), float(curves[0, 1]), float(curves[1:, 1].mean())), order.tolist()

    @property
    def _hidden_step(self) -> int:
        removed = self.removed[1:]
        return 1 + int((removed - HIDDEN * int(removed[-1])).abs().argmin())

    def _hiding(self, before: float, after: float, random_after: float) -> Hiding:
        label, against = (
            "" if index is None else _short_label(self.vit, int(index[0, 0]))
            for index in (self.targets.index, self.targets.against)
        )
        step = self._hidden_step
        return Hiding(step, int(self.removed[step]), before, after, random_after, label, against, self.quantity)


def _short_label(vit: Anatomy, index: int) -> str:
    """The first name of a class, at most `LETTERS` letters of it; a text is one name."""
    label = vit.label(index)
    name = label if isinstance(vit.labels, UnsplitLabels) else short(label)
    return name if len(name) <= LETTERS else name[: LETTERS - 1].rstrip() + "…"


def _is_rare(extreme: int, count: int) -> bool:
    """Whether a result is significant if `extreme` of `count` random orders are at least as extreme."""
    return (1 + extreme) / (1 + count) <= CHANCE


def rank_results(results: Mapping[str, Faithfulness]) -> dict[str, Faithfulness]:
    """The same results with their ranks by score among each other; equal scores share a rank, and NaN is last.

    Effects become shares of one common range, so that they have the order of the ranks.
    """
    spread = max((result.spread for result in results.values()), default=0.0)
    scores = {name: -math.inf if math.isnan(result.score) else result.score for name, result in results.items()}
    ranks = {name: 1 + sum(other > score for other in scores.values()) for name, score in scores.items()}
    return {
        name: replace(result, rank=ranks[name], shown=len(results), spread=spread) for name, result in results.items()
    }


def run_trial(trial: Trial, maps: Mapping[str, Tensor | Attribution]) -> dict[str, Faithfulness]:
    """Test several maps and rank them."""
    return rank_results({name: trial.of(each) for name, each in maps.items()})


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
