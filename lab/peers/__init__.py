"""Other engines on the same weights and prompts, each driven in an environment of its own.

with open_peer("llama.cpp", folder, dtype="float16", threads=2, options={"method": "ngram"}) as peer:
    run = peer.generate([1, 2, 3], max_tokens=64)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
