"""What the outputs of an opened model mean: its head, its labels, and how logits are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from torch import Tensor

from patchlight.anatomy.contract import Contract, Ends
from patchlight.core.errors import Unsupported
from patchlight.core.targets import Kind, Outputs, probabilities

if TYPE_CHECKING:
    from patchlight.anatomy.heads import Head


class Readout(Contract):
    """From the tokens of the last block to logits, and what each of them says.

    `classes` is the number of outputs, `labels` their names; `outputs` how they are read: as a softmax, sigmoids,
    similarities, plain numbers. `head` is what was asked of the model by `ask`, in place of its own classifier (None),
    and `bare` the model itself without.
    """

    classes: int
    labels: Sequence[str] | None
    outputs: Outputs
    assumed_labels: bool = False
    """Whether the labels were read from the model or its classes, and not given by the user."""
    head: Head | None = None
    bare: Self | None = None
    _kind: Kind = "softmax"

    def readout(self, tokens: Tensor) -> Tensor:
        """x_L [B,N,D] to logits [B,C]."""
        if self.head is None:
            return self.classified(tokens)
        return self.head(tokens) if self.head.block is not None else self.head(self.features(tokens))

    def own_outputs(self, classes: int) -> Outputs:
        """How so many outputs of the model's own classifier are read."""
        return Outputs("binary" if classes == 1 and self._kind != "none" else self._kind)

    def ends(self) -> Ends | None:
        """Embedding and head, where they are those of a plain ViT with a CLS token and a linear head; else None."""
        found = self.own_ends()
        if found is None or self.head is None:
            return found
        asked = self.head.linear()
        return None if asked is None else replace(found, head=asked)

    @property
    def depth(self) -> int:
        """How many blocks stand before what is read."""
        return len(self.blocks) if self.head is None or self.head.block is None else self.head.block

    @property
    def probable(self) -> bool:
        """Whether its outputs are best told as probabilities, and not as the similarities or numbers that they are."""
        return self.outputs.kind != "cosine" and self.outputs.no_probability(self.classes) is None

    @property
    def rows_differ(self) -> bool:
        """Whether each class reads tokens of its own, so that attention seen from there is its own too."""
        return self.pooling == "max"

    @property
    def outcomes(self) -> int:
        """How many classes can be asked about: those of its outputs, or both labels of a binary one."""
        return self.outputs.outcomes(self.classes)

    @property
    def sigmoid(self) -> bool:
        """Whether each class is a yes or no by itself."""
        return self.outputs.independent

    def probabilities(self, logits: Tensor) -> Tensor:
        """What `outputs` says: a softmax, sigmoids, …; a binary output gives [1 - p, p]."""
        return probabilities(logits, self.outputs)

    def label(self, index: int) -> str:
        if self.labels:
            return self.labels[index]
        return f"output {index}" if self.outputs.kind == "none" else f"class {index}"

    def pool_row(
        self,
        logits: Tensor,
        pool_attention: Tensor | None,
        tokens: Tensor | None = None,
        index: Tensor | None = None,
    ) -> Tensor:
        """The weight [B,N] with which the classifier reads each output token, for logits [B,C] of their type.

        CLS pooling reads one row, average pooling all patch rows alike, attention pooling by its own attention
        (mean over heads), a head on two readings half of each. A head that looks for the largest reads one of the
        `tokens` [B,N,D], for the class `index` [B].
        """
        if self.head is not None and self.head.block is not None:
            if tokens is None or index is None:
                raise Unsupported(f"the tokens that {self.head} reads were not seen")
            return self.head.read_row(tokens, index.to(tokens.device))
        count = self.tokens_read
        row = logits.new_zeros(len(logits), count)
        patches = 1.0 / (count - self.prefix)
        if self.pooling == "map":
            if pool_attention is None:
                raise Unsupported(f"the attention pooling of {self.name} was not seen, so its rows cannot be read")
            queries = pool_attention[:, :, :1] if self.pool_query == "cls" else pool_attention
            seen = queries.mean((1, 2))
            row[:, count - seen.shape[1] :] = seen
        elif self.pooling == "avg":
            row[:, self.prefix :] = patches
        elif self.pooling == "cls+avg":
            row[:, 0] = 0.5
            row[:, self.prefix :] = 0.5 * patches
        elif self.pooling == "cls+dist":
            row[:, :2] = 0.5
        else:
            row[:, 0] = 1.0
        return row
