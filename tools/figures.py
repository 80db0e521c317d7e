"""Draw the pictures of README and docs that need only the bundled model: `make figures`."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image
from timm.models.vision_transformer import Block
from torch import Tensor, nn

import patchlight as pl
from patchlight.cli import app
from patchlight.zoo import pocket

DOCS = Path(__file__).resolve().parents[1] / "docs"


def draw_demo(folder: Path) -> None:
    """The two figures of `patchlight demo`."""
    with tempfile.TemporaryDirectory() as drawn:
        app(["demo", "--out", drawn], standalone_mode=False)
        for name in ("demo", "two-classes"):
            shutil.copyfile(Path(drawn) / f"patchlight-{name}.png", folder / f"{name}.png")


def draw_gates(path: Path, photos: tuple[str, ...] = ("dog.jpg", "cat.jpg")) -> None:
    """What DiffMask's gates of the bundled model keep of some photographs: gate 0, then gates 0 and 1, and so on."""
    vit = pl.load("pocket")
    count = vit.depth + 2
    figure = Figure(figsize=(0.9 * (count + 1), 1.04 * len(photos)), layout="constrained")
    axes = figure.subplots(len(photos), count + 1, squeeze=False)
    for row, photo in zip(axes, photos, strict=True):
        row[0].imshow(vit.preprocess.crop(Image.open(pocket.PHOTOS / photo)))
        for gate, axis in enumerate(row[1:]):
            with warnings.catch_warnings():  # the first gates keep everything
                warnings.simplefilter("ignore", pl.DegenerateMap)
                maps = pl.explain(vit, pocket.PHOTOS / photo, "diffmask", gate=gate)
            axis.imshow(maps.scores[0].numpy(), cmap="inferno", vmin=0, vmax=1)
            if photo == photos[0]:
                axis.set_title(f"0–{gate}" if gate else "0", fontsize=8)
        for axis in row:
            axis.axis("off")
    figure.savefig(path, dpi=100)


FEW = ("genatt", "tis", "ixg.plus.libra")


def draw_prototypes(path: Path) -> None:
    """One photograph with two classes that are given by example photographs."""
    vit = pl.load("pocket")
    kinds = {"dog": "dog", "cat": "cat", "ship": "ship"}
    features = vit.features_of([pocket.PHOTOS / f"{name}.jpg" for name in kinds])
    asked = vit.ask(pl.heads.Prototypes(features, list(kinds.values())))
    photo = pocket.PHOTOS / "dog-and-cat.jpg"
    maps = pl.explain(asked, photo, FEW, target=[["dog", "cat"]])
    pl.figure(photo, maps, vit=asked, path=path)


def draw_similar(path: Path) -> None:
    """Why two photographs are similar: each is explained by its similarity to the other."""
    vit = pl.load("pocket")
    photos = [pocket.PHOTOS / "dog-and-cat.jpg", pocket.PHOTOS / "dog.jpg"]
    asked = vit.ask(pl.heads.Similar(photos, ["the one below", "the one above"]))
    maps = pl.explain(asked, photos, FEW, target=[1, 0])
    cosine = float(asked.logits(asked.batch(photos))[0, 1])
    pl.figure(photos, maps, predictions=[f"similar to the other: {cosine:.2f}"] * 2, path=path)


class Volumes(nn.Module):
    """A small ViT over volumes of 64 x 64 x 64."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv3d(1, 24, 16, 16)
        self.blocks = nn.ModuleList(Block(24, 3) for _ in range(2))
        self.head = nn.Linear(24, 5)

    def forward(self, volumes: Tensor) -> Tensor:
        tokens = self.project(volumes).flatten(2).mT
        for block in self.blocks:
            tokens = block(tokens)
        logits: Tensor = self.head(tokens.mean(1))
        return logits


def draw_arrays(folder: Path) -> None:
    """A clip of a moving disc, a volume with a ball in it and a rising tone, explained by small random models."""
    from transformers import ASTConfig, ASTForAudioClassification, VideoMAEConfig, VideoMAEForVideoClassification

    sizes: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    place = torch.linspace(-1, 1, 64)
    discs = [(place[:, None] ** 2 + (place - x) ** 2 < 0.1).expand(3, -1, -1) for x in torch.linspace(-0.6, 0.6, 8)]
    ball = place[:, None, None] ** 2 + (place[:, None] - 0.2) ** 2 + (place + 0.3) ** 2 < 0.3
    tone = torch.exp(-(((torch.arange(64) - 8 - torch.arange(256)[:, None] / 6) / 3) ** 2))
    clips = VideoMAEForVideoClassification(VideoMAEConfig(**sizes, image_size=64, num_frames=8))
    sounds = ASTForAudioClassification(ASTConfig(**sizes, max_length=256, num_mel_bins=64))
    for name, model, given, about in (
        ("video", clips, torch.stack(discs), dict[str, Any]()),
        ("volume", Volumes(), ball[None], {"input_shape": (1, 64, 64, 64)}),
        ("sound", sounds, tone, {}),
    ):
        pl.explain(pl.wrap(model.eval(), **about), given[None].float(), "ixg").figure(folder / f"{name}.png")


def main() -> None:
    draw_demo(DOCS)
    draw_prototypes(DOCS / "prototypes.png")
    draw_similar(DOCS / "similar.png")
    draw_arrays(DOCS)
    draw_gates(DOCS / "results" / "diffmask-layers.png")


if __name__ == "__main__":
    main()
