"""Anatomy of any timm network of stages: its forward, cut after a stage that `feature_info` names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from patchlight.anatomy.families import register_family
from patchlight.anatomy.names import STAGED, known_as, why_not
from patchlight.anatomy.opened import Anatomy, undisturbed
from patchlight.anatomy.timm import described
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.core.layout import Geometry, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator


class CutAnatomy(Anatomy):
    """A timm network opened after a stage: `embed` runs its forward up to there, `classified` from there on.

    `stage` (0-based, negative from the end; the second-to-last by default) is one of `stages_of`. Its feature map is
    the tokens [B,p+h*w,D], where p tokens accompany the map. Its blocks cannot be read.
    """

    library = "timm"
    hierarchical = True
    can_drop = "its stages need a complete grid of patches"

    def __init__(self, model: Any, stage: int, **about: Any) -> None:
        stages = stages_of(model)
        if not -len(stages) <= stage < len(stages):
            raise PatchlightError(f"stage {stage} does not exist; {about['name']} has stages 0 to {len(stages) - 1}")
        self.stage, self.stages = stage % len(stages), len(stages)
        self._at = stages[self.stage]
        self._skipped: list[Any] = []
        self._out: Any = None
        self._layout = "rows"
        rows, columns = (max(-(-side // self._at.step), 1) for side in about["preprocess"].size)
        super().__init__(model, grid=(rows, columns), prefix=0, pooling="avg", heads=_heads(model), **about)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return ()

    def watch(self) -> None:
        super().watch()
        cast(Any, self.net).patchlight_cut = Cut(self.net, self._at.path)

    @property
    def _cut(self) -> Cut:
        return cast(Cut, self.net.patchlight_cut)

    def check(self) -> None:
        self.look()
        super().check()

    @undisturbed
    def look(self) -> None:
        """Record the outputs of the modules before the cut, so that they can be skipped, and of the stage."""
        with torch.no_grad():
            blank = torch.zeros(2, *self.input_shape)
            one, two = (self._cut.outputs(self.place(blank[:count])) for count in (1, 2))
        *self._skipped, self._out = (_shapes(a, b) for a, b in zip(one, two, strict=True))
        self._read_layout(*_tensors(self._out))

    def _read_layout(self, cells: BatchShape | None, beside: list[BatchShape]) -> None:
        """Read grid, prefix tokens and extent from the shape of the stage's output."""
        shape = () if cells is None else cells.of(1)
        if len(shape) not in (3, 4) or shape[0] != 1 or len(beside) > 1:
            raise PatchlightError(f"stage {self.stage} of {self.name} has no single feature map")
        if len(shape) == 4:
            channels_last = type(self.model).__name__ in _CHANNELS_LAST  # all three sides are equal
            last = shape[3] == self._at.channels and (shape[1] != shape[3] or channels_last)
            self._layout, sides = ("channels last", shape[1:3]) if last else ("channels first", shape[2:])
            self.layout = Layout((sides[0], sides[1]), beside[0].of(1)[1] if beside else 0)
        else:
            self._layout, self.layout = "rows", Layout(self.grid, shape[1] - self.cells)
        if not 0 <= self.prefix <= 2:
            raise PatchlightError(
                f"stage {self.stage} of {self.name} gives {list(shape)}, which is not a grid of {self.grid[0]} x "
                f"{self.grid[1]} cells"
            )
        self.pooling = "cls" if self.prefix else "avg"
        covered = self.grid[0] * self._at.step, self.grid[1] * self._at.step
        off = max(abs(a - b) for a, b in zip(covered, self.preprocess.size, strict=True))
        extent = covered if off < self._at.step else self.preprocess.size
        self.geometry = Geometry.even(self.grid, self.preprocess.size, extent)

    def embed(self, images: Tensor) -> Tensor:
        cells, beside = _tensors(self._cut.outputs(images)[-1])
        if self._layout == "channels first":
            cells = cells.flatten(2).mT
        elif self._layout == "channels last":
            cells = cells.flatten(1, 2)
        tokens = torch.cat([*beside, cells], 1) if beside else cells
        order = self._order
        return cast(Tensor, tokens if order is None else tokens[:, order.to(tokens.device)])

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        raise IndexError(f"{self.name} has no block {index}: it is opened after stage {self.stage}")

    def features(self, tokens: Tensor) -> Tensor:
        """The output of a model without a classifier; a forward cannot be cut a second time before its classifier."""
        if self.classes:
            raise Unsupported(
                f"the features that the classifier of {self.name} reads are not available; load the model with "
                "num_classes=0 to use another head"
            )
        return self.classified(tokens)

    def classified(self, tokens: Tensor) -> Tensor:
        order = self._order
        tokens = tokens if order is None else tokens[:, order.argsort().to(tokens.device)]
        cells, prefix = tokens, tokens[:, : self.prefix]
        if self._layout != "rows":
            cells = self.layout.of_cells(tokens).unflatten(1, self.grid)
        if self._layout == "channels first":
            cells = cells.permute(0, 3, 1, 2).contiguous()
        first = _tensors(self._out)[0]
        given = _filled(self._out, lambda shape: cells if shape is first else prefix)
        skipped = [_filled(out, lambda shape: shape.zeros(tokens)) for out in self._skipped]
        blank = tokens.new_zeros(len(tokens), *self.input_shape)
        return cast(Tensor, self._cut.onward(blank, skipped, given))

    @property
    def _order(self) -> Tensor | None:
        """The row of each grid cell in the stage's output, if that is not in reading order."""
        reroll = getattr(self.net, "reroll", None)
        if reroll is None:
            return None
        rows = torch.arange(self.tokens).view(1, -1, 1)
        return cast(Tensor, reroll(rows, int(self._at.path.rpartition(".")[2])).flatten())


