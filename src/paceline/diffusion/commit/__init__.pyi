from .history import entropy as entropy
from .learned import NAMES as NAMES
from .learned import BlockFilter as BlockFilter
from .learned import block_confidences as block_confidences
from .quotas import grid as grid
