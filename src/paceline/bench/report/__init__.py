"""Benchmark documents for readers: HTML pages, figures, and tables for a terminal."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
