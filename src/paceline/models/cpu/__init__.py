"""Compiled code for CPUs: vectors, tiles, matrices, attention, and the decoder's forward pass made of them.

Nothing here knows of caches, reads files or chooses what is run; models.passes.compiled_decoder calls it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
