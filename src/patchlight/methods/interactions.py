"""Which pairs of regions act together: interactions of second order in the game of removing tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy, undisturbed
from patchlight.core.errors import PatchlightError, Unsupported, integer
from patchlight.core.registry import check_arguments, resolve_settings
from patchlight.core.targets import Score, Target, resolve_targets, top_classes
from patchlight.evidence.ablation import ABLATION, PixelMasks
from patchlight.evidence.coalitions import draw_coalitions, no_coalitions
from patchlight.evidence.fills import Fill, fill_images
from patchlight.evidence.rules import PLAIN
from patchlight.methods.base import Ask
from patchlight.methods.lime import fit, picture
from patchlight.methods.masking import owners
from patchlight.methods.sampling import jackknife
from patchlight.methods.search import region_members
from patchlight.methods.shapley import constrained_values, score_coalitions

Index = Literal["fbii", "fsii", "bii", "sii", "k-sii", "stii", "archipelago"]
SAMPLED = ("fbii", "fsii")
"""Indices that sampled coalitions can estimate."""
MOST = 64
"""Most regions: their pairs must be fewer than the coalitions that one can afford."""
MARGIN = 2
"""Coalitions for each number that is estimated, at least."""
RIDGE = 1e-9
"""Penalty that makes a regression solvable if a group of its coalitions is left out."""


class RegionPair(NamedTuple):
    """Two regions, as the rows and columns (or other axes) of their cells' centre, and how they act together."""

    first: tuple[float, ...]
    second: tuple[float, ...]
    value: float
    error: float


@dataclass(frozen=True)
class Interactions:
    """How regions of one image act on the score of one class: alone, and in pairs.

    Args:
        values: [n,n], symmetric: the interaction of each pair, and on the diagonal the effect of each region alone.
        error: The standard error of each value [n,n]; None if all coalitions were scored.
        r2: Share of the variance of the scores of other coalitions that effects alone explain, and that effects and
            pairs explain; of all coalitions if all were scored. NaN if it does not exist.
        members: Which cells [n,N] each region has.
        grid: The model's grid.
        index: The name of the interaction index.
        label: The class.
        picture: The image [H,W,3], if it is one.
    """

    values: Tensor
    error: Tensor | None
    r2: tuple[float, float]
    members: Tensor
    grid: tuple[int, ...]
    index: str
    label: str
    picture: np.ndarray | None = None

    @property
    def centres(self) -> Tensor:
        """The place [n,axes] of each region in cells, the first cell being at 0.5."""
        at = torch.cartesian_prod(*(torch.arange(side) + 0.5 for side in self.grid)).view(-1, len(self.grid))
        weights = self.members.to(at) / self.members.sum(1, keepdim=True)
        return weights @ at

    def top(self, k: int = 10, significant: bool = True) -> list[RegionPair]:
        """The k pairs with the largest interactions, positive (synergy) or negative (redundancy).

        Args:
            k: Number of pairs.
            significant: Leave out pairs of less than three standard errors.
        """
        error = torch.full_like(self.values, torch.nan) if self.error is None else self.error
        sure = self.values.abs() > 3 * error if significant and self.error is not None else torch.ones_like(error) > 0
        pairs = torch.triu_indices(len(self.values), len(self.values), 1)
        size = (self.values.abs() * sure)[pairs[0], pairs[1]]
        best = size.argsort(descending=True, stable=True)[:k]
        centres = self.centres.tolist()
        return [
            RegionPair(tuple(centres[i]), tuple(centres[j]), float(self.values[i, j]), float(error[i, j]))
            for i, j in pairs[:, best[size[best] > 0]].T.tolist()
        ]

    @property
    def map(self) -> Tensor:
        """The effect of each region with half of its interactions, spread evenly over its cells [*grid]."""
        pairs = self.values.sum(1) - self.values.diagonal()
        each = (self.values.diagonal() + pairs / 2) / self.members.sum(1)
        return (each @ self.members.to(each)).view(self.grid)

    def __str__(self) -> str:
        alone, both = (f"{100 * value:.0f} %" for value in self.r2)
        found = self.top(3)
        pairs = (
            ", ".join(f"{p.value:+.3g} between {p.first} and {p.second}" for p in found) or "no pair beyond its error"
        )
        return f"{self.index} of {self.label}: effects alone explain {alone} of the scores, with pairs {both}; {pairs}"

    def plot(self, ax: Any = None, k: int = 10) -> Any:
        """Draw the strongest pairs as arcs between their regions, over the photograph: red is synergy, blue redundancy.

        Args:
            ax: Matplotlib axes; by default those of a new figure.
            k: Number of pairs.

        Returns:
            The axes.
        """
        from matplotlib import pyplot
        from matplotlib.patches import FancyArrowPatch

        if len(self.grid) != 2:
            raise Unsupported(f"arcs need a grid of rows and columns, but this one has {len(self.grid)} axes")
        ax = pyplot.subplots()[1] if ax is None else ax
        rows, columns = self.grid
        shown = self.map.numpy() if self.picture is None else self.picture
        ax.imshow(shown, extent=(0, columns, rows, 0), cmap="gray")
        pairs = self.top(k)
        largest = max((abs(pair.value) for pair in pairs), default=1.0)
        for pair in pairs:
            (y0, x0), (y1, x1) = pair.first, pair.second
            colour = "tab:red" if pair.value > 0 else "tab:blue"
            width = 0.5 + 4 * abs(pair.value) / largest
            arc = FancyArrowPatch((x0, y0), (x1, y1), connectionstyle="arc3,rad=0.25", arrowstyle="-", lw=width)
            arc.set(color=colour, alpha=0.85)
            ax.add_patch(arc)
        at = self.centres
        ax.scatter(at[:, 1], at[:, 0], s=12, color="white", edgecolors="black", linewidths=0.5, zorder=3)
        ax.set_title(f"{self.index}: {self.label}", parse_math=False)
        ax.set_axis_off()
        return ax

    def matrix(self, ax: Any = None) -> Any:
        """Draw the matrix of all values, with regions in reading order: red is positive, blue negative.

        Args:
            ax: Matplotlib axes; by default those of a new figure.

        Returns:
            The axes.
        """
        from matplotlib import pyplot

        ax = pyplot.subplots()[1] if ax is None else ax
        most = max(float(self.values.abs().max()), torch.finfo(self.values.dtype).tiny)
        drawn = ax.imshow(self.values.numpy(), cmap="RdBu_r", vmin=-most, vmax=most)
        ax.figure.colorbar(drawn, ax=ax)
        ax.set(xlabel="region", ylabel="region")
        return ax


