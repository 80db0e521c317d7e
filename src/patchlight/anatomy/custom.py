"""User modules that contain a Vision Transformer: their forward is run and intercepted at the backbone's blocks."""

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
"""Keywords of `wrap` for a user's module, in addition to those for every model."""
Output = Callable[[Any], Any]
AtBlock = Callable[[Tensor, Callable[[], Any]], Any]
"""Called where a forward calls a block, with the tokens and the call itself."""


class CustomAnatomy(Anatomy):
    """A module whose forward calls a known Vision Transformer, the backbone.

    The blocks are those of the backbone. `embed` runs the forward until the first block is called. `classified` runs it
    on a blank image and skips all blocks; the last one returns the tokens. The gradient of the logits shows which
    tokens are read.
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
        """The anatomy of the backbone, over its part of the twin."""
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
            block.__class__ = _skippable(cast(Any, type(block)))

    def embed(self, images: Tensor) -> Tensor:
        def stop(tokens: Tensor, call: Callable[[], Any]) -> Any:
            raise _Entered(tokens)

        try:
            with _at_blocks(stop), _flowing():
                self.net(images)
        except _Entered as entered:
            return entered.tokens
        raise PatchlightError(f"the forward of {self.name} does not call the blocks of '{self.path}'")

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return self._inside.block(index, tokens, positions)

    def features(self, tokens: Tensor) -> Tensor:
        """The backbone's features, for heads other than the module's own."""
        return self._inside.features(tokens)

    def classified(self, tokens: Tensor) -> Tensor:
        blank = torch.zeros(1, *self.input_shape, device=tokens.device, dtype=self.dtype)
        return self._behind(tokens, blank if self._one_blank else blank.expand(len(tokens), -1, -1, -1))

    def _behind(self, tokens: Tensor, images: Tensor) -> Tensor:
        """The output of the forward when the last block returns `tokens` and the others return their input."""
        left = len(self.blocks)

        def leave(given: Tensor, call: Callable[[], Any]) -> Any:
            nonlocal left
            left -= 1
            out = given if left else tokens
            return (out,) if self._in_tuples else out

        with _at_blocks(leave), _flowing(), self._hide_projection():
            return self._logits(self.net(images), len(tokens))

    def whole(self, images: Tensor) -> Tensor:
        return self._logits(self.net(images), len(images))

    def ask(self, head: Head, bind: bool = True) -> Self:
        """Use another head on the backbone's features, which the module's own head does not limit."""
        asked = super().ask(head, bind)
        bound = cast("Head", asked.head)
        asked.pooling, asked.can_drop = bound.pooling or self.backbone.pooling, self.backbone.can_drop
        return asked

    def parts(self, index: int) -> Parts:
        return self._inside.parts(index)

    def projection(self) -> nn.Module | None:
        return self._inside.projection()

    def _hide_projection(self) -> contextlib.AbstractContextManager[None]:
        """Hide the projected patches of the blank image from taps."""
        return contextlib.nullcontext() if self.projection() is None else self.projecting(None)

    def _logits(self, out: Any, rows: int) -> Tensor:
        return logits_of(out, rows, self.output, self.name)

    def check(self) -> None:
        """Check that the forward can be intercepted at the blocks, then check it like every model."""
        stops = None if self.bare is not None else self._cross()
        super().check()
        self.gradient = self.gradient or stops

    def _cross(self) -> str | None:
        """Compare parts and whole, and find the pooling; returns why no gradient flows there, or None."""
        with torch.inference_mode(False), torch.no_grad(), self.steady():
            image = random_image(self)
            whole, end = self._see_calls(image)
            tokens = self.embed(image)
            if tokens.ndim != 3 or tokens.shape[1] != self.tokens:  # reported for every model
                return None
            last = self.run(tokens)
            self._compare(whole, last, end, image)
            self._see_batches(last)
            self.can_drop = self._fixed(last)
            if self._assumed:
                self._warn_assumed(image, tokens)
            return self._see_pooling(last)

    def _see_calls(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the plain forward and the output of its last block; every block must have been called once."""
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
                else f"calls blocks of '{self.path}' {calls} times for one image, but has {depth} blocks"
            )
            raise PatchlightError(f"{self.name} {often}; wrap a module that runs it once, or {BY_HAND}")
        self._in_tuples = isinstance(given[-1], tuple)
        return logits, given[-1][0] if self._in_tuples else given[-1]

    def _compare(self, whole: Tensor, last: Tensor, end: Tensor, image: Tensor) -> None:
        """Refuse a forward that reads more than the tokens of the last block, and say what."""
        try:
            logits = self._behind(last, torch.zeros_like(image))
        except Exception as error:
            raise PatchlightError(
                f"what {self.name} does behind its backbone cannot be run by itself: {first_line(error)}; {BY_HAND}"
            ) from error
        if alike(whole, logits):
            return
        if not alike(end, last):
            why, worst = "its forward, or a hook, does more than call one block after the other", (end, last)
        elif alike(whole, self._behind(last, image)):
            why, worst = "its head also reads the image", (whole, logits)
        else:
            why, worst = (
                "its head reads more than the tokens of the last block, for example those of other blocks",
                (whole, logits),
            )
        what = "tokens" if worst[0] is end else "logits"
        raise PatchlightError(
            f"{self.name} gives other {what} than its backbone and head put together (they differ by "
            f"{distance(*worst):.2g}, the largest is {float(worst[0].abs().max()):.2g}): {why}; {BY_HAND}"
        )

    def _see_batches(self, last: Tensor) -> None:
        """Check that one blank image works for a batch of any size, unless the forward reads the batch size."""
        some = torch.cat([last, last.flip(2), last.roll(1, 2)])
        single = torch.cat([self.classified(row[None]) for row in some])
        for self._one_blank in (True, False):
            with contextlib.suppress(Exception):
                if alike(self.classified(some), single):
                    return
        raise PatchlightError(
            f"{self.name} gives an image other logits alone than in a batch, which is not supported; {BY_HAND}"
        )

    def _fixed(self, last: Tensor) -> str | None:
        """Why tokens cannot be dropped: the backbone's reason, or a head that needs all of them."""
        if self.backbone.can_drop is not None:
            return self.backbone.can_drop
        try:
            self.classified(last[:, : self.prefix + max(1, (self.tokens - self.prefix) // 2)])
        except Exception as error:
            return f"its head takes exactly {self.tokens} tokens ({first_line(error)})"
        return None

    def _see_pooling(self, last: Tensor) -> str | None:
        """Find the pooling from the tokens that the logits depend on; returns why there is no gradient, or None."""
        alike = last.mean(1, keepdim=True).expand_as(last) + 0  # all tokens the same
        sizes = [self._sizes(tokens) for tokens in (last, alike)]
        if sizes[0] is None or sizes[1] is None:
            return "its head passes no gradient (a detach, inference_mode, or a step function)"
        reads, shares = sizes[0] > 1e-6 * sizes[0].max(), sizes[1] / sizes[1].sum()
        if not self._pooling_given:
            self.pooling = self._pooling(reads, shares if bool(shares.isfinite().all()) else sizes[0] / sizes[0].sum())
        return None

    def _sizes(self, tokens: Tensor) -> Tensor | None:
        """Size of the gradient of the logits at each token [N]; None if there is no gradient."""
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
        """The pooling, from which tokens are read [N] and their gradient shares [N] where all tokens are equal.

        A mean over all tokens counts as one over patches, and unequal weights as equal ones, because `pool_row` has no
        other forms. The backbone's attention pooling is kept.
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

    def _warn_assumed(self, image: Tensor, tokens: Tensor) -> None:
        """Warn if images are changed before the backbone, whose preprocessing may then not be the module's."""
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
    """The anatomy of a module that contains exactly one known Vision Transformer; None if it contains none."""
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
            f"{kind} contains several Vision Transformers: {named}; wrap a module that runs one of them, or " + BY_HAND
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
    """The outermost modules that a family recognises, by their paths in the uncompiled twin."""
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
    """The anatomy of a module, for the given images if its grid adapts to them, otherwise for its native size."""
    known, of = known_as(module)
    if of and why_not(known, of) is not None:  # another network of timm
        return None
    stage = {key: about[key] for key in ("stage",) if key in about}
    given: dict[str, Any] = {key: about[key] for key in ("preprocess", "processor") if key in about}
    if "preprocess" in given:
        own = _native(module)
        if own is not None and own != given["preprocess"].size:
            given = {"preprocess": replace(given["preprocess"], size=own)}
    return read_anatomy(module, {**stage, **given})


def _native(module: Any) -> tuple[int, int] | None:
    """The image size of a backbone that takes only one."""
    config = getattr(module, "config", None)
    if getattr(module, "dynamic_img_size", False) or type(module).__name__.startswith("Dinov2"):
        return None
    size = getattr(getattr(module, "patch_embed", None), "img_size", None)
    size = getattr(getattr(config, "vision_config", config), "image_size", size)
    if isinstance(size, int):
        return size, size
    return None if size is None else (int(size[0]), int(size[1]))


def _scaled(backbone: Anatomy, preprocess: Preprocess) -> tuple[int, int]:
    """The pixels that the grid covers, if the module resizes its images for the backbone."""
    sides = zip(backbone.extent, preprocess.size, backbone.preprocess.size, strict=True)
    height, width = (round(covered * given / taken) for covered, given, taken in sides)
    return height, width


def _enters(vit: CustomAnatomy) -> bool:
    """Whether the forward reaches the backbone."""
    image = vit.place(torch.zeros(1, *vit.input_shape))
    try:
        with torch.no_grad(), vit.steady():
            vit.embed(image)
    except Exception:
        return False
    return True


def logits_of(out: Any, rows: int, output: Output | None, name: str) -> Tensor:
    """The logits [rows,C] in the output of the forward; one number per image is one class."""
    if output is not None:
        try:
            found = output(out)
        except Exception as error:
            raise PatchlightError(
                f"output= fails on the result of {name}, which is {_describe(out)}: {first_line(error)}"
            ) from error
        if not isinstance(found, Tensor):
            raise PatchlightError(
                f"output gives {_describe(found)} of what {name} gives, which is {_describe(out)}; "
                "it must give the tensor of logits [B,C]"
            )
    else:
        found = _pick_logits(out, name)
    found = found[:, None] if found.ndim == 1 and len(found) == rows else found
    if found.ndim != 2 or len(found) != rows or found.shape[1] == 0 or not found.is_floating_point():
        kind = "" if found.is_floating_point() else f" of {str(found.dtype).removeprefix('torch.')}"
        images = "one image" if rows == 1 else f"{rows} images"
        raise PatchlightError(
            f"{name} gives a tensor {list(found.shape)}{kind} for {images}, not logits [{rows},C]; choose "
            "them with output=lambda out: …"
        )
    return found


def _pick_logits(out: Any, name: str) -> Tensor:
    """The logits in the output of a forward: the entry called logits, the only tensor, or the first of a tuple."""
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
    raise PatchlightError(f"{name} gives {_describe(out)}; choose the logits [B,C] with output=lambda out: {choose}")


def _describe(value: Any) -> str:
    """Describe a value: a tensor by its shape, a dictionary by its keys."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return f"a {kind} with the keys {', '.join(map(repr, value))}" if value else f"an empty {kind}"
    if isinstance(value, tuple | list):
        return f"a {kind} of {', '.join(type(v).__name__ for v in value)}" if value else f"an empty {kind}"
    return "None" if value is None else f"a {kind}"


class _Entered(BaseException):
    """Raised when the first block is called; a BaseException, so that the module's own handlers do not catch it."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self.tokens = tokens


_LOCAL = threading.local()
"""What this thread does where a forward calls a block; twins are shared by all threads."""


@contextlib.contextmanager
def _at_blocks(what: AtBlock) -> Iterator[None]:
    _LOCAL.at_block = what
    try:
        yield
    finally:
        _LOCAL.at_block = None


@cache
def _skippable(kind: type[nn.Module]) -> Any:
    """A subclass of this block type that can be skipped together with its hooks."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        what: AtBlock | None = getattr(_LOCAL, "at_block", None)
        if what is None:
            return kind.__call__(self, *args, **kwargs)
        tokens = args[0] if args else next(iter(kwargs.values()))
        return what(tokens, lambda: kind.__call__(self, *args, **kwargs))

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


class _Flowing(TorchFunctionMode):
    """Inside, `no_grad` in a forward (as in one that trains only its head) has no effect on the backbone."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch._C._set_grad_enabled and not _called_by_us(sys._getframe(1)):
            return None
        return func(*args, **(kwargs or {}))


def _called_by_us(frame: Any) -> bool:
    """Whether the caller is a function of Patchlight, not of the module."""
    while str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch" and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "patchlight"


def _flowing() -> contextlib.AbstractContextManager[Any]:
    return _Flowing() if torch.is_grad_enabled() else contextlib.nullcontext()
