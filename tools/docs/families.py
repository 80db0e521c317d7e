"""Pages of the model families: an example that was run, and the methods that work on its model."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import patchlight as pl
from patchlight.anatomy.families import FAMILIES
from tools.docs.words import as_markdown, code, table, toctree


@dataclass(frozen=True)
class Kind:
    """Models that are opened in the same way, and code that creates a small one called `vit`."""

    name: str
    title: str
    family: str
    words: str
    example: str
    tested: str
    """What the project's tests cover for these models."""

    @cached_property
    def run(self) -> tuple[Any, str]:
        """The opened model of the example, and the printed output."""
        names: dict[str, Any] = {"__name__": "example"}
        printed = io.StringIO()
        torch.manual_seed(0)
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            warnings.simplefilter("ignore")
            exec(compile(self.example, f"<{self.name}>", "exec"), names)
        return names["vit"], printed.getvalue()

    @cached_property
    def refused(self) -> dict[str, str]:
        """The reason for each method that does not work on the model."""
        return {one.name: one.reason for one in pl.list_methods(self.run[0]) if not one.supported}


_SHOW = """
images = torch.randn(1, {channels}, *vit.preprocess.size)
maps = pl.explain(vit, images, ["{methods}"])
print(vit)
print({{name: tuple(att.grid) for name, att in maps.items()}})
"""


def _example(opening: str, *methods: str, channels: int = 3) -> str:
    shown = _SHOW.format(channels=channels, methods='", "'.join(methods or ("genatt", "decompx.plus", "gradcam")))
    imports, _, body = opening.strip().partition("\n\n")
    return f"{imports}\n\nimport patchlight as pl\n\n{body}\n{shown}"


KINDS = (
    Kind(
        "timm-vit",
        "ViT, DeiT, DeiT III, DINOv2 and FlexiViT of timm",
        "timm",
        "The plain Vision Transformers of timm: with a class token or mean pooling, with registers, distilled or not. "
        "All methods work on them; the two trained methods need an explainer that was trained for the model.",
        _example("""
import timm
import torch

model = timm.create_model("vit_tiny_patch16_224", depth=3, num_classes=10)
vit = pl.wrap(model)
"""),
        "every method on small models of ViT (also wide, with one class, unfused), DeiT, distilled DeiT, DeiT "
        "III, DINOv2 with registers, DINOv3, CLIP's and SigLIP's towers, FlexiViT, and registers with mean "
        "pooling",
    ),
    Kind(
        "timm-beit-eva",
        "BEiT, EVA and EVA-02 of timm",
        "timm",
        "Relative position biases, rotary embeddings, gated MLPs and norms inside attention.",
        _example("""
import timm
import torch

model = timm.create_model("eva02_tiny_patch14_224", depth=3, num_classes=10)
vit = pl.wrap(model)
"""),
        "every method on small models of BEiT, BEiT v2, EVA and EVA-02",
    ),
    Kind(
        "timm-relatives",
        "Other plain transformers of timm",
        "timm-relatives",
        "CaiT, XCiT, ConViT, hybrids with a convolutional stem, relative positions, NaFlex, SAM's encoder, Gemma's and "
        "Qwen's towers. If a convolution mixes neighbouring patches, tokens cannot be removed. If a block changes its "
        "attention after the softmax, as in CaiT, attention is not read. Methods that need either are refused.",
        _example(
            """
import timm
import torch

model = timm.create_model("cait_xxs24_224", depth=3, num_classes=10)
vit = pl.wrap(model)
""",
            "gradcam",
            "ixg.plus",
            "occlusion",
        ),
        "parts against the whole, and methods of each kind, on relative positions (three), a hybrid, NaFlex "
        "(two poolings), Qwen's (two), Gemma's, CaiT, SAM's, XCiT and ConViT",
    ),
    Kind(
        "timm-staged",
        "Swin, PVT, Twins and other networks of stages",
        "timm-staged",
        "A model is opened at a stage, and maps have its grid. Swin, SwinV2, PVTv2 and Twins also provide "
        "attention, through windows, pooled keys and merging; for others the feature map of the stage is explained "
        "([which methods are sound](../../methods.md#hierarchical-models)).",
        _example(
            """
import timm
import torch

model = timm.create_model(
    "swin_tiny_patch4_window7_224",
    depths=(1, 1, 2, 1),
    embed_dim=16,
    num_heads=(1, 2, 2, 4),
)
vit = pl.wrap(model, stage=2)
""",
            "genatt",
            "ixg.plus.libra",
            "gradcam",
        ),
        "every method on small models of Swin and PVTv2; parts against the whole, and methods of each kind, "
        "on PiT (two), MViTv2, Hiera, LeViT, NesT, CoaT and EdgeNeXt",
    ),
    Kind(
        "transformers",
        "Image classifiers of transformers",
        "transformers",
        'ViT, DeiT, DINOv2, CLIP and SigLIP with a classifier. From the hub or a folder: `pl.load("hf:NAME")`; images '
        "are prepared as by the model's own processor.",
        _example("""
import torch
from transformers import ViTConfig, ViTForImageClassification

config = ViTConfig(
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=96,
    num_labels=10,
)
vit = pl.wrap(ViTForImageClassification(config).eval())
"""),
        "every method on small models of ViT (fused and eager), DeiT, DINOv2, CLIP and SigLIP, with "
        "transformers 5 and 4.46",
    ),
    Kind(
        "transformers-clip",
        "Image-text models and backbones of transformers",
        "transformers backbones",
        "CLIP and SigLIP with sentences as classes, and backbones without a classifier (DINOv2, DINOv3, MAE) with a "
        "[head](../../heads.md). The [tutorial](../../tutorials/clip.md) has a complete example.",
        _example("""
import torch
from transformers import Dinov2Config, Dinov2Model

config = Dinov2Config(
    hidden_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=224
)
vit = pl.wrap(
    Dinov2Model(config).eval(),
    head=pl.heads.Similar(torch.randn(2, 3, 224, 224), ["one", "another"]),
)
"""),
        "parts against the whole for CLIP, SigLIP and the backbones, and heads of each kind",
    ),
    Kind(
        "open-clip",
        "CLIP and SigLIP of open_clip",
        "open_clip",
        "Sentences are the classes ([image-text models](../../heads-texts.md)). Needs the extra `open_clip`.",
        _example("""
import open_clip
import torch

vision = {
    "image_size": 64,
    "patch_size": 16,
    "width": 48,
    "layers": 3,
    "head_width": 12,
}
text = {
    "context_length": 77,
    "vocab_size": 49408,
    "width": 48,
    "heads": 4,
    "layers": 1,
}
model = open_clip.CLIP(embed_dim=32, vision_cfg=vision, text_cfg=text).eval()
vit = pl.wrap(model, head=pl.heads.Texts(torch.randn(2, 32), ["a dog", "a cat"]))
"""),
        "parts against the whole, sentences, tokenizers and refusals",
    ),
    Kind(
        "torchvision",
        "ViT of torchvision",
        "torchvision",
        '`pl.load("torchvision:vit_b_16")`, or your own model.',
        _example("""
import torch
from torchvision.models import VisionTransformer

model = VisionTransformer(
    image_size=64,
    patch_size=16,
    num_layers=3,
    num_heads=4,
    hidden_dim=48,
    mlp_dim=96,
)
vit = pl.wrap(model.eval())
"""),
        "every method on a small model",
    ),
    Kind(
        "own",
        "Your own module",
        "",
        "A module around one of these is opened at the blocks of its backbone "
        "([models and weights of your own](../../own-models.md)).",
        _example("""
import timm
import torch
from torch import nn


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = timm.create_model(
            "vit_tiny_patch16_224", num_classes=0, depth=3
        )
        self.head = nn.Sequential(nn.Linear(192, 32), nn.GELU(), nn.Linear(32, 5))

    def forward(self, images):
        return self.head(self.backbone.forward_features(images)[:, 1:].mean(1))


vit = pl.wrap(Mine().eval())
"""),
        "modules with heads, poolings and outputs of several kinds, and those that must be refused",
    ),
)


