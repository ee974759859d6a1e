"""Published rules for how much to draft, one module each, and what they share: lengths by sequence, and stoppers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
