"""The counting task: grids of 3 x 3 coloured patches; the class is the number of red ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from patchlight.core.errors import PatchlightError

RED = 4
"""The number of a colour is its bits (red, green, blue) as a binary number: blue 1, green 2, red 4, yellow 6."""
SIDE, PATCH = 3, 16
Part = Literal["train", "validation", "test"]
_PER_COLOUR, _SPLIT = 1000, {"train": 5400, "validation": 300, "test": 300}


@dataclass(frozen=True)
class CountingGrids:
    """Images [n,3,48,48] of -1 and 1, the numbers of red patches `labels` [n], and their positions `red` [n,3,3]."""

    images: Tensor
    labels: Tensor
    red: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def counting_grids(
    count: int | None = None, seed: int = 0, part: Part = "train", distractors: int = 5
) -> CountingGrids:
    """Sample grids from one part of a pool of patches.

    The pool has 1,000 patches of each colour of {0, 1}^3 without black and white, split at random 90:5:5. A grid has
    n ~ Uniform{0..9} red patches and 9 - n others, sampled without replacement, in random order.

    Args:
        count: The number of grids; by default all that the patches of the part fill (600, 33 and 33).
        seed: Random seed.
        part: "train", "validation" or "test".
        distractors: The number of colours besides red: 5 as in the released code, or 6 as in the paper, with white.
    """
    if distractors not in (5, 6):
        raise PatchlightError(f"distractors={distractors} is not possible; give 5 (released code) or 6 (paper)")
    if count is not None and count < 1:
        raise PatchlightError(f"{count} grids are not possible; give at least 1")
    colours = np.arange(1, 7 if distractors == 5 else 8)
    share = len(colours) * _PER_COLOUR / 6000
    pool = np.random.default_rng([seed, 0]).permutation(np.repeat(colours, _PER_COLOUR))
    sizes = {name: round(size * share) for name, size in _SPLIT.items()}
    begin = {"train": 0, "validation": sizes["train"], "test": sizes["train"] + sizes["validation"]}[part]
    pool = pool[begin : begin + sizes[part]]
    distractor_patches, reds = pool[pool != RED], int((pool == RED).sum())
    cells = SIDE * SIDE
    if reds < cells:
        raise PatchlightError(f"seed {seed} leaves only {reds} red patches in the {part} part; give another seed")
    rng = np.random.default_rng([seed, 1, sorted(sizes).index(part)])
    count = len(pool) // cells if count is None else count
    grids = np.empty((count, cells), dtype=np.int64)
    for row in grids:
        red = int(rng.integers(cells + 1))
        row[:red] = RED
        row[red:] = rng.choice(distractor_patches, cells - red, replace=False)
        rng.shuffle(row)
    return draw_grids(torch.from_numpy(grids).view(-1, SIDE, SIDE))


def draw_grids(colours: Tensor) -> CountingGrids:
    """Images of colour numbers [n,3,3]."""
    bits = torch.stack([(colours >> shift) & 1 for shift in (2, 1, 0)], 1).float()
    images = (bits * 2 - 1).repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
    red = colours == RED
    return CountingGrids(images, red.flatten(1).sum(1), red)
