"""Indices to retrieve from while a text is written: passages by their words or by vectors, and tokens by states.

An index is asked with several queries at once, which often costs little more than one, and can score some of its
entries by themselves with the very numbers that it ranks all of them by: that is what retrieval is speculated with.
Nothing here knows of models and texts that are being written; `paceline.search` has the loops.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
