"""Masking methods against captum, grad-cam, scikit-learn and scikit-image, in float64 on tiny models."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from patchlight.methods import lime, masking, rise
from tests.families import images, shared
from tests.literal.plain import maps

TARGET = [2, 5]


@pytest.mark.parametrize(
    ("window", "stride"), [((16, 16), (16, 16)), ((20, 30), (13, 7)), ((17, 9), (17, 9)), ((40, 72), (16, 16))]
)
@pytest.mark.parametrize("baseline", [0.0, 0.5])
def test_captum_occlusion(window: tuple[int, int], stride: tuple[int, int], baseline: float) -> None:
    """It gives each channel the window's whole value, and adds up in float32, hence 1e-6."""
    attr = pytest.importorskip("captum.attr")
    vit = shared("vit-wide", torch.float64)
    batch = images(vit, 2)
    theirs = attr.Occlusion(lambda x: vit.logits(x)).attribute(
        batch,
        sliding_window_shapes=(3, *window),
        strides=(3, *stride),
        baselines=baseline,
        target=torch.tensor(TARGET),
        perturbations_per_eval=8,
    )
    ours = maps(vit, batch, "occlusion", TARGET, window=window, stride=stride, fill=baseline, score="logit")
    for channel in theirs.unbind(1):
        torch.testing.assert_close(ours, channel.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["vit", "vit-wide", "reg4-gap"])
def test_gradcam_score_cam(family: str) -> None:
    """Its scores pass through a float32 tensor, hence 1e-6."""
    peer = pytest.importorskip("pytorch_grad_cam")
    vit = shared(family, torch.float64)
    batch = images(vit, 2)
    network = copy.deepcopy(vit.model)
    raw: list[Any] = []

    def to_grid(t: Tensor) -> Tensor:
        return t[:, vit.prefix :].reshape(len(t), *vit.grid, -1).permute(0, 3, 1, 2)

    with peer.ScoreCAM(network, [network.blocks[-1].norm1], reshape_transform=to_grid) as cam:  # type: ignore[index, union-attr]
        inner = cam.get_cam_image
        cam.get_cam_image = lambda *a, **k: raw.append(inner(*a, **k)) or raw[-1]
        cam(batch, [peer.utils.model_targets.ClassifierOutputTarget(c) for c in TARGET])
    theirs = torch.as_tensor(raw[0])
    torch.testing.assert_close(maps(vit, batch, "score-cam", TARGET), theirs, rtol=1e-6, atol=1e-6)


def test_scikit_learn_ridge() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    pairwise = pytest.importorskip("sklearn.metrics.pairwise")
    generator = torch.Generator().manual_seed(0)
    z = masking.bernoulli((90, 12), 0.5, generator).double()
    y = torch.rand(90, 2, generator=generator, dtype=torch.float64)
    z[5] = 0
    distance = pairwise.cosine_distances(z.numpy(), np.ones((1, 12)))[:, 0]
    weights = np.sqrt(np.exp(-(distance**2) / 0.25**2))
    torch.testing.assert_close(lime.kernel(z[None], torch.tensor([12]), 0.25)[0], torch.from_numpy(weights))
    theirs = linear_model.Ridge(alpha=1.0).fit(z.numpy(), y.numpy(), sample_weight=weights).coef_
    ours = lime.fit(z[None], y[None], torch.from_numpy(weights)[None], 1.0)[0]
    torch.testing.assert_close(ours, torch.from_numpy(theirs), rtol=0, atol=1e-10)


def test_scikit_image_quickshift() -> None:
    segmentation = pytest.importorskip("skimage.segmentation")
    vit = shared("vit", torch.float64)
    batch = images(vit, 2)
    labels = [lime.superpixels(image, vit) for image in batch]
    for image, found in zip(batch, labels, strict=True):
        mean, std = (np.array(v)[:, None, None] for v in (vit.preprocess.mean, vit.preprocess.std))
        picture = np.clip(image.numpy() * std + mean, 0, 1).transpose(1, 2, 0)
        theirs = segmentation.quickshift(picture, kernel_size=4, max_dist=200, ratio=0.2)
        assert np.array_equal(found.numpy(), theirs)
        assert sorted(found.unique().tolist()) == list(range(int(found.max()) + 1))
    ours = maps(vit, batch, "lime", TARGET, preset="paper", samples=60)
    for values, found in zip(ours, labels, strict=True):
        for label in found.unique():
            assert len(values[found == label].unique()) == 1, "a superpixel has one value"
    alone = maps(vit, batch[1:], "lime", TARGET[1:], preset="paper", samples=60)
    torch.testing.assert_close(alone[0], ours[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("cells", "size"), [(7, 224), (8, 224), (4, 50)])
def test_scikit_image_resize(cells: int, size: int) -> None:
    """RISE's mask generator calls skimage's resize; ours is a matrix."""
    transform = pytest.importorskip("skimage.transform")
    grids = rise.draw_grids(3, cells, 0.5, (size, size), torch.Generator().manual_seed(0)).to(torch.zeros(1).double())
    canvas = (cells + 1) * -(-size // cells)
    for i, mask in enumerate(grids.masks(torch.arange(3))):
        up = transform.resize(grids.grids[i].numpy(), (canvas, canvas), order=1, mode="reflect", anti_aliasing=False)
        down, right = grids.shifts[i].tolist()
        theirs = torch.from_numpy(up[down : down + size, right : right + size])
        torch.testing.assert_close(mask, theirs, rtol=0, atol=1e-10)
