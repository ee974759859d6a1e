"""The token tree: structure, merging, choosing nodes under a budget, static shapes. It knows no model, drafter or
verifier.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