@undisturbed
@check_arguments
def interactions(
    vit: Anatomy | nn.Module,
    image: Any,
    target: Target = None,
    *,
    side: int | None = None,
    index: Index = "fbii",
    samples: int = 512,
    score: Score = "logit",
    unit: Literal["auto", "token", "patch"] = "auto",
    fill: Fill = "zero",
    seed: int = 0,
    **ablation: Any,
) -> Interactions:
    """Which pairs of regions act together on the score of a class, and which are redundant.

    .. math:: v(S) \\approx c + \\sum_{i \\in S} a_i + \\sum_{i < j \\in S} b_{ij}

    v(S) is the score of the image with only the regions of S. b is positive for regions that only count together, and
    negative for regions of which one is enough. The default index fits this sum by least squares to coalitions in which
    each region takes part with probability 1/2 (faithful Banzhaf interactions); errors are those of a jackknife. In a
    typical image most pairs are redundant; R squared on other coalitions shows how much pairs explain.

    Args:
        vit: The model.
        image: One image, as in `explain`.
        target: The class, as in `explain`.
        side: Side of the squares of patches that are the regions; None: the smallest that leaves at most 16 regions.
        index: "fbii" and "fsii" (faithful Banzhaf and Shapley interactions: the same fit with coalitions drawn evenly,
            or as for Shapley values, and exact for none and all regions) can be sampled. "bii", "sii", "k-sii" and
            "stii" (Banzhaf, Shapley, efficient Shapley and Shapley-Taylor interactions) need all coalitions.
            "archipelago" is the mean of a pair's interaction in the whole image and in an empty one.
        samples: Number of coalitions; if these are all, every index is exact.
        score: What is explained of the class; probabilities saturate, which looks like redundancy.
        unit: "token" removes the other patches, "patch" paints them with `fill`; "auto" removes them if the model can
            and its classifier reads prefix tokens alone.
        fill: What painted patches show.
        seed: Random seed.
        ablation: `chunk`, `precision` and `compile`, as in methods that ablate.

    Returns:
        `Interactions`.

    Example:
        >>> found = pl.interactions(vit, "cat.jpg", target="cat")                               # doctest: +SKIP
        >>> found.plot(), found.matrix(), found.top(3)                                          # doctest: +SKIP
    """
    vit = wrap(vit)
    samples = integer("samples", samples, 1)
    ask, shown = ask_about_one("interactions", vit, image, target, score, seed, ablation)
    members = region_members(vit.grid, _side(vit.grid) if side is None else integer("side", side, 1))
    removes = unit == "token" or (unit == "auto" and no_coalitions(vit) is None)
    if removes and no_coalitions(vit) is not None:
        raise Unsupported(f"interactions cannot remove tokens: {no_coalitions(vit)}; use unit='patch'")
    filling = None if removes else fill_images(fill, ask.images, vit, seed)

    def game(z: Tensor) -> Tensor:
        cells = z.float() @ members.float() > 0  # [V,N]
        if filling is None:
            scores = score_coalitions(ask, cells)[0]
        else:
            scores = ask.score_variants(PixelMasks(owners(ask, len(z)), cells.view(-1, *vit.grid), filling))
        return scores[:, 0].double().cpu()

    with vit.settled():
        values, error, r2 = interaction_values(game, len(members), index, samples, ask.generator())
    return Interactions(values, error, r2, members, vit.grid, index, vit.label(int(ask.targets.index[0, 0])), shown)


