"""Find the blocks of a model, and where its tokens are, from one run of its forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from patchlight.anatomy.probe import refused_input
from patchlight.anatomy.twin import Twin
from patchlight.anatomy.windows import Merging
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.core.layout import IMAGE_AXES, Geometry

_ATTENTION = ("softmax", "scaled_dot_product_attention", "multi_head_attention_forward")


@dataclass(frozen=True)
class Convolution:
    """A strided convolution: its path, the grid of its output, and what a cell of it covers."""

    path: str
    grid: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]


@dataclass(frozen=True)
class Inputs:
    """What a model takes.

    Args:
        shape: The shape of one input.
        dims: The dimension of it that each axis of the grid is.
        axes: The name of each axis.
        patches: How inputs are cut into patches, if this is not done by a convolution of the model.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...] = (1, 2)
    axes: tuple[str, ...] = IMAGE_AXES
    patches: Convolution | None = None

    @property
    def size(self) -> tuple[int, ...]:
        """The size of one input along each axis of the grid."""
        return tuple(self.shape[dim] for dim in self.dims)


@dataclass(frozen=True)
class Stages:
    """The blocks of a hierarchical model, from the stage that it is opened at.

    Args:
        grids: The grid of each block, and of the output of the last.
        tokens: The number of its tokens, and of the output of the last.
        left: The number of tokens that leave each block.
        convolutions: Kernel, stride and padding of the convolution that merges patches before a block, by its number.
    """

    grids: Sequence[tuple[int, ...]]
    tokens: Sequence[int]
    left: Sequence[int]
    convolutions: Mapping[int, tuple[int, int, int]]

    @property
    def end(self) -> int:
        """Number of blocks of the first stage, which leave as many tokens as enter it."""
        return next((i for i, count in enumerate(self.left) if count != self.tokens[0]), len(self.left))

    @property
    def late(self) -> bool:
        """Whether a token joins the patches in a later stage."""
        return any(count != grid[0] * grid[1] for grid, count in zip(self.grids, self.tokens, strict=True))

    def merging(self, index: int) -> Merging | None:
        """How patches are merged before a block."""
        (rows, columns), coarse = self.grids[index - 1], cast(tuple[int, int], self.grids[index])
        fine = rows, columns
        if fine == coarse:
            return None
        step = fine[0] // coarse[0]
        kernel, stride, padding = self.convolutions.get(index, (step, step, 0))
        return Merging(fine, coarse, kernel, stride, padding)


