"""The steps of ViT-CX for one image: its masks, their similarities, and their scores."""

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
    masked_scores,
    saliency,
    sample_noise,
    scale_to_unit,
    upsampled,
)

DISTANCE, SIGMA = 0.1, 0.1
"""The paper's clustering threshold and standard deviation of the noise."""


def ask_about(vit: Anatomy, image: Tensor, target: int = 0, seed: int = 0) -> Ask:
    """The question that ViT-CX answers for an image [C,H,W]: the probability of a class."""
    plain = {"chunk": None, "precision": "full", "compile": False}
    targets = Targets(torch.tensor([[target]]))
    return Ask(vit, vit.place(image[None]), targets, "probability", seed, PLAIN, ablation_settings=plain)


def channel_masks(ask: Ask, layer: int | str = NORM1) -> tuple[Tensor, float]:
    """The channels of a layer as masks [D,h,w] in [0, 1], without constant ones, and the score of the clean image."""
    features, clean = feature_maps(ask, layer)
    masks, spans = scale_to_unit(features[0].double(), ask.vit.extent)
    return masks[spans > 0], float(clean[0, 0])


def similarities(masks: Tensor, size: tuple[int, ...]) -> Tensor:
    """Sim(i, j) of all D (D - 1) / 2 pairs of masks [D,h,w], upsampled to `size`."""
    first, second = torch.triu_indices(len(masks), len(masks), 1)
    return 1 - cosine_distances(masks, size)[first, second]


def cluster_channels(channels: Tensor, size: tuple[int, ...], distance: float = DISTANCE) -> Tensor:
    """The masks [K,h,w] of ViT-CX: channels [D,h,w], clustered up to `distance`."""
    return cluster_masks(channels[None], clusters(cosine_distances(channels, size)[None], distance), size)


@dataclass(frozen=True)
class Impact:
    """The masks [K,h,w] of one image and their scores s_i [K], from which the effect of the noise is subtracted."""

    ask: Ask
    masks: Tensor
    clean: float
    scores: Tensor
    sigma: float

    def plain(self) -> Tensor:
        """The plain scores f(X M_i) [K]: K forward passes."""
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
        """A mask [H,W] at the size of the image."""
        return upsampled(self.masks, self.ask.images, self.ask.vit.extent)(torch.tensor([index]))[0, 0]

    def through(self, index: int, noisy: bool) -> tuple[Tensor, float]:
        """The image [C,H,W] through a mask, with noise in its gaps if `noisy`, and the probability of the class."""
        mask = self.at_size(index)
        image = self.ask.images * mask
        if noisy:
            image = image + (1 - mask) * self.sigma * sample_noise(self.ask)(torch.tensor([index]))
        score = target_scores(self.ask.vit.logits(image), self.ask.targets, self.ask.score, self.ask.vit.outputs)
        return image[0], float(score.flatten()[0])


def impact(ask: Ask, distance: float = DISTANCE, sigma: float = SIGMA, layer: int | str = NORM1) -> Impact:
    """The masks of an image at a layer, and their scores for the class in question: 1 + 2 K forward passes."""
    vit = ask.vit
    channels, clean = channel_masks(ask, layer)
    masks = cluster_channels(channels, vit.extent, distance)
    owner, clean_score = torch.zeros(len(masks), dtype=torch.long), torch.full((1, 1), clean, device=vit.device)
    scores = causal_scores(ask, upsampled(masks, ask.images, vit.extent), owner, clean_score, sample_noise(ask), sigma)
    return Impact(ask, masks, clean, scores[:, 0].double().cpu(), sigma)
