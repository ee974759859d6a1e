"""Where drafts come from: one module per method, in folders by what a method drafts with. A drafter is defined in
`base`; what several share is in `common/`, `growth/` (trees) and `vocab/` (other or trimmed vocabularies).

A drafter knows contexts (the text so far, the request's rules) and budgets. It does not know the engine, how much
drafting pays (controllers), or which tokens are accepted (verifiers).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
