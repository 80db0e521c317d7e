"""Patchlight shows which patches of an image a Vision Transformer decided on, and measures how far that can be trusted.

Importing it is cheap: the names in `__init__.pyi` are loaded when they are first used.
"""

import lazy_loader

__version__ = "1.0.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
