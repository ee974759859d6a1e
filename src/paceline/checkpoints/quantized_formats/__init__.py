"""Quantised safetensors checkpoints: one module for each format, and what turns its tensors into weights.

`formats` says by a configuration which format it is, `quantized_checkpoint` gives the matrices under the names of float
checkpoints, `matrix_rows` as blocks that compiled passes multiply as they are.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
