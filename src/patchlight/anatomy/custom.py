"""A module of one's own around a Vision Transformer: its forward is run, and crossed at the blocks of its backbone."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from patchlight.anatomy.contract import Parts, Pooling
from patchlight.anatomy.families import read_anatomy
from patchlight.anatomy.names import known_as, why_not
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.probe import BY_HAND, alike, distance, random_image
from patchlight.core.errors import AssumedPreprocess, PatchlightError, first_line, warn
from patchlight.core.images import Preprocess

if TYPE_CHECKING:
    from patchlight.anatomy.heads import Head

CUSTOM = ("output", "grid", "prefix", "pooling", "channels", "extent")
"""What `wrap` takes for a module of one's own beside what it takes for every model."""
Output = Callable[[Any], Any]
AtBlock = Callable[[Tensor, Callable[[], Any]], Any]
"""What is done where a forward calls a block: a function of the tokens it is given, and of the call itself."""


class CustomAnatomy(Anatomy):
    """A module whose forward calls a known Vision Transformer, the backbone, and does something of its own around it.

    Blocks are the backbone's. Before and behind them stands whatever the forward does: `embed` runs it until the first
    block is called, and `classified` runs it on a blank image, all blocks passed over, the last one giving the tokens.
    Which token the logits are read from is seen by their gradient.
    """

    library = "own"

    def __init__(
        self, model: nn.Module, *, path: str, backbone: Anatomy, output: Output | None, assumed: bool, **about: Any
    ) -> None:
        self.path, self.backbone, self.output = path, backbone, output
        code = getattr(output, "__code__", None)
        self.reading = "" if output is None else repr(output if code is None else (code.co_code, code.co_consts))
        self._assumed = assumed
        self._pooling_given = "pooling" in about
        self._in_tuples = False
        self._one_blank = True
        super().__init__(
            model,
            **{
                "grid": backbone.grid,
                "prefix": backbone.prefix,
                "pooling": backbone.pooling,
                "channels": backbone.channels,
                "extent": _scaled(backbone, about["preprocess"]),
                "heads": backbone.heads,
                "classes": 1,  # the probe counts them
                **about,
            },
        )

    @property
    def _inside(self) -> Anatomy:
        """The anatomy of the backbone, over the part of the twin that is its."""
        running = self.running
        if running.part[0] is not running.net:
            running.part = running.net, self.backbone.over(running.net.get_submodule(self.path), self)
        return cast(Anatomy, running.part[1])

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self._inside.blocks

    def watch(self) -> None:
        inside = self._inside
        inside.watch()
        for block in inside.blocks:
            block.__class__ = _crossed(cast(Any, type(block)))

    def embed(self, images: Tensor) -> Tensor:
        def stop(tokens: Tensor, call: Callable[[], Any]) -> Any:
            raise _Entered(tokens)

        try:
            with _at_blocks(stop), _flowing():
                self.net(images)
        except _Entered as entered:
            return entered.tokens
        raise PatchlightError(f"the forward of {self.name} never calls the blocks of '{self.path}'")

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return self._inside.block(index, tokens, positions)

    def features(self, tokens: Tensor) -> Tensor:
        """The backbone's: what another head than the module's own reads."""
        return self._inside.features(tokens)

    def classified(self, tokens: Tensor) -> Tensor:
        blank = torch.zeros(1, self.channels, *self.preprocess.size, device=tokens.device, dtype=self.dtype)
        return self._behind(tokens, blank if self._one_blank else blank.expand(len(tokens), -1, -1, -1))

    def _behind(self, tokens: Tensor, images: Tensor) -> Tensor:
        """What the forward makes of images when the last block gives `tokens`, and the others what they are given."""
        left = len(self.blocks)

        def leave(given: Tensor, call: Callable[[], Any]) -> Any:
            nonlocal left
            left -= 1
            out = given if left else tokens
            return (out,) if self._in_tuples else out

        with _at_blocks(leave), _flowing(), self._unprojected():
            return self._logits(self.net(images), len(tokens))

    def whole(self, images: Tensor) -> Tensor:
        return self._logits(self.net(images), len(images))

    def ask(self, head: Head, bind: bool = True) -> Self:
        """Another head reads the backbone's features, so what the module does behind them limits nothing."""
        asked = super().ask(head, bind)
        bound = cast("Head", asked.head)
        asked.pooling, asked.can_drop = bound.pooling or self.backbone.pooling, self.backbone.can_drop
        return asked

    def parts(self, index: int) -> Parts:
        return self._inside.parts(index)

    def projection(self) -> nn.Module | None:
        return self._inside.projection()

    def _unprojected(self) -> contextlib.AbstractContextManager[None]:
        """Nobody who looks at projected patches sees those of the blank image."""
        return contextlib.nullcontext() if self.projection() is None else self.projecting(None)

    def _logits(self, out: Any, rows: int) -> Tensor:
        """The logits [rows,C] among what the forward gives; one number for each image is one class."""
        if self.output is not None:
            try:
                found = self.output(out)
            except Exception as error:
                raise PatchlightError(
                    f"output fails on what {self.name} gives, which is {_described(out)}: {first_line(error)}"
                ) from error
            if not isinstance(found, Tensor):
                raise PatchlightError(
                    f"output gives {_described(found)} of what {self.name} gives, which is {_described(out)}; "
                    "it must give the tensor of logits [B,C]"
                )
        else:
            found = _picked(out, self.name)
        found = found[:, None] if found.ndim == 1 and len(found) == rows else found
        if found.ndim != 2 or len(found) != rows or found.shape[1] == 0 or not found.is_floating_point():
            kind = "" if found.is_floating_point() else f" of {str(found.dtype).removeprefix('torch.')}"
            images = "one image" if rows == 1 else f"{rows} images"
            raise PatchlightError(
                f"{self.name} gives a tensor {list(found.shape)}{kind} for {images}, not logits [{rows},C]; choose "
                "them with output=lambda out: …"
            )
        return found

    def check(self) -> None:
        """Cross the forward on a probe, and say what it does that cannot be crossed; then as every model."""
        stops = None if self.bare is not None else self._cross()
        super().check()
        self.gradient = self.gradient or stops

    def _cross(self) -> str | None:
        """Compare parts and whole, and see how the forward goes on behind the blocks; why no gradient flows there."""
        with torch.inference_mode(False), torch.no_grad(), self.steady():
            image = random_image(self)
            whole, end = self._see_calls(image)
            tokens = self.embed(image)
            if tokens.ndim != 3 or tokens.shape[1] != self.tokens:  # which is told of every model
                return None
            last = self.run(tokens)
            self._compare(whole, last, end, image)
            self._see_batches(last)
            self.can_drop = self._fixed(last)
            if self._assumed:
                self._tell_assumed(image, tokens)
            return self._see_pooling(last)

    def _see_calls(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the plain forward, and what its last block gave; every block must have been called once."""
        given: list[Any] = []

        def see(tokens: Tensor, call: Callable[[], Any]) -> Any:
            given.append(call())
            return given[-1]

        try:
            with _at_blocks(see):
                out = self.net(image)
        except Exception as error:
            raise PatchlightError(
                f"{self.name} does not take an image of shape {list(image.shape)}: {first_line(error)}; give "
                f"preprocess=pl.Preprocess((height, width)) and channels= of the images it takes, or {BY_HAND}"
            ) from error
        logits = self._logits(out, 1)
        calls, depth = len(given), self.depth
        if calls != depth:
            often = (
                f"runs its backbone '{self.path}' {calls // depth} times for one image, and only one run can be opened"
                if calls and calls % depth == 0
                else f"calls blocks of '{self.path}' {calls} times for one image, and there are {depth} of them"
            )
            raise PatchlightError(f"{self.name} {often}; wrap a module that runs it once, or {BY_HAND}")
        self._in_tuples = isinstance(given[-1], tuple)
        return logits, given[-1][0] if self._in_tuples else given[-1]

    def _compare(self, whole: Tensor, last: Tensor, end: Tensor, image: Tensor) -> None:
        """Refuse a forward that reads more than the tokens of the last block, and say what more."""
        try:
            logits = self._behind(last, torch.zeros_like(image))
        except Exception as error:
            raise PatchlightError(
                f"what {self.name} does behind its backbone cannot be run by itself: {first_line(error)}; {BY_HAND}"
            ) from error
        if alike(whole, logits):
            return
        if not alike(end, last):
            why, worst = "its forward, or a hook, does more at the blocks than call one after the other", (end, last)
        elif alike(whole, self._behind(last, image)):
            why, worst = "beside the tokens of the last block it reads the image", (whole, logits)
        else:
            why, worst = "it reads more than the tokens of the last block, those of other blocks say", (whole, logits)
        what = "tokens" if worst[0] is end else "logits"
        raise PatchlightError(
            f"{self.name} gives other {what} than its backbone and what follows it put together (they differ by "
            f"{distance(*worst):.2g}, the largest is {float(worst[0].abs().max()):.2g}): {why}; {BY_HAND}"
        )

    def _see_batches(self, last: Tensor) -> None:
        """Whether one blank image will do for a batch of any size: all but what asks the image for its length."""
        some = torch.cat([last, last.flip(2), last.roll(1, 2)])
        single = torch.cat([self.classified(row[None]) for row in some])
        for self._one_blank in (True, False):
            with contextlib.suppress(Exception):
                if alike(self.classified(some), single):
                    return
        raise PatchlightError(f"{self.name} gives an image other logits alone than in a batch; {BY_HAND}")

    def _fixed(self, last: Tensor) -> str | None:
        """Why tokens cannot be dropped: the backbone's reason, or what follows it takes no other number of them."""
        if self.backbone.can_drop is not None:
            return self.backbone.can_drop
        try:
            self.classified(last[:, : self.prefix + max(1, (self.tokens - self.prefix) // 2)])
        except Exception as error:
            return f"what follows its backbone takes {self.tokens} tokens and no fewer ({first_line(error)})"
        return None

    def _see_pooling(self, last: Tensor) -> str | None:
        """Find the pooling by the tokens that logits depend on; why there is no gradient, where there is none."""
        alike = last.mean(1, keepdim=True).expand_as(last) + 0  # all tokens the same
        sizes = [self._sizes(tokens) for tokens in (last, alike)]
        if sizes[0] is None or sizes[1] is None:
            return "what follows its backbone passes no gradient (a detach, inference_mode, or a step function)"
        reads, shares = sizes[0] > 1e-6 * sizes[0].max(), sizes[1] / sizes[1].sum()
        if not self._pooling_given:
            self.pooling = self._pooling(reads, shares if bool(shares.isfinite().all()) else sizes[0] / sizes[0].sum())
        return None

    def _sizes(self, tokens: Tensor) -> Tensor | None:
        """How large the gradient of the logits is at each token [N]; None where none flows."""
        with torch.enable_grad():
            leaf = tokens.detach().requires_grad_()
            logits = self.classified(leaf)
            if not logits.requires_grad:
                return None
            weights = torch.randn(3, logits.shape[1], generator=torch.Generator().manual_seed(0)).to(logits)
            options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
            found = torch.stack([torch.autograd.grad(logits, leaf, w[None], **options)[0][0] for w in weights])
        return found.float().norm(dim=2).sum(0) if bool(found.any()) else None

    def _pooling(self, reads: Tensor, shares: Tensor) -> Pooling:
        """By which tokens are read [N], and the share of each in the gradient where all tokens are the same [N].

        A mean over all tokens is read as one over patches, and patches that weigh differently as if alike: that is what
        `pool_row` can say. The backbone's attention pooling stays what it is.
        """
        first, patches = self.prefix > 0 and bool(reads[0]), bool(reads[self.prefix :].any())
        if self.backbone.pooling == "map" and patches:
            return "map"
        if self.backbone.pooling == "cls+dist" and first and bool(reads[1]) and not patches:
            return "cls+dist"
        if first and not patches:
            return "cls"
        if patches:
            return "cls+avg" if first and float(shares[0]) > 2 * float(shares[self.prefix :].mean()) else "avg"
        return self.backbone.pooling

    def _tell_assumed(self, image: Tensor, tokens: Tensor) -> None:
        """Warn where images are changed before the backbone, whose preprocessing then need not be the module's."""
        try:
            plain = self._inside.embed(image)
        except Exception:
            return
        if plain.shape == tokens.shape and not alike(plain, tokens):
            given = self.preprocess
            warn(
                f"{self.name} changes images, or their tokens, before the blocks of '{self.path}', whose preprocessing "
                f"(mean {list(given.mean)}, std {list(given.std)}) is assumed; give preprocess=pl.Preprocess("
                f"{given.size}, mean=…, std=…) if it takes other images",
                AssumedPreprocess,
            )
        self._assumed = False


def read_custom(model: nn.Module, about: dict[str, Any]) -> Anatomy | None:
    """The anatomy of a module around one known Vision Transformer; None where there is none in it."""
    kind = str(about.get("name") or type(model).__name__)
    found = _backbones(model, about)
    if not found:
        return None
    anatomies = {path: _around(model, path, backbone, about, kind) for path, backbone in found.items()}
    if len(anatomies) > 1:
        anatomies = {path: vit for path, vit in anatomies.items() if _enters(vit)} or anatomies
    if len(anatomies) > 1:
        named = " and ".join(f"'{path}' ({type(vit.backbone.model).__name__})" for path, vit in anatomies.items())
        raise PatchlightError(
            f"{kind} has more than one Vision Transformer in it: {named}; wrap a module that runs one of them, or "
            + BY_HAND
        )
    return next(iter(anatomies.values()))


def _around(model: nn.Module, path: str, backbone: Anatomy, about: dict[str, Any], kind: str) -> CustomAnatomy:
    if backbone.hierarchical:
        inner = type(backbone.model).__name__
        raise PatchlightError(
            f"{kind} is built around '{path}', a {inner}, which has stages and no blocks to cross; wrap the {inner} "
            f"itself, or {BY_HAND}"
        )
    taken = {key: about[key] for key in ("labels", "sigmoid", "regression", *CUSTOM[1:]) if key in about}
    return CustomAnatomy(
        model,
        path=path,
        backbone=backbone,
        output=about.get("output"),
        assumed="preprocess" not in about and "processor" not in about,
        name=kind,
        preprocess=about.get("preprocess", backbone.preprocess),
        **taken,
    )


def _backbones(model: nn.Module, about: dict[str, Any]) -> dict[str, Anatomy]:
    """The outermost modules that a family knows, by their paths in the twin, where nothing is compiled."""
    found: dict[str, Anatomy] = {}
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        module = module._modules.get("_orig_mod") or module
        if id(module) in seen:
            continue
        seen.add(id(module))
        backbone = _read_backbone(module, about)
        if backbone is not None:
            found[path] = backbone
            continue
        waiting += [(f"{path}.{name}".lstrip("."), m) for name, m in module._modules.items() if m is not None]
    return dict(sorted(found.items()))


def _read_backbone(module: nn.Module, about: dict[str, Any]) -> Anatomy | None:
    """The anatomy of a module, for images as given where its grid follows them, else for those it is made for."""
    known, of = known_as(module)
    if of and why_not(known, of) is not None:  # some other network of timm's
        return None
    stage = {key: about[key] for key in ("stage",) if key in about}
    given: dict[str, Any] = {key: about[key] for key in ("preprocess", "processor") if key in about}
    if "preprocess" in given:
        own = _native(module)
        if own is not None and own != given["preprocess"].size:
            given = {"preprocess": replace(given["preprocess"], size=own)}
    return read_anatomy(module, {**stage, **given})


def _native(module: Any) -> tuple[int, int] | None:
    """The size of the images that a backbone takes, where it says so and takes no other."""
    config = getattr(module, "config", None)
    if getattr(module, "dynamic_img_size", False) or type(module).__name__.startswith("Dinov2"):
        return None
    size = getattr(getattr(module, "patch_embed", None), "img_size", None)
    size = getattr(getattr(config, "vision_config", config), "image_size", size)
    if isinstance(size, int):
        return size, size
    return None if size is None else (int(size[0]), int(size[1]))


def _scaled(backbone: Anatomy, preprocess: Preprocess) -> tuple[int, int]:
    """The pixels that the grid covers, where the module resizes its images for the backbone."""
    sides = zip(backbone.extent, preprocess.size, backbone.preprocess.size, strict=True)
    height, width = (round(covered * given / taken) for covered, given, taken in sides)
    return height, width


def _enters(vit: CustomAnatomy) -> bool:
    """Whether the forward reaches the backbone."""
    image = vit.place(torch.zeros(1, vit.channels, *vit.preprocess.size))
    try:
        with torch.no_grad(), vit.steady():
            vit.embed(image)
    except Exception:
        return False
    return True


def _picked(out: Any, name: str) -> Tensor:
    """The logits of what a forward gives: called so, the only tensor, or the first of a tuple."""
    if isinstance(out, Tensor):
        return out
    logits = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    values = list(out.values()) if isinstance(out, Mapping) else list(out) if isinstance(out, tuple | list) else []
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) == 1 or (tensors and not isinstance(out, Mapping) and tensors[0] is values[0]):
        return tensors[0]
    choose = "out['…']" if isinstance(out, Mapping) else "…"
    raise PatchlightError(f"{name} gives {_described(out)}; choose the logits [B,C] with output=lambda out: {choose}")


def _described(value: Any) -> str:
    """A value in words: a tensor by its shape, a dictionary by its keys."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return f"a {kind} with the keys {', '.join(map(repr, value))}" if value else f"an empty {kind}"
    if isinstance(value, tuple | list):
        return f"a {kind} of {', '.join(type(v).__name__ for v in value)}" if value else f"an empty {kind}"
    return "None" if value is None else f"a {kind}"


class _Entered(BaseException):
    """The first block was called with these tokens; no handler of the module's own is to catch it."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self.tokens = tokens


_LOCAL = threading.local()
"""What this thread does where the forward around a backbone calls a block; twins are shared by all threads."""


@contextlib.contextmanager
def _at_blocks(what: AtBlock) -> Iterator[None]:
    _LOCAL.at_block = what
    try:
        yield
    finally:
        _LOCAL.at_block = None


@cache
def _crossed(kind: type[nn.Module]) -> Any:
    """A block of this kind that can be passed over, its hooks with it."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        what: AtBlock | None = getattr(_LOCAL, "at_block", None)
        if what is None:
            return kind.__call__(self, *args, **kwargs)
        tokens = args[0] if args else next(iter(kwargs.values()))
        return what(tokens, lambda: kind.__call__(self, *args, **kwargs))

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


class _Flowing(TorchFunctionMode):
    """Inside, a forward that runs its backbone under `no_grad`, as one that trains its head alone does, does not."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch._C._set_grad_enabled and not _ours(sys._getframe(1)):
            return None
        return func(*args, **(kwargs or {}))


def _ours(frame: Any) -> bool:
    """Whether it is a function of Patchlight's that asks torch, and not the module."""
    while str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch" and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "patchlight"


def _flowing() -> contextlib.AbstractContextManager[Any]:
    return _Flowing() if torch.is_grad_enabled() else contextlib.nullcontext()
