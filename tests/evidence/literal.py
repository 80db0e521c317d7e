"""Slow versions of what the evidence is made of: the backward rules as their papers write them, k-means, imputation.

The function of an operation takes a rule, the inputs and the gradient g of the output, and returns the gradients of
the inputs. The plain gradient and LibraGrad are written as derivatives, of the operation and of its form with const[.].
Ali et al. ("conservative") and Achtibat et al. ("attnlrp") write how relevance passes; a gradient stands for it by
R = x * g, so what leaves an input x is R / x. Rows and columns are short, and nothing is shared between rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Gradients = tuple[Tensor, ...]
HELD = ("libra", "gamma", "lxt")
"""Rules that differ in linear maps only."""


def filled(shape: Sequence[int], value: Callable[..., float]) -> Tensor:
    """A float64 tensor whose element at each place is `value(*place)`."""
    places = torch.cartesian_prod(*(torch.arange(n) for n in shape)).reshape(-1, len(shape)).tolist()
    return torch.tensor([float(value(*place)) for place in places], dtype=torch.float64).reshape(tuple(shape))


def same(i: int, j: int) -> float:
    return 1.0 if i == j else 0.0


def attention(rule: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, g: Tensor) -> Gradients:
    """o_i = sum_j A_ij v_j, A = softmax(S), S_ij = <q_i, k_j> / sqrt(d) + bias_ij; one head [n,d], n and m tokens."""
    n, d = q.shape
    m = len(k)
    root = math.sqrt(d)
    S = filled((n, m), lambda i, j: sum(q[i, p] * k[j, p] for p in range(d)) / root + bias[i, j])
    A = filled((n, m), lambda i, j: math.exp(S[i, j]) / sum(math.exp(S[i, c]) for c in range(m)))
    o = filled((n, d), lambda i, p: sum(A[i, j] * v[j, p] for j in range(m)))
    nothing = torch.zeros_like(q), torch.zeros_like(k)
    if rule in HELD:  # const[A] v
        return *nothing, filled((m, d), lambda j, p: sum(A[i, j] * g[i, p] for i in range(n)))
    R = o * g
    if rule == "conservative":
        # AH-rule: R(v_j) = sum_i v_j A_ij / (sum_j' v_j' A_ij') R(o_i), and nothing to the gates
        R_v = filled((m, d), lambda j, p: sum(v[j, p] * A[i, j] / o[i, p] * R[i, p] for i in range(n)))
        return *nothing, R_v / v
    if rule == "attnlrp":
        # uniform rule of a product: half to each factor; softmax by its Taylor expansion: R_S = S (R_A - A sum R_A)
        R_v = filled((m, d), lambda j, p: sum(A[i, j] * v[j, p] * R[i, p] / (2 * o[i, p]) for i in range(n)))
        R_A = filled((n, m), lambda i, j: sum(A[i, j] * v[j, p] * R[i, p] / (2 * o[i, p]) for p in range(d)))
        R_S = filled((n, m), lambda i, j: S[i, j] * (R_A[i, j] - A[i, j] * sum(R_A[i, c] for c in range(m))))
        R_q = filled((n, d), lambda i, p: sum(q[i, p] * k[j, p] / root * R_S[i, j] / (2 * S[i, j]) for j in range(m)))
        R_k = filled((m, d), lambda j, p: sum(q[i, p] * k[j, p] / root * R_S[i, j] / (2 * S[i, j]) for i in range(n)))
        return R_q / q, R_k / k, R_v / v
    g_v = filled((m, d), lambda j, p: sum(A[i, j] * g[i, p] for i in range(n)))
    g_A = filled((n, m), lambda i, j: sum(g[i, p] * v[j, p] for p in range(d)))
    g_S = filled((n, m), lambda i, j: sum(g_A[i, c] * A[i, c] * (same(c, j) - A[i, j]) for c in range(m)))
    g_q = filled((n, d), lambda i, p: sum(g_S[i, j] * k[j, p] for j in range(m)) / root)
    g_k = filled((m, d), lambda j, p: sum(g_S[i, j] * q[i, p] for i in range(n)) / root)
    return g_q, g_k, g_v


def layer_norm(rule: str, x: Tensor, weight: Tensor, eps: float, g: Tensor) -> Gradients:
    """y_j = weight_j (x_j - mean) / s + bias_j, s = sqrt(var + eps), of one token [D]."""
    D = len(x)
    mean = sum(x.tolist()) / D
    s = math.sqrt(sum((float(x[j]) - mean) ** 2 for j in range(D)) / D + eps)
    if rule in HELD:  # (x - mean) / const[s]: the mean stays in the graph
        return (filled((D,), lambda i: sum(g[j] * weight[j] / s * (same(i, j) - 1 / D) for j in range(D))),)
    if rule in ("conservative", "attnlrp"):
        # LN-rule: R(x_i) = sum_j x_i (d_ij - 1/D) / (sum_i' x_i' (d_i'j - 1/D)) R_j; the division passes R as it is
        R = filled((D,), lambda j: weight[j] * (x[j] - mean) / s * g[j])
        shift = filled((D,), lambda j: sum(x[i] * (same(i, j) - 1 / D) for i in range(D)))
        return (filled((D,), lambda i: sum(x[i] * (same(i, j) - 1 / D) / shift[j] * R[j] for j in range(D))) / x,)

    def slope(j: int, i: int) -> Tensor | float:
        return (same(i, j) - 1 / D) / s - (x[j] - mean) * (x[i] - mean) / (D * s**3)

    return (filled((D,), lambda i: sum(g[j] * weight[j] * slope(j, i) for j in range(D))),)


def rms_norm(rule: str, x: Tensor, weight: Tensor, eps: float, g: Tensor) -> Gradients:
    """y_j = weight_j x_j / r, r = sqrt(mean x^2 + eps), of one token [D]."""
    D = len(x)
    r = math.sqrt(sum(float(x[j]) ** 2 for j in range(D)) / D + eps)
    if rule in HELD:  # x / const[r]
        return (filled((D,), lambda i: g[i] * weight[i] / r),)
    if rule in ("conservative", "attnlrp"):  # the division passes R as it is
        return (filled((D,), lambda i: weight[i] * x[i] / r * g[i]) / x,)

    def slope(j: int, i: int) -> Tensor | float:
        return same(i, j) / r - x[j] * x[i] / (D * r**3)

    return (filled((D,), lambda i: sum(g[j] * weight[j] * slope(j, i) for j in range(D))),)


def _gelu_share(h: float) -> float:
    return 0.5 * (1 + math.erf(h / math.sqrt(2)))


def _gelu_slope(h: float) -> float:
    return _gelu_share(h) + h * math.exp(-h * h / 2) / math.sqrt(2 * math.pi)


def _tanh_share(h: float) -> float:
    return 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))


def _tanh_slope(h: float) -> float:
    inner = math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)
    return _tanh_share(h) + h * 0.5 / math.cosh(inner) ** 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * h * h)


def _sigmoid(h: float) -> float:
    return 1 / (1 + math.exp(-h))


def _quick_slope(h: float) -> float:
    return _sigmoid(1.702 * h) * (1 + 1.702 * h * (1 - _sigmoid(1.702 * h)))


def _softplus_share(h: float) -> float:
    return (math.log1p(math.exp(h)) - math.log(2)) / h


SHARES: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "gelu": (_gelu_share, _gelu_slope),
    "tanh-gelu": (_tanh_share, _tanh_slope),
    "quick-gelu": (lambda h: _sigmoid(1.702 * h), _quick_slope),
    "silu": (_sigmoid, lambda h: _sigmoid(h) * (1 + h * (1 - _sigmoid(h)))),
    "relu": (lambda h: float(h > 0), lambda h: float(h > 0)),
    "elu": (lambda h: 1.0 if h > 0 else math.expm1(h) / h, lambda h: 1.0 if h > 0 else math.exp(h)),
    "tanh": (lambda h: math.tanh(h) / h, lambda h: 1 - math.tanh(h) ** 2),
    "softplus": (_softplus_share, _sigmoid),
}
"""Of each activation, (f(h) - f(0)) / h and f'(h)."""


