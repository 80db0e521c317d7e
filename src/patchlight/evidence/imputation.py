"""Linear imputation (Rong et al., ICML 2022): missing pixels from their neighbours, for many images at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.core.resize import to_pixels

STEPS = 500
"""Maximum number of steps; a hole as wide as the image takes about thirty."""
DAMPING = 0.8
"""Damping of the Jacobi sweeps, so that they smooth."""


def imputed(images: Tensor, missing: Tensor) -> Tensor:
    """Images [n,C,H,W] with each missing pixel [n,1,H,W] the weighted mean of its neighbours, all solved together.

    w is 1/6 for the four direct neighbours and 1/12 for the four diagonal ones; neighbours outside the image are left
    out and the weights renormalised. So (d - W) y = 0 at every missing pixel, d = W 1, with y = x where pixels are
    known: symmetric, and positive definite if at least one is known. Conjugate gradients are preconditioned by one
    multigrid cycle per step, so wide holes take few steps. A channel of an image stops when all its missing pixels are
    the mean of their neighbours to 1e-5 of its largest value (1e-11 in float64), independently of the batch. If every
    pixel is missing, the result is the channel's mean, the initial value.
    """
    kind = torch.promote_types(images.dtype, torch.float32)
    with torch.autocast(images.device.type, enabled=False):
        x, holes = images.to(kind), _holes(missing.to(kind))
        there, d = holes[0]
        enough = x.abs().amax((2, 3), keepdim=True) * (1e-11 if kind == torch.float64 else 1e-5)
        tiny = torch.finfo(kind).tiny
        y = torch.where(missing, x.mean((2, 3), keepdim=True), x)
        r = _around(y).sub_(d * y).mul_(there)
        z = _cycle(r, holes)
        p, rz = z.clone(), _dot(r, z)
        for step in range(STEPS):
            goes_on = r.abs().amax((2, 3), keepdim=True) > enough
            if step % 4 == 0 and not bool(goes_on.any()):
                break
            q = _unlike(p, d, there)
            alpha = torch.where(goes_on, rz / _dot(p, q).clamp_min(tiny), 0)
            y.addcmul_(alpha, p)
            r.addcmul_(alpha, q, value=-1)
            z = _cycle(r, holes)
            before, rz = rz, _dot(r, z)
            p.mul_(rz / before.clamp_min(tiny)).add_(z)
    return y.to(images.dtype)


Hole = tuple[Tensor, Tensor]
"""The missing pixels [n,1,h,w], 1 or 0, and d [1,1,h,w]."""


def _holes(there: Tensor) -> list[Hole]:
    """The hole at every scale, each half the size of the one before; a cell is missing if all of its pixels are."""
    found = [there]
    while min(found[-1].shape[-2:]) > 3:
        found.append(-F.max_pool2d(_even(-found[-1], -1.0), 2))
    return [(one, _around(torch.ones_like(one[:1]))) for one in found]


def _cycle(r: Tensor, holes: list[Hole]) -> Tensor:
    """Approximate (d - W)^-1 r: a damped Jacobi sweep, the residual solved at half the size, and another sweep."""
    there, d = holes[0]
    z = DAMPING * r / d
    if len(holes) > 1:
        rest = _halve(r - _unlike(z, d, there)).mul_(4 * holes[1][0])  # the same stencil over twice the distance
        z = _double(_cycle(rest, holes[1:]), z).mul_(there).add_(z)
    return (r - _unlike(z, d, there)).mul_(DAMPING / d).add_(z)


def _unlike(x: Tensor, d: Tensor, there: Tensor) -> Tensor:
    """(d - W) x at missing pixels: the difference of each from the mean of its neighbours."""
    return (d * x).sub_(_around(x)).mul_(there)


def _around(x: Tensor) -> Tensor:
    """W x: the weighted sum of each pixel's neighbours inside the image."""
    return _filter(x, x.new_tensor([[1, 2, 1], [2, 0, 2], [1, 2, 1]]) / 12)


def _halve(x: Tensor) -> Tensor:
    """Cells at half the size, each a mean of the 4 x 4 pixels around it: the transpose of doubling, over 4."""
    line = x.new_tensor([1, 3, 3, 1]) / 8
    return _filter(_even(x), line[:, None] * line, stride=2)


def _double(x: Tensor, like: Tensor) -> Tensor:
    """Cells at twice the size, interpolated; zero outside."""
    padded = F.pad(x, (1, 1, 1, 1))
    wide = to_pixels(padded, [2 * side for side in padded.shape[-2:]])
    return wide[..., 2 : 2 + like.shape[-2], 2 : 2 + like.shape[-1]].contiguous()


def _filter(x: Tensor, kernel: Tensor, stride: int = 1) -> Tensor:
    """Each channel convolved separately; folded into one image, which is exact on CUDA and fast on a CPU."""
    flat = x.reshape(1, -1, *x.shape[-2:])
    out = F.conv2d(flat, kernel.expand(flat.shape[1], 1, -1, -1), stride=stride, padding=1, groups=flat.shape[1])
    return out.view(*x.shape[:-2], *out.shape[-2:])


def _even(x: Tensor, value: float = 0.0) -> Tensor:
    """With an additional row and column where their number is odd."""
    height, width = x.shape[-2:]
    return F.pad(x, (0, width % 2, 0, height % 2), value=value)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((2, 3), keepdim=True)
