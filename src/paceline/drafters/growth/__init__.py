"""How draft models, exits and heads grow trees: `base` what all growing trees share, `levels`, `sampled` and `dyspec`
the published ways, `policies` their names and options.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
