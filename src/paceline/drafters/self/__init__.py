"""Self-speculation: the target drafts with some of its layers, or with rounded weights."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
