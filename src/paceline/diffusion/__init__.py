"""Parallel decoding of masked diffusion language models: canvas, rules, caches, verification and the one loop over
them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
