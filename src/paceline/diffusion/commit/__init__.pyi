from .bounded import Bounded as Bounded
from .coherent import entropy as entropy
from .learned import NAMES as NAMES
from .learned import BlockFilter as BlockFilter
from .learned import block_confidences as block_confidences
from .time_grid import grid as grid
from .time_grid import uniform as uniform
