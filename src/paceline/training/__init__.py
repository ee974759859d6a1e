"""Training of drafters: answers of the target are gathered, and heads learn from its states what it will say next.

A method is one module with a loss and a view of the data (`HeadTrainer`); the loop that trains knows none of them. What
is trained is written in the format of paceline.models.heads.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
