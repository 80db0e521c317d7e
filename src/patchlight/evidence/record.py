"""What a pass sees of one block (`Record`, written by taps and hooks), and how a layer map reads it (`Evidence`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from patchlight.errors import PatchlightError, Unsupported

BACKWARD = frozenset({"g", "gy", "gn", "G", "bias"})
"""Parts of the evidence that take a backward."""
TAPPED = frozenset({"A", "G", "v", "n", "gn", "u", "bias"})
"""Parts that are seen inside a block, as it runs."""
PARTS = frozenset({"x", "y", "A", "v", "n", "u", "p"}) | BACKWARD


@dataclass
class Record:
    """What one pass has seen of one block so far: tensors by their letters in `Evidence`.

    `scalar_bias` [B] sums the bias terms that belong to no token; `shared` is what layer maps keep for each other.
    """

    index: int
    x: Tensor
    prefix: int = 0
    depth: int = 0
    open_parts: Callable[[], Any] = lambda: None
    seen: dict[str, Tensor] = field(default_factory=dict)
    scalar_bias: Tensor | None = None
    shared: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seen["x"] = self.x

    @cached_property
    def parts(self) -> Any:
        return self.open_parts()

    def add_bias(self, value: Tensor) -> None:
        """Add a bias map: per token [B,N] where it has the tokens' length, else its sum, to a per-image scalar."""
        if value.ndim == 2 and value.shape[1] == self.x.shape[1]:
            self.seen["bias"] = self.seen["bias"] + value if "bias" in self.seen else value
        else:
            total = value.reshape(value.shape[0], -1).sum(1)
            self.scalar_bias = total if self.scalar_bias is None else self.scalar_bias + total

    def complete(self) -> None:
        """Gradients that never came are zero: the score does not depend on that tensor."""
        for gradient, of in (("gy", "x"), ("gn", "n"), ("G", "A")):
            if gradient not in self.seen and of in self.seen:
                self.seen[gradient] = torch.zeros_like(self.seen[of])
        if "bias" not in self.seen:
            self.seen["bias"] = self.x.new_zeros(self.x.shape[:2])

    def forget(self) -> None:
        """Drop what belongs to one backward, so that the next class starts clean."""
        for name in BACKWARD:
            self.seen.pop(name, None)
        self.scalar_bias = None
        self.shared.clear()

    def end(self) -> End:
        return End(self.seen.get("bias"), self.scalar_bias)


@dataclass(frozen=True)
class End:
    """The bias terms behind the last block: those of the final norm by token [B,N], all others summed [B]."""

    bias: Tensor | None = None
    scalar_bias: Tensor | None = None


class _Part:
    """A tensor of the evidence."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, evidence: Evidence, owner: type) -> Tensor:
        return evidence.read(self.name)


class Evidence:
    """What one pass saw of one block, as far as a layer map declares that it reads it.

    x, y: tokens entering and leaving [B,N,D]; g, gy: their gradients. A: attention [B,H,N,N] (to, from); G: its
    gradient; v: values [B,H,N,d]. n, gn: output of the first norm and its gradient. u: tokens after attention and
    its skip. bias: sum over the block's biases b of <b, ds/dz> per token [B,N]. p: the projected patches [B,P,D],
    before positions; every block has the same.
    `index` and `depth` say which block of how many, `prefix` how many tokens stand before the patches.
    """

    x, y, A, v, n, u, p = (_Part() for _ in range(7))
    g, gy, gn, G, bias = (_Part() for _ in range(5))

    def __init__(self, record: Record, needs: Iterable[str] = PARTS, reader: str = "this layer map") -> None:
        self._record, self._needs, self._reader = record, needs, reader
        self.index, self.prefix, self.depth = record.index, record.prefix, record.depth

    @classmethod
    def of(
        cls, x: Tensor, *, index: int = 0, prefix: int = 0, depth: int = 1, parts: Any = None, **seen: Tensor
    ) -> Evidence:
        """Evidence made by hand, to try a layer map on.

        >>> Evidence.of(torch.zeros(1, 3, 4), A=torch.ones(1, 2, 3, 3)).heads_mean.shape
        torch.Size([1, 3, 3])
        """
        return cls(Record(index, x, prefix, depth, lambda: parts, dict(seen)), {"x", *seen})

    def read(self, name: str) -> Tensor:
        """The part of that letter; it must be declared."""
        if name not in self._needs:
            declared = "{" + ", ".join(map(repr, sorted(self._needs))) + "}"
            raise PatchlightError(f"`{self._reader}` reads {name} but declares needs={declared}; add '{name}' to needs")
        try:
            return self._record.seen[name]
        except KeyError:
            raise Unsupported(
                f"`{self._reader}` reads {name}, and block {self.index} of this model shows none"
            ) from None

    @property
    def parts(self) -> Any:
        """The block's norms and linear maps (`Anatomy.parts`), opened when first asked for."""
        return self._record.parts

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """A quantity that several layer maps use, computed once per block and class."""
        shared = self._record.shared
        if name not in shared:
            shared[name] = compute()
        return shared[name]

    @property
    def AG(self) -> Tensor:
        """A * G [B,H,N,N]."""
        return self.once("AG", lambda: self.A * self.G)

    @property
    def heads_mean(self) -> Tensor:
        """mean_h A [B,N,N]."""
        return self.once("heads_mean", lambda: self.A.mean(1))
