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
    """DecompX: how much of the logit comes from each token that enters block `start`, biases apart. Signed.

    With attention A, the norms' deviations and the ratios GELU(h)/h held constant, y_c = sum_j <J_s[j], x_s[j]> +
    const: the map is a_j = <J_s[j], x_s[j]>. J_s for every s is the gradient under the `libra` rule, so one forward and
    one backward replace N forwards for each start. `.plus` and `.skipplus` sum over starts. Of a gated MLP (SwiGLU)
    each factor gets half of the product, so that the sum holds there too.
    """
    return token_ixg(b)
