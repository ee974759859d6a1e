"""Steering: rules on logits that look at more than the target's own row of a node, and the table of their methods.

A method is a class that says what it looks at, layers of the target or a second sequence, and a pure function of rows.
The rows come with the scoring pass, for the root and every node of a draft tree along its own path, so that drafts are
verified against the distribution that the method makes. What carries the second sequence through the life of the first
is the engine's business (`engine.companions`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
