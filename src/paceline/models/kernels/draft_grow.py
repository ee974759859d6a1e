"""How draft trees of points grow, compiled: which children the rows give, which nodes are fed next, what the tree is in the end.

In: records of growing trees (models.kernels.draft_frame), logits of their rows. Out: nodes; fronts; finished trees. Not here: the
model (models.kernels.draft_tree), tokens by rank (models.kernels.draft_rank), rows of the next pass (models.kernels.draft_lay).

These are the ways to grow of `drafters.draft_tree` (points), `grow_eagle2`, `grow_dyspec` (points), `grow_threshold` (points) and
`grow_static`, which stay the readable form. The first three are one: children enter as long as they are above the bar, the
smallest reach among the NODES largest, and the most likely nodes above it are fed; they differ in how many children and rows they
take, and whether nodes of earlier levels still count.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from paceline.models.kernels import draft_frame as of
from paceline.models.kernels.draft_columns import doubles, floats, ints, read_double, small_ints, write_double
from paceline.models.kernels.draft_rank import row_top, take_best
from paceline.models.kernels.draft_tiles import write
from paceline.models.kernels.vectors import read

RANKS = 64
"""Most children of a place in a shape."""


@njit(error_model="numpy")
def grow(data: int, index: int, team: int, scored: bool) -> None:
    """One tree: children of the rows that were scored, and the next front, or the end, or a question."""
    growth = read(data + of.GROWTHS) + index * of.GROWTH_FIELDS
    state = read(growth + of.STATE)
    if state == of.GROWING and scored:
        write(growth + of.FIRST_NEW, read(growth + of.NODE_COUNT))
        sound = _expand(data, index, growth, team)
        write(growth + of.FRONT_COUNT, 0)
        if not sound:
            write(growth + of.STATE, of.BROKEN)
            return
    elif state != of.ASKING:
        return
    write(growth + of.STATE, of.GROWING)
    if read(growth + of.KIND) == of.STATIC:
        _static_front(growth)
    else:
        _likely_front(growth)
    if read(growth + of.STATE) == of.GROWING and read(growth + of.FRONT_COUNT) == 0:
        write(growth + of.STATE, of.FINISHED)
        _finish(growth)


@njit(error_model="numpy")
def _expand(data: int, index: int, growth: int, team: int) -> bool:
    """Children of the front; False where a row holds NaN."""
    kind, first = read(growth + of.KIND), read(read(data + of.SEQUENCES) + index * of.SEQUENCE_FIELDS + of.FIRST_ROW)
    for place in range(read(growth + of.FRONT_COUNT)):
        _, whole = row_top(data, first + place, team)
        if not whole > 0.0:
            return False
    if kind == of.BEST_PATHS:
        _expand_best(data, growth, first, team)
    elif kind == of.THRESHOLD:
        _expand_threshold(data, growth, first, team)
    else:
        _expand_static(data, growth, first, team)
    return True


@njit(error_model="numpy")
def _next(data: int, row: int, top: float, whole: float) -> tuple[int, float]:
    """The next token of a row and its chance; -1 and 0 where none is left."""
    token, logit = take_best(data, row)
    return token, 0.0 if token < 0 else min(np.float64(np.float32(math.exp(logit - top) / whole)), 1.0)


@njit(error_model="numpy")
def _add(growth: int, parent: int, token: int, chance: float, place: int) -> int:
    """A new node; its number, or -1 where there is no room."""
    node, room = read(growth + of.NODE_COUNT), read(growth + of.ROOM)
    if node >= room:
        return -1
    depths, reaches = ints(growth + of.NODE_DEPTHS, room), doubles(growth + of.NODE_REACHES, room)
    ints(growth + of.NODE_TOKENS, room)[node] = token
    ints(growth + of.NODE_PARENTS, room)[node] = parent
    ints(growth + of.NODE_PLACES, room)[node] = place
    ints(growth + of.WAITING, room)[node] = 1
    doubles(growth + of.NODE_CHANCES, room)[node] = chance
    depths[node] = 1 + (depths[parent] if parent >= 0 else 0)
    reaches[node] = chance * (reaches[parent] if parent >= 0 else 1.0)
    write(growth + of.NODE_COUNT, node + 1)
    return node


@njit(error_model="numpy")
def _reach(growth: int, node: int) -> float:
    return doubles(growth + of.NODE_REACHES, read(growth + of.ROOM))[node] if node >= 0 else 1.0


@njit(error_model="numpy")
def _bar(growth: int) -> float:
    """What a node's reach must exceed to be among the best; 0 while there are fewer."""
    nodes = read(growth + of.NODES)
    return doubles(growth + of.LARGEST, nodes)[nodes - 1] if read(growth + of.LARGEST_COUNT) == nodes else 0.0


