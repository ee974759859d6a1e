"""Models that run: native ones and their variants, those of transformers, models under other token ids, denoisers, and
small ones that are given a target's states. Nothing here knows who runs, waits or shares a prefix (paceline.engine).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
