"""Sufficient sets: several disjoint sets of patches, each of which is enough for the prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy, undisturbed
from patchlight.core.errors import PatchlightError, integer
from patchlight.core.registry import check_arguments
from patchlight.core.targets import Target
from patchlight.evidence.fills import Fill
from patchlight.methods.interactions import ask_about_one
from patchlight.methods.orders import SetFunction, guided_order
from patchlight.methods.posterior import prior_estimate
from patchlight.methods.search import prior_settings, region_members, set_function

COLOURS = ("tab:red", "tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:brown", "tab:pink", "tab:olive")


@dataclass(frozen=True)
class SufficientSets:
    """Disjoint sets of patches of one image, each of which is enough for the prediction.

    Args:
        sets: Masks [k,*grid] of the patches of each set, in the order in which they were found.
        probabilities: The probability of the class with only the patches of each set.
        without: The probability without the patches of each set: high if another set is enough.
        full: The probability with all patches.
        rest: The probability without the patches of all sets.
        label: The class.
        picture: The image [H,W,3], if the input is an image.
    """

    sets: Tensor
    probabilities: tuple[float, ...]
    without: tuple[float, ...]
    full: float
    rest: float
    label: str
    picture: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.sets)

    def __str__(self) -> str:
        sizes = ", ".join(f"{n} patches ({p:.2f})" for n, p in zip(self.sizes, self.probabilities, strict=True))
        text = f"{len(self)} disjoint sets keep it: {sizes}; without all of them {self.rest:.2f}"
        return f"{self.label} ({self.full:.2f}): {text if len(self) else 'no set of patches alone keeps it'}"

    @property
    def sizes(self) -> list[int]:
        """Number of patches of each set."""
        return [int(patches.sum()) for patches in self.sets]

    def plot(self, ax: Any = None) -> Any:
        """Draw the sets over the photograph, each in its own colour.

        Args:
            ax: Matplotlib axes; None: those of a new figure.

        Returns:
            The axes.
        """
        from matplotlib import pyplot
        from matplotlib.colors import to_rgb

        ax = pyplot.subplots()[1] if ax is None else ax
        rows, columns = self.sets.shape[-2:]
        if self.picture is not None:
            ax.imshow(self.picture, extent=(0, columns, rows, 0))
        overlay = np.zeros((rows, columns, 4))
        for number, patches in enumerate(self.sets):
            overlay[patches.numpy()] = (*to_rgb(COLOURS[number % len(COLOURS)]), 0.6)
        ax.imshow(overlay, extent=(0, columns, rows, 0))
        ax.set_title(f"{self.label}: {len(self)} sufficient sets", parse_math=False)
        ax.set_axis_off()
        return ax


@undisturbed
@check_arguments
def sufficient_sets(
    vit: Anatomy | nn.Module,
    image: Any,
    target: Target = None,
    *,
    share: float = 0.9,
    most: int = 5,
    prior: str = "posterior",
    samples: int = 128,
    candidates: int = 8,
    unit: Literal["auto", "token", "patch"] = "auto",
    fill: Fill = "zero",
    seed: int = 0,
    **ablation: Any,
) -> SufficientSets:
    """Find several disjoint minimal sets of patches, each of which is enough for the prediction.

    A map cannot show that either of two objects is enough. Each set is found by a greedy search, guided by a prior map,
    among the patches of no earlier set, until the class has `share` of its probability. Then patches are dropped as
    long as it has. So each set is minimal: without any one of its patches, the probability is lower. There may be
    smaller sets.

    Args:
        vit: The model.
        image: One image, as in `explain`.
        target: The class, as in `explain`.
        share: Share of the probability of the whole image that a set must reach.
        most: Maximum number of sets.
        prior: The method whose map guides the search.
        samples: Number of samples, if the prior is a sampling method.
        candidates: Number of patches that each step of the search compares.
        unit: "token" removes the other patches, "patch" paints them with `fill`; "auto" removes them if the model can.
        fill: The fill of painted patches.
        seed: Random seed.
        ablation: `chunk`, `precision` and `compile`, as in methods that ablate.

    Example:
        >>> found = pl.sufficient_sets(vit, "dogs.jpg")                                         # doctest: +SKIP
        >>> print(found), found.plot()                                                          # doctest: +SKIP
    """
    vit = wrap(vit)
    if not 0 < share <= 1:
        raise PatchlightError(f"share is {share}; give a share of the probability above 0, at most 1")
    ask, colours = ask_about_one("sufficient_sets", vit, image, target, "probability", seed, ablation)
    with vit.settled():
        prior_maps = prior_estimate(ask, prior, **prior_settings(prior, samples)).maps[0]
        removes = unit == "token" or (unit == "auto" and vit.can_drop is None)
        members = region_members(vit.grid, 1)
        shown, hidden = (set_function(ask, members, name, removes, fill) for name in ("insertion", "deletion"))
        everything = torch.arange(vit.cells, device=ask.images.device)[None, None]
        full = float(shown(everything))
        width, count = integer("candidates", candidates, 1), integer("most", most, 1)
        sets = disjoint_sets(shown, prior_maps, share * full, width, count)
        masks = torch.zeros(len(sets), vit.cells, dtype=torch.bool)
        for mask, patches in zip(masks, sets, strict=True):
            mask[patches.cpu()] = True
        alone = [float(shown(patches[None, None])) for patches in sets]
        without = [1 - float(hidden(patches[None, None])) for patches in sets]
        union = torch.cat(sets)[None, None] if sets else None
        rest = full if union is None else 1 - float(hidden(union)) if union.shape[2] < vit.cells else 0.0
    label = vit.label(int(ask.targets.index[0, 0]))
    return SufficientSets(masks.view(-1, *vit.grid), tuple(alone), tuple(without), full, rest, label, colours)


def disjoint_sets(value: SetFunction, prior: Tensor, limit: float, width: int, most: int) -> list[Tensor]:
    """Disjoint minimal sets of players with a value of at least `limit`; the prior [1,n] guides the search."""
    free, sets = torch.arange(prior.shape[1], device=prior.device), list[Tensor]()
    while len(sets) < most and len(free) > 0:
        if float(value(free[None, None])) < limit:
            break
        best: list[float] = []

        def value_of_free(candidates: Tensor, free: Tensor = free, best: list[float] = best) -> Tensor:
            values = value(free[candidates])
            best.append(float(values.max()))
            return values

        def enough(best: list[float] = best) -> bool:
            return bool(best) and best[-1] >= limit

        order = guided_order(value_of_free, prior[:, free], width, stop=enough).regions[0]
        chosen = minimal(value, free[order[: len(best)] if enough() else order], limit)
        sets.append(chosen)
        free = free[torch.isin(free, chosen, invert=True)]
    return sets


def minimal(value: SetFunction, chosen: Tensor, limit: float) -> Tensor:
    """A subset [m] of players [n] with a value of at least `limit`, and a lower one without any one of them."""
    while len(chosen) > 1:
        subsets = torch.stack([torch.cat([chosen[:i], chosen[i + 1 :]]) for i in range(len(chosen))])
        values = value(subsets[None])[0]
        if float(values.max()) < limit:
            break
        chosen = subsets[values.argmax()]
    return chosen