def _yes_or(reason: str | None) -> str:
    return "yes" if reason is None else f"no, {as_markdown(reason)}"


def page(kind: Kind) -> str:
    """The page of a family: its models, an example with its output, and the methods that work."""
    vit, printed = kind.run
    names = [one.name for one in pl.list_methods()]
    works = [name for name in names if name not in kind.refused]
    read = FAMILIES[kind.family] if kind.family else None
    family = f"Opened by the family `{read.name}`: {as_markdown(read.summary)}\n\n" if read is not None else ""
    refused = table(
        ("refused", "why"),
        ((f"[{name}](../methods/{name}.md)", as_markdown(reason)) for name, reason in kind.refused.items()),
    )
    links = ", ".join(f"[{name}](../methods/{name}.md)" for name in works)
    return (
        f"# {kind.title}\n\n{kind.words}\n\n{family}"
        f"This example was run with random weights when the page was built:\n\n```python\n{kind.example}```\n\n"
        f"```text\n{printed}```\n\n"
        f"Tested: {kind.tested}.\n\n"
        "Tokens can be removed: "
        f"{_yes_or(vit.can_drop)}. Attention can be read: "
        f"{_yes_or('no blocks are open' if not vit.depth else vit.attention)}."
        f"\n\n## What works\n\nOf the {len(names)} methods, {len(works)} work on this model: {links}.\n"
        + (f"\n{refused}" if kind.refused else "")
    )


def index() -> str:
    rows = (
        (f"[{kind.title}]({kind.name}.md)", code(kind.family), len(pl.list_methods()) - len(kind.refused))
        for kind in KINDS
    )
    return (
        "# Model families\n\nHow models are opened and which methods work on them, with an example for each family. "
        "[Models of timm](../../models.md) lists every name of timm.\n\n"
        + table(("models", "family", "methods that work"), rows)
        + "\n"
        + toctree(kind.name for kind in KINDS)
    )


def write(folder: Path) -> Iterator[Path]:
    """Write the pages of all families and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in [("index", index()), *((kind.name, page(kind)) for kind in KINDS)]:
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
        yield folder / f"{name}.md"
