"""What a family of models defines: where things are inside a Vision Transformer, as functions of its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchlight.anatomy.watching import TokenWatch
from patchlight.anatomy.windows import Merging
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.core.layout import Geometry, Layout
from patchlight.core.targets import Outputs

States = Tensor | Mapping[int, Tensor]
"""What a readout takes: the tokens of the last block, or the states x_i that it reads, by i."""
Pooling = Literal["cls", "avg", "map", "cls+dist", "cls+avg", "max", "gradient"]


@dataclass(frozen=True)
class Parts:
    """The parts of one pre-norm block that methods read by name; None where a block has no such part.

    `value()` is W_V [H*d, D], heads in order; it exists only if nothing but attention is between it and `out`. `qkv()`
    is weight and bias of queries, keys and values, stacked; `scale1` and `scale2` are layer scales. Read linear parts
    with `affine`, because they may be wrapped by adapters. `beyond` names what a block does in addition to u = x +
    scale1 * out(attention(norm1(x))) and y = u + scale2 * fc2(activation(fc1(norm2(u)))).
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
    """What comes before and after the blocks of a plain ViT with a CLS token.

    x_0 = cat(prefix [1,p,D], projection(image)) + positions [1,N,D]; the logits are head(norm(x_L)[0]).
    """

    projection: nn.Conv2d
    prefix: Tensor
    positions: Tensor
    norm: nn.LayerNorm
    head: nn.Module | Affine


@dataclass(frozen=True)
class Affine:
    """A linear layer as a function: x W^T + b."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def to(self, like: Tensor) -> Affine:
        """The same map on the device and in the type of `like`."""
        bias = None if self.bias is None else self.bias.detach().to(like)
        return Affine(self.weight.detach().to(like), bias)


def affine(layer: Any) -> Affine | None:
    """The linear map that a layer computes; None if it is not linear.

    A plain linear layer has a weight. Any other layer (for example, an adapter around one) is evaluated at 0, at the
    unit vectors, and at one random vector to check that it is linear.
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
    inputs = torch.cat([torch.eye(size), torch.zeros(1, size), torch.randn(1, size, generator=generator)]).to(like)
    try:
        with torch.no_grad():
            *units, bias, expected = layer(inputs)
    except Exception:  # a user's layer may need another input
        return None
    weight = (torch.stack(units) - bias).mT.contiguous()
    error = (Affine(weight, bias)(inputs[-1]) - expected).abs().max()
    close = float(error) <= 100 * torch.finfo(like.dtype).eps ** 0.9 * float(expected.abs().max() + 1)
    return Affine(weight, bias if bool(bias.any()) else None) if close else None