def ask_about_one(
    name: str, vit: Anatomy, image: Any, target: Target, score: Score, seed: int, ablation: dict[str, Any]
) -> tuple[Ask, np.ndarray | None]:
    """The question of a function that takes one image and one class, and the image [H,W,3] if it is a picture."""
    batch = vit.batch(image)
    targets = resolve_targets(target, len(batch), vit.outcomes, vit.labels)
    targets = targets or top_classes(vit.logits(batch), vit.outputs)
    if len(batch) != 1 or targets.several:
        raise PatchlightError(f"{name} takes one image and one class; call it once for each")
    settings = resolve_settings(name, ABLATION, {}, ablation)
    ask = Ask(vit, batch, targets, score, integer("seed", seed, 0), PLAIN, ablation_settings=settings)
    return ask, picture(batch[0], vit) if vit.layout.inputs == "images" and vit.channels == 3 else None


def _side(grid: tuple[int, ...]) -> int:
    """The side of the smallest squares of which at most 16 cover a grid."""
    return next(s for s in itertools.count(1) if math.prod(-(-length // s) for length in grid) <= 16)


def interaction_values(
    game: Callable[[Tensor], Tensor], players: int, index: Index, samples: int, generator: torch.Generator
) -> tuple[Tensor, Tensor | None, tuple[float, float]]:
    """Values [n,n] of a game of coalitions [V,n], their errors, and R squared of the fits without and with pairs."""
    columns = 1 + players + players * (players - 1) // 2
    if index == "archipelago":
        return _archipelago(game, players), None, (math.nan, math.nan)
    if players < 64 and 2**players <= samples:
        z = all_coalitions(players)
        y = game(z)
        values = exact_values(z, y, index)
        return values, None, (_r_squared(z, y, z, y, False), _r_squared(z, y, z, y, True))
    if index not in SAMPLED:
        raise PatchlightError(
            f"index='{index}' needs all {2**players:,} coalitions of {players} regions, and samples={samples}; give a "
            "larger side, more samples, or index='fbii'"
        )
    if players > MOST or samples < MARGIN * columns:
        raise PatchlightError(
            f"{samples} coalitions are too few for the {columns:,} effects of {players} regions and their pairs; give "
            f"at least samples={MARGIN * columns}, or a larger side (at most {MOST} regions)"
        )
    test_count = max(32, samples // 4)
    if index == "fsii":
        z = draw_coalitions(samples + test_count, players, generator)
    else:
        z = torch.rand(samples + test_count, players, generator=generator) < 0.5
    ends = torch.stack([torch.zeros(players), torch.ones(players)]).bool()
    scores = game(torch.cat([z, ends]))
    y, none, full = scores[:-2], scores[-2], scores[-1]

    def fitted(weights: Tensor) -> Tensor:
        if index == "fbii":
            found = fit(design(z[:samples])[None], y[None, :samples, None], weights[None], RIDGE)[0, 0]
        else:
            gain, total = (y[:samples] - none)[:, None], (full - none)[None]
            found = constrained_values(design(z[:samples]), gain, total, weights)[:, 0]
        return as_matrix(found, players)

    estimated = jackknife(fitted, samples, y, together=2 if index == "fsii" else 1)
    r2 = tuple(_r_squared(z[:samples], y[:samples], z[samples:], y[samples:], pairs) for pairs in (False, True))
    return estimated.maps, estimated.error, (r2[0], r2[1])


def all_coalitions(players: int) -> Tensor:
    """All coalitions z [2^n,n]; player i is in coalition k if bit i of k is set."""
    return (torch.arange(2**players)[:, None] >> torch.arange(players)) & 1 > 0


def design(z: Tensor, pairs: bool = True) -> Tensor:
    """The columns [V,n(+n(n-1)/2)] of a regression: players, and their pairs."""
    z = z.double()
    i, j = torch.triu_indices(z.shape[1], z.shape[1], 1)
    return torch.cat([z, z[:, i] * z[:, j]], 1) if pairs else z


def as_matrix(effects: Tensor, players: int) -> Tensor:
    """Effects of players and pairs, in the order of `design`, as a symmetric matrix [n,n]."""
    i, j = torch.triu_indices(players, players, 1)
    values = effects[:players].diag()
    values[i, j] = values[j, i] = effects[players:]
    return values


def _r_squared(z: Tensor, y: Tensor, test_z: Tensor, test_scores: Tensor, pairs: bool) -> float:
    """R squared on other coalitions of the least-squares fit to coalitions z with scores y."""
    one = torch.ones(len(z), 1, dtype=torch.float64)
    fitted = torch.linalg.lstsq(torch.cat([one, design(z, pairs)], 1), y[:, None], driver="gelsd").solution
    rest = test_scores - fitted[0] - design(test_z, pairs) @ fitted[1:, 0]
    spread = (test_scores - test_scores.mean()).square().sum()
    return float(1 - rest.square().sum() / spread) if float(spread) > 0 else math.nan


def moebius(scores: Tensor) -> Tensor:
    """The Moebius transform m [2^n] of scores v [2^n]: v(S) = sum of m(T) over all T in S.

    >>> moebius(torch.tensor([0.0, 1.0, 1.0, 5.0])).tolist()
    [0.0, 1.0, 1.0, 3.0]
    """
    m = scores.clone()
    for player in range(len(m).bit_length() - 1):
        halves = m.view(-1, 2, 2**player)
        halves[:, 1] -= halves[:, 0]
    return m


def exact_values(z: Tensor, scores: Tensor, index: Index) -> Tensor:
    """The values [n,n] of an index from all coalitions z and their scores."""
    players = z.shape[1]
    size = z.sum(1).double()
    if index == "fbii":
        return as_matrix(fit(design(z)[None], scores[None, :, None], torch.ones(1, len(z)), RIDGE)[0, 0], players)
    if index == "fsii":
        inner = (size > 0) & (size < players)
        log = torch.lgamma(size) + torch.lgamma(players - size)  # of 1 / C(n - 2, s - 1), up to a factor
        gain, total = (scores - scores[0])[inner, None], (scores[-1] - scores[0])[None]
        return as_matrix(constrained_values(design(z[inner]), gain, total, log[inner].softmax(0))[:, 0], players)
    m, inside = moebius(scores), z.double()
    two, one = size.clamp_min(2), size.clamp_min(1)
    pair = {"bii": 0.5 ** (two - 2), "stii": 2 / (two * (two - 1))}.get(index, 1 / (two - 1))
    alone = {"bii": 0.5 ** (one - 1), "stii": (size == 1).double()}.get(index, 1 / one)
    values = inside.T @ ((m * pair * (size > 1))[:, None] * inside)
    effects = inside.T @ (m * alone)
    values.fill_diagonal_(0)
    if index == "k-sii":
        effects = effects - values.sum(1) / 2
    return values + effects.diag()


def _archipelago(game: Callable[[Tensor], Tensor], players: int) -> Tensor:
    """The interaction of each pair in an empty and in a whole image, on average; players alone in the same way."""
    i, j = torch.triu_indices(players, players, 1)
    single = torch.eye(players).bool()
    some = torch.cat([torch.zeros(1, players).bool(), single, single[i] | single[j]])
    effects = torch.zeros(players + len(i), dtype=torch.float64)
    for scores, sign in zip(game(torch.cat([some, ~some])).chunk(2), (1, -1), strict=True):
        none, alone, both = scores.split([1, players, len(i)])
        effects += torch.cat([sign * (alone - none), both - alone[i] - alone[j] + none]) / 2
    return as_matrix(effects, players)
