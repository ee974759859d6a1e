"""Which drafted tokens are accepted; one module a rule.

Verifiers see trees, rows of the target after all sampling rules, and a source of randomness; they know no sampling
rule, no drafter and no model.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
