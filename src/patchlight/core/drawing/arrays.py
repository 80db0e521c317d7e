"""Maps of videos, volumes and sounds: a contact sheet, three slices, or heat over time and frequency."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import Tensor

from patchlight.core.drawing.heat import HEAT, SIGNED, Scale, blend, colour_map, robust_scale
from patchlight.core.drawing.pictures import figure_bytes, figure_format, figure_picture
from patchlight.core.drawing.shown import ShownFigure
from patchlight.core.errors import PatchlightError
from patchlight.core.files import write_atomic

if TYPE_CHECKING:
    from patchlight.core.attribution import Attribution

FRAMES, ROW = 16, 8
"""Maximum number of frames of a contact sheet, and of one of its rows."""
SIDE = 224
"""The longer side of a frame or slice in pixels."""
SHOWN = 4
"""Maximum number of inputs in a figure."""


def array_figure(att: Attribution, place: int = 0) -> ShownFigure:
    """Draw map number `place` by its axes: time, rows and columns; depth, rows and columns; or two other axes."""
    draw: Callable[..., ShownFigure] = _plane if len(att.axes) == 2 else _volume if "depth" in att.axes else _video
    if len(att.axes) not in (2, 3):
        raise PatchlightError(f"maps with the axes {', '.join(att.axes)} cannot be drawn; use att.numpy()")
    scores = att.scores.reshape(-1, *att.grid)[place]
    image = place // max(att.target.numel() // max(len(att), 1), 1)
    photo = att.photos[image] if image < len(att.photos) else None
    fig = draw(att, scores, robust_scale(scores), photo)
    fig.suptitle(f"{att.method}: {att.captions[place]}", fontsize=10, parse_math=False)
    return fig


def arrays_figure(maps: Mapping[str, Attribution], path: str | Path | None = None) -> ShownFigure:
    """The drawings of the first inputs below each other, and of several methods side by side."""
    if path is not None:
        figure_format(path)
    rows = min(SHOWN, *(len(att.captions) for att in maps.values()))
    if rows == len(maps) == 1:
        fig = array_figure(next(iter(maps.values())))
    else:
        drawn = [figure_picture(array_figure(att, i)) for i in range(rows) for att in maps.values()]
        width, height = drawn[0].size
        fig = ShownFigure(figsize=(6 * len(maps), 6 * rows * height / width), layout="constrained", dpi=110)
        for ax, picture in zip(fig.subplots(rows, len(maps), squeeze=False).flat, drawn, strict=True):
            ax.imshow(picture)
            ax.set_axis_off()
    if path is not None:
        write_atomic(Path(path), figure_bytes(fig, path))
    return fig


def _new_figure(width: float, height: float) -> ShownFigure:
    return ShownFigure(figsize=(width, height), layout="constrained", dpi=110)


def _picture(photo: Tensor | None, size: tuple[int, int]) -> Image.Image:
    """A plane [1 or 3,h,w] of a photograph as a picture; grey without one."""
    scale = max(1.0, SIDE / max(size))
    if photo is None:
        return Image.new("RGB", (round(size[1] * scale), round(size[0] * scale)), (128, 128, 128))
    colours = photo.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(colours).resize((round(size[1] * scale), round(size[0] * scale)))


def _video(att: Attribution, scores: Tensor, scale: Scale, photo: Tensor | None) -> ShownFigure:
    """Frames with their heat, and below them the sum of the scores of each time step."""
    frames, cells, covered = att.image_size[0], att.grid[0], (att.extent or att.image_size)[0]
    shown = [int(i) for i in np.linspace(0, frames - 1, min(FRAMES, frames)).round()]
    columns = min(ROW, len(shown))
    rows = math.ceil(len(shown) / columns)
    high = att.image_size[1] / att.image_size[2]
    fig = _new_figure(1.3 * columns + 0.6, (1.3 * high + 0.25) * rows + 1.7)
    layout = fig.add_gridspec(rows + 1, columns, height_ratios=[*[1.3 * high + 0.25] * rows, 1.3])
    for i, frame in enumerate(shown):
        ax = fig.add_subplot(layout[i // columns, i % columns])
        cell = min(frame * cells // covered, cells - 1)
        picture = _picture(None if photo is None else photo[:, frame], (att.image_size[1], att.image_size[2]))
        ax.imshow(blend(picture, scores[cell], scale, covers=att.covers[1:]))
        ax.set_title(f"frame {frame}", fontsize=8)
        ax.set_axis_off()
    ax = fig.add_subplot(layout[rows, :])
    sums = scores.sum((1, 2)).double().numpy()
    colours = np.where(sums < 0, "#3b78b5", "#c44536")  # against, for
    ax.bar((np.arange(cells) + 0.5) * covered / cells - 0.5, sums, 0.9 * covered / cells, color=colours)
    ax.axhline(0, color="0.3", linewidth=0.8)
    ax.set(xlim=(-0.5, frames - 0.5), xlabel="frame", ylabel="sum of scores")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.tick_params(labelsize=8)
    return fig


def _volume(att: Attribution, scores: Tensor, scale: Scale, photo: Tensor | None) -> ShownFigure:
    """Three orthogonal slices through the (middle) highest-scoring cell, each with the place of the other two."""
    size, cells = att.image_size, torch.tensor(att.grid)
    highest = (scores == scores.max()).nonzero().float()  # several cells if sets share a score
    best = highest[(highest - highest.mean(0)).norm(dim=1).argmin()]
    covered = torch.tensor(att.extent or size)
    centre = ((best + 0.5) * covered / cells).long().tolist()
    fine = _single_map(att, scores).upsample()[0]
    planes = [(0, (1, 2)), (1, (0, 2)), (2, (0, 1))]
    fig = _new_figure(9, 1.1 + 7.5 * max(size[:2]) / (2 * size[2] + size[1]))
    panels = fig.subplots(1, 3, width_ratios=[size[across] for _, (_, across) in planes])
    for ax, (axis, (down, across)) in zip(panels, planes, strict=True):
        flat = None if photo is None else photo.select(axis + 1, centre[axis])
        picture = _picture(flat, (size[down], size[across]))
        extent = (-0.5, size[across] - 0.5, size[down] - 0.5, -0.5)
        ax.imshow(blend(picture, fine.select(axis, centre[axis]), scale), extent=extent)
        ax.axvline(centre[across], color="white", linewidth=0.8, linestyle="dotted")
        ax.axhline(centre[down], color="white", linewidth=0.8, linestyle="dotted")
        ax.set_title(f"{att.axes[axis]} {centre[axis]} of {size[axis]}", fontsize=9)
        ax.set(xlabel=att.axes[across], ylabel=att.axes[down])
        ax.tick_params(labelsize=8)
    return fig


def _single_map(att: Attribution, scores: Tensor) -> Attribution:
    return replace(att, scores=scores[None], target=att.target.flatten()[:1], against=None, error=None)


def _plane(att: Attribution, scores: Tensor, scale: Scale, photo: Tensor | None) -> ShownFigure:
    """Heat over two axes, the second to the right, the first upwards: frequency over time."""
    units = ("", "") if att.geometry is None else att.geometry.unit
    fine = _single_map(att, scores).upsample()[0]
    height, width = att.image_size
    fig = _new_figure(7.5, 3.6)
    ax = fig.subplots()
    extent = (0, width, 0, height)
    heat = blend(_picture(photo, (height, width)), fine, scale)
    ax.imshow(heat.transpose(Image.Transpose.FLIP_TOP_BOTTOM), extent=extent, aspect="auto")
    for label, set_label in ((0, ax.set_ylabel), (1, ax.set_xlabel)):
        unit = units[label] if units[label] not in ("", "px") else "bins"
        set_label(f"{att.axes[label]} ({unit})")
    low = -scale.high if scale.signed else scale.low
    bar: Any = colour_map(SIGNED if scale.signed else HEAT)
    fig.colorbar(ScalarMappable(Normalize(low, scale.high), bar), ax=ax, label="score")
    return fig