class Contract(ABC):
    """The parts of a model, each run on `net`, the twin of the user's model.

    `layout` is how tokens stand in the sequence, `geometry` what a cell of the grid covers in the input; `pooling` how
    the classifier reads the tokens; `heads` and `width` the size of the blocks.
    """

    name: str
    layout: Layout
    geometry: Geometry
    pooling: Pooling
    heads: int
    width: int

    library: str = ""
    task: str = ""
    """The task of a model that is not a classifier, such as "detection"; "" for classifiers."""
    can_drop: str | None = None
    """None if tokens can be dropped, otherwise the reason why not."""
    can_rule: str | None = None
    """None if backward rules cover all operations of its blocks, otherwise the reason why not."""
    can_decompose: str | None = None
    """None if what is behind the blocks has rules of decomposition and relevance, otherwise the reason why not."""
    can_attend: str | None = None
    """None if the attention found by the probe is all that a block does, otherwise the reason why not."""
    sinks: str = ""
    """Why rows of attention may say little about the image, if its attention falls on tokens that mean nothing."""
    prefers: tuple[str, ...] = ()
    """Methods that "auto" tries first, where others were measured to be better than its usual ones."""
    unordered: bool = False
    """Whether the cells of the grid have no neighbours, as the tiles of a bag."""
    pools_only: bool = False
    """Whether its only attention is where it pools tokens, so that none is between tokens."""
    packed: bool = False
    """Whether its blocks take the tokens of all images as one list."""
    pool_query: Literal["all", "cls"] = "all"
    """Which queries of an attention pooling the classifier reads."""
    reading: str = ""
    """Which of a model's outputs is read, if there are several."""
    states_read: tuple[int, ...] = ()
    """The states that the readout reads, if it reads others than the last."""
    windows: int = 1
    """In how many windows of the batch axis the blocks take the tokens of one input."""
    hierarchical: bool = False
    """Whether it has stages and is opened at one of them, whose feature map is read."""

    @property
    @abstractmethod
    def net(self) -> Any:
        """The twin of the model, on which all parts run."""

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The transformer blocks, in order."""

    @abstractmethod
    def embed(self, images: Tensor) -> Tensor:
        """Images [B,C,H,W] to x_0 [B,N,D]: the tokens that enter block 0, position embedding and prefix included.

        Other inputs have the shape [B,*input_shape].
        """

    @abstractmethod
    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Run block `index` on tokens whose patches are at `positions` [B,k] of the grid (None: all, in order)."""

    def merge(self, index: int, tokens: Tensor) -> Tensor:
        """The input of block `index`, from the output of the block before: what a forward does between the two."""
        return tokens

    def changes(self, index: int) -> bool:
        """Whether `merge` does something before block `index`."""
        return self.merging(index) is not None

    def width_of(self, index: int) -> int:
        """Number of channels of the tokens of block `index`."""
        return self.width

    def merging(self, index: int) -> Merging | None:
        """How `merge` combines tokens before block `index`; None if each token stays itself."""
        return None

    @property
    def stage_end(self) -> int:
        """Number of blocks before the feature map of a hierarchical model."""
        return 0

    @property
    def reads(self) -> tuple[int, ...]:
        """The states that the readout reads: x_0 enters block 0, x_i leaves block i - 1; the last for classifiers."""
        return self.states_read or (len(self.blocks),)

    @property
    def several_states(self) -> bool:
        """Whether the readout reads other states than the last."""
        return bool(self.states_read)

    def states(self, tokens: Tensor) -> dict[int, Tensor]:
        """The states that the readout reads, where the last block has just returned `tokens` in this thread."""
        return {len(self.blocks): tokens}

    @abstractmethod
    def features(self, tokens: Tensor) -> Tensor:
        """x_L [B,N,D] to the pooled and normalised features [B,E] that a head reads."""

    def classify(self, features: Tensor) -> Tensor:
        """Features [B,E] to the logits of the model's classifier; unchanged if it has none."""
        return features

    def classified(self, tokens: Tensor) -> Tensor:
        """x_L [B,N,D] to the model's own logits."""
        return self.classify(self.features(tokens))

    spared: tuple[str, ...] = ()
    """Modules behind the blocks that stay in half precision where the blocks are widened to float32."""
    reads_positions: bool = False
    """Whether the readout depends on which patches were dropped; then `classified_at` is defined."""

    def classified_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The model's own logits, of the patches at `positions` [B,k] alone."""
        return self.classified(tokens)

    def cannot_remove(self, unit: str) -> str | None:
        """Why sets of cells of this unit cannot leave the sequence; None if they can."""
        return self.can_drop

    def model_output(self, images: Tensor) -> Any:
        """The output of the whole model for images, run on the twin."""
        return self.net(images)

    def default_question(self) -> Any:
        """The default question of a model with a `task`."""
        raise PatchlightError(
            f"{self.name} is a model for {self.task}, so it needs a question; give head=, one of pl.heads"
        )

    def encode_texts(self, prompts: Sequence[str]) -> Tensor:
        """Features [n,E] of sentences, comparable with those of images; only for models with a text encoder."""
        raise Unsupported(
            f"{self.name} has no text encoder; give pl.heads.Texts(embeddings, labels), made by "
            "the text model that it was trained with"
        )

    def text_outputs(self) -> Outputs:
        """How similarities to texts become logits and probabilities."""
        return Outputs("cosine", 1.0)

    def parts(self, index: int) -> Parts:
        """The named parts of a block."""
        return Parts()

    def own_ends(self) -> Ends | None:
        """`ends` of the model's own classifier."""
        return None

    def projection(self) -> nn.Module | None:
        """The module that outputs the projected patches, before prefix tokens and positions are added; None if there is
        none.
        """
        return None

    @property
    def grid(self) -> tuple[int, ...]:
        """Cells along each axis: rows and columns of patches, for images."""
        return self.layout.grid

    @property
    def axes(self) -> tuple[str, ...]:
        """The name of each axis of the grid."""
        return self.layout.axes

    @property
    def cells(self) -> int:
        """Number of cells of the grid."""
        return self.layout.cells

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches: CLS, DIST, registers."""
        return self.layout.prefix

    @property
    def suffix(self) -> int:
        """Number of tokens after the patches."""
        return self.layout.suffix

    @property
    def extent(self) -> tuple[int, ...]:
        """The part of the input (pixels from the top left, for images) that the grid covers along each axis.

        It is less than the image where patches do not fit into it, and more where it is padded.
        """
        return self.geometry.extent(self.grid)

    @property
    def tokens(self) -> int:
        """N: prefix tokens, patches and suffix tokens."""
        return self.layout.count

    @property
    def tokens_read(self) -> int:
        """Number of tokens that the last block returns: fewer than N where patches were merged."""
        return self.tokens


def stacked(*layers: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of several linear layers as one."""
    maps = [linear(layer) for layer in layers]
    weight = torch.cat([m.weight for m in maps])
    if all(m.bias is None for m in maps):
        return weight, None
    return weight, torch.cat([weight.new_zeros(len(m.weight)) if m.bias is None else m.bias for m in maps])


def linear(layer: Any) -> Affine:
    """The linear map of a layer; an error if it is not linear."""
    found = affine(layer)
    if found is None:
        raise Unsupported(f"a {type(layer).__name__} of this model is not a readable linear map")
    return found
