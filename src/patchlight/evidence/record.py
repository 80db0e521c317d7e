"""The values that a pass records of one block (`Record`), and the access of layer maps to them (`Evidence`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from patchlight.anatomy.windows import Merging, Reach
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.evidence.rows import Entry, FusedAttention, Local, Matrix, Rows, head_mean, mean_row, signed, written

T = TypeVar("T")
BACKWARD = frozenset({"g", "gy", "gn", "go", "G", "dO", "bias"})
"""The parts of the evidence that need a backward."""
ATTENTION = frozenset({"A", "G", "q", "k", "v", "dO"})
"""The parts recorded from a block's attention."""
TAPPED = ATTENTION | {"n", "gn", "o", "go", "u", "bias"}
"""The parts recorded inside a running block."""
PARTS = frozenset({"x", "y", "p"}) | TAPPED | BACKWARD


@dataclass
class Record:
    """The values of one block that a pass has recorded so far.

    Args:
        index: The block.
        x: The tokens that enter the block.
        prefix: Number of tokens before the patches.
        depth: Number of blocks.
        open_parts: Returns `Anatomy.parts` of the block.
        seen: Tensors by their letters in `Evidence`.
        scalar_bias: The sum [B] of the bias terms that belong to no token.
        shared: A cache for the layer maps.
        fused: The inputs of attention, if it stayed fused and its matrices are read.
        dO: The gradient of the output of fused attention.
        unscale: A factor [B] of all gradients.
        only_read: Whether attention has only the rows that are read.
        leaf: The output of attention, if a graph begins there.
        reach: The windows, if attention does not connect all tokens; A, G and v are then those of windows [B*W,...].
        suffix: Number of tokens after the patches.
    """

    index: int
    x: Tensor
    prefix: int = 0
    depth: int = 0
    open_parts: Callable[[], Any] = lambda: None
    seen: dict[str, Tensor] = field(default_factory=dict)
    scalar_bias: Tensor | None = None
    shared: dict[str, Any] = field(default_factory=dict)
    fused: FusedAttention | None = None
    dO: Tensor | None = None
    unscale: Tensor | None = None
    only_read: bool = False
    leaf: Tensor | None = None
    reach: Reach | None = None
    suffix: int = 0

    def __post_init__(self) -> None:
        self.seen["x"] = self.x

    @cached_property
    def parts(self) -> Any:
        """The parts of the block."""
        return self.open_parts()

    def see(self, name: str, value: Tensor) -> None:
        """Record A, G or v in the type of the tokens; a separate axis for windows is flattened."""
        value = value.detach().to(self.x.dtype)
        self.seen[name] = value.flatten(0, 1) if value.ndim == 5 else value

    def add_bias(self, value: Tensor, place: Reach | Merging | None = None) -> None:
        """Add a bias map per token [B,N], or if it has another length, its sum per image.

        `place` is the arrangement of its values, if tokens are in windows or on a coarser grid.
        """
        value = value.to(self.x.dtype)
        if place is not None:
            value = place.per_token(value, len(self.x))
        value = value.reshape(len(self.x), -1)
        if value.shape[1] == self.x.shape[1]:
            self.seen["bias"] = self.seen["bias"] + value if "bias" in self.seen else value
        else:
            total = value.sum(1)
            self.scalar_bias = total if self.scalar_bias is None else self.scalar_bias + total

    def complete(self) -> None:
        """Set missing gradients to zero, because the score does not depend on their tensors."""
        for gradient, of in (("gy", "x"), ("gn", "n"), ("go", "o"), ("G", "A")):
            if gradient not in self.seen and of in self.seen:
                self.seen[gradient] = torch.zeros_like(self.seen[of])
        if "dO" not in self.seen and "v" in self.seen:
            self.seen["dO"] = self.x.new_zeros(()).expand_as(self.seen["v"])
        if "bias" not in self.seen:
            self.seen["bias"] = self.x.new_zeros(self.x.shape[:2])

    def forget(self) -> None:
        """Clear the values of a backward before the next class."""
        for name in BACKWARD:
            self.seen.pop(name, None)
        self.scalar_bias = self.dO = None
        self.shared.clear()

    def clear(self) -> None:
        """Clear all values."""
        self.forget()
        self.seen.clear()
        self.fused = self.leaf = None

    @property
    def attention(self) -> FusedAttention | None:
        """Fused attention with the gradient of this backward."""
        return None if self.fused is None else replace(self.fused, dO=self.dO, unscale=self.unscale)

    def fused_part(self, name: str) -> Tensor:
        """A, G, q, k, v or dO of fused attention, in the type of the tokens."""
        attention: Any = self.attention
        part: Tensor = attention.output_gradient if name == "dO" else getattr(attention, name)
        return part.to(self.x.dtype)

    def see_dO(self, gradient: Tensor) -> None:
        """Record the gradient of the output of attention [B,H,N,d], unchanged if attention stayed fused."""
        if self.fused is None:
            self.seen["dO"] = gradient.to(self.x.dtype)
        else:
            self.dO = gradient

    def end(self) -> EndBias:
        """The bias at the end of the block."""
        return EndBias(self.seen.get("bias"), self.scalar_bias)


