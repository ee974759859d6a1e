"""How much to draft: `base` says what a controller is, `auto/` measures what pays, `policies/` holds published rules,
and `memory_limit` keeps any of them within a number of bytes.

Controllers see sizes, measured times and outcomes. They know no model, no drafter's workings, and count no steps: the
engine does.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
