"""Where things are inside a Vision Transformer: one small contract that every supported library fills in."""

from __future__ import annotations

import contextlib
import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchlight.anatomy.twin import Twin, multiply_patches
from patchlight.anatomy.watching import TokenWatch, watch_tokens
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.core.images import Preprocess, to_batch
from patchlight.core.targets import Kind, Names, Outputs, probabilities

if TYPE_CHECKING:
    from patchlight.anatomy.heads import Head
    from patchlight.anatomy.windows import Merging

P = ParamSpec("P")
R = TypeVar("R")
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


class Anatomy(ABC):
    """A Vision Transformer, opened: `readout(run(embed(images)))` equals `model(images)`.

    `model` is the user's own and is only read; everything runs on `net`, a twin of it. `grid` is the patch grid (rows,
    columns); `prefix` the number of tokens before the patches (CLS, DIST, registers); `pooling` how the classifier
    reads the tokens; `depth`, `heads`, `width` the transformer's size; `classes` the number of outputs, `labels` their
    names; `outputs` how they are read: as a softmax, sigmoids, similarities, plain numbers. `head` is what was asked of
    it by `ask`, in place of its own classifier (None), and `bare` itself without.
    `extent` are the pixels (rows, columns) that the grid covers, from the top left: less than the image where patches
    do not fit into it, more where it is padded.
    """

    library: str = ""
    can_drop: str | None = None
    """None when tokens can be dropped, else the reason why not."""
    can_rule: str | None = None
    """None when backward rules see all that its blocks do, else the reason why not."""
    pool_query: Literal["all", "cls"] = "all"
    """Which queries of an attention pooling the classifier reads."""
    reading: str = ""
    """What tells apart which of a model's outputs are read, where there are several."""
    hierarchical: bool = False
    """Whether it is a pyramid, opened at one of its stages: that stage's feature map is what features are read of."""

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
        regression: bool = False,
        channels: int = 3,
        extent: tuple[int, int] | None = None,
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
        self.assumed_labels = False
        """Whether the labels were read from the model or its classes, and not given by the user."""
        self.head: Head | None = None
        self.bare: Self | None = None
        self._kind: Kind = "none" if regression else "sigmoid" if sigmoid else "softmax"
        self.outputs = self.own_outputs(classes)
        self.channels = channels
        self.extent = preprocess.size if extent is None else extent
        self.attention: str | None = None
        """None when a block's attention matrix can be read, else the reason why not."""
        self.gradient: str | None = None
        """None when gradients flow through the blocks, else the reason why not."""
        self.reads_first = False
        """Whether the logits are read from the first token alone, and `first_row` gives what they are read from."""
        self.overflows = False
        """Whether float16 was seen to be too small for its numbers."""
        self.width = 0
        self._checked = self._suspect = False
        self._begin()

    def _begin(
        self, dtype: torch.dtype | None = None, products: bool = False, only: tuple[type[nn.Module], ...] | None = None
    ) -> None:
        """Make the twin that everything runs on, in another type or with patches as products where asked."""
        self._views: dict[Any, Self] = {}
        self._lock = threading.RLock()
        self._probing, self._products = False, products
        self.twin = Twin(self.model, dtype, only)
        self.twin.renew(self._open)

    def _open(self, net: nn.Module) -> None:
        """Take a new twin into use, once it is watched."""
        there = object.__new__(type(self))
        there.__dict__.update(self.__dict__, net=net)
        there.watch()
        self.net, self.overflows = net, False

    def watch(self) -> None:
        """Have taps see the twin's norms and attention outputs, and `projecting` its patches."""
        if self._products:
            multiply_patches(self.net)
        for index in range(self.depth):
            parts = self.parts(index)
            watch_tokens(parts.norm1, "n")
            watch_tokens(parts.out, "o")
            watch_tokens(parts.norm2, "u")
        projection = self.projection()
        if projection is not None:
            projection.register_forward_hook(_projected)

    def __getstate__(self) -> dict[str, Any]:
        made = ("net", "twin", "_views", "_lock", "_probing", "_products")
        return {key: value for key, value in self.__dict__.items() if key not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def renew(self) -> None:
        """Have the twin follow what was done to the model since: moved, given another head or hook, loaded anew.

        Everything that explains or measures does so by itself; whoever calls `embed`, `block` or `readout` does it
        with `batch` or `steady`.
        """
        settled: set[int] | None = getattr(_LOCAL, "settled", None)
        if settled is not None:
            if id(self) in settled:
                return
            settled.add(id(self))
        if self.twin.renew(self._open):
            self._suspect = True
        if self._suspect and self._checked:
            with self._lock:
                if self._suspect and not self._probing:  # the probe renews too
                    self._probing = True
                    try:
                        self.check()
                    finally:
                        self._probing = False

    @property
    def castable(self) -> bool:
        """Whether `view` can have it compute in another type."""
        return True

    def view(
        self, dtype: torch.dtype | None = None, products: bool = False, only: tuple[type[nn.Module], ...] | None = None
    ) -> Self:
        """The same anatomy over a twin whose weights (of the kinds of module in `only`) are a copy in another type.

        It is kept, and renewed by `steady`. `products`: the patch projection is one matrix product.
        """
        key = (dtype, products, only)
        with self._lock:
            if key not in self._views:
                self._views[key] = object.__new__(type(self))
                self._views[key].__dict__.update(self.__getstate__())
                self._views[key]._begin(dtype, products, only)
            self._views[key].__dict__.update(self.__getstate__())
            self._views[key]._checked = False  # it is what this one is, which is checked
            return self._views[key]

    def over(self, net: nn.Module, holder: Anatomy) -> Self:
        """The same anatomy over another copy of its model: a part of the twin of `holder`, which contains it."""
        there = object.__new__(type(self))
        there.__dict__.update(self.__dict__, net=net, _products=holder._products)
        return there

    def copied(self, dtype: torch.dtype) -> Self:
        """The same anatomy over a copy of the model, which may be changed, in this type."""
        there = object.__new__(type(self))
        there.__dict__.update(self.__getstate__())
        there.model = copy.deepcopy(self.model).requires_grad_(False).to(dtype)
        there._checked = False  # it is what this one is
        there._begin()
        return there

    def wide(self) -> Self:
        """Itself, or its view in float32 where the weights are of half precision: what relevance is computed in."""
        return self.view(torch.float32) if self.dtype in (torch.float16, torch.bfloat16) else self

    def check(self) -> None:
        """Run a probe through the twin, whole and in parts, and refuse a model whose parts do not make the whole.

        What the probe shows is believed over what the model says about itself: classes, tokens, width, and whether a
        block's attention can be seen.
        """
        from patchlight.anatomy.probe import probe, probe_head

        probe(self) if self.bare is None else probe_head(self, self.bare)
        self._checked, self._suspect = True, False

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

    def readout(self, tokens: Tensor) -> Tensor:
        """x_L [B,N,D] to logits [B,C]."""
        if self.head is None:
            return self.classified(tokens)
        return self.head(tokens) if self.head.block is not None else self.head(self.features(tokens))

    def features_of(self, images: Any) -> Tensor:
        """The features [B,E] of images (a tensor, PIL images or paths)."""
        with self.steady(), torch.no_grad():
            own = self if self.bare is None else self.bare
            return own.features(own.run(own.embed(self.place(to_batch(images, self.preprocess, self.channels)))))

    def whole(self, images: Tensor) -> Any:
        """What the model itself gives for images, run on the twin."""
        return self.net(images)

    def own_outputs(self, classes: int) -> Outputs:
        """How so many outputs of the model's own classifier are read."""
        return Outputs("binary" if classes == 1 and self._kind != "none" else self._kind)

    def ask(self, head: Head, bind: bool = True) -> Self:
        """The same model asked by another head: what its classes are, and how features become their logits.

        What the head needs of the model (features of reference images, of sentences) is computed anew, unless `bind` is
        False: then it stays what it was computed as.
        """
        bare = self if self.bare is None else self.bare
        asked = object.__new__(type(bare))
        bound = head.bound(bare) if bind else head
        asked.__dict__.update(bare.__getstate__(), head=bound, bare=bare)
        asked.classes, asked.labels, asked.assumed_labels = len(bound.labels), Names(bound.labels), False
        asked.outputs, asked.pooling = bound.outputs, bound.pooling or bare.pooling
        asked._begin()
        asked.check()
        return asked

    def encode_texts(self, prompts: Sequence[str]) -> Tensor:
        """The features [n,E] of sentences beside which those of images lie; of models with a text side alone."""
        raise Unsupported(
            f"{self.name} has no text side to read sentences with; give pl.heads.Texts(embeddings, labels), made by "
            "the text model that it was trained with"
        )

    def text_outputs(self) -> Outputs:
        """How similarities to texts become logits and probabilities."""
        return Outputs("cosine", 1.0)

    def first_row(self, tokens: Tensor, heads: int | None = None) -> Tensor:
        """The last block of a plain ViT on tokens [B,N,D], its output at the first token alone [B,1,D], by its parts.

        Only keys and values are computed for all tokens. `reads_first` says whether it may stand for the block; it may
        be computed with another number of `heads`, as if the block had them.
        """
        heads = self.heads if heads is None else heads
        parts: Any = self.parts(self.depth - 1)
        weight, bias = parts.qkv()
        size = len(weight) // 3
        n = parts.norm1(tokens)
        q = F.linear(n[:, :1], weight[:size], None if bias is None else bias[:size])
        both = F.linear(n, weight[size:], None if bias is None else bias[size:])
        k, v = both.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q.unflatten(-1, (heads, -1)).transpose(1, 2), k, v)
        attended = parts.out(o.transpose(1, 2).flatten(2))
        u = tokens[:, :1] + (attended if parts.scale1 is None else attended * parts.scale1)
        added = parts.fc2(parts.activation(parts.fc1(parts.norm2(u))))
        row: Tensor = u + (added if parts.scale2 is None else added * parts.scale2)
        return row

    def parts(self, index: int) -> Parts:
        """The named parts of a block."""
        return Parts()

    def no_linear_values(self) -> str | None:
        """Why the value and output projections of its blocks cannot be read as one linear map per head; else None."""
        blocks = [self.parts(i) for i in range(self.depth)]
        reason = f"{self.name} has no value and output projection that make one linear map per head"
        if any(b.value is None or b.out is None or b.qkv is None for b in blocks) or affine(blocks[0].out) is None:
            return reason
        try:
            blocks[0].qkv()  # type: ignore[misc]
        except Unsupported as error:
            return f"{reason}: {error}"
        return None

    def ends(self) -> Ends | None:
        """Embedding and head, where they are those of a plain ViT with a CLS token and a linear head; else None."""
        found = self.own_ends()
        if found is None or self.head is None:
            return found
        asked = self.head.linear()
        return None if asked is None else replace(found, head=asked)

    def own_ends(self) -> Ends | None:
        """The same with the model's own classifier."""
        return None

    def projection(self) -> nn.Module | None:
        """The module whose output is the projected patches, before prefix tokens and positions join them; else None."""
        return None

    @contextlib.contextmanager
    def projecting(self, change: Callable[[Tensor], Tensor | None] | None) -> Iterator[None]:
        """Inside, `change` sees the projected patches [B,P,D] of every `embed`, and what it returns replaces them.

        With None, nobody sees them.
        """
        if self.projection() is None:
            raise Unsupported(f"{self.name} has no patch projection to look at")
        before = getattr(_LOCAL, "change", None)
        _LOCAL.change = change
        try:
            yield
        finally:
            _LOCAL.change = before

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
        return self.outputs.alone

    @property
    def tokens(self) -> int:
        """N: prefix tokens and patches."""
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def tokens_read(self) -> int:
        """How many tokens the last block gives: fewer than N where patches were merged."""
        return self.tokens

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(p for p in self.net.parameters() if p.is_floating_point()).dtype

    def run(self, tokens: Tensor, start: int = 0, stop: int | None = None, keep: Tensor | None = None) -> Tensor:
        """Blocks start..stop-1 on `tokens`; `keep` [B,k] drops all other patches first, and keeps their positions."""
        if keep is not None:
            self.check_droppable()
            self._check_keep(tokens, keep)
            tokens = self.gather(tokens, keep)
        for index in range(start, self.depth if stop is None else stop):
            tokens = self.block(index, self.merge(index, tokens), keep)
        return tokens

    def check_droppable(self) -> None:
        if self.can_drop is not None:
            raise Unsupported(f"{self.name} cannot drop tokens: {self.can_drop}")

    def gather(self, tokens: Tensor, keep: Tensor, owner: Tensor | None = None) -> Tensor:
        """The prefix tokens and the patches at `keep` [V,k], in that order, of image owner[v] (None: one row each)."""
        places = self.places(keep)
        owner = torch.arange(len(keep), device=keep.device) if owner is None else owner
        rows = (places + tokens.shape[1] * owner[:, None]).flatten()
        return tokens.flatten(0, 1).index_select(0, rows).view(*places.shape, tokens.shape[2])

    def places(self, keep: Tensor) -> Tensor:
        """Where the prefix tokens and the patches at `keep` [V,k] stand among all tokens: [V,p+k]."""
        prefix = torch.arange(self.prefix, device=keep.device).expand(len(keep), -1)
        return torch.cat([prefix, keep + self.prefix], 1)

    def _check_keep(self, tokens: Tensor, keep: Tensor) -> None:
        patches = self.grid[0] * self.grid[1]
        if keep.ndim != 2 or keep.shape[0] != tokens.shape[0] or keep.is_floating_point():
            raise PatchlightError(
                f"keep has shape {list(keep.shape)} and dtype {keep.dtype}; give integer patch indices "
                f"[{tokens.shape[0]},k]"
            )
        if keep.numel() and not 0 <= int(keep.min()) <= int(keep.max()) < patches:
            raise PatchlightError(f"keep holds {int(keep.min())}..{int(keep.max())}; patches are 0 to {patches - 1}")

    def logits(self, images: Tensor) -> Tensor:
        """Logits [B,C] of preprocessed images, without gradients."""
        with self.steady(), torch.no_grad():
            return self.readout(self.run(self.embed(self.place(images))))

    def batch(self, images: Any) -> Tensor:
        """One preprocessed [B,C,H,W] tensor from tensors, PIL images or paths, where the model lives."""
        self.renew()
        return self.place(to_batch(images, self.preprocess, self.channels))

    def place(self, images: Tensor) -> Tensor:
        """Images where the model lives, in its type."""
        return images.to(self.device, self.dtype)

    def probabilities(self, logits: Tensor) -> Tensor:
        """What `outputs` says: a softmax, sigmoids, …; a binary output gives [1 - p, p]."""
        return probabilities(logits, self.outputs)

    def predict(self, images: Any, k: int = 5) -> list[list[tuple[str, float]]]:
        """For each image its first k classes as (label, probability), or (label, output) where not `probable`."""
        logits = self.logits(self.batch(images)).float()
        values = self.probabilities(logits) if self.probable else logits
        top = values.topk(min(k, self.outcomes), 1)
        rows = zip(top.values.tolist(), top.indices.tolist(), strict=True)
        return [[(self.label(i), p) for p, i in zip(*row, strict=True)] for row in rows]

    def label(self, index: int) -> str:
        if self.labels:
            return self.labels[index]
        return f"output {index}" if self.outputs.kind == "none" else f"class {index}"

    def patches(self, values: Tensor) -> Tensor:
        """Per-token values [B,N] to the patch grid [B,h,w]: the one place that drops prefix tokens."""
        return values[:, self.prefix :].reshape(-1, *self.grid)

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

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Inside, this thread looks once whether the model has changed, and its views follow once."""
        before = getattr(_LOCAL, "settled", None)
        _LOCAL.settled = set()
        try:
            self.renew()
            yield
        finally:
            _LOCAL.settled = before

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Inside, the twin is what the model is now, and computes in its own type whatever autocast surrounds it."""
        self.renew()
        with torch.autocast(self.device.type, enabled=False):
            yield

    def __repr__(self) -> str:
        grid, size = "x".join(map(str, self.grid)), "x".join(map(str, self.preprocess.size))
        return (
            f"<{self.name} ({self.library}): {self.depth} blocks of {self.heads} heads, {grid} patches of a {size} "
            f"image, {self.prefix} prefix tokens, {self.pooling} pooling, {self.classes} classes, {self.device}>"
        )


def undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """A function that computes what it means, whatever autocast or inference mode surrounds the call."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), contextlib.ExitStack() as around:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    around.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return call


_LOCAL = threading.local()
"""What this thread wants done to projected patches (the hook below stands on every twin for all threads), and which
anatomies it has settled."""


def _projected(module: nn.Module, given: Any, out: Tensor) -> Tensor | None:
    change: Callable[[Tensor], Tensor | None] | None = getattr(_LOCAL, "change", None)
    if torch.compiler.is_compiling() or change is None:
        return None
    if isinstance(module, nn.Conv2d):
        new = change(out.flatten(2).mT)
        return None if new is None else new.mT.reshape(out.shape)
    new = change(out.flatten(1, -2))
    return None if new is None else new.reshape(out.shape)


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


def check_finite(model: nn.Module, name: str) -> None:
    """Refuse a model with NaN or infinity in a weight, by the weight's name."""
    for key, value in model.named_parameters():
        if not bool(torch.isfinite(value.detach()).all()):
            raise PatchlightError(f"{name} has NaN or infinity in '{key}'; load sound weights")
