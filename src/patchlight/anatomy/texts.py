"""The text side of image-text models: sentences to features; too long ones are refused rather than cut."""

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
"""How many sentences are read at once."""


class TextSide(Anatomy):
    """An anatomy whose model reads sentences too, by its `tokenizer`."""

    tokenizer: Any = None
    tokenizer_advice: ClassVar[str]
    """Where a tokenizer can be had."""

    def encode_texts(self, prompts: Sequence[str]) -> Tensor:
        if self.tokenizer is None or isinstance(self.tokenizer, NoTokenizer):
            why = f" ({self.tokenizer.reason})" if isinstance(self.tokenizer, NoTokenizer) else ""
            raise PatchlightError(
                f"{self.name} came without a tokenizer to read sentences with{why}; give {self.tokenizer_advice}, or "
                "pl.heads.Texts(embeddings, labels)"
            )
        with self.steady(), torch.no_grad():
            chunks = (prompts[begin : begin + CHUNK] for begin in range(0, len(prompts), CHUNK))
            return torch.cat([self.encode_chunk(chunk) for chunk in chunks])

    @abstractmethod
    def encode_chunk(self, prompts: Sequence[str]) -> Tensor:
        """The features [n,E] of some sentences, read at once."""


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
