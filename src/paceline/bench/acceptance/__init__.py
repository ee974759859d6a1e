"""How often drafts are accepted under each rule of verification, against the most that an exact rule could accept."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
