"""The native runners.

Nothing here reads files, or knows who runs, waits or shares a prefix (paceline.engine).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
