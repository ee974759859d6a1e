from .token_counts import FORMAT as FORMAT
from .token_counts import STEP as STEP
from .token_counts import TokenCounts as TokenCounts
from .token_counts import counts_path as counts_path
