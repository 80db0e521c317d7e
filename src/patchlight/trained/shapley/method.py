"""The method `vit-shapley`: Shapley values of all patches and classes, predicted by a trained network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchlight.core.errors import Unsupported
from patchlight.evidence.precision import casting, rounding
from patchlight.methods.base import Ask, own_passes
from patchlight.trained.shapley.networks import ViTShapley


@own_passes(
    "vit-shapley",
    paper="Covert et al., ICLR 2023",
    aliases=("vitshapley",),
    every_class=True,
    score="probability",
    precision="tf32",
    refuses=ViTShapley.refusal,
    depends=ViTShapley.identity,
    cost="1 or 2 forwards; trained once per model",
)
def vit_shapley(ask: Ask, explainer: Any = None) -> Tensor:
    """Shapley values of the patches, predicted by a trained network.

        phi = tanh(MLP(block(LN(x_L)))) + the constant that makes   sum phi = v(all) - v(none)

    x_L are the tokens of the model, or of a copy that was trained for this. v(S) is the probability that the surrogate
    (a copy that was trained to work without patches, or the model itself) gives a class on the patches of S alone, so
    other scores are not available. All classes come from one pass; the map is signed. Two forward passes, or one where
    surrogate and backbone are the model itself.

    Args:
        explainer: A `pl.shapley.ViTShapley` or its folder; None: the explainer of the bundled model.
    """
    if ask.score != "probability":
        raise Unsupported(f"'vit-shapley' explains probabilities, not {ask.score!r}; leave out score")
    vit, precision = ask.vit, ask.precision
    network = ViTShapley.resolve(explainer).join(vit)
    with torch.no_grad(), rounding(vit, precision), casting(vit, precision):
        phi = network(ask.images).movedim(1, 2)
    rows = torch.arange(len(phi), device=phi.device)[:, None]
    values = phi[rows, ask.targets.index.to(phi.device)]
    if ask.targets.against is not None:
        values = values - phi[rows, ask.targets.against.to(phi.device)]
    return values.reshape(*values.shape[:2], *vit.grid)
