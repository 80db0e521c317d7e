"""DecompX without bias, in reverse mode: the forward decomposition of N x N x D vectors, from one backward."""

from __future__ import annotations

from torch import Tensor

from patchlight.evidence.record import Evidence
from patchlight.methods.base import layer_map
from patchlight.methods.compositions import FIRST
from patchlight.methods.gradients import token_ixg


@layer_map(
    "decompx",
    paper="Modarressi et al., ACL 2023; on ViTs SkipPLUS, CVPR-W 2024",
    needs={"x", "g"},
    combine=FIRST,
    rule="libra",
)
def decompx(b: Evidence) -> Tensor:
    """How much of the logit comes from each patch when the network is treated as linear.

        logit = sum_j a_j + const,   a_j = <J[j], x[j]>

    x are the tokens that enter block `start`; the map is a, and biases are not part of it. Attention, the norms'
    deviations and the ratios GELU(h)/h are held constant, so J is the gradient under the `libra` rule: one forward and
    one backward pass replace N forwards per start. `.plus` and `.skipplus` sum over starts. In a gated MLP (SwiGLU)
    each factor gets half of the product, so the sum holds there too.
    """
    return token_ixg(b)
