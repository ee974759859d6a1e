"""Where drafts come from: one module a method, in folders by what a method drafts with; what a drafter is stands in
`base`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
