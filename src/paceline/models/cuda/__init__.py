"""Passes at fixed shapes for CUDA graphs, and their attention. It has never run on a GPU."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
