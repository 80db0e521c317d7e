"""Noisy linear imputation (Rong et al., ICML 2022): missing pixels from those around them, of many images at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

SWEEPS = 4000
"""Steps after which an image is left as it is; holes as wide as the image take some hundreds."""


def imputed(images: Tensor, missing: Tensor) -> Tensor:
    """Images [n,C,H,W] with each missing pixel [n,1,H,W] the weighted mean of its neighbours, all solved together.

    w is 1/6 for the four direct neighbours and 1/12 for the four diagonal ones; those outside the image are left out
    and the rest counts for all. So (d - W) y = 0 at every missing pixel, d = W 1, with y = x where pixels are known:
    symmetric and positive where one is. Conjugate gradients, preconditioned by d, a depth-wise 3 x 3 convolution each;
    an image's channel stops when all its pixels are the mean of their neighbours to 1e-5 of its largest value (1e-12 in
    float64), whatever else is in the batch. Where every pixel is missing the image's channel means are left, since
    they are what is begun with.
    """
    kind = torch.promote_types(images.dtype, torch.float32)
    with torch.autocast(images.device.type, enabled=False):
        x, there = images.to(kind), missing.to(kind)
        d = _around(torch.ones_like(x[:1, :1]))
        enough = x.abs().amax((2, 3), keepdim=True) * (1e-12 if kind == torch.float64 else 1e-5)
        tiny = torch.finfo(kind).tiny
        y = torch.where(missing, x.mean((2, 3), keepdim=True), x)
        r = _around(y).sub_(d * y).mul_(there)
        z = r / d
        p, rz = z.clone(), _dot(r, z)
        for step in range(SWEEPS):
            goes_on = z.abs().amax((2, 3), keepdim=True) > enough
            if step % 8 == 0 and not bool(goes_on.any()):
                break
            q = (d * p).sub_(_around(p)).mul_(there)
            alpha = torch.where(goes_on, rz / _dot(p, q).clamp_min(tiny), 0)
            y.addcmul_(alpha, p)
            r.addcmul_(alpha, q, value=-1)
            z = r / d
            before, rz = rz, _dot(r, z)
            p.mul_(rz / before.clamp_min(tiny)).add_(z)
    return y.to(images.dtype)


def _around(x: Tensor) -> Tensor:
    """W x: the weighted sum of each pixel's neighbours, those outside left out."""
    weight = x.new_tensor([[1, 2, 1], [2, 0, 2], [1, 2, 1]]).div(12)
    flat = x.reshape(1, -1, *x.shape[-2:])  # one channel each: exact on every device, and fast on a CPU
    return F.conv2d(flat, weight.expand(flat.shape[1], 1, 3, 3), padding=1, groups=flat.shape[1]).view_as(x)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((2, 3), keepdim=True)
