from .base import Controller as Controller
from .base import Outcome as Outcome
from .base import Plan as Plan
from .base import Signal as Signal
from .base import StepTimes as StepTimes
from .memory_limit import Footprint as Footprint
from .memory_limit import LimitedController as LimitedController
