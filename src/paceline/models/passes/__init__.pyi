from .base import Passes as Passes
from .eager import EagerPasses as EagerPasses
from .eligibility import machine_lacks as machine_lacks
from .graphs import ScoringGraphs as ScoringGraphs
from .strict import NOT_STRICT_IN_TRANSFORMERS as NOT_STRICT_IN_TRANSFORMERS
from .strict import StrictPasses as StrictPasses
from .strict import strict_unavailable as strict_unavailable
from .strict import why_not_strict as why_not_strict
