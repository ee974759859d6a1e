"""Passes at fixed shapes for CUDA graphs, and their attention. Run on one H200."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
