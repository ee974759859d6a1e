"""OpenAI's and Anthropic's APIs, and a live page. The server knows models only through `AsyncLLM`; nothing below it
knows of HTTP.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
