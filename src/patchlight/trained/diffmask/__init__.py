"""VISION DIFFMASK: gates, trained beside a frozen Vision Transformer, that keep the patches its output depends on.

`train` trains an explainer and `import_gates` reads a published one; `DiffMask.save` and `load` write and read it; the
method `diffmask` explains with it.
"""

from patchlight.core.errors import TrainingWarning
from patchlight.trained.diffmask.gates import DiffMask, load
from patchlight.trained.diffmask.published import import_gates
from patchlight.trained.diffmask.settings import DiffMaskProgress, DiffMaskSettings
from patchlight.trained.diffmask.train import train

__all__ = ["DiffMask", "DiffMaskProgress", "DiffMaskSettings", "TrainingWarning", "import_gates", "load", "train"]
