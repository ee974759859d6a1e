"""The automatic controller: drafts as much as pays on this machine, for this model and text.

`costs` what passes and drafts take; `acceptance` how likely drafts are accepted; `choice` what brings most tokens per
second (pure functions); `trust` whether outcomes agree, and the ledger of all learning; `controller` the plan; `words`
its explanation. None of them knows a model, a drafter or the engine.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
