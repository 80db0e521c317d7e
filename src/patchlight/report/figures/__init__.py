"""The figures of the papers by name, drawn with your model and images: `draw("skipplus-2", …)`."""

from patchlight.report.figures.base import FIGURES as FIGURES
from patchlight.report.figures.base import draw as draw
from patchlight.report.figures.base import list_figures as list_figures
from patchlight.report.figures.base import register_figure as register_figure
from patchlight.report.figures.drawing import Drawing as Drawing
