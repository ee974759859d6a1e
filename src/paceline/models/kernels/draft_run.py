"""The compiled draft of a one-layer model: the one entry to its chains and trees.

In: the address of the table of models.kernels.draft_frame. Out: machine code for this CPU. Not here: what it does
(models.kernels.draft, models.kernels.draft_tree).
"""

from __future__ import annotations

import functools
from typing import Any

from numba import njit

from paceline.models.kernels import draft_frame as of
from paceline.models.kernels import frame as at
from paceline.models.kernels.draft import chain
from paceline.models.kernels.draft_tree import trees
from paceline.models.kernels.entry import machine_code, source_number
from paceline.models.kernels.vectors import call_int, read


@njit(error_model="numpy")
def draft(data: int) -> None:
    """What one thread of the team does."""
    frame, me, team = read(data + of.FRAME), 0, 1
    if read(frame + at.THREAD) != 0:
        me, team = call_int(read(frame + at.THREAD)), call_int(read(frame + at.TEAM))
    if read(data + of.MODE) == of.CHAINS:
        chain(data, me, team)
    else:
        trees(data, me, team)


@functools.cache
def compiled() -> Any:
    """`draft` as machine code for this CPU, from numba's cache on disk where one can be written."""
    sources = source_number()

    def entry(data: int) -> None:
        if sources != 0:  # the cache tells functions apart by their constants, and would miss changes in other files
            draft(data)

    return machine_code(entry, "the kernels of one-layer drafts", "about a minute")