@njit(error_model="numpy")
def _rank(growth: int, reach: float) -> None:
    """Enter a reach above the bar among the largest."""
    nodes, count = read(growth + of.NODES), read(growth + of.LARGEST_COUNT)
    largest = doubles(growth + of.LARGEST, nodes)
    if count < nodes:
        write(growth + of.LARGEST_COUNT, count + 1)
    else:
        count -= 1
    while count > 0 and largest[count - 1] < reach:
        largest[count] = largest[count - 1]
        count -= 1
    largest[count] = reach


@njit(error_model="numpy")
def _expand_best(data: int, growth: int, first: int, team: int) -> None:
    front = ints(growth + of.FRONT, read(growth + of.FRONT_ROWS))
    for place in range(read(growth + of.FRONT_COUNT)):
        top, whole = row_top(data, first + place, team)
        parent = front[place]
        above = _reach(growth, parent)
        for _ in range(read(growth + of.CHILDREN)):
            token, chance = _next(data, first + place, top, whole)
            if not above * chance > _bar(growth) or _add(growth, parent, token, chance, -1) < 0:
                break
            _rank(growth, above * chance)


@njit(error_model="numpy")
def _expand_threshold(data: int, growth: int, first: int, team: int) -> None:
    """The places with the largest worth come first."""
    count, rows = read(growth + of.FRONT_COUNT), read(growth + of.FRONT_ROWS)
    front, tokens, found = (
        ints(growth + of.FRONT, rows),
        ints(growth + of.RANK_TOKENS, rows),
        doubles(growth + of.RANK_CHANCES, rows),
    )
    for place in range(count):
        top, whole = row_top(data, first + place, team)
        tokens[place], found[place] = _next(data, first + place, top, whole)
    while read(growth + of.NODE_COUNT) < read(growth + of.NODES):
        best, worth = 0, -1.0
        for place in range(count):
            mine = _reach(growth, front[place]) * found[place]
            if mine > worth:
                best, worth = place, mine
        if not worth > 0.0 or (worth < read_double(growth + of.LEAST) and read(growth + of.NODE_COUNT) > 0):
            return
        if _add(growth, front[best], tokens[best], found[best], -1) < 0:
            return
        top, whole = row_top(data, first + best, team)
        tokens[best], found[best] = _next(data, first + best, top, whole)


@njit(error_model="numpy")
def _expand_static(data: int, growth: int, first: int, team: int) -> None:
    """Each node of the front gets the children that its place in the shape has."""
    rows, count = read(growth + of.FRONT_ROWS), read(growth + of.SHAPE_COUNT)
    parents, ranks = small_ints(growth + of.SHAPE_PARENTS, count), small_ints(growth + of.SHAPE_RANKS, count)
    front, places = ints(growth + of.FRONT, rows), ints(growth + of.NODE_PLACES, read(growth + of.ROOM))
    tokens, found = ints(growth + of.RANK_TOKENS, RANKS), doubles(growth + of.RANK_CHANCES, RANKS)
    for place in range(read(growth + of.FRONT_COUNT)):
        top, whole = row_top(data, first + place, team)
        parent, known = front[place], 0
        mine = places[parent] if parent >= 0 else -1
        for child in range(mine + 1, count):
            if parents[child] == mine:
                while known <= ranks[child]:
                    tokens[known], found[known] = _next(data, first + place, top, whole)
                    known += 1
                if found[ranks[child]] > 0.0:
                    _add(growth, parent, tokens[ranks[child]], found[ranks[child]], child)


