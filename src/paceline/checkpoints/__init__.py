"""From a folder or hub id to configuration, weights and tokenizer: readers of a checkpoint's files. Nothing here runs a
model, or knows what a user asked for; of `paceline.models` it knows `models.spec` alone.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
