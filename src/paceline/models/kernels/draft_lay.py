"""The rows of the next pass of growing trees, compiled: tokens, places, and what each sees of its tree.

In: fronts of trees (models.kernels.draft_grow). Out: records of rows and their own slots. Not here: which nodes are in a front.
"""

from __future__ import annotations

from numba import njit

from paceline.models.kernels import draft_frame as of
from paceline.models.kernels import frame as at
from paceline.models.kernels.draft_columns import ints
from paceline.models.kernels.draft_tiles import write
from paceline.models.kernels.vectors import LANES, read


@njit(error_model="numpy")
def lay_rows(data: int) -> None:
    """The fronts of all trees as the rows of the next pass; no rows where a tree asks or its cache is full."""
    frame, row, waits = read(data + of.FRAME), 0, False
    for index in range(read(data + of.COUNT_OF)):
        growth, sequence = (
            read(data + of.GROWTHS) + index * of.GROWTH_FIELDS,
            read(data + of.SEQUENCES) + index * of.SEQUENCE_FIELDS,
        )
        needed = (
            read(sequence + of.LENGTH) + read(sequence + of.COUNT) + read(growth + of.FED_COUNT) + read(growth + of.FRONT_COUNT)
        )
        write(sequence + of.ROW_COUNT, 0)
        if read(growth + of.STATE) in (of.GROWING, of.FULL):
            write(growth + of.STATE, of.FULL if needed > read(sequence + of.CAPACITY) else of.GROWING)
        waits = waits or read(growth + of.STATE) in (of.ASKING, of.FULL)
    write(frame + at.ROWS, 0)
    if waits:
        return
    for index in range(read(data + of.COUNT_OF)):
        growth, sequence = (
            read(data + of.GROWTHS) + index * of.GROWTH_FIELDS,
            read(data + of.SEQUENCES) + index * of.SEQUENCE_FIELDS,
        )
        if read(growth + of.STATE) == of.GROWING:
            write(sequence + of.FIRST_ROW, row)
            write(sequence + of.ROW_COUNT, read(growth + of.FRONT_COUNT))
            for place in range(read(growth + of.FRONT_COUNT)):
                _lay(data, growth, sequence, row + place, place)
            row += read(growth + of.FRONT_COUNT)
    write(frame + at.ROWS, row)


@njit(error_model="numpy")
def _lay(data: int, growth: int, sequence: int, row: int, place: int) -> None:
    """One row: a node's token, position and slot, and the slots of its path."""
    room, text, fed = read(growth + of.ROOM), read(sequence + of.LENGTH) + read(sequence + of.COUNT), read(growth + of.FED_COUNT)
    node = ints(growth + of.FRONT, read(growth + of.FRONT_ROWS))[place]
    parents, order = ints(growth + of.NODE_PARENTS, room), ints(growth + of.NODE_FED, room)
    token, depth = ints(growth + of.NODE_TOKENS, room)[node], ints(growth + of.NODE_DEPTHS, room)[node]
    laid, own = read(data + of.LAID) + row * of.ROW_FIELDS, read(data + of.OWN) + row * read(data + of.OWN_PITCH)
    order[node] = fed
    write(laid + of.ROW_TOKEN, token)
    write(laid + of.ROW_POSITION, text - 1 + depth)
    write(laid + of.ROW_SLOT, text + fed)
    write(laid + of.ROW_OWN, depth)
    for i in range(depth, (depth + LANES - 1) // LANES * LANES):  # keys are taken sixteen at a time
        write(own + 8 * i, 0)
    ints(growth + of.FED_TOKENS, room)[fed] = token
    ints(growth + of.FED_PARENTS, room)[fed] = 1 + order[parents[node]] if parents[node] >= 0 else 0
    at_node = node
    for i in range(depth):
        write(own + 8 * (depth - 1 - i), text + order[at_node])
        at_node = parents[at_node]
    write(growth + of.FED_COUNT, fed + 1)