@njit(error_model="numpy")
def _may_descend(growth: int, depth: int, reach: float) -> int:
    """Whether the level below a node is drafted: 1, 0, or -1 where this must be asked first."""
    below = depth + 1
    if below > read(growth + of.DEPTH):
        return 0
    if below > max(read(growth + of.LEVEL), 1):
        if read(growth + of.ASKS) == 1:
            if read(growth + of.QUESTION) != below:
                write(growth + of.QUESTION, below)
                write_double(growth + of.QUESTION_REACH, reach)
                write(growth + of.STATE, of.ASKING)
                return -1
            if read(growth + of.ANSWER) == 0:
                write(growth + of.DEPTH, below - 1)
                return 0
        write(growth + of.LEVEL, below)
    return 1


@njit(error_model="numpy")
def _likely_front(growth: int) -> None:
    """The most likely nodes whose children may still be among the tree's."""
    room, count, rows = read(growth + of.ROOM), read(growth + of.NODE_COUNT), read(growth + of.FRONT_ROWS)
    waiting, reaches = ints(growth + of.WAITING, room), doubles(growth + of.NODE_REACHES, room)
    depths, front = ints(growth + of.NODE_DEPTHS, room), ints(growth + of.FRONT, rows)
    start, by_bar = read(growth + of.FIRST_NEW) if read(growth + of.LEVELWISE) == 1 else 0, read(growth + of.KIND) == of.BEST_PATHS
    if not by_bar and count >= read(growth + of.NODES):
        return
    while read(growth + of.FRONT_COUNT) < rows:
        best, most = -1, 0.0
        for node in range(start, count):
            if waiting[node] == 1 and reaches[node] > most:
                best, most = node, reaches[node]
        if best < 0 or (not most > _bar(growth) if by_bar else most < read_double(growth + of.LEAST)):
            return
        go = _may_descend(growth, depths[best], most)
        if go < 0:
            return
        waiting[best] = 0
        if go == 1:
            front[read(growth + of.FRONT_COUNT)] = best
            write(growth + of.FRONT_COUNT, read(growth + of.FRONT_COUNT) + 1)


@njit(error_model="numpy")
def _static_front(growth: int) -> None:
    """All new nodes that have children in the shape."""
    room, total, count = read(growth + of.ROOM), read(growth + of.SHAPE_COUNT), 0
    front, places = ints(growth + of.FRONT, read(growth + of.FRONT_ROWS)), ints(growth + of.NODE_PLACES, room)
    parents, reaches, most = small_ints(growth + of.SHAPE_PARENTS, total), doubles(growth + of.NODE_REACHES, room), 0.0
    for node in range(read(growth + of.FIRST_NEW), read(growth + of.NODE_COUNT)):
        for child in range(places[node] + 1, total):
            if parents[child] == places[node]:
                front[count] = node
                count, most = count + 1, max(most, reaches[node])
                break
    if count > 0 and _may_descend(growth, ints(growth + of.NODE_DEPTHS, room)[front[0]], most) == 1:
        write(growth + of.FRONT_COUNT, count)


@njit(error_model="numpy")
def _finish(growth: int) -> None:
    """The tree: all nodes, or the most likely ones; the first of equal ones, so that a parent stays with its child.

    What was waiting waits no more: the column takes the nodes' new numbers.
    """
    room, nodes, count = read(growth + of.ROOM), read(growth + of.NODES), read(growth + of.NODE_COUNT)
    tokens, parents, places = (
        ints(growth + of.NODE_TOKENS, room),
        ints(growth + of.NODE_PARENTS, room),
        ints(growth + of.WAITING, room),
    )
    chances, depths = doubles(growth + of.NODE_CHANCES, room), ints(growth + of.NODE_DEPTHS, room)
    columns, sure = small_ints(growth + of.OUT_COLUMNS, 3 * nodes), floats(growth + of.OUT_CHANCES, nodes)
    worth, bar, above, out = doubles(growth + of.NODE_REACHES, room), _bar(growth), 0, 0
    for node in range(count):
        above += 1 if worth[node] > bar else 0
    left = nodes - above
    for node in range(count):
        places[node] = -1
        if worth[node] < bar or (worth[node] == bar and left <= 0):
            continue
        left -= 1 if worth[node] == bar else 0
        columns[out], columns[nodes + out] = tokens[node], places[parents[node]] if parents[node] >= 0 else -1
        columns[2 * nodes + out], sure[out] = depths[node], chances[node]
        places[node] = out
        out += 1
    write(growth + of.OUT_COUNT, out)
