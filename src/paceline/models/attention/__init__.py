"""Who sees what in a forward pass, decided once: segments, masks and lists of slots, for passes of PyTorch's operators,
strict, captured and compiled ones; and attention by PyTorch's operators.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
