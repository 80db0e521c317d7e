"""The figure of the supplement of Wu et al., "Token Transformation Matters" (TokenTM)."""

from __future__ import annotations

from matplotlib.figure import Figure

from patchlight.evidence.ablation import Count
from patchlight.report.figures.base import Drawing, Methods, register_figure
from patchlight.report.figures.panels import by_method, explained, of_prediction

METHODS: dict[str, object] = {
    "Grad-CAM": {"method": "attcam", "preset": "chefer"},
    "LRP": "lrp",
    "Cons. LRP": "ixg.conservative",
    "Trans. Attr.": "transatt",
    "Raw Att.": "rawatt",
    "Rollout": "rollout",
    "ATTCAT": "attcat",
    "GAE": "genatt",
    "TokenTM": "tokentm",
}
"""The paper's rows, in its order and by its names."""


@register_figure(
    "tokentm-1",
    paper="TokenTM (Wu et al., CVPR 2024), supplement, Figure 1",
    shows="nine methods' maps of the predicted class, a row for each; the paper says that TokenTM's lie on the object",
    stand_in="a ViT-B/16 and five images of ImageNet",
    quick={"shown": 3},
)
def visualisations(drawing: Drawing, shown: Count = 8, methods: Methods | None = None) -> Figure:
    """A row for every method and a column for every image: what speaks for the predicted class.

    Signed maps (LRP, ATTCAT) are shown by their positive part, so that all rows have the same colours. The row TokenTM
    is the default reading of `tokentm`, which is reconstructed; `methods` draws others.
    """
    drawing = of_prediction(drawing)
    return by_method(drawing, explained(drawing, METHODS if methods is None else methods))
