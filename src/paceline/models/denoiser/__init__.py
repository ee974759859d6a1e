"""Diffusion language models: bidirectional or block-causal passes over the slots of a canvas.

Which slots are written, in which order, and when a cache is refreshed is for `paceline.diffusion` to say.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
