"""What a family of models fills in: where things are inside a Vision Transformer, as functions of its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchlight.anatomy.watching import TokenWatch
from patchlight.anatomy.windows import Merging
from patchlight.core.errors import Unsupported
from patchlight.core.targets import Outputs

Pooling = Literal["cls", "avg", "map", "cls+dist", "cls+avg", "max"]


@dataclass(frozen=True)
class Parts:
    """The parts of one pre-norm block that methods read by name; None where a block has no such part.

    `value()` gives W_V [H*d, D], heads in order; it is there only where nothing but attention stands between it and
    `out`. `qkv()` gives weight and bias of queries, keys and values, stacked; `scale1` and `scale2` are layer scales.
    What a linear part computes is read with `affine`, since adapters may stand around it. `beyond` says
    what else a block does than u = x + scale1 * out(attention(norm1(x))) and
    y = u + scale2 * fc2(activation(fc1(norm2(u)))).
    """

    norm1: nn.Module | None = None
    norm2: nn.Module | None = None
    out: nn.Module | None = None
    value: Callable[[], Tensor] | None = None
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
    head: nn.Module | Affine


@dataclass(frozen=True)
class Affine:
    """What a linear layer computes: x W^T + b."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def to(self, like: Tensor) -> Affine:
        """The same map where `like` is, in its type."""
        bias = None if self.bias is None else self.bias.detach().to(like)
        return Affine(self.weight.detach().to(like), bias)


def affine(layer: Any) -> Affine | None:
    """The linear map of a layer, as it is and not as it is stored; None where it is none.

    A plain linear layer shows its weight. Any other (an adapter around one, say) is asked: the images of 0 and of the
    unit vectors, and one random vector to see that it is linear at all.
    """
    if isinstance(layer, Affine):
        return layer
    if not isinstance(layer, nn.Module):
        return None
    hooks = [hook for hook in layer._forward_hooks.values() if not isinstance(hook, TokenWatch)]
    hooked = hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    if type(layer).forward is nn.Linear.forward and not hooked:
        return Affine(layer.weight, layer.bias)  # type: ignore[arg-type]
    size, like = getattr(layer, "in_features", None), next(layer.parameters(), None)
    if not isinstance(size, int) or like is None or not like.is_floating_point():
        return None
    generator = torch.Generator().manual_seed(0)
    given = torch.cat([torch.eye(size), torch.zeros(1, size), torch.randn(1, size, generator=generator)]).to(like)
    try:
        with torch.no_grad():
            *units, bias, seen = layer(given)
    except Exception:  # somebody's layer may want anything else
        return None
    weight = (torch.stack(units) - bias).mT.contiguous()
    error = (Affine(weight, bias)(given[-1]) - seen).abs().max()
    close = float(error) <= 100 * torch.finfo(like.dtype).eps ** 0.9 * float(seen.abs().max() + 1)
    return Affine(weight, bias if bool(bias.any()) else None) if close else None


class Contract(ABC):
    """The parts of a model, each run on `net`, the twin of the user's model: together they are the model.

    `grid` is the patch grid (rows, columns); `prefix` the number of tokens before the patches (CLS, DIST, registers);
    `pooling` how the classifier reads the tokens; `heads` and `width` the size of the blocks.
    """

    name: str
    grid: tuple[int, int]
    prefix: int
    pooling: Pooling
    heads: int
    width: int

    library: str = ""
    can_drop: str | None = None
    """None when tokens can be dropped, else the reason why not."""
    can_rule: str | None = None
    """None when backward rules see all that its blocks do, else the reason why not."""
    can_attend: str | None = None
    """None when the attention that a probe sees in a block is what the block does, else the reason why not."""
    pool_query: Literal["all", "cls"] = "all"
    """Which queries of an attention pooling the classifier reads."""
    reading: str = ""
    """What tells apart which of a model's outputs are read, where there are several."""
    hierarchical: bool = False
    """Whether it is a pyramid, opened at one of its stages: that stage's feature map is what features are read of."""

    @property
    @abstractmethod
    def net(self) -> Any:
        """The twin of the model, which all parts run on."""

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

    def merge(self, index: int, tokens: Tensor) -> Tensor:
        """The tokens that block `index` is given, of those that the one before gave: where a stage begins, merged."""
        return tokens

    def width_of(self, index: int) -> int:
        """How many channels the tokens of block `index` have."""
        return self.width

    def members(self, index: int) -> list[nn.Module]:
        """The modules whose parameters are those of block `index`, and of what stands between it and its neighbours."""
        return [self.blocks[index]]

    def merging(self, index: int) -> Merging | None:
        """Which tokens `merge` makes those of block `index` of; None where they are the same."""
        return None

    @property
    def stage_end(self) -> int:
        """How many blocks stand before the feature map of a hierarchical model."""
        return 0

    @abstractmethod
    def features(self, tokens: Tensor) -> Tensor:
        """x_L [B,N,D] to what a head reads [B,E]: pooled and normalised."""

    def classify(self, features: Tensor) -> Tensor:
        """Features [B,E] to the logits of the model's own classifier; of a model that has none, themselves."""
        return features

    def classified(self, tokens: Tensor) -> Tensor:
        """x_L [B,N,D] to the model's own logits."""
        return self.classify(self.features(tokens))

    def whole(self, images: Tensor) -> Any:
        """What the model itself gives for images, run on the twin."""
        return self.net(images)

    def encode_texts(self, prompts: Sequence[str]) -> Tensor:
        """The features [n,E] of sentences beside which those of images lie; of models with a text side alone."""
        raise Unsupported(
            f"{self.name} has no text side to read sentences with; give pl.heads.Texts(embeddings, labels), made by "
            "the text model that it was trained with"
        )

    def text_outputs(self) -> Outputs:
        """How similarities to texts become logits and probabilities."""
        return Outputs("cosine", 1.0)

    def parts(self, index: int) -> Parts:
        """The named parts of a block."""
        return Parts()

    def own_ends(self) -> Ends | None:
        """The same with the model's own classifier."""
        return None

    def projection(self) -> nn.Module | None:
        """The module whose output is the projected patches, before prefix tokens and positions join them; else None."""
        return None

    @property
    def tokens(self) -> int:
        """N: prefix tokens and patches."""
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def tokens_read(self) -> int:
        """How many tokens the last block gives: fewer than N where patches were merged."""
        return self.tokens


def stacked(*layers: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of several linear layers as one."""
    maps = [linear(layer) for layer in layers]
    weight = torch.cat([m.weight for m in maps])
    if all(m.bias is None for m in maps):
        return weight, None
    return weight, torch.cat([weight.new_zeros(len(m.weight)) if m.bias is None else m.bias for m in maps])


def linear(layer: Any) -> Affine:
    """The linear map of a layer that must be one."""
    found = affine(layer)
    if found is None:
        raise Unsupported(f"a {type(layer).__name__} of this model is no linear map that can be read")
    return found
