"""A benchmark run: workloads, settings, the harness that times them, and the document that holds the figures."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
