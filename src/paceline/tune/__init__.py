"""Tuning: the fastest setting for a model, its prompts and this machine, if one is shown to be faster."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