_CHANNELS_LAST = ("VOLO", "HieraDet")


@dataclass(frozen=True)
class Stage:
    """The end of a stage: the module at `path`; one cell of its map is `step` pixels of the image."""

    path: str
    step: int
    channels: int


def stages_of(model: Any) -> list[Stage]:
    """The stages of a timm network, from its `feature_info`."""
    kind = type(model).__name__
    if kind == "CoaT":
        alone = (1, 2, 3, 4) if model.parallel_blocks is None else (1, 2)  # the others run in parallel
        ends = [(i, getattr(model, f"serial_blocks{i}")) for i in alone]
        return [Stage(f"serial_blocks{i}.{len(b) - 1}", 2 ** (i + 1), model.embed_dims[i - 1]) for i, b in ends]
    if kind == "Visformer":
        return [Stage(f"stage{i}", 2 ** (i + 2), 0) for i in (1, 2, 3)]
    wrong = {"MultiScaleVit": ("block.", "stages.")}.get(kind, ("", ""))  # there is no module of that name
    return [Stage(s["module"].replace(*wrong), int(s["reduction"]), int(s["num_chs"])) for s in model.feature_info]


@dataclass(frozen=True)
class BatchShape:
    """The shape of a tensor for one image and for two, from which follows that for any number."""

    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: torch.dtype

    def of(self, batch: int) -> tuple[int, ...]:
        return tuple(a + (b - a) * (batch - 1) for a, b in zip(*self.sizes, strict=True))

    def zeros(self, like: Tensor) -> Tensor:
        """Zeros for as many images as `like` has rows."""
        dtype = like.dtype if self.dtype.is_floating_point else self.dtype
        return like.new_zeros(self.of(len(like)), dtype=dtype)


