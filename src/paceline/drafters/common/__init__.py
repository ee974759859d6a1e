"""What drafters of several folders share: base classes, chains, rows of a draft model, its cache, tables that learn
from text.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
