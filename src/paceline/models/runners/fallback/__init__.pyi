from .runner import FallbackCache as FallbackCache
from .runner import TransformersRunner as TransformersRunner
from .runner import quiet as quiet
from .transformers_cache import CausalModel as CausalModel
from .transformers_cache import CroppedHistory as CroppedHistory
from .transformers_cache import History as History
from .transformers_cache import ReplayedHistory as ReplayedHistory
from .transformers_cache import choose_history as choose_history
