"""Completeness: FullGrad's terms, added up, are the score (they are under the libra rule)."""

from __future__ import annotations

from torch import Tensor, stack

from patchlight.anatomy.opened import Anatomy
from patchlight.core.targets import Targets
from patchlight.evidence.passes import run_pass
from patchlight.evidence.rules import RULES
from patchlight.evidence.runner import LayerJob
from patchlight.methods.gradients import fullgrad


def totals(vit: Anatomy, batch: Tensor, rule: str = "libra", targets: Targets | None = None) -> tuple[Tensor, Tensor]:
    """sum_i <x_l, g_l> + the bias terms of the blocks from l on + those behind them, for every l [L,B]; and the score.

    The score [L,B] is the class's logit, the same for every l.
    """
    job = LayerJob(fullgrad, frozenset({"x", "g", "bias"}), tuple(range(vit.depth)))
    seen = run_pass(vit, batch, targets, rule=RULES[rule], jobs=[job])
    pairs, end = seen.layers(), seen.end()
    rest = sum(t.reshape(len(batch), -1).sum(1) for t in (end.bias, end.scalar_bias) if t is not None)
    sums = []
    for layer in reversed(range(vit.depth)):
        input_terms, bias_terms = pairs[layer]
        rest = rest + bias_terms.sum(1)
        sums.append(input_terms.sum(1) + rest)
    return stack(sums[::-1]), seen.scores[:, 0].expand(vit.depth, -1)
