"""Drafters that retrieve from datastores of texts, and the datastores: suffix arrays on disk, mapped and only read."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
