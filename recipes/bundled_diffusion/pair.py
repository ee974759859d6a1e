"""What this recipe takes from that of the bundled pair: the optimizer's step, a run on disk, command lines.

In:  recipes/bundled_pair beside this folder. Out: its functions, under one roof for `import`.
Not here: this recipe's own flags (flags.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(
    str(Path(__file__).parents[1] / "bundled_pair")
)  # behind this folder, which has modules of the same names
from optimizing import groups, learning_rate, set_rate, update
from options import Flags, add_flags, new_parser
from resume import Progress, keep, take_up

__all__ = [
    "Flags",
    "Progress",
    "add_flags",
    "groups",
    "keep",
    "learning_rate",
    "new_parser",
    "set_rate",
    "take_up",
    "update",
]
