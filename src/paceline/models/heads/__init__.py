"""Trained heads that draft from a target's hidden states: what one is, and how it is read and written.

A head is a folder of `config.json` ({"paceline_head": {...}}, see `HeadConfig`) and `model.safetensors` with the
tensors of `tensors_of`. Nothing here runs a head (paceline.drafters.heads) or trains one.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