class Cut:
    """The forward of a twin, cut after the module at `path`.

    Every module beside that path runs normally, runs until the cut, or is skipped when the forward resumes from the
    cut. What a forward does between those modules then runs on blanks.
    """

    def __init__(self, net: nn.Module, path: str) -> None:
        self._net, self._path = net, path
        owner, prefix = net, ""
        for part in path.split("."):
            for name, child in owner.named_children():
                if name != part or prefix + name == path:
                    cast(Any, child).forward = partial(self._step, prefix + name, child.forward)
            owner, prefix = getattr(owner, part), f"{prefix}{part}."

    def outputs(self, images: Tensor) -> list[Any]:
        """The outputs of the modules before the cut, in call order, and of the module at the cut."""
        run = _Run(self)
        with run.running():
            try:
                self._net(images)
            except _Reached:
                return run.outputs
        raise PatchlightError(f"'{self._path}' of this model is not called in its forward, so it cannot be cut there")

    def onward(self, blank: Tensor, skipped: Sequence[Any], given: Any) -> Any:
        """The output of the model with `given` at the cut; modules before it return `skipped`."""
        with _Run(self, [*skipped, given], skips=True).running():
            return self._net(blank)

    def _step(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run: _Run | None = getattr(_LOCAL, "run", None)
        if run is None or run.cut is not self or run.free:
            return forward(*args, **kwargs)
        run.free = not run.skips or name == self._path  # nested modules are not beside the path
        if run.skips:
            return run.outputs.pop(0)
        run.outputs.append(forward(*args, **kwargs))
        run.free = False
        if name == self._path:
            raise _Reached
        return run.outputs[-1]


_LOCAL = threading.local()
"""The run that this thread is in."""


@dataclass
class _Run:
    """One forward of a cut twin, with outputs of modules that are recorded or (if it skips) to be returned."""

    cut: Cut
    outputs: list[Any] = field(default_factory=list)
    skips: bool = False
    free: bool = False
    """Whether modules run normally: inside one beside the path, or after the cut."""

    @contextmanager
    def running(self) -> Iterator[None]:
        before = getattr(_LOCAL, "run", None)
        _LOCAL.run = self
        try:
            yield
        finally:
            _LOCAL.run = before


class _Reached(Exception):
    """Raised when the module at the cut has returned."""


def _shapes(one: Any, two: Any) -> Any:
    """An output for one image and for two, with shapes in place of tensors."""
    if isinstance(one, Tensor):
        return BatchShape((tuple(one.shape), tuple(two.shape)), one.dtype)
    if isinstance(one, tuple | list):
        return type(one)(_shapes(a, b) for a, b in zip(one, two, strict=True))
    return one


def _filled(shapes: Any, tensor: Callable[[BatchShape], Tensor]) -> Any:
    """An output with tensors in place of shapes."""
    if isinstance(shapes, BatchShape):
        return tensor(shapes)
    return type(shapes)(_filled(s, tensor) for s in shapes) if isinstance(shapes, tuple | list) else shapes


def _tensors(out: Any) -> tuple[Any, list[Any]]:
    """The feature map (or its shape) in the output of a stage, and the tensors beside it."""
    if isinstance(out, tuple | list):
        found = [o for o in out if isinstance(o, Tensor | BatchShape)]
        return (found[0], found[1:]) if found else (None, [])
    return (out, []) if isinstance(out, Tensor | BatchShape) else (None, [])


def _heads(model: nn.Module) -> int:
    """Number of heads of the last attention that has this attribute."""
    found = [m.num_heads for m in model.modules() if isinstance(getattr(m, "num_heads", None), int)]
    return int(cast(Any, found[-1])) if found else 1


@register_family("timm-staged", package="timm")
def read_staged(
    model: Any, stage: int = -2, name: str | None = None, labels: Sequence[str] | None = None, **about: Any
) -> Anatomy | None:
    """The anatomy of a timm network of stages with attention, or None if it is not of timm."""
    known, module = known_as(model)
    if not module:
        return None
    reason = why_not(known, module)
    if reason is not None or module not in STAGED:
        why = reason or "its class is not supported"
        raise PatchlightError(
            f"{name or known} ({type(model).__name__}) is not a supported Vision Transformer: {why}; "
            "pl.list_models() names those of timm that are"
        )
    return CutAnatomy(model, stage, **described(model, name, labels, about))
