from .search import Interval as Interval
from .static_trees import TreeTuning as TreeTuning
from .static_trees import drafter_of as drafter_of
from .static_trees import tune_tree as tune_tree
from .tree_page import TREE_MARK as TREE_MARK
from .tree_page import tree_html as tree_html
from .tuning import Tuning as Tuning
from .tuning import tune as tune
