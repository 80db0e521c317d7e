"""Vision Transformers, opened: where tokens, blocks and classifier are in a model. Start with `load.py`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["heads"])
