"""Configuration: keyword-only and checked at the edge; every layer behind it may trust it.

The names are vLLM's. Defaults that depend on a checkpoint are `llm`'s, and the methods themselves the `registry`'s.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
