"""What runs a checkpoint: the native decoder, the transformers fallback, diffusion models.

Token ids and trees come in, logits and hidden states go out. Nothing here samples, drafts, decides how much to draft,
or knows of requests and texts.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
