"""The automatic controller: drafts as much as pays on this machine, for this model and text.

`costs` what passes and drafts take; `acceptance` how likely drafts are accepted; `choice` what brings most tokens per second (pure
functions); `trust` whether outcomes agree, and the ledger of all learning; `controller` the plan; `words` its explanation. None of
them knows a model, a drafter or the engine.
"""

from paceline.controllers.auto.acceptance import Acceptance, Own, Source
from paceline.controllers.auto.choice import Forecast, choose, worth_scoring
from paceline.controllers.auto.controller import AutoController
from paceline.controllers.auto.costs import GRID, Costs, Curve, Line
from paceline.controllers.auto.trust import LONGEST_WAIT, Ledger, State, Trust

__all__ = [
    "GRID",
    "LONGEST_WAIT",
    "Acceptance",
    "AutoController",
    "Costs",
    "Curve",
    "Forecast",
    "Ledger",
    "Line",
    "Own",
    "Source",
    "State",
    "Trust",
    "choose",
    "worth_scoring",
]
