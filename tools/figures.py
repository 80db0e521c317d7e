"""Draw the pictures of README and docs that need only the bundled model: `make figures`."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

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


def main() -> None:
    draw_demo(DOCS)
    draw_prototypes(DOCS / "prototypes.png")
    draw_similar(DOCS / "similar.png")
    draw_gates(DOCS / "results" / "diffmask-layers.png")


if __name__ == "__main__":
    main()
