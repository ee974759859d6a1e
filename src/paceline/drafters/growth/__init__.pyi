from .base import Growth as Growth
from .policies import MAX_WIDTH as MAX_WIDTH
from .policies import PolicyName as PolicyName
from .policies import TreePolicy as TreePolicy
from .policies import tree_policy as tree_policy
