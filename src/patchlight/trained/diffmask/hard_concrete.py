"""The Hard Concrete distribution of DiffMask's gates: a stretched binary Concrete, clamped to [0, 1]."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

TEMPERATURE, LOW, HIGH = 0.2, -0.2, 1.0
"""tau, l and r: s in (0, 1) is stretched to (l, r) and clamped, so P(z = 0) > 0 and P(z = 1) = 0."""
SHIFT = TEMPERATURE * math.log(-LOW / HIGH)


def sample(u: Tensor, uniform: Tensor) -> Tensor:
    """z = clamp(s (r - l) + l, 0, 1) with s = sigmoid((logit U + u) / tau), for locations u and U in (0, 1)."""
    s = torch.sigmoid((uniform.logit(1e-6) + u) / TEMPERATURE)
    return (s * (HIGH - LOW) + LOW).clamp(0, 1)


def sample_product(u: Tensor, uniform: Tensor) -> Tensor:
    """prod_i z_i [B,P] of one sample for each of the locations u [S,B,P]."""
    product: Tensor = _SampleProduct.apply(u, uniform)
    return product


class _SampleProduct(torch.autograd.Function):
    """d prod_j z_j / d u_i = (prod_j z_j / z_i) (r - l) s_i (1 - s_i) / tau where z_i > 0, else 0.

    The gradient of `Tensor.prod` synchronises with the device to count zeros. It is not needed here, because a z_i of 0
    has no gradient.
    """

    @staticmethod
    def forward(ctx: Any, u: Tensor, uniform: Tensor) -> Tensor:
        z = sample(u, uniform)
        product = z.prod(0)
        ctx.save_for_backward(z, product)
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        z, product = ctx.saved_tensors
        slope = (z - LOW) * (HIGH - z) / (TEMPERATURE * (HIGH - LOW)) / z
        return torch.where(z > 0, slope, 0) * (gradient * product), None


def log_keep_probability(u: Tensor) -> Tensor:
    """log P(z != 0) = log sigmoid(u - tau log(-l / r)), without underflow."""
    return F.logsigmoid(u - SHIFT)


def expected(u: Tensor) -> Tensor:
    """E[z] = integral_0^1 P(z > t) dt = (r - l) integral_{-l/(r-l)}^1 sigmoid(u - tau logit y) dy.

    With y = sigmoid(x) the integrand is smooth and falls like exp(-x); 24 Gauss-Legendre nodes give an error of 1e-6.
    """
    shifts, weights = _nodes_on(u.device, u.dtype)
    return torch.sigmoid(u[..., None] - shifts) @ weights


@cache
def _nodes_on(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """tau times the nodes x from y = -l / (r - l), and weights w y (1 - y), normalised so that E[z] tends to 1."""
    first, last = math.log(-LOW / HIGH), 16.0
    x, w = np.polynomial.legendre.leggauss(24)
    x = first + (x + 1) * (last - first) / 2
    y = 1 / (1 + np.exp(-x))
    weights = w * y * (1 - y)
    with torch.inference_mode(False):
        nodes = torch.tensor(x.tolist(), device=device, dtype=dtype)
        return TEMPERATURE * nodes, torch.tensor((weights / weights.sum()).tolist(), device=device, dtype=dtype)
