"""The proof that a setting writes what the model would: same tokens, or the same distribution."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
