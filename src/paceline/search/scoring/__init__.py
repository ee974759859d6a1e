"""What texts are judged by: models, in one pass for all texts, at the level of tokens or of bytes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
