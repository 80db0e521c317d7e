"""ViT-Shapley: a network trained to give the Shapley values of all patches for all classes in one forward.

`train` makes an explainer (a surrogate first, then the network), `ViTShapley.save` and `load` keep it, and method
`vit-shapley` explains with it.
"""

from patchlight.trained.shapley.networks import ViTShapley, load
from patchlight.trained.shapley.settings import ShapleyProgress, ShapleySettings, SurrogateProgress
from patchlight.trained.shapley.train import train

__all__ = ["ShapleyProgress", "ShapleySettings", "SurrogateProgress", "ViTShapley", "load", "train"]
