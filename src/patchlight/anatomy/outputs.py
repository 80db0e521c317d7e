"""What the outputs of an opened model mean: its head, its labels, and how logits are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from patchlight.anatomy.contract import Contract, Ends
from patchlight.core.errors import Unsupported
from patchlight.core.targets import Kind, Outputs, probabilities

if TYPE_CHECKING:
    from patchlight.anatomy.heads import Head, Question


class Readout(Contract):
    """From the tokens of the last block to logits and their meaning.

    `classes` is the number of outputs, `labels` their names; `outputs` how they are read: as a softmax, sigmoids,
    similarities, plain numbers. `head` is the head given to `ask` in place of the model's classifier (None), and `bare`
    the anatomy without it.
    """

    classes: int
    labels: Sequence[str] | None
    outputs: Outputs
    assumed_labels: bool = False
    """Whether the labels come from the model, not from the user."""
    head: Head | None = None
    bare: Self | None = None
    _kind: Kind = "softmax"

    @property
    def several_states(self) -> bool:
        return bool(self.states_read) and (self.head is None or self.head.block is None)

    def readout(self, tokens: Any, positions: Tensor | None = None) -> Tensor:
        """x_L [B,N,D] to logits [B,C]; `positions` [B,k] are the patches that are left, if some were dropped.

        A model that reads several states takes them by their numbers; or x_L alone, just after its blocks have run.
        """
        if self.reads_positions and positions is not None:
            return self.classified_at(tokens, positions)
        if self.head is None or self.question is not None:
            return self.classified(tokens)
        return self.head(tokens) if self.head.block is not None else self.head(self.features(tokens))

    @property
    def question(self) -> Question | None:
        """The head, if it reads the complete output of the model."""
        from patchlight.anatomy.heads import Question

        return self.head if isinstance(self.head, Question) else None

    def own_outputs(self, classes: int) -> Outputs:
        """How a given number of outputs of the model's classifier is read."""
        return Outputs("binary" if classes == 1 and self._kind != "none" else self._kind)

    def ends(self) -> Ends | None:
        """Embedding and head, if they are those of a plain ViT with a CLS token and a linear head; otherwise None."""
        found = self.own_ends()
        if found is None or self.head is None:
            return found
        asked = self.head.linear()
        return None if asked is None else replace(found, head=asked)

    @property
    def depth(self) -> int:
        """Number of blocks before the tokens that are read."""
        return len(self.blocks) if self.head is None or self.head.block is None else self.head.block

    @property
    def probable(self) -> bool:
        """Whether outputs are shown as probabilities, not as similarities or numbers."""
        return self.outputs.kind != "cosine" and self.outputs.no_probability(self.classes) is None

    @property
    def rows_differ(self) -> bool:
        """Whether each class reads other tokens, so that attention rows differ between classes."""
        return self.pooling in ("max", "gradient")

    @property
    def outcomes(self) -> int:
        """Number of classes that can be explained: those of its outputs, or both labels of a binary one."""
        return self.outputs.outcomes(self.classes)

    @property
    def sigmoid(self) -> bool:
        """Whether each class is an independent yes or no."""
        return self.outputs.independent

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities of logits: a softmax, sigmoids, …; a binary output gives [1 - p, p]."""
        return probabilities(logits, self.outputs)

    def label(self, index: int) -> str:
        if self.labels:
            return self.labels[index]
        return f"output {index}" if self.outputs.kind == "none" else f"class {index}"

    def pool_row(
        self, logits: Tensor, pool_attention: Tensor | None, tokens: Tensor | None = None, index: Tensor | None = None
    ) -> Tensor:
        """The weight [B,N] with which the classifier reads each output token, for logits [B,C].

        CLS pooling reads one row, average pooling all patch rows equally, attention pooling by its attention (mean over
        heads), a head on two tokens half of each. A head that takes the maximum reads one of the `tokens` [B,N,D], for
        the class `index` [B]. A question reads each token by the size of the score's gradient times its own.
        """
        if self.pooling == "gradient":
            if tokens is None or index is None:
                raise Unsupported(f"the tokens that {self.head} reads were not recorded")
            return self.state_rows({self.depth: tokens}, index)[self.depth]
        if self.head is not None and self.head.block is not None:
            if tokens is None or index is None:
                raise Unsupported(f"the tokens that {self.head} reads were not recorded")
            return self.head.read_row(tokens, index.to(tokens.device))
        count = self.tokens_read
        row = logits.new_zeros(len(logits), count)
        cells = slice(self.prefix, count - self.suffix)
        patches = 1.0 / (cells.stop - cells.start)
        if self.pooling == "map":
            if pool_attention is None:
                raise Unsupported(f"the attention pooling of {self.name} was not called, so its rows cannot be read")
            queries = pool_attention[:, :, :1] if self.pool_query == "cls" else pool_attention
            seen = queries.mean((1, 2))
            row[:, count - seen.shape[1] :] = seen
        elif self.pooling == "avg":
            row[:, cells] = patches
        elif self.pooling == "cls+avg":
            row[:, 0] = 0.5
            row[:, cells] = 0.5 * patches
        elif self.pooling == "cls+dist":
            row[:, :2] = 0.5
        else:
            row[:, 0] = 1.0
        return row

    def state_rows(self, states: Mapping[int, Tensor], index: Tensor) -> dict[int, Tensor]:
        """|ds/dx_i| |x_i| of every token [B,N_i] of the states read, for the class `index` [B]; they sum to 1."""
        with torch.enable_grad():
            leaves = {i: tokens.detach().requires_grad_() for i, tokens in states.items()}
            logits = self.readout(leaves if self.several_states else leaves[self.depth])
            scores = logits.gather(1, index.to(logits.device)[:, None])
            gradients = torch.autograd.grad(scores.sum(), list(leaves.values()), materialize_grads=True)
        return weigh_states(states, gradients)


def weigh_states(states: Mapping[int, Tensor], gradients: Sequence[Tensor]) -> dict[int, Tensor]:
    """|g_i| |x_i| of every token [B,N_i] of some states and their gradients; they sum to 1."""
    pairs = zip(states.items(), gradients, strict=True)
    rows = {i: (gradient.norm(dim=2) * tokens.norm(dim=2)).detach() for (i, tokens), gradient in pairs}
    total = torch.stack([row.sum(1) for row in rows.values()]).sum(0)[:, None]
    return {i: row / total.clamp_min(torch.finfo(row.dtype).tiny) for i, row in rows.items()}
