from .deer import DeerDrafter as DeerDrafter
from .diffuspec import NONE as NONE
from .diffuspec import DiffuSpecDrafter as DiffuSpecDrafter
from .diffuspec import best_path as best_path
from .diffuspec import lattice_of as lattice_of
from .trigram_counts import CHUNK as CHUNK
from .trigram_counts import SMALLEST as SMALLEST
from .trigram_counts import TrigramCounts as TrigramCounts
