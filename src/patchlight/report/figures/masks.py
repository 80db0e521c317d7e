"""ViT-CX taken apart: the masks of one image, how alike they are, and what each of them causes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.targets import Targets, target_scores
from patchlight.evidence.rules import PLAIN
from patchlight.methods.base import Ask
from patchlight.methods.cams import NORM1, feature_maps
from patchlight.methods.vitcx import (
    causal_scores,
    cluster_masks,
    clusters,
    cosine_distances,
    draws,
    masked_scores,
    saliency,
    scaled,
    upsampled,
)

DISTANCE, SIGMA = 0.1, 0.1
"""The paper's threshold of clustering and deviation of the noise."""


def ask_about(vit: Anatomy, image: Tensor, target: int = 0, seed: int = 0) -> Ask:
    """The question that ViT-CX is asked about an image [C,H,W]: the probability of a class."""
    plain = {"chunk": None, "precision": "full", "compile": False}
    targets = Targets(torch.tensor([[target]]))
    return Ask(vit, vit.place(image[None]), targets, "probability", seed, PLAIN, ablation_settings=plain)


def channel_masks(ask: Ask, layer: int | str = NORM1) -> tuple[Tensor, float]:
    """The channels of a layer as masks [D,h,w] in [0, 1], constant ones left out; and the image's own score."""
    features, clean = feature_maps(ask, layer)
    masks, spans = scaled(features[0].double(), ask.vit.extent)
    return masks[spans > 0], float(clean[0, 0])


def similarities(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """Sim(i, j) of all pairs i < j of masks [D,h,w], seen at `size`: D (D - 1) / 2 numbers."""
    first, second = torch.triu_indices(len(masks), len(masks), 1)
    return 1 - cosine_distances(masks, size)[first, second]


def clustered(channels: Tensor, size: tuple[int, int], distance: float = DISTANCE) -> Tensor:
    """The masks [K,h,w] of channels [D,h,w], those closer than `distance` put together as ViT-CX does."""
    return cluster_masks(channels[None], clusters(cosine_distances(channels, size)[None], distance), size)


@dataclass(frozen=True)
class Impact:
    """What the K masks [K,h,w] of one image cause: s_i [K], the effect of the noise subtracted."""

    ask: Ask
    masks: Tensor
    clean: float
    scores: Tensor
    sigma: float

    def plain(self) -> Tensor:
        """f(X M_i) [K], the score with nothing subtracted: K forwards."""
        owner = torch.zeros(len(self.masks), dtype=torch.long)
        at_size = upsampled(self.masks, self.ask.images, self.ask.vit.extent)
        return masked_scores(self.ask, at_size, owner)[:, 0].double().cpu()

    def coverage(self) -> Tensor:
        """rho(x) = 1/K sum_i M_i(x) [H,W]."""
        return self.weighted(torch.full_like(self.scores, 1 / len(self.scores)), corrected=False)

    def weighted(self, scores: Tensor, corrected: bool) -> Tensor:
        """sum_i s_i M_i(x) [H,W], over sum_i M_i(x) where `corrected` for coverage."""
        return saliency(scores[:, None], self.masks.cpu(), self.ask.vit.extent, corrected)[0]

    def at_size(self, index: int) -> Tensor:
        """A mask [H,W] as the image is seen through it."""
        return upsampled(self.masks, self.ask.images, self.ask.vit.extent)(torch.tensor([index]))[0, 0]

    def through(self, index: int, noisy: bool) -> tuple[Tensor, float]:
        """The image [C,H,W] through a mask, the gaps filled with noise where `noisy`; and the class's probability."""
        mask = self.at_size(index)
        image = self.ask.images * mask
        if noisy:
            image = image + (1 - mask) * self.sigma * draws(self.ask)(torch.tensor([index]))
        score = target_scores(self.ask.vit.logits(image), self.ask.targets, self.ask.score, self.ask.vit.outputs)
        return image[0], float(score.flatten()[0])


def impact(ask: Ask, distance: float = DISTANCE, sigma: float = SIGMA, layer: int | str = NORM1) -> Impact:
    """The masks of an image at a layer and their scores for the class asked about: 1 + 2 K forwards."""
    vit = ask.vit
    channels, clean = channel_masks(ask, layer)
    masks = clustered(channels, vit.extent, distance)
    owner, clean_score = torch.zeros(len(masks), dtype=torch.long), torch.full((1, 1), clean, device=vit.device)
    scores = causal_scores(ask, upsampled(masks, ask.images, vit.extent), owner, clean_score, draws(ask), sigma)
    return Impact(ask, masks, clean, scores[:, 0].double().cpu(), sigma)
