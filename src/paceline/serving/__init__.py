"""The OpenAI-compatible server and its live page. It knows models only through `AsyncLLM`; nothing below knows HTTP."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
