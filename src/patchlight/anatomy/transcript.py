"""The sequence that the language model of a vision-language model reads, as it was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from patchlight.anatomy.discovery import map_tensors
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.core.layout import Layout


@dataclass(frozen=True)
class Transcript:
    """A prompt with its image, and answers to it, as one sequence: prompt, answers, visual tokens.

    Whatever does not depend on the image is text: ends of lines of tiles, and other images too.

    Each answer follows the prompt and does not attend to the other answers; positions are those of the plain model.

    Args:
        layout: The layout of the sequence: its text is the prefix, visual tokens are the cells.
        prompt: The ids [P] of the prompt, with one image token for each visual token.
        answers: The ids [T] of each answer.
        text: What enters the language model for each token of the text [S,D].
        calls: The other arguments of each block of the language model.
        read: For each answer, the places in the text whose outputs predict its tokens [T].
    """

    layout: Layout
    prompt: Tensor
    answers: Sequence[Tensor]
    text: Tensor
    calls: Sequence[Mapping[str, Any]]
    read: Sequence[Tensor]
    recent: list[Any] = field(default_factory=list, compare=False, repr=False)
    """The masks of the last sequence that was run."""
    before: int = 0
    """How many tokens of the text stand before the image and attend to nothing behind them."""
    keys: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """By type: the net they were computed with, and keys and values of these tokens, the same for every image."""


class Keys:
    """Keys and values of the first `count` tokens, in the place of a cache: recorded once, then put before others."""

    count = 0

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if not self.count:
            self.layers[layer] = key, value
            return key, value
        first = (each[:, :, : self.count].expand(len(key), -1, -1, -1) for each in self.layers[layer])
        return torch.cat([next(first), key], 2), torch.cat([next(first), value], 2)


def join_runs(
    runs: Sequence[tuple[Tensor, Sequence[Mapping[str, Any]]]],
    ids: Sequence[Tensor],
    size: int,
    visual: Tensor,
    layout: Layout,
) -> Transcript:
    """The sequence of several runs with one prompt.

    Args:
        runs: Of each answer, what entered the language model [1,P+T,D], and the arguments of each of its blocks.
        ids: The ids [P+T] of the prompt with each answer.
        size: The number of ids of the prompt.
        visual: The places of the visual tokens [n] in the prompt.
        layout: The layout of visual tokens alone.
    """
    device = ids[0].device
    text = torch.ones(size, dtype=torch.bool, device=device).index_fill(0, visual, False).nonzero()[:, 0]
    if not bool((text == size - 1).any()):
        raise PatchlightError("the prompt ends with the image; put text behind it")
    parts = [torch.arange(size, len(each), device=device) for each in ids]
    embedded = torch.cat([runs[0][0][0, text], *(run[0][0, part] for run, part in zip(runs, parts, strict=True))])
    at = torch.cat([text, *parts, visual])
    owner = torch.cat([torch.full_like(part, number) for number, part in enumerate((text, *parts))])
    owner = torch.cat([owner, torch.zeros_like(visual)])
    seen = (owner == 0) | (owner == owner[:, None])  # an answer attends to the prompt and itself
    longest = max(range(len(ids)), key=lambda number: len(ids[number]))  # the others are called like its beginning
    calls = [_gathered(call, len(ids[longest]), at, seen) for call in runs[longest][1]]
    for call in calls:  # blocks of one kind share their mask
        same = (other["attention_mask"] for other in calls)
        call["attention_mask"] = next(mask for mask in same if torch.equal(mask, call["attention_mask"]))
    read, begin = [], len(text)
    for part in parts:
        read.append(torch.arange(begin - 1, begin - 1 + len(part), device=device))
        read[-1][:1] = len(text) - 1  # its first token is predicted at the end of the prompt
        begin += len(part)
    before = int(visual[0])
    if any(bool(call["attention_mask"][:before, before:].any()) for call in calls):
        before = 0
    answers, layout = [each[size:] for each in ids], replace(layout, prefix=len(embedded))
    return Transcript(layout, ids[0][:size], answers, embedded, calls, read, before=before)


def token_axis(value: Tensor, count: int) -> int | None:
    """The axis of an argument of a block that belongs to the tokens: the first of this length behind the batch."""
    return next((axis for axis in range(1, value.ndim) if value.shape[axis] == count), None)


def _gathered(call: Mapping[str, Any], count: int, at: Tensor, seen: Tensor) -> dict[str, Any]:
    """The arguments of a block for the tokens `at` of a sequence of `count`, each of which attends to those `seen`."""

    def gather(value: Tensor) -> Tensor:
        axis = token_axis(value, count)
        return value if axis is None else value.index_select(axis, at)

    mask = _allowed(call["attention_mask"], count, at.device)[at][:, at] & seen
    return {
        **{key: map_tensors(value, gather) for key, value in call.items()},
        "attention_mask": mask,
    }


def _allowed(mask: Tensor | None, count: int, device: torch.device) -> Tensor:
    """Which token attends to which [S,S], of the mask that a block is called with; None is causal attention."""
    if mask is None:
        return torch.ones(count, count, dtype=torch.bool, device=device).tril()
    if mask.ndim != 4:
        raise Unsupported(
            "its language model runs with a kind of attention that is not supported; load it with "
            "attn_implementation='sdpa' or 'eager'"
        )
    return mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] > torch.finfo(mask.dtype).min / 2


def variant_mask(
    script: Transcript, allowed: Tensor, keep: Tensor | None, places: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The additive mask [B or 1,1,m,m] of the kept tokens; blocks after one another share it."""
    for positions, source, kind, mask in tuple(script.recent):
        if positions is keep and source is allowed and kind == dtype:
            return cast(Tensor, mask)
    if places is None:
        shown = allowed[None]
    else:
        shown = allowed[places[:, :, None], places[:, None, :]]
    mask = torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill(~shown, torch.finfo(dtype).min)[
        :, None
    ]
    script.recent[:] = [*script.recent[-1:], (keep, allowed, dtype, mask)]
    return mask
