"""Patchlight shows which patches drove a Vision Transformer's prediction, and measures how faithful that is.

The names in `__init__.pyi` are loaded when they are first used, so that the import is cheap.
"""

import lazy_loader

__version__ = "1.0.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
