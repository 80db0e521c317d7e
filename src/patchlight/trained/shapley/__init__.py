"""ViT-Shapley: a network trained to predict the Shapley values of all patches for all classes in one forward.

`train` trains an explainer (first a surrogate, then the network); `ViTShapley.save` and `load` write and read it; the
method `vit-shapley` explains with it.
"""

from patchlight.trained.shapley.networks import ViTShapley, load
from patchlight.trained.shapley.settings import ShapleyProgress, ShapleySettings, SurrogateProgress
from patchlight.trained.shapley.train import train

__all__ = ["ShapleyProgress", "ShapleySettings", "SurrogateProgress", "ViTShapley", "load", "train"]
