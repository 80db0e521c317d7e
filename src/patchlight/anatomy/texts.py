"""Sentences to the token ids that a text side reads; too long ones are refused rather than cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from patchlight.core.errors import PatchlightError

CHUNK = 256
"""How many sentences are read at once."""


@dataclass(frozen=True)
class NoTokenizer:
    """Stands for a tokenizer that could not be read, and says why."""

    reason: str


def has_text_side(model: nn.Module) -> bool:
    """Whether a model reads texts beside images."""
    return any(hasattr(model, name) for name in ("get_text_features", "encode_text"))


def check_length(prompts: Sequence[str], lengths: Sequence[int], room: int, name: str) -> None:
    """Refuse sentences of more tokens than a model reads: the rest would be cut off without a word."""
    for prompt, length in zip(prompts, lengths, strict=True):
        if length > room:
            shown = prompt if len(prompt) <= 60 else prompt[:57] + "…"
            raise PatchlightError(
                f"the text {shown!r} makes {length} tokens, and {name} reads {room} (marks of beginning and end "
                "included); shorten it"
            )


def check_vocabulary(ids: Tensor, size: int, name: str) -> None:
    """Refuse ids that a model does not know: they come of another model's tokenizer."""
    if int(ids.max()) >= size:
        raise PatchlightError(
            f"the tokenizer gives token {int(ids.max())}, and {name} knows 0 to {size - 1}; give tokenizer= the one "
            "that it was trained with"
        )


def in_chunks(encode: Callable[[Sequence[str]], Tensor], prompts: Sequence[str]) -> Tensor:
    """What `encode` gives for all sentences, of some at a time."""
    return torch.cat([encode(part) for part in _chunks(prompts)])


def _chunks(prompts: Sequence[str]) -> Iterator[Sequence[str]]:
    for begin in range(0, len(prompts), CHUNK):
        yield prompts[begin : begin + CHUNK]
