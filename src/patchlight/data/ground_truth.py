"""Ground truth: scenes of small signs, and tasks whose deciding patches are known.

Every sign fills exactly one patch of an 8 x 8 grid. All tasks share their scenes: a sign that decides one task
distracts in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from patchlight.core.errors import PatchlightError
from patchlight.data.base import Data, Sample, Sources, register_data

GRID, PATCH = 8, 8
KINDS = ("horizontal", "vertical", "checked", "diagonal")
"""Textures of the two tiles; the watermark is the sign of one of them."""
SIGNS = ("warm", "cold", "watermark", "plus", "ring", "dot 1", "dot 2", "dot 3")
WARM, COLD, WATERMARK, PLUS, RING = range(5)
DOTS = (5, 6, 7)
VERSION = 1
"""Changes when the scenes of a seed change."""
TaskName = Literal["count", "mosaic", "shortcut", "position", "either", "both", "distractor"]


@dataclass(frozen=True)
class Task:
    """A question about a scene.

    Attributes:
        classes: The names of its answers.
        signs: The only signs that decide it.
    """

    classes: tuple[str, ...]
    signs: tuple[int, ...]


TASKS: dict[str, Task] = {
    "count": Task(("0", "1", "2", "3"), DOTS),  # how many dots there are
    "mosaic": Task(KINDS, (WARM, COLD)),  # the textures of the tiles; one of the two is explained
    "shortcut": Task(KINDS, (WATERMARK,)),  # the texture of the warm tile, which the watermark gave away in training
    "position": Task(("top left", "top right", "bottom left", "bottom right"), (WARM,)),  # quarter of the warm tile
    "either": Task(("neither", "plus or ring"), (PLUS, RING)),  # whether there is one of them; both are there
    "both": Task(("not both", "plus and ring"), (PLUS, RING)),
    "distractor": Task(KINDS, (WARM,)),  # the texture of the warm tile, beside a cold tile with a texture of its own
}


def find_task(name: str) -> Task:
    """The task of this name."""
    if name not in TASKS:
        raise PatchlightError(f"unknown task '{name}'; give one of {', '.join(TASKS)}")
    return TASKS[name]


@dataclass(frozen=True)
class Scenes:
    """Scenes, as the places and kinds of their signs.

    Attributes:
        places: The patch of each sign [n,8], all different.
        present: Whether each sign is visible [n,8].
        kinds: The textures of the warm tile, the cold tile and the watermark [n,3], as indices of `KINDS`.
        ground: The background [n,3,64,64] uint8.
    """

    places: Tensor
    present: Tensor
    kinds: Tensor
    ground: Tensor

    def __len__(self) -> int:
        return len(self.places)

    def label(self, task: str, ask_cold: bool = False) -> Tensor:
        """The class to explain [n]: the answer; of a mosaic, the texture of the warm or the cold tile."""
        plus, ring = self.present[:, PLUS], self.present[:, RING]
        if task == "count":
            return self.present[:, list(DOTS)].sum(1)
        if task == "position":
            row, column = self.places[:, WARM] // GRID, self.places[:, WARM] % GRID
            return (row >= GRID // 2) * 2 + (column >= GRID // 2).long()
        if task in ("either", "both"):
            return (plus | ring if task == "either" else plus & ring).long()
        if task == "shortcut":
            return self.kinds[:, WATERMARK]
        return self.kinds[:, COLD if task == "mosaic" and ask_cold else WARM]

    def causes(self, task: str, label: Tensor) -> Tensor:
        """The patches [n,8,8] that decide for the class `label` [n]."""
        signs = list(find_task(task).signs)
        visible = self.present[:, signs]
        if task == "mosaic":
            visible = visible & (self.kinds[:, signs] == label[:, None])
        causes = torch.zeros(len(self), GRID * GRID, dtype=torch.bool, device=label.device)
        return causes.scatter_(1, self.places[:, signs], visible).view(-1, GRID, GRID)

    def images(self) -> Tensor:
        """The pictures [n,3,64,64] uint8."""
        bank = _sprites().to(self.ground.device)
        cells = self.ground.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).permute(0, 2, 3, 1, 4, 5)
        cells = cells.reshape(len(self), GRID * GRID, 3, PATCH, PATCH).clone()
        which = torch.arange(len(self), device=cells.device)
        for sign in range(len(SIGNS)):
            kind = self.kinds[:, sign] if sign < 3 else torch.zeros_like(which)
            sprite = bank[min(sign, DOTS[0]), kind]
            shown = self.present[:, sign, None, None, None] & (sprite >= 0)
            at = self.places[:, sign]
            cells[which, at] = torch.where(shown, sprite.clamp_min(0).to(torch.uint8), cells[which, at])
        cells = cells.view(-1, GRID, GRID, 3, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
        return cells.reshape(len(self), 3, GRID * PATCH, GRID * PATCH)


def sample_scenes(count: int, generator: torch.Generator, shown: bool = False) -> Scenes:
    """Random scenes; each sign except the tiles and the watermark is present with probability 0.5.

    Args:
        count: The number of scenes.
        generator: Its device is that of the scenes.
        shown: Whether plus, ring and a dot are always present and the two textures differ, as in the explained
            scenes, in which every task has a cause.
    """
    device = generator.device
    places = torch.rand(count, GRID * GRID, generator=generator, device=device).argsort(1)[:, : len(SIGNS)]
    present = torch.rand(count, len(SIGNS), generator=generator, device=device) < 0.5
    present[:, :3] = True
    kinds = torch.randint(len(KINDS), (count, 3), generator=generator, device=device)
    if shown:
        present[:, [PLUS, RING, DOTS[0]]] = True
        step = torch.randint(1, len(KINDS), (count,), generator=generator, device=device)
        kinds[:, COLD] = (kinds[:, WARM] + step) % len(KINDS)
    tone = 90 + 60 * torch.rand(count, 3, 1, 1, generator=generator, device=device)
    grain = torch.randn(count, 1, GRID * PATCH, GRID * PATCH, generator=generator, device=device) * 12
    return Scenes(places, present, kinds, (tone + grain).clamp(0, 255).to(torch.uint8))


@cache
def _sprites() -> Tensor:
    """The signs [6,4,3,8,8] int16 by their kind; -1 is transparent."""
    at = torch.arange(PATCH)
    row, column = at[:, None].expand(PATCH, PATCH), at[None].expand(PATCH, PATCH)
    textures = [row // 2 % 2, column // 2 % 2, (row // 2 + column // 2) % 2, (row + column) // 2 % 2]
    away = ((row - 3.5) ** 2 + (column - 3.5) ** 2).sqrt()
    middle = (at >= 3) & (at <= 4)
    corner = [(row < 4) & (column < 4), (row < 4) & (column > 3), (row > 3) & (column < 4), (row > 3) & (column > 3)]
    bank = torch.full((6, len(KINDS), 3, PATCH, PATCH), -1, dtype=torch.int16)

    def paint(sign: int, kind: int, where: Tensor, colour: Sequence[int], other: Sequence[int] = (-1, -1, -1)) -> None:
        shown, below = (torch.tensor(rgb, dtype=torch.int16)[:, None, None] for rgb in (colour, other))
        bank[sign, kind] = torch.where(where, shown, below)

    for kind, texture in enumerate(textures):
        paint(WARM, kind, texture.bool(), (240, 120, 40), (90, 30, 10))
        paint(COLD, kind, texture.bool(), (60, 130, 240), (10, 30, 90))
        paint(WATERMARK, kind, corner[kind] & (away < 4.5), (235, 235, 235))
    plus = (middle[:, None] | middle[None]) & (away < 4.3)
    for sign, where, colour in (
        (PLUS, plus, (40, 200, 60)),
        (RING, (away > 2) & (away < 4), (210, 60, 210)),
        (DOTS[0], away < 2.3, (250, 230, 40)),
    ):
        paint(sign, 0, where, colour)
    return bank


@register_data("ground-truth", made_up=True)
def open_ground_truth(
    path: Any = None,
    task: TaskName = "mosaic",
    scenes: Annotated[int, Field(ge=1)] = 1000,
    seed: Annotated[int, Field(ge=0)] = 0,
) -> Data:
    """Generated scenes of 64 x 64 pixels in which the cause of the answer is known; the mask is the cause.

    Eight signs lie on an 8 x 8 grid of patches: a warm and a cold tile with one of four textures, a watermark, a plus,
    a ring and up to three dots. The task selects the label and the mask; the images of all tasks are the same.
    The models `ground-truth:TASK` were trained for the tasks.

    Args:
        path: Not used.
        task: The task, which defines the label and the deciding patches.
        scenes: The number of scenes.
        seed: Random seed.
    """
    chosen = find_task(task)
    numbers = {f"scene-{i:04d}": i for i in range(scenes)}

    def scene(name: str) -> tuple[Scenes, Tensor]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + numbers[name])
        scenes = sample_scenes(1, generator, shown=True)
        return scenes, scenes.label(task, ask_cold=numbers[name] % 2 == 1)

    def read(name: str) -> Sample:
        scenes, label = scene(name)
        mask = scenes.causes(task, label)[0].repeat_interleave(PATCH, 0).repeat_interleave(PATCH, 1)
        picture = Image.fromarray(scenes.images()[0].permute(1, 2, 0).numpy())
        return Sample(name, picture, int(label), mask=mask.to(torch.int8))

    def sources(name: str) -> Sources:
        return Sources((), int(scene(name)[1]), [VERSION, seed, numbers[name]], {"masks"})

    return Data("ground-truth", list(numbers), read, chosen.classes, sources)