def activation(rule: str, kind: str, h: Tensor, g: Tensor) -> Gradients:
    """f(h) of numbers [...]: f(h) = f(0) + h const[(f(h) - f(0)) / h], f(0) a bias; Ali et al. leave f alone."""
    share, slope = SHARES[kind]
    flat, given = h.flatten().tolist(), g.flatten().tolist()
    if rule in HELD:
        out = [share(a) * b for a, b in zip(flat, given, strict=True)]
    elif rule == "attnlrp":  # identity rule: R(h) = R(f(h))
        out = [(share(a) * a) * b / a for a, b in zip(flat, given, strict=True)]
    else:
        out = [slope(a) * b for a, b in zip(flat, given, strict=True)]
    return (torch.tensor(out, dtype=torch.float64).reshape(h.shape),)


def gate(rule: str, a: Tensor, b: Tensor, g: Tensor) -> Gradients:
    """a * b of two activations, elementwise."""
    if rule in HELD:  # the backward of a b / 2
        return b / 2 * g, a / 2 * g
    if rule == "attnlrp":  # uniform rule: half of R to each
        R = a * b * g
        return R / 2 / a, R / 2 / b
    return b * g, a * g


def linear(rule: str, x: Tensor, weight: Tensor, bias: Tensor, g: Tensor) -> Gradients:
    """z_j = sum_i W_ji x_i + b_j of one token [D]: no rule touches it."""
    z = filled((len(weight),), lambda j: sum(weight[j, i] * x[i] for i in range(len(x))) + bias[j])
    if rule in (
        "conservative",
        "attnlrp",
    ):  # z-rule (epsilon = 0): R_i = sum_j W_ji x_i / z_j R_j, the bias keeps its own
        R = z * g
        rows = range(len(weight))
        return (filled((len(x),), lambda i: sum(weight[j, i] * x[i] / z[j] * R[j] for j in rows)) / x,)
    return (filled((len(x),), lambda i: sum(weight[j, i] * g[j] for j in range(len(weight)))),)


