from .base import Growth as Growth
from .options import GrowthOptions as GrowthOptions
from .options import growth_policy as growth_policy
from .options import with_tree_options as with_tree_options
from .policies import MAX_WIDTH as MAX_WIDTH
from .policies import TreePolicy as TreePolicy
