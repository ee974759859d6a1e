from .controller import AutoController as AutoController
from .costs import PASSES as PASSES
from .costs import Costs as Costs
from .store import CostKey as CostKey
from .store import CostStore as CostStore
from .store import MemoryKey as MemoryKey
