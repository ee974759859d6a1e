"""Codebook features: a model whose activations are sums of a few discrete codes, which can be read and forced.

A codebook stands behind a module of every layer and replaces what the module gives by the mean of the codes nearest to
it. Training (`training.codebooks`) moves codes and model together until little is lost; here is what they are, which
codes fire on a text, and generation with codes forced. It runs in plain PyTorch, apart from the engine: nothing is
drafted, and a text is decoded by itself.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
