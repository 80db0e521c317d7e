"""Register neurons: finding the MLP neurons that make outlier tokens, and moving what they write to an extra token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from patchlight.anatomy.contract import Ends, Parts
from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy, undisturbed
from patchlight.core.errors import ChangedModel, PatchlightError, Unsupported, warn

OUTLIER = 5.0
"""A token is an outlier if its norm exceeds the median of its image's patches by this factor."""
SHARE = 0.1
"""A register neuron is at least this share as active at outliers as the most active one, and at other patches at most
this share as active as at outliers."""
MOVED = 0.1
"""Change of a probability from which moving the neurons explains another function."""
Neurons = Mapping[int, Sequence[int]]
"""Neurons of the MLP by block."""


@dataclass(frozen=True)
class Registers:
    """Outlier tokens of a model and the neurons that make them.

    Args:
        neurons: Neurons of the MLP by block; empty if there are none.
        scores: (block, neuron, mean activation at outlier tokens) of the most active neurons, the strongest first.
        ratios: For each block, the largest norm of a patch token after it divided by the median, as a mean over images.
        outliers: Which patches [B,*grid] of each image are outliers after the last block.
        changes: How much the probability of each image's prediction changes if the neurons are moved [B].
    """

    neurons: dict[int, tuple[int, ...]]
    scores: tuple[tuple[int, int, float], ...]
    ratios: tuple[float, ...]
    outliers: Tensor
    changes: Tensor

    def __str__(self) -> str:
        if not self.neurons:
            return f"no outlier tokens: norms are at most {max(self.ratios):.1f} times the median"
        count = self.outliers.flatten(1).sum(1).double().mean()
        listed = ", ".join(f"{neuron} of block {block}" for block, own in self.neurons.items() for neuron in own)
        return (
            f"{float(count):.1f} outlier tokens per image, {max(self.ratios):.0f} times the median norm, made by "
            f"neuron {listed}; moving them changes probabilities by up to {float(self.changes.abs().max()):.2f}"
        )

    def mark(self, axes: Any, image: int = 0) -> None:
        """Draw a circle around each outlier token of an image.

        Args:
            axes: A matplotlib axes that shows a map of the model's grid or, with its image, the image.
            image: Number of the image among those that were searched.
        """
        rows, columns = self.outliers.shape[-2:]
        left, right, bottom, top = (
            axes.images[0].get_extent() if axes.images else (-0.5, columns - 0.5, rows - 0.5, -0.5)
        )
        at = self.outliers[image].nonzero().double() + 0.5
        x, y = left + (right - left) * at[:, 1] / columns, top + (bottom - top) * at[:, 0] / rows
        axes.scatter(x, y, s=60, facecolors="none", edgecolors="white", linewidths=1.5)


class _Moved(Anatomy):
    """An anatomy with one more token, to which some neurons of its MLPs write instead of to the patches."""

    def check(self) -> None:
        """The model without the token was checked; with it, it is another function."""

    def watch(self) -> None:
        super().watch()
        for index, neurons in self.moved.items():
            fc2 = super().parts(index).fc2
            if fc2 is not None:
                fc2.register_forward_pre_hook(_Move(self.prefix, torch.tensor(neurons)))

    def embed(self, images: Tensor) -> Tensor:
        tokens = super().embed(images)  # type: ignore[safe-super]
        return torch.cat([tokens, torch.zeros_like(tokens[:, :1])], 1)

    def features(self, tokens: Tensor) -> Tensor:
        return super().features(self._without(tokens))  # type: ignore[safe-super]

    def classified(self, tokens: Tensor) -> Tensor:
        return super().classified(self._without(tokens))

    def _without(self, tokens: Tensor) -> Tensor:
        """Tokens without the additional one, which is missing if only the first row of a block was computed."""
        return tokens[:, :-1] if tokens.shape[1] > self.prefix else tokens

    def parts(self, index: int) -> Parts:
        found = super().parts(index)
        return (
            found
            if index not in self.moved
            else replace(found, beyond="its register neurons write to an additional token")
        )

    def own_ends(self) -> Ends | None:
        return None


