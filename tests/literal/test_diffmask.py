"""VISION DIFFMASK's equations 1 to 5 in float64, one patch at a time, against the objective of preset `paper`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.trained.diffmask import DiffMaskSettings
from patchlight.trained.diffmask.gates import observe
from patchlight.trained.diffmask.objective import penalty
from patchlight.trained.diffmask.train import GateLearner
from patchlight.trained.loop import Devices
from tests.trained.toys import batches, pictures, toy

TAU, LOW, HIGH = 0.2, -0.2, 1.0
"""Of the Hard Concrete; the text says only that its support is [0, 1)."""
ALPHA, BETA, LAMBDA, MARGIN = 15.0, 8.0, 20.0, 0.1


def states(net: Any, image: Tensor) -> list[Tensor]:
    """The patch embeddings without and with positions, and the L hidden states, patches only [P,D]."""
    bare = net.patch_embed(image[None])
    tokens = net._pos_embed(bare)
    found = [bare[0], tokens[0, 1:]]
    for block in net.blocks:
        tokens = block(tokens)
        found.append(tokens[0, 1:])
    return found


def distribution(net: Any, patches: Tensor) -> Tensor:
    """y for patch embeddings [P,D]."""
    tokens = net._pos_embed(patches[None])
    for block in net.blocks:
        tokens = block(tokens)
    return torch.softmax(net.head(net.norm(tokens)[0, 0]), 0)


def activation(w: dict[str, Tensor], gate: int, bare: Tensor, state: Tensor) -> Tensor:
    """Equation 1 for one patch: u = alpha MLP([h; h']) + beta, the MLP's two layers weight-normalised."""
    W1 = torch.stack([g * v / v.norm() for v, g in zip(w["v1"][gate], w["g1"][gate], strict=True)])
    W2 = w["g2"][gate, 0] * w["v2"][gate, 0] / w["v2"][gate, 0].norm()
    hidden = torch.tanh(W1 @ torch.cat([bare, state]) + w["c1"][gate, 0])
    return ALPHA * torch.tanh(W2 @ hidden + w["c2"][gate, 0, 0]) + BETA


def objective(net: Any, images: Tensor, w: dict[str, Tensor], uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 5, the sum over images of L0 + lambda (KL - m), and KL of every image."""
    total, divergences = torch.zeros((), dtype=torch.float64), []
    for n, image in enumerate(images):
        hidden = states(net, image)
        masked, norm = [], torch.zeros((), dtype=torch.float64)
        for i, patch in enumerate(hidden[0]):
            z, nonzero = torch.ones(()).double(), torch.ones(()).double()
            for gate, state in enumerate(hidden):
                u = activation(w, gate, patch, state[i])
                noise = uniform[gate, n, i]
                s = torch.sigmoid((torch.log(noise) - torch.log(1 - noise) + u) / TAU)
                z = z * torch.clamp(s * (HIGH - LOW) + LOW, 0, 1)  # equation 2, and the product over gates
                nonzero = nonzero * torch.sigmoid(u - TAU * torch.log(torch.tensor(-LOW / HIGH)))
            masked.append(z * patch + (1 - z) * w["baseline"])  # equation 3
            norm = norm + nonzero  # the number of patches whose z is not 0, expected
        y, y_hat = distribution(net, hidden[0]), distribution(net, torch.stack(masked))
        kl = (y * (y / y_hat).log()).sum()
        total = total + norm + LAMBDA * (kl - MARGIN)  # equations 4 and 5
        divergences.append(kl)
    return total, torch.stack(divergences)


def test_preset_paper_is_the_texts_objective() -> None:
    single = toy()
    vit = pl.wrap(single.model.double(), name="toy", preprocess=single.preprocess)
    images = pictures(3).double()
    learner = GateLearner(vit, batches(), DiffMaskSettings.preset("paper", steps=5), Devices(vit))
    learner.network.double()
    count, patches = learner.network.count, vit.grid[0] * vit.grid[1]
    uniform = torch.rand(count, 3, patches, generator=torch.Generator().manual_seed(5)).double() * 0.98 + 0.01
    k = learner.draw(np.random.default_rng(0))
    assert k == count - 1, "all gates vote"
    now = learner.sampled(images, observe(vit, images), k, uniform, torch.zeros(3).double())
    now.loss.mean().backward()
    weights = {name: p.detach().clone().requires_grad_() for name, p in learner.network.named_parameters()}
    total, divergences = objective(vit.model, images, weights, uniform)
    (total / len(images)).backward()
    assert torch.allclose(now.kl, divergences, rtol=1e-9)
    assert float(now.loss.detach().sum()) == pytest.approx(float(total.detach()), rel=1e-9)
    for name, parameter in learner.network.named_parameters():
        if name == "beta":
            assert parameter.grad is None, "beta is constant"
            continue
        assert parameter.grad is not None
        assert float(parameter.grad.norm()) > 0
        assert torch.allclose(parameter.grad, weights[name].grad, rtol=1e-7, atol=1e-10), name  # type: ignore[arg-type]


@pytest.mark.parametrize(("kl", "after"), [(0.5, 20.3), (0.0, 19.7)])
def test_the_multiplier_ascends(kl: float, after: float) -> None:
    """max over lambda of equation 5: its gradient is KL - m, and Adam's first step has the length of its rate."""
    vit = toy()
    learner = GateLearner(vit, batches(), DiffMaskSettings.preset("paper", steps=5), Devices(vit))
    learner.multipliers.step(3, torch.tensor(kl), MARGIN)
    assert float(learner.multipliers[3]) == pytest.approx(after, abs=1e-5)
    for _ in range(2000):
        learner.multipliers.step(3, torch.tensor(0.0), MARGIN)
    assert float(learner.multipliers[3]) == 0, "lambda >= 0"


def test_the_penalty_counts_gates_that_are_not_zero() -> None:
    """The footnote on L0, #{i | z_i != 0}, as a mean over samples."""
    u = torch.tensor([[0.4, -1.0, 2.0], [1.5, 0.3, -0.2]], dtype=torch.float64)
    noise = torch.rand(40_000, *u.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = (torch.sigmoid((noise.logit() + u) / TAU) * (HIGH - LOW) + LOW).clamp(0, 1).prod(1)
    counted = float((z != 0).double().sum(1).mean())
    log_keep = torch.nn.functional.logsigmoid(u - TAU * torch.log(torch.tensor(-LOW / HIGH))).sum(0)
    assert float(penalty(log_keep[None], "count")) == pytest.approx(counted, abs=0.03)


def test_preset_paper_has_the_numbers_of_section_3_1() -> None:
    s = DiffMaskSettings.preset("paper")
    assert (s.alpha, s.beta, s.lambda_start, s.margin, s.batch_size, s.epochs) == (15, 8, 20, 0.1, 16, 25)
    assert (s.gate_rate, s.baseline_rate, s.lambda_rate) == (2e-5, 1e-3, 0.3)
    assert (s.lambda_low, s.lambda_high, s.warmup, s.restarts, s.finish) == (0, None, 0, 0, 0)
