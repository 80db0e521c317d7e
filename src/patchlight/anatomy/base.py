"""Where things are inside a Vision Transformer: one small contract that every supported library fills in."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from patchlight.errors import PatchlightError, Unsupported
from patchlight.images import Preprocess, to_batch

Pooling = Literal["cls", "avg", "map", "cls+dist", "cls+avg"]


@dataclass(frozen=True)
class Parts:
    """The parts of one pre-norm block that methods read by name; None where a block has no such part.

    `value` is W_V [H*d, D], heads in order; it is there only where nothing but attention stands between it and `out`.
    `qkv()` gives weight and bias of queries, keys and values, stacked; `scale1` and `scale2` are layer scales.
    `beyond` says what else a block does than u = x + scale1 * out(attention(norm1(x))) and
    y = u + scale2 * fc2(activation(fc1(norm2(u)))).
    """

    norm1: nn.Module | None = None
    norm2: nn.Module | None = None
    out: nn.Module | None = None
    value: Tensor | None = None
    qkv: Callable[[], tuple[Tensor, Tensor | None]] | None = None
    fc1: nn.Module | None = None
    activation: Callable[[Tensor], Tensor] | None = None
    fc2: nn.Module | None = None
    scale1: Tensor | None = None
    scale2: Tensor | None = None
    beyond: str = ""


@dataclass(frozen=True)
class Ends:
    """What stands before and behind the blocks of a plain ViT with a CLS token.

    x_0 = cat(prefix [1,p,D], projection(image)) + positions [1,N,D]; the logits are head(norm(x_L)[0]).
    """

    projection: nn.Conv2d
    prefix: Tensor
    positions: Tensor
    norm: nn.LayerNorm
    head: nn.Linear


class Anatomy(ABC):
    """A Vision Transformer, opened: `readout(run(embed(images)))` equals `model(images)`.

    `grid` is the patch grid (rows, columns); `prefix` the number of tokens before the patches (CLS, DIST, registers);
    `pooling` how the classifier reads the tokens; `depth`, `heads`, `width` the transformer's size; `classes` the
    number of outputs and `labels` their names; `sigmoid` whether probabilities are sigmoids rather than a softmax.
    """

    library: str = ""
    can_drop: str | None = None
    """None when tokens can be dropped, else the reason why not."""
    hierarchical: bool = False
    """Whether it is opened behind a stage of a pyramid: a feature map and a grid, but no blocks (depth 0)."""

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str,
        grid: tuple[int, int],
        prefix: int,
        pooling: Pooling,
        heads: int,
        classes: int,
        preprocess: Preprocess,
        labels: Sequence[str] | None = None,
        sigmoid: bool | None = None,
        channels: int = 3,
    ) -> None:
        self.model = model
        self.name = name
        self.grid = grid
        self.prefix = prefix
        self.pooling = pooling
        self.heads = heads
        self.classes = classes
        self.preprocess = preprocess
        self.labels = list(labels) if labels is not None else None
        self.sigmoid = classes == 1 if sigmoid is None else sigmoid
        self.channels = channels
        if self.labels is not None and len(self.labels) != max(classes, 2 if classes == 1 else 1):
            raise PatchlightError(f"{len(self.labels)} labels were given for a model with {classes} classes")

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The transformer blocks, in order."""

    @abstractmethod
    def embed(self, images: Tensor) -> Tensor:
        """Images [B,C,H,W] to x_0 [B,N,D]: the tokens that enter block 0, position embedding and prefix included."""

    @abstractmethod
    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Block `index` on tokens whose patches stand at `positions` [B,k] of the grid (None: all, in order)."""

    @abstractmethod
    def readout(self, tokens: Tensor) -> Tensor:
        """x_L [B,N,D] to logits [B,C]."""

    def parts(self, index: int) -> Parts:
        """The named parts of a block."""
        return Parts()

    def ends(self) -> Ends | None:
        """Embedding and head, where they are those of a plain ViT with a CLS token; else None."""
        return None

    def projection(self) -> nn.Module | None:
        """The module whose output is the projected patches, before prefix tokens and positions join them; else None."""
        return None

    @contextlib.contextmanager
    def projecting(self, change: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
        """Inside, `change` sees the projected patches [B,P,D] of every `embed`, and what it returns replaces them."""
        module = self.projection()
        if module is None:
            raise Unsupported(f"{self.name} has no patch projection to look at")

        def seen(_: nn.Module, given: Any, out: Tensor) -> Tensor | None:
            if isinstance(module, nn.Conv2d):
                new = change(out.flatten(2).mT)
                return None if new is None else new.mT.reshape(out.shape)
            new = change(out.flatten(1, -2))
            return None if new is None else new.reshape(out.shape)

        handle = module.register_forward_hook(seen)
        try:
            yield
        finally:
            handle.remove()

    @property
    def depth(self) -> int:
        return len(self.blocks)

    @property
    def tokens(self) -> int:
        """N: prefix tokens and patches."""
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def run(self, tokens: Tensor, start: int = 0, stop: int | None = None, keep: Tensor | None = None) -> Tensor:
        """Blocks start..stop-1 on `tokens`; `keep` [B,k] drops all other patches first, and keeps their positions."""
        if keep is not None:
            self.check_droppable()
            tokens = self.gather(tokens, keep)
        for index in range(start, self.depth if stop is None else stop):
            tokens = self.block(index, tokens, keep)
        return tokens

    def check_droppable(self) -> None:
        if self.can_drop is not None:
            raise Unsupported(f"{self.name} cannot drop tokens: {self.can_drop}")

    def gather(self, tokens: Tensor, keep: Tensor) -> Tensor:
        """The prefix tokens and the patches at `keep` [B,k], in that order."""
        patches = self.grid[0] * self.grid[1]
        if keep.ndim != 2 or keep.shape[0] != tokens.shape[0] or keep.is_floating_point():
            raise PatchlightError(
                f"keep has shape {list(keep.shape)} and dtype {keep.dtype}; give integer patch indices "
                f"[{tokens.shape[0]},k]"
            )
        if keep.numel() and not 0 <= int(keep.min()) <= int(keep.max()) < patches:
            raise PatchlightError(f"keep holds {int(keep.min())}..{int(keep.max())}; patches are 0 to {patches - 1}")
        index = (keep + self.prefix)[..., None].expand(-1, -1, tokens.shape[2])
        return torch.cat([tokens[:, : self.prefix], tokens.gather(1, index)], 1)

    def logits(self, images: Tensor) -> Tensor:
        """Logits [B,C] of preprocessed images, without gradients."""
        with self.steady(), torch.no_grad():
            return self.readout(self.run(self.embed(self.place(images))))

    def batch(self, images: Any) -> Tensor:
        """One preprocessed [B,C,H,W] tensor from tensors, PIL images or paths, where the model lives."""
        return self.place(to_batch(images, self.preprocess, self.channels))

    def place(self, images: Tensor) -> Tensor:
        return images.to(self.device, self.dtype)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Softmax, or the sigmoid of multi-label heads; a one-output head gives [1 - p, p]."""
        if self.classes == 1:
            return torch.cat([-logits, logits], 1).sigmoid()
        return logits.sigmoid() if self.sigmoid else logits.softmax(1)

    def predict(self, images: Any, k: int = 5) -> list[list[tuple[str, float]]]:
        """For each image the k most probable classes, as (label, probability)."""
        top = self.probabilities(self.logits(self.batch(images)).float()).topk(min(k, max(self.classes, 2)), 1)
        rows = zip(top.values.tolist(), top.indices.tolist(), strict=True)
        return [[(self.label(i), p) for p, i in zip(*row, strict=True)] for row in rows]

    def label(self, index: int) -> str:
        return self.labels[index] if self.labels else f"class {index}"

    def patches(self, values: Tensor) -> Tensor:
        """Per-token values [B,N] to the patch grid [B,h,w]: the one place that drops prefix tokens."""
        return values[:, self.prefix :].reshape(-1, *self.grid)

    def pool_row(self, batch: int, pool_attention: Tensor | None) -> Tensor:
        """The weight [B,N] with which the classifier reads each output token.

        CLS pooling reads one row, average pooling all patch rows alike, attention pooling by its own attention
        (mean over heads), a head on two readings half of each.
        """
        row = torch.zeros(batch, self.tokens, device=self.device, dtype=self.dtype)
        patches = 1.0 / (self.tokens - self.prefix)
        if self.pooling == "map":
            if pool_attention is None:
                raise Unsupported(f"the attention pooling of {self.name} was not seen, so its rows cannot be read")
            seen = pool_attention.mean((1, 2))
            row[:, self.tokens - seen.shape[1] :] = seen
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

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Evaluation mode and frozen parameters inside, both as they were afterwards."""
        modules = modules_of(self.model)
        training = [m for m in modules if m.training]
        learning = [p for p in parameters_of(modules) if p.requires_grad]
        for module in training:
            module.training = False
        for parameter in learning:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for module in training:
                module.training = True
            for parameter in learning:
                parameter.requires_grad_(True)

    def __repr__(self) -> str:
        grid, size = "x".join(map(str, self.grid)), "x".join(map(str, self.preprocess.size))
        return (
            f"<{self.name} ({self.library}): {self.depth} blocks of {self.heads} heads, {grid} patches of a {size} "
            f"image, {self.prefix} prefix tokens, {self.pooling} pooling, {self.classes} classes, {self.device}>"
        )


def modules_of(model: nn.Module) -> list[nn.Module]:
    """A model and every module in it once, without the names that `nn.Module.modules` puts together on the way."""
    found = {id(model): model}
    waiting = [model]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return list(found.values())


def parameters_of(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """The modules' own parameters, likewise without names."""
    return (p for module in modules for p in module._parameters.values() if p is not None)


def stacked(*maps: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of several linear maps as one."""
    weight = torch.cat([m.weight for m in maps])
    if all(m.bias is None for m in maps):
        return weight, None
    return weight, torch.cat([weight.new_zeros(len(m.weight)) if m.bias is None else m.bias for m in maps])


def check_finite(model: nn.Module, name: str) -> None:
    """Refuse a model with NaN or infinity in a weight, by the weight's name."""
    for key, value in model.named_parameters():
        if not bool(torch.isfinite(value).all()):
            raise PatchlightError(f"{name} has NaN or infinity in '{key}'; load sound weights")
