"""Layers in PyTorch: linear maps and norms, rotary and latent attention, MLPs and experts, the decoder made of them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