@dataclass(frozen=True)
class EndBias:
    """The bias terms after the last block: those of the final norm by token [B,N], and the sum of all others [B]."""

    bias: Tensor | None = None
    scalar_bias: Tensor | None = None


class _Part:
    """A tensor of the evidence."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, evidence: Evidence, owner: type) -> Tensor:
        return evidence.read(self.name)


class Evidence:
    """The recorded values of one block that a layer map has declared in `needs`.

    x, y: tokens that enter and leave the block [B,N,D]; g, gy: their gradients. A: attention [B,H,N,N] (to, from); G:
    its gradient. q, k, v: queries (times the scale of the scores in some models), keys and values [B,H,N,d]; dO: the
    gradient of the output A v of attention [B,H,N,d], so that G = dO v^T. n, gn: output of the first norm and its
    gradient. o, go: output of the attention module (after its output projection, before layer scale and skip) and its
    gradient. u: tokens after attention and its skip. bias: sum over the block's biases b of <b, ds/dz> per token [B,N].
    p: the projected patches [B,P,D], before positions, the same in every block.

    `matrix` is a mean over the heads of A, G or both. It is written out only if necessary, so prefer it to A and G if
    only rows are needed. `index` is the block, `depth` the number of blocks, `tokens` is N, `prefix` the number of
    tokens before the patches, and `cells` the slice of the patches. With `only_read`, q and dO have only the rows that
    are read.
    """

    x, y, A, q, k, v, n, o, u, p = (_Part() for _ in range(10))
    g, gy, gn, go, G, dO, bias = (_Part() for _ in range(7))

    def __init__(self, record: Record, needs: Iterable[str] = PARTS, reader: str = "this layer map") -> None:
        self._record, self._needs, self._reader = record, needs, reader
        self.index, self.prefix, self.depth, self.tokens = record.index, record.prefix, record.depth, record.x.shape[1]
        self.cells = slice(record.prefix, self.tokens - record.suffix)
        self.only_read = record.only_read

    @classmethod
    def of(
        cls, x: Tensor, *, index: int = 0, prefix: int = 0, depth: int = 1, parts: Any = None, **seen: Tensor
    ) -> Evidence:
        """Create evidence from tensors, to try a layer map.

        >>> Evidence.of(torch.zeros(1, 3, 4), A=torch.ones(1, 2, 3, 3)).heads_mean.shape
        torch.Size([1, 3, 3])
        """
        return cls(Record(index, x, prefix, depth, lambda: parts, dict(seen)), {"x", *seen})

    def read(self, name: str) -> Tensor:
        """The part with that letter, which must be declared."""
        self._check_declared(name)
        record = self._record
        if name in record.seen:
            reach = record.reach
            if reach is None or name not in ATTENTION:
                return self._seen(name)
            if name not in ("A", "G"):
                raise Unsupported(f"`{self._reader}` reads {name}, and block {self.index} has it in windows or pooled")
            return self.once(f"written {name}", lambda: reach.written(self._in_windows(name, reach)))
        if record.fused is None or name not in ATTENTION:
            raise Unsupported(f"`{self._reader}` reads {name}, and block {self.index} of this model does not expose it")
        return self.once(name, lambda: record.fused_part(name))

    def _seen(self, name: str) -> Tensor:
        """A recorded part, without scaling of gradients."""
        value, unscale = self._record.seen[name], self._record.unscale
        if unscale is None or name not in BACKWARD:
            return value
        each = unscale.repeat_interleave(len(value) // len(unscale))  # windows of one image
        return self.once(name, lambda: value * each.view(-1, *[1] * (value.ndim - 1)))

    def _in_windows(self, name: str, reach: Reach) -> Tensor:
        """A, G or AG [B,H,W,n,m]."""
        A, G = (self._seen(letter) if letter in name else None for letter in "AG")
        value = G if A is None else A if G is None else A * G
        assert value is not None
        value = value.unflatten(0, (len(self._record.x), -1)).transpose(1, 2)
        return value if A is not None else reach.gradients(value)

    def _check_declared(self, name: str) -> None:
        if name not in self._needs:
            declared = "{" + ", ".join(map(repr, sorted(self._needs))) + "}"
            raise PatchlightError(f"`{self._reader}` reads {name} but declares needs={declared}; add '{name}' to needs")

    @property
    def parts(self) -> Any:
        """The norms and linear maps of the block (`Anatomy.parts`)."""
        return self._record.parts

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """A value that several layer maps use, computed once per block and class."""
        shared = self._record.shared
        if name not in shared:
            shared[name] = compute()
        return shared[name]  # type: ignore[no-any-return]

    def matrix(self, entry: Entry, columns: Tensor | None = None, rows: Tensor | None = None) -> Matrix:
        """mean_h rows_h[i] f(A_h, G_h)[i,j] columns_h[j], f an entry such as "A" or "relu(AG)": [B,N,N], or its `Rows`.

        Scales are [B,H,N], or [B,1,N] for all heads.
        """
        for name in "AG":
            if name in entry:
                self._check_declared(name)
        attention = self._record.attention
        if attention is not None:
            return Rows(attention, entry, columns, rows)
        if self._record.reach is not None:
            local = self._local(entry, self._record.reach, columns, rows)
            if local is not None:
                return local
        if columns is None and rows is None:
            return self.once(f"mean {entry}", lambda: head_mean(self._entries(entry)))
        return head_mean(self._entries(entry), columns, rows)

    def _local(self, entry: Entry, reach: Reach, columns: Tensor | None, rows: Tensor | None) -> Matrix | None:
        """The matrix of an attention in windows; None if its columns cannot be scaled there."""
        if columns is None and rows is None:
            return self.once(f"mean {entry}", lambda: Local(self._windows(entry, reach).mean(1), reach))
        scales = [None if columns is None else reach.keys(columns), None if rows is None else reach.queries(rows)]
        if columns is not None and scales[0] is None:
            return None
        values = self._windows(entry, reach).transpose(1, 2)
        flat = [None if t is None else t.transpose(1, 2).flatten(0, 1) for t in scales]
        mean = head_mean(values.flatten(0, 1), *flat)
        return Local(mean.unflatten(0, values.shape[:2]), reach)

    def _windows(self, entry: Entry, reach: Reach) -> Tensor:
        """An entry [B,H,W,n,m]."""
        name = "AG" if "AG" in entry else "G" if "G" in entry else "A"
        return self.once(f"windows {entry}", lambda: signed(entry, self._in_windows(name, reach)))

    def _entries(self, entry: Entry) -> Tensor:
        values = self.AG if "AG" in entry else self.G if "G" in entry else self.A
        return self.once(entry, lambda: signed(entry, values))

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        record = self._record
        if record.fused is not None:
            return record.fused.q.shape[1]
        return (self.A if record.reach is None else record.seen["A"]).shape[1]

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """A @ b, in bfloat16 if attention stayed fused, for large products that need little precision."""
        if self._record.fused is None or not a.is_cuda:
            return a @ b
        return (a.bfloat16() @ b.bfloat16()).to(a.dtype)

    @property
    def gradient_mean(self) -> Tensor:
        """The mean of G over the attended patches [B,H,N], for each attending token."""
        self._check_declared("G")
        attention, reach = self._record.attention, self._record.reach
        if reach is not None:
            G = self._seen("G").unflatten(0, (len(self._record.x), -1)).transpose(1, 2)
            means: Tensor = reach.means(G.flatten(0, 1)).unflatten(0, G.shape[:2])
            return means
        return self.G[..., self.cells].mean(-1) if attention is None else attention.gradient_mean(self.cells)

    @property
    def positive_gradient(self) -> Tensor:
        """mean_hi ReLU(G[h,i,j]) [B,N]; at most one head of G = dO v^T is written out at a time."""
        attention = self._record.attention
        if attention is not None and attention.dO is not None:
            self._check_declared("dO")
            return mean_row(Rows(attention, "relu(G)"))
        dO, v = self.dO, self.v
        return torch.stack([(dO[:, h] @ v[:, h].mT).relu_().mean(1) for h in range(v.shape[1])]).mean(0)

    @property
    def AG(self) -> Tensor:
        """A * G [B,H,N,N]."""
        reach = self._record.reach
        if reach is None:
            return self.once("AG", lambda: self.A * self.G)
        for name in "AG":
            self._check_declared(name)
        return self.once("written AG", lambda: reach.written(self._in_windows("AG", reach)))

    @property
    def heads_mean(self) -> Tensor:
        """mean_h A [B,N,N], written out."""
        return written(self.matrix("A"))
