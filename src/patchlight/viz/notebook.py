"""What a notebook shows of an attribution."""

from __future__ import annotations

import base64
import io
from html import escape

import numpy as np
from PIL import Image
from torch import Tensor

from patchlight.attribution import Attribution
from patchlight.viz.heat import HEAT, SATURATED, SIGNED, colour_map, display_size, is_signed, robust_scale, upsample

SHOWN = 8


def heat_html(att: Attribution) -> str:
    """The first maps as inline pictures, colours alone, with their classes, the method and the model."""
    signed = is_signed(att.scores)
    maps = att.scores.reshape(-1, *att.grid)
    cells = [
        f'<figure style="display:inline-block;margin:2px"><img alt="{escape(label)}" '
        f'src="data:image/png;base64,{_png(scores, att, signed)}">'
        f"<figcaption>{escape(label)}</figcaption></figure>"
        for scores, label in zip(maps[:SHOWN], att.named, strict=False)
    ]
    more = f"<p>and {len(maps) - SHOWN} more</p>" if len(maps) > SHOWN else ""
    ends = "blue against, red for" if signed else "dark lowest, bright highest"
    about = f"{len(att)} image(s), {att.grid[0]}x{att.grid[1]} {att.level}s; {ends}, each map by its 99th percentile"
    return f"<div><b>{escape(att.method)}</b> of {escape(att.model)} ({about})<br>{''.join(cells)}{more}</div>"


def _png(scores: Tensor, att: Attribution, signed: bool) -> str:
    shown = upsample(scores, display_size(att.image_size, 112), covers=att.covers)
    values = robust_scale(scores, signed)(shown).double().numpy()
    colours = colour_map(SIGNED)(0.5 + SATURATED * values / 2) if signed else colour_map(HEAT)(values)
    out = io.BytesIO()
    Image.fromarray((255 * colours[..., :3]).round().astype(np.uint8)).save(out, "png", optimize=True)
    return base64.b64encode(out.getvalue()).decode()
