"""How logits become tokens: a request's rules along every path of a tree, raw logprobs, and the draws.

The rules are penalties, filters and bad words; they are applied once, before verification. Draws are pure functions of
(seed, position, purpose). Nothing here knows drafters, verifiers or the engine.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
