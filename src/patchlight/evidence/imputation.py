"""Linear imputation (Rong et al., ICML 2022) of missing pixels from their neighbours, for many images at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.core.resize import to_pixels

STEPS = 500
"""Maximum number of steps; a hole as wide as the image needs about thirty."""
DAMPING = 0.8
"""Damping of the Jacobi sweeps."""


def imputed(images: Tensor, missing: Tensor) -> Tensor:
    """Images [n,C,H,W] in which each missing pixel [n,1,H,W] is the weighted mean of its neighbours.

    The weights are 1/6 for the four direct neighbours and 1/12 for the four diagonal ones, renormalised at the borders
    of the image. So (d - W) y = 0 at every missing pixel, with d = W 1, and y = x at known pixels. The system is solved
    by conjugate gradients, preconditioned with one multigrid cycle per step. A channel of an image stops when all its
    missing pixels are the mean of their neighbours up to 1e-5 of its largest value (1e-11 in float64), independently of
    the batch. If all pixels are missing, the result is the mean of the channel.
    """
    kind = torch.promote_types(images.dtype, torch.float32)
    with torch.autocast(images.device.type, enabled=False):
        x, holes = images.to(kind), _holes(missing.to(kind))
        hole, d = holes[0]
        tolerance = x.abs().amax((2, 3), keepdim=True) * (1e-11 if kind == torch.float64 else 1e-5)
        tiny = torch.finfo(kind).tiny
        y = torch.where(missing, x.mean((2, 3), keepdim=True), x)
        r = _neighbours(y).sub_(d * y).mul_(hole)
        z = _cycle(r, holes)
        p, rz = z.clone(), _dot(r, z)
        for step in range(STEPS):
            active = r.abs().amax((2, 3), keepdim=True) > tolerance
            if step % 4 == 0 and not bool(active.any()):
                break
            q = _apply(p, d, hole)
            alpha = torch.where(active, rz / _dot(p, q).clamp_min(tiny), 0)
            y.addcmul_(alpha, p)
            r.addcmul_(alpha, q, value=-1)
            z = _cycle(r, holes)
            before, rz = rz, _dot(r, z)
            p.mul_(rz / before.clamp_min(tiny)).add_(z)
    return y.to(images.dtype)


Hole = tuple[Tensor, Tensor]
"""The missing pixels [n,1,h,w], 1 or 0, and d [1,1,h,w]."""


def _holes(missing: Tensor) -> list[Hole]:
    """The missing pixels at every scale, each half the previous size; a cell is missing if all of its pixels are."""
    scales = [missing]
    while min(scales[-1].shape[-2:]) > 3:
        scales.append(-F.max_pool2d(_pad_to_even(-scales[-1], -1.0), 2))
    return [(hole, _neighbours(torch.ones_like(hole[:1]))) for hole in scales]


def _cycle(r: Tensor, holes: list[Hole]) -> Tensor:
    """Approximate (d - W)^-1 r: a damped Jacobi sweep, the residual solved at half the size, and another sweep."""
    hole, d = holes[0]
    z = DAMPING * r / d
    if len(holes) > 1:
        coarse = _halve(r - _apply(z, d, hole)).mul_(4 * holes[1][0])  # the same stencil over twice the distance
        z = _double(_cycle(coarse, holes[1:]), z).mul_(hole).add_(z)
    return (r - _apply(z, d, hole)).mul_(DAMPING / d).add_(z)


def _apply(x: Tensor, d: Tensor, hole: Tensor) -> Tensor:
    """(d - W) x at missing pixels."""
    return (d * x).sub_(_neighbours(x)).mul_(hole)


def _neighbours(x: Tensor) -> Tensor:
    """W x: the weighted sum of the neighbours of each pixel."""
    return _filter(x, x.new_tensor([[1, 2, 1], [2, 0, 2], [1, 2, 1]]) / 12)


def _halve(x: Tensor) -> Tensor:
    """Downsample by two: each cell is a mean of 4 x 4 pixels, the transpose of `_double` divided by 4."""
    line = x.new_tensor([1, 3, 3, 1]) / 8
    return _filter(_pad_to_even(x), line[:, None] * line, stride=2)


def _double(x: Tensor, like: Tensor) -> Tensor:
    """Upsample by two, bilinearly, with zeros outside."""
    padded = F.pad(x, (1, 1, 1, 1))
    wide = to_pixels(padded, [2 * side for side in padded.shape[-2:]])
    return wide[..., 2 : 2 + like.shape[-2], 2 : 2 + like.shape[-1]].contiguous()


def _filter(x: Tensor, kernel: Tensor, stride: int = 1) -> Tensor:
    """Convolve each channel separately, as one image with many channels, which is exact on CUDA and fast on a CPU."""
    flat = x.reshape(1, -1, *x.shape[-2:])
    out = F.conv2d(flat, kernel.expand(flat.shape[1], 1, -1, -1), stride=stride, padding=1, groups=flat.shape[1])
    return out.view(*x.shape[:-2], *out.shape[-2:])


def _pad_to_even(x: Tensor, value: float = 0.0) -> Tensor:
    """Pad odd numbers of rows and columns by one."""
    height, width = x.shape[-2:]
    return F.pad(x, (0, width % 2, 0, height % 2), value=value)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((2, 3), keepdim=True)
