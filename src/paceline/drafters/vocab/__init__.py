"""Draft models with another vocabulary than the target's, or with a part of it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
