"""Which of the slots in line are written in a round: quotas, thresholds, agreement, exploration, learned filters."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
