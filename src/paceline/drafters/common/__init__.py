"""What drafters of several folders share: chains, options, rows, the cache of a draft model, tables that learn from
text.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
