"""Trained explainers: networks that are trained beside a frozen model, and the training loop they share.

Each kind of explainer defines a `Learner` (one step, its report and its state), `Training` settings, and an `Explainer`
that is saved.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["diffmask", "shapley"])
