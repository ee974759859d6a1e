"""SuffixDecoding: suffix trees over this text and past ones, and what to draft from them (arXiv:2411.04975)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
