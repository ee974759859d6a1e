from .learning_drafter import LearningDrafter as LearningDrafter
from .learning_drafter import LearningStatus as LearningStatus
from .messages import receive as receive
from .messages import send as send
