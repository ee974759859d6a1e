"""Trained heads: small networks that draft from the target's hidden states (formats: paceline.models.heads)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
