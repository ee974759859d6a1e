"""Parallel decoding of masked diffusion language models: the canvas, the parts of decoding methods and the one loop
over them, and the engine that serves requests with it.

A method is a composition of parts, one of each kind: `schedule`, `score`, `commit`, `edit`, `stop`, `cache`,
`verification` and a check of constraints (`base` says what each must do, `catalogue` names them all, `methods` puts one
together). Nothing here prints, and the models know nothing of it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
