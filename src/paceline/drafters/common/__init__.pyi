from .bases import SingleDrafter as SingleDrafter
from .chains import chain_tree as chain_tree
from .draft_rows import fit_rows as fit_rows
from .tables import tables_of as tables_of