def slow_lloyd(points: np.ndarray, initial: np.ndarray, iterations: int, empty: str) -> np.ndarray:
    """Point by point, then cluster by cluster, in float64."""
    centroids = points[initial].astype(np.float64)
    for _ in range(iterations):
        distance = np.array([((p - centroids) ** 2).sum(1) for p in points])
        nearest = distance.argmin(1)
        far = iter(np.argsort(-distance.min(1), kind="stable"))
        moved = np.zeros_like(centroids)
        for k in range(len(centroids)):
            members = points[nearest == k]
            if len(members):
                moved[k] = members.mean(0)
            elif empty == "reseed":
                moved[k] = points[next(far)]
        shift, centroids = ((moved - centroids) ** 2).sum(), moved
        if shift <= 1e-4:
            break
    return centroids


def imputed(image: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """An image [C,H,W] with every missing pixel [H,W] the mean of its neighbours, by one dense system (ROAD)."""
    channels, height, width = image.shape
    weights = {
        (i, j): 1 / 6 if i == 0 or j == 0 else 1 / 12 for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)
    }
    places = [(i, j) for i in range(height) for j in range(width) if missing[i, j]]
    A, b = np.zeros((len(places), len(places))), np.zeros((len(places), channels))
    for n, (i, j) in enumerate(places):
        for (di, dj), w in weights.items():
            other = (i + di, j + dj)
            if not (0 <= other[0] < height and 0 <= other[1] < width):
                continue
            A[n, n] += w
            if missing[other]:
                A[n, places.index(other)] -= w
            else:
                b[n] += w * image[:, other[0], other[1]]
    out = image.copy()
    for (i, j), value in zip(places, np.linalg.solve(A, b), strict=True):
        out[:, i, j] = value
    return out
