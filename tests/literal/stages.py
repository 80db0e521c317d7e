"""Hierarchical transformers written out with dense matrices, slowly: what the literal versions of row methods multiply.

`Written` runs one image through the stages of a tiny Swin, SwinV2, PVTv2 or Twins. Every block's attention is one
matrix A [H,N,M] from all keys to all tokens of the stage, zero where the model does not look, found token by token;
`P` [M,N] says which token each key is (or which it pools), and `D` [N,N'] of which tokens of the stage before each
token is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Grid = tuple[int, int]


@dataclass
class Block:
    """What is seen of a block: tokens entering [N,D], after attention, leaving; attention [H,N,M]; keys [M,N]."""

    module: Any
    x: Tensor
    u: Tensor
    A: Tensor
    P: Tensor
    y: Tensor = field(default_factory=lambda: torch.empty(0))
    D: Tensor | None = None

    @property
    def G(self) -> Tensor:
        assert self.A.grad is not None
        return self.A.grad

    @property
    def mean(self) -> Tensor:
        """mean_h A [N,N], the keys as tokens."""
        return self.A.detach().mean(0) @ self.P

    @property
    def positive(self) -> Tensor:
        """mean_h ReLU(A G) [N,N]."""
        return (self.A.detach() * self.G).clamp(min=0).mean(0) @ self.P


def children(fine: Grid, coarse: Grid, kernel: int, stride: int, padding: int) -> Tensor:
    """[M,N]: each coarse token is the mean of those of its kernel x kernel children that are on the grid."""
    matrix = torch.zeros(coarse[0] * coarse[1], fine[0] * fine[1], dtype=torch.float64)
    for a in range(coarse[0]):
        for b in range(coarse[1]):
            for i in range(a * stride - padding, a * stride - padding + kernel):
                for j in range(b * stride - padding, b * stride - padding + kernel):
                    if 0 <= i < fine[0] and 0 <= j < fine[1]:
                        matrix[a * coarse[1] + b, i * fine[1] + j] = 1
    return matrix / matrix.sum(1, keepdim=True)


def bins(grid: Grid, side: int) -> Tensor:
    """[M,N]: each of side x side keys is the mean of a bin, from floor(a g / side) to ceil((a + 1) g / side)."""
    matrix = torch.zeros(side * side, grid[0] * grid[1], dtype=torch.float64)
    for a in range(side):
        for b in range(side):
            for i in range(a * grid[0] // side, -(-(a + 1) * grid[0] // side)):
                for j in range(b * grid[1] // side, -(-(b + 1) * grid[1] // side)):
                    matrix[a * side + b, i * grid[1] + j] = 1
    return matrix / matrix.sum(1, keepdim=True)


def heads(x: Tensor, count: int) -> Tensor:
    """[N,D] to [H,N,d]."""
    return x.view(len(x), count, -1).transpose(0, 1)


def in_windows(grid: Grid, window: Grid, shift: Grid) -> tuple[list[list[tuple[int, int, int]]], int, int]:
    """For every token of the padded grid: its window, its place in it, and the region of the mask; and the size.

    Tokens of the grid come first, in order; those of padding behind them.
    """
    sides = [-(-g // w) * w for g, w in zip(grid, window, strict=True)]
    places = [(r, c) for r in range(grid[0]) for c in range(grid[1])]
    rolled = [((r - shift[0]) % grid[0], (c - shift[1]) % grid[1]) for r, c in places]
    rolled += [(r, c) for r in range(sides[0]) for c in range(sides[1]) if r >= grid[0] or c >= grid[1]]
    found = []
    for where in rolled:
        axes = []
        for axis in (0, 1):
            p, w, s, side = where[axis], window[axis], shift[axis], sides[axis]
            region = 0 if s == 0 or p < side - w else 1 if p < side - s else 2
            axes.append((p // w, p % w, region))
        found.append(axes)
    return found, len(places), len(rolled)


def visible(found: list[list[tuple[int, int, int]]], masked: bool) -> Tensor:
    """Which token sees which: those of its window and, where it is shifted, of its region."""
    size = len(found)
    seen = torch.zeros(size, size, dtype=torch.bool)
    for i in range(size):
        for j in range(size):
            same = all(a[0] == b[0] for a, b in zip(found[i], found[j], strict=True))
            region = all(a[2] == b[2] for a, b in zip(found[i], found[j], strict=True))
            seen[i, j] = same and (region or not masked)
    return seen


def position_bias(attn: Any, found: list[list[tuple[int, int, int]]]) -> Tensor:
    """The relative position bias [H,M,M] between the places of tokens in their windows."""
    (height, width) = attn.window_size
    if hasattr(attn, "cpb_mlp"):
        table = 16 * torch.sigmoid(attn.cpb_mlp(attn.relative_coords_table).view(-1, attn.num_heads))
    else:
        table = attn.relative_position_bias_table
    rows = torch.tensor([axes[0][1] for axes in found])
    columns = torch.tensor([axes[1][1] for axes in found])
    down = rows[:, None] - rows[None] + height - 1
    right = columns[:, None] - columns[None] + width - 1
    return table[down * (2 * width - 1) + right].permute(2, 0, 1)


def masked_softmax(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


class Written:
    """One image [C,H,W] through a model from stage `stage` on: its blocks, the pooled row, the logit's gradients."""

    def __init__(self, model: Any, image: Tensor, target: int, stage: int) -> None:
        self.model, self.blocks, self._merged = model, list[Block](), None
        kind = type(model).__name__
        self._swin, self._pvt = kind.startswith("Swin"), kind.startswith("Pyramid")
        stages = model.layers if self._swin else model.stages if self._pvt else model.blocks
        x, grid = image[None], (0, 0)
        self.kept: list[Tensor] = []
        for i in range(len(stages)):
            before, (x, grid) = grid, self._merge(i, x, grid)
            if i == stage:
                x = x.detach().requires_grad_()
                self.grid = grid
            elif i > stage:
                shape = (3, 2, 1) if self._pvt else (2, 2, 0)
                self._merged = children(before, grid, *shape)
            for j, block in enumerate(stages[i] if kind == "Twins" else stages[i].blocks):
                x = self._block(i, j, block, x, grid, i >= stage)
        self.logits = self._read(x, grid)
        self.logits[target].backward()
        self.row = torch.full((len(x),), 1 / len(x), dtype=torch.float64)

    def _merge(self, i: int, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        """The tokens [N,D] of a stage, by the model's own merging."""
        if i > 0:
            x = x.T.unflatten(1, grid)[None]
        if self._swin:
            x = self.model.patch_embed(x) if i == 0 else x.permute(0, 2, 3, 1)
            x = self.model.layers[i].downsample(x)
        elif self._pvt:
            x = self.model.patch_embed(x) if i == 0 else self.model.stages[i].downsample(x)
        else:
            x, size = self.model.patch_embeds[i](x.contiguous())
            return x[0], size
        return x[0].flatten(0, 1), (x.shape[1], x.shape[2])

    def _block(self, i: int, j: int, block: Any, x: Tensor, grid: Grid, keep: bool) -> Tensor:
        """The input of the next block or merging: a norm or convolution may follow the output y of this one."""
        if keep and x.requires_grad:
            x.retain_grad()
        post = hasattr(block.attn, "logit_scale")
        added, A, P = self._attention(block.attn, x if post else block.norm1(x), grid)
        u = x + (block.norm1(added) if post else added)
        if self._pvt:
            y = u + block.mlp(block.norm2(u)[None], grid)[0]
            after = self.model.stages[i].norm(y) if j == len(self.model.stages[i].blocks) - 1 else y
        elif self._swin:
            y = after = u + (block.norm2(block.mlp(u)) if post else block.mlp(block.norm2(u)))
        else:
            y = u + block.mlp(block.norm2(u))
            after = self.model.pos_block[i](y[None], grid)[0] if j == 0 else y
        if keep:
            A.retain_grad()
            y.retain_grad()
            self.blocks.append(Block(block, x, u.detach(), A, P, y, self._merged))
            self._merged = None
        return after

    def _attention(self, attn: Any, n: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """What attention adds [N,D], its matrix [H,N,M], and the keys as tokens [M,N]."""
        size, width, count = len(n), n.shape[1], attn.num_heads
        if hasattr(attn, "qkv"):
            window, shift = self._window(attn)
            found, _, padded = in_windows(grid, window, shift)
            n = F.pad(n, (0, 0, 0, padded - size))
            bias = attn.qkv.bias
            if hasattr(attn, "logit_scale"):
                bias = torch.cat([attn.q_bias, torch.zeros_like(attn.q_bias), attn.v_bias])
            q, k, v = (heads(t, count) for t in F.linear(n, attn.qkv.weight, bias).split(width, 1))
            if hasattr(attn, "logit_scale"):
                cosine = (q / q.norm(dim=-1, keepdim=True)) @ (k / k.norm(dim=-1, keepdim=True)).mT
                scores = cosine * attn.logit_scale.clamp(max=torch.tensor(100.0).log().item()).exp()
            else:
                scores = q @ k.mT / (width // count) ** 0.5
            if self._swin:
                scores = scores + position_bias(attn, found)
            A = masked_softmax(scores, visible(found, any(shift)))[:, :size]
            P = torch.eye(padded, size, dtype=torch.float64)
        else:
            q = heads(attn.q(n), count)
            keys, P = n, torch.eye(size, dtype=torch.float64)
            if getattr(attn, "pool", None) is not None:
                side = attn.pool.output_size
                pooled = attn.sr(attn.pool(n.T.unflatten(1, grid)[None]))[0].flatten(1).T
                keys, P = attn.act(attn.norm(pooled)), bins(grid, side)
            elif attn.sr is not None:
                step = attn.sr.stride[0]
                keys = attn.norm(attn.sr(n.T.unflatten(1, grid)[None])[0].flatten(1).T)
                P = children(grid, (grid[0] // step, grid[1] // step), step, step, 0)
            k, v = (heads(t, count) for t in attn.kv(keys).split(width, 1))
            A = (q @ k.mT / (width // count) ** 0.5).softmax(-1)
        mixed = (A @ v).transpose(0, 1).flatten(1)
        return attn.proj(mixed), A, P

    def _window(self, attn: Any) -> tuple[Grid, Grid]:
        if not self._swin:
            return (attn.ws, attn.ws), (0, 0)
        block = next(b for layer in self.model.layers for b in layer.blocks if b.attn is attn)
        return tuple(block.window_size), tuple(block.shift_size)

    def _read(self, x: Tensor, grid: Grid) -> Tensor:
        head: nn.Module = getattr(self.model.head, "fc", self.model.head)
        return head((x if self._pvt else self.model.norm(x)).mean(0))

    def lifted(self, values: Tensor, layer: int) -> Tensor:
        """Values of the tokens entering block `layer`, pulled to those entering the first."""
        for index in range(layer, 0, -1):
            D = self.blocks[index].D
            values = values if D is None else values @ D
        return values

    def row_at(self, layer: int) -> Tensor:
        """The pooled row, pulled to the tokens of the stage of block `layer`."""
        row = self.row
        for index in range(len(self.blocks) - 1, layer, -1):
            D = self.blocks[index].D
            row = row if D is None else row @ D
        return row

    def product(self, matrices: list[Tensor]) -> Tensor:
        """The pooled row of the product of the blocks' matrices, with the merging between them, last leftmost."""
        whole = torch.eye(self.grid[0] * self.grid[1], dtype=torch.float64)
        for matrix, block in zip(matrices, self.blocks, strict=True):
            whole = matrix @ (whole if block.D is None else block.D @ whole)
        return self.row @ whole
