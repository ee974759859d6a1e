from .fixed import FixedController as FixedController
from .ppd import CHOICE_STEPS as CHOICE_STEPS
from .ppd import EXPLORATION_STEPS as EXPLORATION_STEPS
from .ppd import PPDController as PPDController
