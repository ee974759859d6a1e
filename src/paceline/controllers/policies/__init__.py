"""Published rules for how much to draft, one module each, and their base classes. They follow acceptance alone; none
notices when drafting does not pay, but for `ppd`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
