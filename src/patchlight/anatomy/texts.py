"""The text encoder of image-text models; sentences that are too long are refused, not truncated."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError

CHUNK = 256
"""Sentences encoded at once."""


class TextSide(Anatomy):
    """An anatomy whose model also encodes sentences, with its `tokenizer`."""

    tokenizer: Any = None
    tokenizer_advice: ClassVar[str]
    """How to get a tokenizer."""

    def encode_texts(self, prompts: Sequence[str]) -> Tensor:
        if self.tokenizer is None or isinstance(self.tokenizer, NoTokenizer):
            why = f" ({self.tokenizer.reason})" if isinstance(self.tokenizer, NoTokenizer) else ""
            raise PatchlightError(
                f"{self.name} has no tokenizer{why}; give {self.tokenizer_advice}, or "
                "pl.heads.Texts(embeddings, labels)"
            )
        with self.steady(), torch.no_grad():
            chunks = (prompts[begin : begin + CHUNK] for begin in range(0, len(prompts), CHUNK))
            return torch.cat([self.encode_chunk(chunk) for chunk in chunks])

    @abstractmethod
    def encode_chunk(self, prompts: Sequence[str]) -> Tensor:
        """Features [n,E] of some sentences in one batch."""


@dataclass(frozen=True)
class NoTokenizer:
    """Stand-in for a tokenizer that could not be read, with the reason."""

    reason: str


def has_text_side(model: nn.Module) -> bool:
    """Whether a model encodes texts as well as images."""
    sides = (model, *(child for key, child in model.named_children() if key.startswith("owl")))
    grounded = hasattr(getattr(model, "model", None), "text_backbone")
    return grounded or any(hasattr(side, name) for side in sides for name in ("get_text_features", "encode_text"))


def check_length(prompts: Sequence[str], lengths: Sequence[int], room: int, name: str) -> None:
    """Refuse sentences with more tokens than a model reads; the rest would be cut off silently."""
    for prompt, length in zip(prompts, lengths, strict=True):
        if length > room:
            shown = prompt if len(prompt) <= 60 else prompt[:57] + "…"
            raise PatchlightError(
                f"the text {shown!r} makes {length} tokens, and {name} reads {room} (marks of beginning and end "
                "included); shorten it"
            )


def check_vocabulary(ids: Tensor, size: int, name: str) -> None:
    """Refuse ids outside the model's vocabulary: they come from another model's tokenizer."""
    wrong = ids[(ids < 0) | (ids >= size)]
    if len(wrong):
        raise PatchlightError(
            f"the tokenizer gives token {int(wrong[0])}, but the vocabulary of {name} is 0 to {size - 1}; set "
            "tokenizer= to the one of its training"
        )
