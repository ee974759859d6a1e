"""Forward passes of one model: by PyTorch's operators, in a form of these that keeps a row's bits, compiled for CPUs,
captured as CUDA graphs. `base` says what one takes and gives, `eligibility` which models run in compiled ones.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
