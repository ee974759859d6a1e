"""What sequences keep between passes: keys and values in the blocks of an arena, the caches that hold them, places of
layers with a sliding window, and how much memory there is. What a pass computes is no business of this package.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
