"""What every package may use: checks of arguments, the user's cache folder, signs of waiting, compiling of host code.

Nothing here knows a model, a method or the engine.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
