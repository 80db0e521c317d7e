"""An opened model: its twin, and views of it in other types, with other heads, over other copies of its weights."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from patchlight.anatomy.contract import Pooling, affine
from patchlight.anatomy.outputs import Readout
from patchlight.anatomy.probe import probe, probe_head
from patchlight.anatomy.twin import Twin, multiply_patches
from patchlight.anatomy.watching import watch_tokens
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.core.fingerprints import hash_images
from patchlight.core.images import Preprocess, to_batch
from patchlight.core.inputs import ArrayPreprocess
from patchlight.core.layout import IMAGE_AXES, Geometry, Layout
from patchlight.core.targets import UnsplitLabels

if TYPE_CHECKING:
    from patchlight.anatomy.heads import Head

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Computing:
    """How a twin computes: in another type (for the module types in `only`), with patches as one matrix product."""

    dtype: torch.dtype | None = None
    products: bool = False
    only: tuple[type[nn.Module], ...] | None = None


@dataclass
class Running:
    """What one view of a model runs on: its twin, the copy of the model now in use, and views made of it."""

    twin: Twin
    net: Any = None
    views: dict[Any, Anatomy] = field(default_factory=dict)
    """By how they compute, or by the size of their images."""
    lock: Any = field(default_factory=threading.RLock)
    probing: bool = False
    sites: Any = None
    """For a model whose forward is crossed: its blocks, and how it calls them."""
    prepared: dict[Any, Any] = field(default_factory=dict)
    """Questions that were prepared for images."""
    part: tuple[Any, Any] = (None, None)
    """The copy in use, and the anatomy of the model inside it, or the functions that describe it, over this copy."""


class Anatomy(Readout):
    """A Vision Transformer, opened: `readout(run(embed(images)))` equals `model(images)`.

    `model` is the user's module and is only read; everything runs on `net`, a twin of it. `Contract` lists what a
    family defines, and `Readout` what the outputs mean. `preprocess` is how images are prepared, `channels` their
    number of channels; `input_shape` is the shape of one input without the batch, (channels, height, width) for images.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str,
        grid: tuple[int, ...],
        prefix: int,
        pooling: Pooling,
        heads: int,
        classes: int,
        preprocess: Preprocess,
        labels: Sequence[str] | None = None,
        sigmoid: bool | None = None,
        regression: bool = False,
        channels: int = 3,
        extent: tuple[int, ...] | None = None,
        suffix: int = 0,
        axes: tuple[str, ...] = IMAGE_AXES,
        order: Sequence[int] | Tensor | None = None,
        geometry: Geometry | None = None,
        input_shape: tuple[int, ...] | None = None,
    ) -> None:
        self.model, self.name = model, name
        self.layout = Layout(grid, prefix, suffix, axes, None if order is None else tuple(order))
        self.pooling, self.heads = pooling, heads
        self.channels = channels
        self.input_shape = (channels, *preprocess.size) if input_shape is None else tuple(input_shape)
        size = self.input_shape[-len(self.grid) :]
        self.geometry = Geometry.even(self.grid, size, extent) if geometry is None else geometry
        if self.layout.inputs != "images":
            preprocess = ArrayPreprocess.of(preprocess, self.input_shape, self.layout, self.geometry)
        self.preprocess = preprocess
        self.classes, self.labels = classes, None if labels is None else list(labels)
        self._kind = "none" if regression else "sigmoid" if sigmoid else "softmax"
        self.outputs = self.own_outputs(classes)
        self.attention: str | None = None
        """None if a block's attention matrix can be read, otherwise the reason why not."""
        self.gradient: str | None = None
        """None if gradients flow through the blocks, otherwise the reason why not."""
        self.reads_first = False
        """Whether the logits depend on the first token alone, so that `first_row` is enough."""
        self.moved: Mapping[int, Sequence[int]] = {}
        """Neurons of the MLPs, by block, that write to an additional token."""
        self.overflows = False
        """Whether float16 was found to overflow."""
        self.width = 0
        self._checked = self._suspect = False
        self._computing = Computing()
        self.running = self._begin()

    @cached_property
    def running(self) -> Running:
        """What it runs on; a copy of an anatomy starts without one and creates it on first use."""
        return self._begin()

    def _begin(self) -> Running:
        running = Running(Twin(self.model, self._computing.dtype, self._computing.only, self.spared))
        running.twin.renew(lambda net: self._use(running, net))
        return running

    def _use(self, running: Running, net: nn.Module) -> None:
        """Start to use a new copy of the model, after hooks are added to it."""
        self.copy_with(running=replace(running, net=net)).watch()
        running.net, self.overflows = net, False

    def copy_with(self, **changes: Any) -> Self:
        """The same anatomy with other attributes; without a twin, unless `running` is among them."""
        other = copy.copy(self)
        for key, value in changes.items():
            setattr(other, key, value)
        return other

    def __getstate__(self) -> dict[str, Any]:
        """The state that is copied and pickled."""
        return {key: value for key, value in self.__dict__.items() if key != "running"}

    @property
    def net(self) -> Any:
        """The module that is run."""
        return self.running.net

    @property
    def twin(self) -> Twin:
        """The copy of the model that everything runs on."""
        return self.running.twin

    def watch(self) -> None:
        """Let taps observe the twin's norms and attention outputs, and `projecting` its patches."""
        if self._computing.products:
            multiply_patches(self.net)
        for index in range(self.depth):
            parts = self.parts(index)
            watch_tokens(parts.norm1, "n")
            watch_tokens(parts.out, "o")
            watch_tokens(parts.norm2, "u")
        projection = self.projection()
        if projection is not None:
            projection.register_forward_hook(_projected)

    def renew(self) -> None:
        """Update the twin after changes to the model: moved, a new head or hook, weights loaded again.

        Everything that explains or measures does this automatically; if you call `embed`, `block` or `readout`
        yourself, use `batch` or `steady`.
        """
        if self.bare is not None and self.bare.running is self.running:
            self.bare.renew()
            return
        settled: set[int] | None = getattr(_LOCAL, "settled", None)
        if settled is not None:
            if id(self.running) in settled:
                return
            settled.add(id(self.running))
        running = self.running
        if running.twin.renew(lambda net: self._use(running, net)):
            self._suspect = True
        if self._suspect and self._checked:
            with running.lock:
                if self._suspect and not running.probing:  # the probe also renews
                    running.probing = True
                    try:
                        self.check()
                    finally:
                        running.probing = False

    @property
    def castable(self) -> bool:
        """Whether `view` can compute in another type."""
        return True

    def view(
        self, dtype: torch.dtype | None = None, products: bool = False, only: tuple[type[nn.Module], ...] | None = None
    ) -> Self:
        """The same anatomy over a twin whose weights (of the module types in `only`) are a copy in another type.

        It is cached, and updated by `steady`. `products`: the patch projection is one matrix product.
        """
        computing, views = Computing(dtype, products, only), self.running.views
        with self.running.lock:
            if computing not in views:
                views[computing] = self.copy_with(_computing=computing)
            view = cast(Self, views[computing])
            if self.question is not None:  # several questions share it
                view = view.copy_with(running=view.running)
            view._follow(self, computing)
        return view

    def _follow(self, other: Anatomy, computing: Computing) -> None:
        """Copy what is known about another anatomy of the same model, which has been checked."""
        vars(self).update(other.__getstate__(), _computing=computing, _checked=False)

    def extended(self, kind: Any, **changes: Any) -> Self:
        """The same anatomy with other attributes, and with the methods that a subclass of `Anatomy` replaces."""
        other = self.copy_with(**changes)
        other.__class__ = type(kind.__name__, (kind, type(self)), {"__module__": kind.__module__})
        return other

    def over(self, net: nn.Module, holder: Anatomy) -> Self:
        """The same anatomy over a part of the twin of `holder`, a model that contains it."""
        return self.copy_with(running=replace(self.running, net=net), _computing=holder._computing)

    def resized(self, grid: tuple[int, int], size: tuple[int, int], bare: Self | None) -> Self:
        """The same anatomy for inputs of another size, on the same twin; `bare` is that size without the head."""
        return self.copy_with(
            layout=replace(self.layout, grid=grid),
            geometry=Geometry.even(grid, size),
            preprocess=replace(self.preprocess, size=size),
            input_shape=(self.channels, *size),
            bare=bare,
            running=self.running,
        )

    def copied(self, dtype: torch.dtype) -> Self:
        """The same anatomy over a copy of the model in this type, which may be changed."""
        model = copy.deepcopy(self.model).requires_grad_(False).to(dtype)
        return self.copy_with(model=model, _checked=False, _computing=Computing())  # the same model

    def wide(self) -> Self:
        """The anatomy itself, or its float32 view if the weights are in half precision; relevance needs float32."""
        return self.view(torch.float32) if self.dtype in (torch.float16, torch.bfloat16) else self

    def ask(self, head: Head, bind: bool = True) -> Self:
        """The same model with another head, which defines the classes and their logits.

        What the head needs of the model (features of reference images or sentences) is computed again, unless `bind` is
        False.
        """
        bare = self if self.bare is None else self.bare
        bound = head.bound(bare) if bind else head
        other = bare.copy_with(
            head=bound,
            bare=bare,
            classes=len(bound.labels),
            labels=UnsplitLabels(bound.labels),
            assumed_labels=False,
            outputs=bound.outputs,
            pooling=bound.pooling or bare.pooling,
            _computing=Computing(),
        )
        if other.question is None:
            other.check()
        elif bare._computing == other._computing:  # questions about the output run on the same twin
            other.running = bare.running
        return other

    def prepared(self, image: Tensor, size: tuple[int, int] | None = None) -> Self:
        """The model with its question prepared for one image; itself if its head is the same for every image.

        What is found for an image is cached for the last few images.

        Args:
            image: The preprocessed image [1,...].
            size: Width and height of its photograph, if it has one.
        """
        question, bare = self.question, self.bare
        if question is None or bare is None or question.image == hash_images(image):
            return self
        question = question.general or question
        cache, key = self.running.prepared, (question, hash_images(image), size)
        if key not in cache:
            while len(cache) >= _PREPARED:
                del cache[next(iter(cache))]
            with bare.settled(), torch.inference_mode(False):
                cache[key] = question.for_image(bare, bare.place(image), size)
        head = cache[key]
        paired = head.outputs.kind == "paired"
        return self.copy_with(
            head=head,
            classes=len(head.labels) * (2 if paired else 1),
            labels=UnsplitLabels(head.labels),
            outputs=head.outputs,
            running=self.running,
        )

    def check(self) -> None:
        """Run a probe through the twin, whole and in parts, and refuse a model whose parts do not make the whole.

        The probe's results override what the model reports about itself: classes, tokens, width, and whether the
        attention of a block can be read.
        """
        probe(self) if self.bare is None else probe_head(self, self.bare)
        self._checked, self._suspect = True, False

    def features_of(self, images: Any) -> Tensor:
        """The features [B,E] of images (a tensor, PIL images or paths)."""
        with self.steady(), torch.no_grad():
            own = self if self.bare is None else self.bare
            return own.features(own.run(own.embed(self.place(to_batch(images, self.preprocess, self.channels)))))

    def first_row(self, tokens: Tensor, heads: int | None = None) -> Tensor:
        """The output of the last block of a plain ViT at the first token alone [B,1,D], from tokens [B,N,D].

        Only keys and values are computed for all tokens. Valid only if `reads_first`; `heads` computes the block as if
        it had another number of heads.
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

    def no_linear_values(self) -> str | None:
        """Why value and output projections cannot be read as one linear map per head; None if they can."""
        blocks = [self.parts(i) for i in range(self.depth)]
        reason = f"{self.name} has no value and output projection that make one linear map per head"
        if any(b.value is None or b.out is None or b.qkv is None for b in blocks) or affine(blocks[0].out) is None:
            return reason
        try:
            blocks[0].qkv()  # type: ignore[misc]
        except Unsupported as error:
            return f"{reason}: {error}"
        return None

    @contextlib.contextmanager
    def projecting(self, change: Callable[[Tensor], Tensor | None] | None) -> Iterator[None]:
        """Inside, `change` gets the projected patches [B,P,D] of every `embed`, and its result replaces them.

        None disables an outer `change`.
        """
        if self.projection() is None:
            raise Unsupported(f"{self.name} has no readable patch projection")
        before = getattr(_LOCAL, "change", None)
        _LOCAL.change = change
        try:
            yield
        finally:
            _LOCAL.change = before

    @property
    def device(self) -> torch.device:
        """The device of the model's weights."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type that the model computes in."""
        net: nn.Module = self.net
        return next(p for p in net.parameters() if p.is_floating_point()).dtype

    def run(self, tokens: Tensor, start: int = 0, stop: int | None = None, keep: Tensor | None = None) -> Tensor:
        """Run blocks start..stop-1 on `tokens`; `keep` [B,k] first drops all other patches; positions stay."""
        if keep is not None:
            self.check_droppable()
            self._check_keep(tokens, keep)
            tokens = self.gather(tokens, keep)
        for index in range(start, self.depth if stop is None else stop):
            tokens = self.block(index, self.merge(index, tokens), keep)
        return tokens

    def check_droppable(self) -> None:
        """Raise Unsupported if tokens cannot be dropped."""
        if self.can_drop is not None:
            raise Unsupported(f"{self.name} cannot drop tokens: {self.can_drop}")

    def gather(self, tokens: Tensor, keep: Tensor, owner: Tensor | None = None) -> Tensor:
        """The tokens at `places(keep)` of image owner[v] (None: one row each)."""
        places = self.places(keep)
        owner = torch.arange(len(keep), device=keep.device) if owner is None else owner
        rows = (places + tokens.shape[1] * owner[:, None]).flatten()
        return tokens.flatten(0, 1).index_select(0, rows).view(*places.shape, tokens.shape[2])

    def places(self, keep: Tensor) -> Tensor:
        """Indices [V,p+k+s] of the prefix tokens, the patches at `keep` [V,k] and the suffix among all tokens."""
        return self.layout.places(keep)

    def _check_keep(self, tokens: Tensor, keep: Tensor) -> None:
        patches = self.cells
        if keep.ndim != 2 or keep.shape[0] != tokens.shape[0] or keep.is_floating_point():
            raise PatchlightError(
                f"keep has shape {list(keep.shape)} and dtype {keep.dtype}; give integer patch indices "
                f"[{tokens.shape[0]},k]"
            )
        if keep.numel() and not 0 <= int(keep.min()) <= int(keep.max()) < patches:
            raise PatchlightError(f"keep contains {int(keep.min())}..{int(keep.max())}; patches are 0 to {patches - 1}")

    def logits(self, images: Tensor) -> Tensor:
        """Logits [B,C] of preprocessed images, without gradients."""
        with self.steady(), torch.no_grad():
            return self.readout(self.run(self.embed(self.place(images))))

    def batch(self, images: Any) -> Tensor:
        """One preprocessed [B,C,H,W] tensor from tensors, PIL images or paths, on the model's device."""
        self.renew()
        return self.place(to_batch(images, self.preprocess, self.channels))

    def fit(self, images: Any) -> tuple[Self, Any]:
        """The anatomy for these inputs, whose size may differ from call to call, and the inputs as it takes them."""
        return self, images

    def place(self, images: Tensor) -> Tensor:
        """Images on the device and in the type of the model."""
        return images.to(self.device, self.dtype)

    def predict(self, images: Any, k: int = 5) -> list[list[tuple[str, float]]]:
        """The top k classes of each image as (label, probability), or (label, output) if not `probable`."""
        logits = self.logits(self.batch(images)).float()
        values = self.probabilities(logits) if self.probable else logits
        top = values.topk(min(k, self.outcomes), 1)
        rows = zip(top.values.tolist(), top.indices.tolist(), strict=True)
        return [[(self.label(i), p) for p, i in zip(*row, strict=True)] for row in rows]

    def patches(self, values: Tensor) -> Tensor:
        """Per-token values [B,N] to the grid [B,*grid], without prefix and suffix."""
        return self.layout.of_cells(values).reshape(-1, *self.grid)

    def channels_first(self, images: Tensor) -> Tensor:
        """Inputs [B,*input_shape] as [B,C,*size], the axes in the order of the grid's; images are that already."""
        return self.geometry.channels_first(images)

    def as_input(self, images: Tensor) -> Tensor:
        """The inverse of `channels_first`."""
        return self.geometry.as_input(images, len(self.input_shape) > len(self.grid))

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Inside, this thread checks only once whether the model has changed."""
        before = getattr(_LOCAL, "settled", None)
        _LOCAL.settled = set()
        try:
            self.renew()
            yield
        finally:
            _LOCAL.settled = before

    def own_cast(self) -> contextlib.AbstractContextManager[Any]:
        """The arithmetic of this view: autocast where only some of its modules are in another type."""
        low = self._computing
        return torch.autocast(self.device.type, low.dtype, enabled=low.only is not None)

    def record_calls(self) -> None:
        """Record how the forward calls the blocks, before taps watch them."""

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Inside, the twin matches the model as it is now and computes in its own type, regardless of autocast."""
        self.renew()
        with torch.autocast(self.device.type, enabled=False):
            yield

    def __repr__(self) -> str:
        grid, size = "x".join(map(str, self.grid)), "x".join(map(str, self.geometry.size))
        return (
            f"<{self.name} ({self.library}): {self.depth} blocks of {self.heads} heads, {grid} patches of a {size} "
            f"image, {self.prefix} prefix tokens, {self.pooling} pooling, {self.classes} classes, {self.device}>"
        )


def undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """A function that computes the same inside and outside autocast or inference mode."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), contextlib.ExitStack() as around:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    around.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return call


_PREPARED = 8
"""The number of images whose prepared questions are kept."""
_LOCAL = threading.local()
"""What this thread does to projected patches (the hook below is on every twin, for all threads), and which
anatomies it has settled."""


def _projected(module: nn.Module, given: Any, out: Tensor) -> Tensor | None:
    change: Callable[[Tensor], Tensor | None] | None = getattr(_LOCAL, "change", None)
    if torch.compiler.is_compiling() or change is None:
        return None
    if isinstance(module, _ConvNd):
        new = change(out.flatten(2).mT)
        return None if new is None else new.mT.reshape(out.shape)
    new = change(out.flatten(1, -2))
    return None if new is None else new.reshape(out.shape)


def check_finite(model: nn.Module, name: str) -> None:
    """Refuse a model with NaN or infinity in a weight, by the weight's name."""
    for key, value in model.named_parameters():
        if not bool(torch.isfinite(value.detach()).all()):
            raise PatchlightError(f"{name} has NaN or infinity in '{key}'; load intact weights")
