"""The model: where things are inside a Vision Transformer, read from the model. `load.py` is the door."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["heads"])
