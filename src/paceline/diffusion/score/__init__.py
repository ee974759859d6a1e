"""How sure the model is of a slot: measures, and what changes them (noise, bars and penalties)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
