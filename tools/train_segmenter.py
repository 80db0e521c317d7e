"""Train ``pocket-segmenter``, a DPT of 1.2 million parameters, on composed scenes (``tools/scenes.py``).

    python -m tools.train_segmenter --out DIR --minutes 16 --batch 32 --rate 3e-3 --warmup 50

It needs torch, transformers, safetensors and no data. Its ViT is that of ``pocket-detector`` and stays as it is; only
the decoder is trained, for which a CPU suffices. Written to ``--out``: ``pocket-segmenter.safetensors`` (float16) and
``pocket-segmenter.json`` with the configuration and the measured accuracy.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DPTConfig, DPTForSemanticSegmentation

from patchlight.zoo import shapes
from tools.scenes import LABELS, SIDE, Scenes, compose
from tools.train_detector import make, normalise, options_of

CLASSES = ("ground", *LABELS)
ARCHITECTURE: dict[str, Any] = {
    "hidden_size": 144,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "intermediate_size": 288,
    "image_size": SIDE,
    "patch_size": 8,
    "is_hybrid": False,
    "backbone_out_indices": [3, 4, 5],
    "readout_type": "ignore",
    "reassemble_factors": [1, 0.5, 0.25],
    "neck_hidden_sizes": [32, 32, 32],
    "fusion_hidden_size": 32,
    "use_auxiliary_head": False,
    "initializer_range": 0.1,
    "semantic_classifier_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def build() -> Any:
    """The model: a random decoder behind the ViT of the bundled detector, which is not trained."""
    config: Any = DPTConfig(**ARCHITECTURE)
    config.id2label = dict(enumerate(CLASSES))
    model: Any = DPTForSemanticSegmentation(config)
    begin = {
        f"dpt.{key.removeprefix('vit.')}": each for key, each in shapes.build("pocket-detector").state_dict().items()
    }
    state = model.state_dict()
    for key in state.keys() & begin.keys():
        state[key].copy_(begin[key][:, : state[key].shape[1]] if "position" in key else begin[key])
    model.dpt.requires_grad_(False)
    return model


def classes_of(scenes: Scenes, step: int = 1) -> Tensor:
    """The class [n,H,W] of every pixel, or of one in a number of rows and columns; a later shape lies above."""
    classes = torch.zeros_like(scenes.masks[:, 0], dtype=torch.long)
    for i in range(scenes.masks.shape[1]):
        classes = torch.where(scenes.masks[:, i], scenes.labels[:, i, None, None] + 1, classes)
    return classes[:, ::step, ::step]


def loss_of(out: Any, scenes: Scenes) -> Tensor:
    """The cross-entropy of all pixels."""
    return F.cross_entropy(out.logits.float(), classes_of(scenes, SIDE // out.logits.shape[-1]))


@torch.no_grad()
def accuracy(model: Any, count: int, device: str) -> dict[str, float]:
    """Of new scenes: the mean IoU of the classes, and the shares of right pixels and of objects mostly right."""
    generator = torch.Generator(device).manual_seed(10**6)
    table = torch.zeros(len(CLASSES), len(CLASSES), dtype=torch.long)
    right = total = 0
    for _ in range(count // 100):
        scenes = compose(100, generator)
        logits = F.interpolate(model(normalise(scenes.images)).logits, (SIDE, SIDE), mode="bilinear")
        best, real = logits.argmax(1), classes_of(scenes)
        pairs = (real * len(CLASSES) + best).flatten().bincount(minlength=table.numel())
        table += pairs.view_as(table).cpu()
        there = scenes.labels >= 0
        same = (scenes.masks & (best == real)[:, None]).sum((2, 3)) > 0.5 * scenes.masks.sum((2, 3))
        right, total = right + int(same[there].sum()), total + int(there.sum())
    overlap = table.diag() / (table.sum(0) + table.sum(1) - table.diag())
    return {
        "mean_iou": float(overlap.mean()),
        "pixels": float(table.diag().sum() / table.sum()),
        "objects_right": right / total,
        "objects": total,
    }


def main() -> None:
    options = options_of(__doc__)
    torch.manual_seed(0)
    make("pocket-segmenter", build(), ARCHITECTURE, loss_of, accuracy, options)


if __name__ == "__main__":
    main()
