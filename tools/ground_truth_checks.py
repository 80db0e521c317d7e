"""What a model of a ground-truth task depends on: its answers when parts of the scenes are sampled again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.data.ground_truth import COLD, GRID, SIGNS, WARM, Scenes, find_task, sample_scenes


def answers(scenes: Scenes, task: str) -> Tensor:
    """The share of each class [n,C] in the true answer: one class, or two halves where two textures are asked."""
    count = len(find_task(task).classes)
    if task == "mosaic":
        warm, cold = (F.one_hot(scenes.kinds[:, i], count) for i in (WARM, COLD))
        return (warm + cold) / 2
    return F.one_hot(scenes.label(task), count).float()


def resample(scenes: Scenes, signs: Sequence[int], generator: torch.Generator, ground: bool = False) -> Scenes:
    """The same scenes with these signs sampled again (place, presence, kind), and optionally the background."""
    fresh = sample_scenes(len(scenes), generator)
    unchanged = [sign for sign in range(len(SIGNS)) if sign not in signs]
    keys = torch.rand(len(scenes), GRID * GRID, generator=generator, device=generator.device)
    keys.scatter_(1, scenes.places[:, unchanged], 2.0)
    places, present, kinds = scenes.places.clone(), scenes.present.clone(), scenes.kinds.clone()
    places[:, list(signs)] = keys.argsort(1)[:, : len(signs)]
    present[:, list(signs)] = fresh.present[:, list(signs)]
    textured = [sign for sign in signs if sign < 3]
    kinds[:, textured] = fresh.kinds[:, textured]
    return Scenes(places, present, kinds, fresh.ground if ground else scenes.ground)


def check_model(model: Any, task: str, count: int = 2000, seed: int = 1) -> dict[str, float]:
    """Shares of right answers that show what a model of a task depends on.

    `accuracy` on new scenes and `explained` on scenes as those that are explained; `follows`: after the deciding signs
    alone were sampled again and the answer changed, the share of new answers; `ignores`: after all else was sampled
    again, the share of unchanged answers; `without`: accuracy without the deciding signs where there is a chance level.

    Args:
        model: From normalised images [B,3,64,64] to logits.
        task: Its task.
        count: Number of scenes.
        seed: Random seed.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    signs = find_task(task).signs
    rest = [sign for sign in range(len(SIGNS)) if sign not in signs]

    def right(scenes: Scenes, true: Tensor) -> Tensor:
        with torch.no_grad():
            logits = torch.cat([model(part / 127.5 - 1) for part in scenes.images().float().split(500)])
        most = (true > 0).sum(1)
        places = logits.argsort(1, descending=True).argsort(1)
        return ((places < most[:, None]) == (true > 0)).all(1).double()

    plain, shown = sample_scenes(count, generator), sample_scenes(count, generator, shown=True)
    moved, other = resample(plain, signs, generator), resample(plain, rest, generator, ground=True)
    true, explained, after = (answers(scenes, task) for scenes in (plain, shown, moved))
    gone = shown.present.clone()
    gone[:, list(signs)] = False
    return {
        "accuracy": float(right(plain, true).mean()),
        "explained": float(right(shown, explained).mean()),
        "follows": float(right(moved, after)[(after != true).any(1)].mean()),
        "ignores": float(right(other, true).mean()),
        "without": float(right(replace(shown, present=gone), explained).mean()),
    }
