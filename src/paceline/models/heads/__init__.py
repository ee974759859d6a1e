"""Trained heads that draft from a target's hidden states: what one is, how it is read and written, and those that are
maps of one state.

A head is a folder of `config.json` ({"paceline_head": {...}}, see `HeadConfig`) and `model.safetensors` with the
tensors of `tensors_of`, or one in the files of another engine (`formats`). Heads with a decoder layer of their own run
in models.runners; who drafts with one (paceline.drafters.heads) or trains it is no business of this package.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