@dataclass(frozen=True)
class Discovery:
    """What one run of a forward shows.

    Args:
        name: The name of the model in errors.
        blocks: Paths of the blocks, in the order in which they are called.
        attentions: The part of each block that contains its attention.
        shapes: The shape of the tokens that enter each block, for one input.
        ends: The shape of the tokens that leave each block, for one input.
        pools: Whether attention follows the blocks, as in attention pooling.
        convolutions: The convolutions before each block, the strided ones among them in the order of their calls.
        constant: How many tokens before block 0, at the start and at the end, do not depend on the input.
        inputs: What the model takes.
        order: The place of each cell among the grid tokens before block 0; None where it was not found.
        heads: The number of attention heads of the last block.
        windows: In how many windows of the batch axis the blocks take the tokens of one input.
    """

    name: str
    blocks: list[str]
    attentions: list[str]
    shapes: list[tuple[int, ...]]
    ends: list[tuple[int, ...]]
    pools: bool
    convolutions: dict[int, list[Convolution]]
    constant: tuple[int, int]
    inputs: Inputs
    order: tuple[int, ...] | None = None
    heads: int = 1
    windows: int = 1

    @property
    def geometry(self) -> Geometry:
        """What the cells before block 0 cover of an input: equal parts unless one convolution cuts it."""
        grid, stem, size = self.grid(0, sum(self.constant)), self.stem, self.inputs.size
        frames = len(grid) - (0 if stem is None else len(stem.grid))  # frames that are cut one by one
        unit = ("frame", *("px",) * (len(grid) - 1)) if len(grid) > 2 else ("px",) * len(grid)
        dims = None if self.inputs.dims == (1, 2) else self.inputs.dims
        if stem is None or grid[frames:] != stem.grid:
            return Geometry.even(grid, size, unit=unit, dims=dims)
        step, cell = ((1.0,) * frames + tuple(map(float, sides)) for sides in (stem.stride, stem.kernel))
        begin = (0.0,) * frames + tuple(float(-side) for side in stem.padding)
        return Geometry(size, step, cell, begin, unit, dims)

    @property
    def stem(self) -> Convolution | None:
        """The convolution that cuts the input into patches; None if there is none."""
        return next(iter(self.convolutions.get(0, [])), None)

    def tokens(self, index: int) -> int:
        """Number of tokens that enter a block, or that leave the last."""
        return math.prod((*self.shapes, self.ends[-1])[index][1:-1])

    def grid(self, index: int, prefix: int = 0) -> tuple[int, ...]:
        """The grid of a block: as fine as the patches that the input is cut into, or coarser by a whole number.

        Raises:
            PatchlightError: The tokens of the block are not on a grid.
        """
        if self.stem is None:
            raise PatchlightError("no convolution cuts the image into patches, so they cannot be located")
        fine, count = self.stem.grid, self.tokens(index) - prefix
        if count % math.prod(fine) == 0:  # also several frames, each of which is cut by itself
            return fine if count == math.prod(fine) else (count // math.prod(fine), *fine)
        for joined in (0, 1):  # a token may join in a late stage
            grids = (tuple(-(-side // step) for side in fine) for step in range(1, max(fine) + 1))
            coarse = next((grid for grid in grids if math.prod(grid) == count - joined), None)
            if coarse is not None:
                return coarse
        raise PatchlightError(f"{count} tokens are not a grid over the {fine[0]} x {fine[-1]} patches of the image")

    def located(self, stage: int) -> dict[str, Any]:
        """Where the tokens of the model are, as keywords of `CrossedAnatomy`.

        Args:
            stage: The stage at which a hierarchical model is opened.
        """
        counts = [self.tokens(index) for index in range(len(self.blocks) + 1)]
        facts: dict[str, Any] = {"heads": self.heads, "pools": self.pools, "attentions": self.attentions}
        facts |= {"axes": self.inputs.axes, "input_shape": self.inputs.shape}
        if len(set(counts)) == 1:
            (prefix, suffix), grid = self.constant, self.grid(0, sum(self.constant))
            facts |= {"paths": self.blocks, "prefix": prefix, "suffix": suffix, "order": self.order}
            return facts | {"windows": self.windows, "grid": grid, "geometry": self.geometry}
        begins = [0, *(i for i in range(1, len(self.blocks)) if counts[i] != counts[i - 1])]
        if not -len(begins) <= stage < len(begins):
            raise PatchlightError(f"stage {stage} does not exist; {self.name} has stages 0 to {len(begins) - 1}")
        first = begins[stage]
        grids = [self.grid(index) for index in range(first, len(counts))]
        left = [math.prod(shape[1:-1]) for shape in self.ends]
        merges = {i - first: c[0] for i, c in self.convolutions.items() if i > first}
        merging = {i: (c.kernel[0], c.stride[0], c.padding[0]) for i, c in merges.items()}
        facts |= {
            "attentions": self.attentions[first:],
            "paths": self.blocks[first:],
            "stages": Stages(grids, counts[first:], left[first:], merging),
            "prefix": 0,
            "stage": stage % len(begins),
        }
        return facts | {"grid": grids[0], "extent": self._covered(grids[0]), "order": self._coarser(grids[0])}

    def _covered(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """The part of the input that a grid of merged patches covers: more than its size where patches were padded."""
        stem, size = self.stem, self.inputs.size
        if stem is None:
            return size
        steps = range(1, max(stem.grid) + 1)
        step = next((n for n in steps if tuple(-(-side // n) for side in stem.grid) == grid), 0)
        covered = tuple(cells * step * pixels for cells, pixels in zip(grid, stem.stride, strict=True))
        return covered if step else size

    def _coarser(self, grid: tuple[int, ...]) -> tuple[int, ...] | None:
        """The order of the cells of a coarser grid: a model that pools tokens in place keeps the order of the first."""
        if self.order is None or self.stem is None or self.order == tuple(range(len(self.order))):
            return None
        fine = torch.tensor(self.order).view(self.stem.grid)
        step = self.stem.grid[0] // grid[0]
        return tuple((fine[::step, ::step].flatten() % math.prod(grid)).tolist())


def find_blocks(
    model: nn.Module,
    run: Callable[[nn.Module, Tensor], Any],
    inputs: Inputs,
    name: str,
    prepare: Callable[[nn.Module], None] = lambda net: None,
) -> Discovery:
    """Find the blocks of a model: the outermost modules of one class in a list that each contain one attention.

    Args:
        model: The model, which is only read.
        run: How a copy of it is run on a batch.
        inputs: What it takes.
        name: The name of the model in errors.
        prepare: What is done to the copy before.
    """
    like = next(p for p in model.parameters() if p.is_floating_point())
    batch = torch.randn(2, *inputs.shape, generator=torch.Generator().manual_seed(0)).to(like)
    try:
        discovery = _discover(model, run, batch, inputs, name, prepare)
    except PatchlightError as error:
        raise PatchlightError(f"{name} cannot be opened: {error}") from error
    except Exception as error:
        raise refused_input(name, (1, *inputs.shape), error) from error
    if discovery is None:
        raise Unsupported(f"{name} cannot be opened: it is a convolutional network, and has no attention")
    return discovery


def _discover(model: nn.Module, run: Any, batch: Tensor, inputs: Inputs, name: str, prepare: Any) -> Discovery | None:
    """What a run on a batch of two shows; None where there is no attention between tokens."""
    net, watch = _watched(model, run, batch, prepare)
    chosen = watch.chosen()
    if not chosen:
        return None
    last, first = id(chosen[-1]), watch.entries[id(chosen[0])]
    windows = len(first) // len(batch) if first.ndim == 3 else 1
    constant = _constant(first)

    def per_input(tokens: Tensor) -> Tensor:
        return joined(tokens, windows, constant[0])

    discovery = Discovery(
        name,
        [watch.paths[id(module)] for module in chosen],
        [watch.part_with_attention(module) for module in chosen],
        [(1, *per_input(watch.entries[id(module)]).shape[1:]) for module in chosen],
        [(1, *per_input(watch.outputs[id(module)]).shape[1:]) for module in chosen],
        len(watch.stacks) > watch.ends[last],
        watch.convolutions(chosen) if inputs.patches is None else {0: [inputs.patches]},
        (windows * constant[0], windows * constant[1]),
        inputs,
        heads=watch.heads[watch.ends[last] - 1],
        windows=windows,
    )

    def embed(some: Tensor) -> Tensor:
        try:
            run(net, some)
        except Entered as entered:
            return per_input(entered.tokens)
        raise AssertionError("the first block is called")

    chosen[0].register_forward_pre_hook(_stop, with_kwargs=True)
    with torch.inference_mode(False), torch.no_grad():
        return replace(discovery, order=_order(discovery, embed, batch[:1]))


def discover_stages(
    model: nn.Module, inputs: Tensor, paths: Sequence[str] | None = None
) -> list[tuple[str, list[tuple[int, ...]]]]:
    """The modules that end the stages of a network (those at `paths`), and the shapes of their outputs, in order."""
    net, watch = _watched(model, run_plainly, inputs)
    ends = watch.stage_ends() if paths is None else paths
    outs = [watch.returned.get(id(net.get_submodule(path)), []) for path in ends]
    return [(path, [tuple(out.shape) for out in out]) for path, out in zip(ends, outs, strict=True)]


def run_plainly(net: nn.Module, batch: Tensor) -> Any:
    """Run a model that takes nothing but the batch."""
    return net(batch)


def _watched(
    model: nn.Module, run: Any, batch: Tensor, prepare: Callable[[nn.Module], None] = lambda net: None
) -> tuple[nn.Module, _Watch]:
    """A copy of a model that was run on a batch, and the calls of its modules."""
    copies: list[nn.Module] = []
    Twin(model).renew(copies.append)
    prepare(copies[0])
    watch = _Watch(copies[0])
    with torch.inference_mode(False), torch.no_grad(), watch:
        run(copies[0], batch)
    return copies[0], watch


def map_size(shape: Sequence[int]) -> tuple[int, ...]:
    """The sides of a feature map [B,C,h,w] or [B,h,w,C], or the number of tokens [B,n,D]."""
    if len(shape) == 3:
        return (shape[1],)
    return tuple(shape[1:3]) if channels_last(shape) else tuple(shape[2:])


def channels_last(shape: Sequence[int]) -> bool:
    """Whether a map of square cells has its channels in the last dimension."""
    return shape[1] == shape[2] != shape[3]


class Entered(BaseException):
    """Raised when a block is called; a BaseException, so that the module's own handlers do not catch it."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self.tokens = tokens


def _stop(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    raise Entered(tensors_in([args, kwargs])[0])


@dataclass
class _Visit:
    """One call of a module: how many attentions came before its start and its end."""

    module: nn.Module
    start: int
    end: int = 0


class _Watch(TorchFunctionMode):
    """Inside, the calls of modules and of attention are recorded."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        modules, lists = dict(net.named_modules()), (nn.ModuleList, nn.Sequential, nn.ModuleDict)
        self.paths: dict[int, str] = {id(module): path for path, module in modules.items()}
        self.listed = {
            id(modules[path]) for path in modules if path and isinstance(modules[path.rpartition(".")[0]], lists)
        }
        self.visits: list[_Visit] = []
        self.stacks: list[list[int]] = []
        """For each attention, the calls of modules that it happens in, from the outside."""
        self.open: list[int] = []
        self.entries: dict[int, Tensor] = {}
        self.ends: dict[int, int] = {}
        self.outputs: dict[int, Tensor] = {}
        self.returned: dict[int, list[Tensor]] = {}
        self.heads: list[int] = []
        self.strided: list[tuple[int, Convolution]] = []
        for module in modules.values():
            module.register_forward_pre_hook(self._begin, with_kwargs=True)
            module.register_forward_hook(self._end)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.open.append(len(self.visits))
        self.visits.append(_Visit(module, len(self.stacks)))
        tokens = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if tokens is not None:
            self.entries.setdefault(id(module), tokens.detach())

    def _end(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        number = self.open.pop()
        self.visits[number].end = self.ends[id(module)] = len(self.stacks)
        self.returned[id(module)] = tensors_in(out)
        self.outputs |= {id(module): tokens.detach() for tokens in tensors_in(out)[:1]}
        if isinstance(module, _ConvNd) and max(module.stride) > 1 and isinstance(out, Tensor):
            padding = module.padding if isinstance(module.padding, tuple) else (0,) * len(module.stride)
            shape = tuple(out.shape[2:])
            convolution = Convolution(self.paths[id(module)], shape, module.kernel_size, module.stride, padding)
            self.strided.append((number, convolution))

    def convolutions(self, blocks: list[nn.Module]) -> dict[int, list[Convolution]]:
        """The strided convolutions before each block and after the one before."""
        starts = [next(i for i, visit in enumerate(self.visits) if visit.module is block) for block in blocks]
        inside = tuple(f"{self.paths[id(block)]}." for block in blocks)
        by_block: dict[int, list[Convolution]] = {}
        for number, convolution in self.strided:
            index = sum(start < number for start in starts)
            if not convolution.path.startswith(inside):
                by_block.setdefault(index, []).append(convolution)
        return by_block

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _ATTENTION and (name != "softmax" or args[0].ndim >= 3):
            self.stacks.append(list(self.open))
            self.heads.append(args[4] if name == "multi_head_attention_forward" else args[0].shape[-3])
        return func(*args, **(kwargs or {}))

    def chosen(self) -> list[nn.Module]:
        """The longest run of attentions, each alone in its own module of one class; else two in each module.

        Of several classes the one whose modules keep the shape of their tokens, then the outermost.
        """
        best: list[nn.Module] = []
        for count in (1, 2):
            chains = [self._around(stack, count) for stack in self.stacks[::count]]
            runs = [self._run(module, chains[start:]) for start, chain in enumerate(chains) for module in chain]
            best = max(runs, key=lambda run: (len(run), self._keeps_shape(run)), default=[])
            if best:
                break
        return best

    def part_with_attention(self, block: nn.Module) -> str:
        """The path of the child of a block in which its attention happens; the block itself if it is there."""
        for stack in self.stacks:
            modules = [self.visits[number].module for number in stack]
            place = next((i for i, module in enumerate(modules) if module is block), None)
            if place is not None:
                return self.paths[id(modules[min(place + 1, len(modules) - 1)])]
        return self.paths[id(block)]

    def stage_ends(self) -> list[str]:
        """The outermost members of lists after which the size of the map changes."""
        ends: list[tuple[str, tuple[int, ...]]] = []
        inside = ""
        for visit in self.visits:
            path, out = self.paths[id(visit.module)], self.outputs.get(id(visit.module))
            if id(visit.module) not in self.listed or out is None or (inside and path.startswith(inside)):
                continue
            inside = f"{path}."
            if out.ndim in (3, 4):
                size = map_size(out.shape)
                ends = [*ends[: -1 if ends and ends[-1][1] == size else None], (path, size)]
        return [path for path, _ in ends]

    def _around(self, stack: list[int], count: int) -> list[nn.Module]:
        """The members of lists around an attention that have this number of attentions, from the outside."""
        visits = [self.visits[number] for number in stack]
        return [v.module for v in visits if v.end - v.start == count and id(v.module) in self.listed]

    @staticmethod
    def _run(module: nn.Module, chains: list[list[nn.Module]]) -> list[nn.Module]:
        run: list[nn.Module] = []
        for chain in chains:
            alike = next((m for m in chain if type(m) is type(module)), None)
            if alike is None or any(alike is m for m in run):
                break
            run.append(alike)
        return run

    def _keeps_shape(self, modules: list[nn.Module]) -> bool:
        return all(self.entries[id(m)].shape == self.outputs[id(m)].shape for m in modules)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A nested value with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(each, change) for key, each in value.items()}
        kind: Any = type(value)
        return changed if kind is dict else kind(changed)
    return type(value)(map_tensors(each, change) for each in value) if type(value) in (tuple, list) else value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nested value, in order."""
    tensors: list[Tensor] = []
    map_tensors(value, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return tensors


def joined(tokens: Tensor, windows: int, prefix: int) -> Tensor:
    """Tokens [B*W,p+n,D] of W windows each as [B,W*p+W*n,D]: the prefix tokens of all windows, then their cells."""
    if windows == 1:
        return tokens
    each = tokens.unflatten(0, (-1, windows))
    return torch.cat([each[:, :, :prefix].flatten(1, 2), each[:, :, prefix:].flatten(1, 2)], 1)


def parted(tokens: Tensor, windows: int, prefix: int) -> Tensor:
    """The inverse of `joined`."""
    if windows == 1:
        return tokens
    parts = tokens[:, : windows * prefix], tokens[:, windows * prefix :]
    return torch.cat([part.unflatten(1, (windows, -1)) for part in parts], 2).flatten(0, 1)


def _constant(tokens: Tensor) -> tuple[int, int]:
    """How many tokens at the start and at the end (of every window) are the same for both inputs."""
    if tokens.ndim != 3 or len(tokens) % 2:
        return 0, 0
    one, other = tokens.unflatten(0, (2, -1))
    same = (one == other).all(-1).all(0).tolist()
    start = same.index(False) if False in same else 0
    end = same[::-1].index(False) if False in same else 0
    return start, end


def _order(discovery: Discovery, embed: Callable[[Tensor], Tensor], blank: Tensor) -> tuple[int, ...] | None:
    """The place of each cell among the grid tokens, found by changing the input where a bit of the cell's number is 1.

    None where patches are not cut by one convolution, or overlap so much that none has pixels of its own.
    """
    grid, stem = discovery.grid(0, sum(discovery.constant)), discovery.stem
    if stem is None or grid[-len(stem.grid) :] != stem.grid or len(discovery.shapes[0]) != 3:
        return None
    geometry = discovery.geometry
    owner = torch.zeros([1] * blank.ndim, dtype=torch.long)
    for axis, dim in enumerate(discovery.inputs.dims):
        alone = _owners(geometry, axis, grid[axis])
        shape = [1] * blank.ndim
        shape[dim + 1] = len(alone)
        alone = alone.view(shape)
        owner = torch.where((owner < 0) | (alone < 0), -1, owner * grid[axis] + alone)
    count, prefix = math.prod(grid), discovery.constant[0]
    codes = (owner + 1).to(blank.device)
    noise = torch.randn(blank.shape, generator=torch.Generator().manual_seed(1)).to(blank)
    base, seen = embed(blank)[0, prefix : prefix + count], torch.zeros(count, dtype=torch.long)
    for bit in range((count + 1).bit_length()):
        shown = embed(blank + noise * (codes >> bit & 1).to(blank))[0, prefix : prefix + count]
        seen += (shown != base).any(-1).long().cpu() << bit
    place = {code - 1: position for position, code in enumerate(seen.tolist())}
    return tuple(place[cell] for cell in range(count)) if sorted(place) == list(range(count)) else None


def _owners(geometry: Geometry, axis: int, count: int) -> Tensor:
    """The one of `count` cells that each place along an axis belongs to [size]; -1 where none or several do."""
    begins = geometry.begin[axis] + geometry.step[axis] * torch.arange(count)
    inside = torch.arange(geometry.size[axis])[None] - begins[:, None]
    covered = (inside >= 0) & (inside < geometry.cell[axis])
    return torch.where(covered.sum(0) == 1, covered.long().argmax(0), -1)
