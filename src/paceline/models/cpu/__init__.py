"""The decoder's forward pass on the CPU as compiled code: vectors, tiles, matrices, attention, the pass, and who calls
it. Nothing here reads files or chooses what is run; `eligibility` says whether a model runs here at all.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
