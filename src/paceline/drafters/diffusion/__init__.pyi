from .causal_path import NONE as NONE
from .causal_path import best_path as best_path
from .causal_path import lattice_of as lattice_of
from .deer import DeerDrafter as DeerDrafter
from .diffuspec import DiffuSpecDrafter as DiffuSpecDrafter
from .trigram_counts import CHUNK as CHUNK
from .trigram_counts import SMALLEST as SMALLEST
from .trigram_counts import TrigramCounts as TrigramCounts