class _Move:
    """A hook before the second linear map of an MLP: some neurons are zero at patches, and write to the last token."""

    def __init__(self, prefix: int, neurons: Tensor) -> None:
        self.prefix, self.neurons = prefix, neurons

    def __call__(self, _: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        hidden, *rest = given
        if hidden.ndim != 3 or hidden.shape[1] <= self.prefix + 1:  # the first row alone, or a test of linearity
            return None
        index = self.neurons.to(hidden.device)
        values = hidden[..., index]
        largest = values.gather(1, values.abs().argmax(1, keepdim=True))
        patches = torch.zeros_like(values[:, self.prefix : -1])
        values = torch.cat([values[:, : self.prefix], patches, largest], 1)
        return (hidden.index_copy(2, index, values), *rest)


def with_registers(vit: Anatomy, registers: Registers | Neurons) -> Anatomy:
    """The same model, whose register neurons write to one more token: patches keep their own content.

    The map of a method is then that of a slightly different function; measure it on the model itself.
    """
    neurons = {int(block): tuple(map(int, own)) for block, own in _neurons(registers).items() if len(own)}
    if not neurons:
        return vit
    _check(vit, neurons)
    layout, name = replace(vit.layout, suffix=vit.suffix + 1), f"{vit.name} with moved neurons {neurons}"
    return vit.extended(_Moved, moved=neurons, layout=layout, name=name)


def _neurons(registers: Registers | Neurons) -> Neurons:
    return registers.neurons if isinstance(registers, Registers) else registers


def _check(vit: Anatomy, neurons: Neurons) -> None:
    """Refuse models whose blocks have no plain MLP or cannot take another token, and neurons that do not exist."""
    if vit.head is not None and vit.head.block is not None:
        raise Unsupported(f"{vit.head} reads tokens inside the model, so its registers cannot be moved")
    if vit.hierarchical or vit.depth == 0 or vit.suffix or vit.layout.order is not None:
        raise Unsupported(
            f"register neurons need blocks over one sequence of patches, and {vit.name} has no such blocks"
        )
    for index in neurons or range(vit.depth):
        if not 0 <= index < vit.depth:
            raise PatchlightError(f"block {index} does not exist; {vit.name} has blocks 0 to {vit.depth - 1}")
        parts = vit.parts(index)
        if parts.fc2 is None or "rotates" in parts.beyond or "position" in parts.beyond:
            why = parts.beyond or "its MLP has no second linear map"
            raise Unsupported(f"register neurons of {vit.name} cannot be moved: {why}")
        size = getattr(parts.fc2, "in_features", None)
        unknown = [n for n in neurons.get(index, ()) if not 0 <= n < (size or n + 1)]
        if unknown:
            raise PatchlightError(f"neuron {unknown[0]} does not exist; the MLP of block {index} has {size} neurons")


@undisturbed
def find_registers(vit: Anatomy | nn.Module, images: Any, batch_size: int = 16) -> Registers:
    """Outlier tokens of a model, and the MLP neurons that make them (Jiang et al., NeurIPS 2025).

    A patch token is an outlier if its norm after the last block is more than five times the median of its image. A
    neuron's score is its mean activation at outlier tokens, up to the first block that has outliers; register neurons
    are those with at least a tenth of the highest score that are quiet at most other patches.

    Args:
        vit: The model.
        images: Some images, as in `explain`; about 20 are enough.
        batch_size: Images per forward pass.

    Returns:
        `Registers`, to be given to `pl.wrap(vit, registers=…)`.

    Example:
        >>> found = pl.find_registers(vit, images)                                              # doctest: +SKIP
        >>> pl.explain(pl.wrap(vit, registers=found), images, "rollout")                        # doctest: +SKIP
    """
    vit = wrap(vit)
    _check(vit, {})
    batch = vit.batch(images)
    outside, total, quiet, ratios = [], torch.zeros(0), torch.zeros(0), []
    with torch.no_grad(), vit.settled(), vit.wide().steady():
        wide = vit.wide()
        for some in batch.to(wide.dtype).split(batch_size):
            norms, hidden = _observe(wide, some)  # [L,b,N], [L,b,N,M]
            ratio = norms / norms.median(2, keepdim=True).values
            there = ratio[-1] > OUTLIER
            outside.append(there)
            ratios.append(ratio.amax(2))
            count = there.sum(1).clamp_min(1)
            at = (hidden * there[None, ..., None]).sum(2) / count[None, :, None]  # [L,b,M]
            elsewhere = hidden.masked_fill(there[None, ..., None], torch.nan).nanmedian(2).values
            found = there.any(1)
            total = total + at[:, found].sum(1) if total.numel() else at[:, found].sum(1)
            quiet = quiet + elsewhere[:, found].sum(1) if quiet.numel() else elsewhere[:, found].sum(1)
    outliers, peaks = torch.cat(outside), torch.cat(ratios, 1)
    images_with = int(outliers.any(1).sum())
    mean = peaks.mean(1)
    neurons: dict[int, tuple[int, ...]] = {}
    scores: list[tuple[int, int, float]] = []
    if images_with:
        first = int((peaks[:, outliers.any(1)].mean(1) > OUTLIER).to(torch.uint8).argmax())
        score = (total / images_with)[: first + 1]
        score = score.where(quiet[: first + 1] / images_with <= SHARE * score, 0)
        best = score.flatten().topk(min(10, score.numel()))
        scores = [(int(i) // score.shape[1], int(i) % score.shape[1], float(v)) for v, i in zip(*best, strict=True)]
        chosen = [(block, neuron) for block, neuron, value in scores if value >= SHARE * scores[0][2] and value > 0]
        neurons = {b: tuple(n for own, n in chosen if own == b) for b in sorted({b for b, _ in chosen})}
    changes = _changes(vit, with_registers(vit, neurons), batch, batch_size)
    result = Registers(neurons, tuple(scores), tuple(mean.tolist()), outliers.view(-1, *vit.grid).cpu(), changes)
    if bool((changes.abs() > MOVED).any()):
        most = f"{float(changes.abs().max()):.2f}"
        words = (
            f"moving register neurons of {vit.name} changes a probability by {most}, so the maps explain a different "
            "function than the original model"
        )
        warn(words, ChangedModel)
    return result


def _observe(vit: Anatomy, images: Tensor) -> tuple[Tensor, Tensor]:
    """Norms [L,B,N] of the patches after each block, and the size of their hidden values [L,B,N,M]."""
    norms, seen, hooks = [], list[Tensor](), []
    cells = vit.layout.of_cells
    with vit.running.lock:
        try:
            for index in range(vit.depth):
                fc2: Any = vit.parts(index).fc2
                hooks.append(fc2.register_forward_pre_hook(lambda _, given: seen.append(cells(given[0]).abs())))
            tokens = vit.embed(images)
            for index in range(vit.depth):
                tokens = vit.block(index, tokens)
                norms.append(cells(tokens).norm(dim=-1))
        finally:
            for hook in hooks:
                hook.remove()
    return torch.stack(norms), torch.stack(seen)


def _changes(vit: Anatomy, moved: Anatomy, images: Tensor, batch_size: int) -> Tensor:
    """How much the probability of each image's prediction changes."""
    rows = []
    for some in images.split(batch_size):
        before, after = (each.probabilities(each.logits(some)) for each in (vit, moved))
        top = before.argmax(1, keepdim=True)
        rows.append((after - before).gather(1, top)[:, 0].cpu())
    return torch.cat(rows)
