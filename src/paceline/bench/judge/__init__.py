"""Judging what was decoded: same tokens, same distribution, the most that a rule can accept, run against run."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
