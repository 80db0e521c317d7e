"""Explainers: networks trained beside a frozen model, and what their training has in common.

An explainer gives the loop a `Learner` (`loop.py`): one step, its report, its state. Settings are a `Training`, what is
saved is an `Explainer`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["diffmask", "shapley"])
