"""Building a draft tree from a table of tri-grams by a tree search that balances exploring and exploiting.

In: a table, the last two tokens, a budget. Out: a tree of the most visited nodes. Not here: the table (`aded_table`),
requests (`aded`).

Every simulation walks down from the root, to the child with the highest

    value + exploration * chance * sqrt(N) / (1 + n) * (C1 + log((N + C2 + 1) / C2))

(N: visits of all siblings, n: of the child), to a node that was not visited yet. That node gets the followers of its
row as children, and all on the way count a visit. A node's *value* is the mean, over the visits through it, of the
tokens that the target is expected to take along the path from its parent down, the best follower of the last node
included, as a share of the depth that is left to it. Visits without an effect (a row that is not there, the depth is
reached) count too: a node's visits are those of its children and the one that made it.

The score is that of MuZero (arXiv:1911.08265, C1 = 1.25, C2 = 19652), which ADED (arXiv:2407.12021) has too; the
paper's constants and value are not known to us.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from paceline.drafters.lookup.aded_table import DOUBT, FloatArray, IntArray, LongArray, Rows, find_trigram
from paceline.utils import compiled

C1: Final = 1.25
C2: Final = 19652.0


@compiled
def _expand(rows: Rows, first: int, at: tuple[int, int], links: IntArray, facts: FloatArray) -> int:
    """Give a node the followers of its pair as children, likeliest first; returns the number of nodes.

    Args:
        first: the token before the node's own. at: the node, the number of nodes so far.
        links: (n, 5) int32: token, parent, first child, number of children, depth. facts: (n, 2) float32: chance, sum
        of values.
    """
    node, size = at
    row = find_trigram(rows, first, links[node, 0])
    links[node, 2] = size
    if row < 0:
        return size
    followers, weights = rows[2][row], rows[3][row]
    total = DOUBT
    for k in range(len(followers)):
        total += weights[k]
    for k in range(len(followers)):
        if followers[k] >= 0 and weights[k] > 0:
            child = size
            while child > links[node, 2] and facts[child - 1, 0] < weights[k] / total:
                links[child, 0], facts[child, 0] = links[child - 1, 0], facts[child - 1, 0]
                child -= 1
            links[child, 0], facts[child, 0] = followers[k], weights[k] / total
            links[size, 1], links[size, 2], links[size, 3], links[size, 4] = node, -1, 0, links[node, 4] + 1
            facts[size, 1] = 0.0
            size += 1
    links[node, 3] = size - links[node, 2]
    return size


@compiled
def _choose(node: int, links: IntArray, facts: FloatArray, visits: LongArray, exploration: float) -> int:
    """The child to go to: the highest score, of equal ones the likeliest."""
    begin, end = int(links[node, 2]), int(links[node, 2] + links[node, 3])
    total = 0
    for child in range(begin, end):
        total += visits[child]
    spread = exploration * np.sqrt(total) * (C1 + np.log((total + C2 + 1) / C2))
    best, highest = begin, -1.0
    for child in range(begin, end):
        value = facts[child, 1] / visits[child] if visits[child] > 0 else 0.0
        score = value + spread * facts[child, 0] / (1 + visits[child])
        if score > highest:
            best, highest = child, score
    return best


@compiled
def search_tree(
    rows: Rows, first: int, second: int, limits: tuple[int, int], exploration: float
) -> tuple[IntArray, FloatArray, LongArray, int]:
    """Simulate from the last two tokens; (links, facts, visits, number of nodes), node 0 being the root.

    Args:
        limits: simulations, depth.
    """
    simulations, depth = limits
    most = 1 + (simulations + 1) * rows[2].shape[1]
    links, facts, visits = np.empty((most, 5), np.int32), np.empty((most, 2), np.float32), np.zeros(most, np.int64)
    links[0, 0], links[0, 1], links[0, 2], links[0, 3], links[0, 4] = second, -1, -1, 0, 0
    facts[0, 0], facts[0, 1] = 1.0, 0.0
    size = 1
    for _ in range(simulations):
        node, before = 0, first
        while visits[node] > 0 and links[node, 3] > 0:
            before, node = links[node, 0], _choose(node, links, facts, visits, exploration)
        if visits[node] == 0 and links[node, 4] < depth:
            size = _expand(rows, before, (node, size), links, facts)
        gain = facts[links[node, 2], 0] if links[node, 3] > 0 else 0.0
        while node >= 0:
            visits[node] += 1
            if node > 0:
                gain = facts[node, 0] * (1.0 + gain)
                facts[node, 1] += gain / (depth - links[node, 4] + 1)
            node = links[node, 1]
    return links, facts, visits, size


@compiled
def grow(  # noqa: PLR0917 - compiled code has no keyword arguments
    rows: Rows,
    pair: tuple[int, int],
    limits: tuple[int, int],
    exploration: float,
    want: tuple[int, bool],
    out: tuple[IntArray, FloatArray],
) -> int:
    """Search, and take the most visited nodes; returns their number.

    Args:
        pair: the last two tokens. limits, exploration: as for `search`. want: most nodes; chains only.
        out: links (nodes, 3) int32: token, parent, depth; chances (nodes,) float32.
    """
    tree, facts, visits, size = search_tree(rows, pair[0], pair[1], limits, exploration)
    nodes, chain = want
    front, count, node, above = np.empty((size, 2), np.int64), 0, 0, -1
    for taken in range(nodes + 1):
        if chain:
            count = 0
        for child in range(tree[node, 2], tree[node, 2] + tree[node, 3]):
            if visits[child] > 0:
                front[count, 0], front[count, 1], count = child, above, count + 1
        if count == 0 or taken == nodes:
            return taken
        best = 0
        for k in range(1, count):
            if visits[front[k, 0]] > visits[front[best, 0]]:
                best = k
        node, parent, count = front[best, 0], front[best, 1], count - 1
        front[best, 0], front[best, 1] = front[count, 0], front[count, 1]
        out[0][taken, 0], out[0][taken, 1], out[0][taken, 2] = tree[node, 0], parent, tree[node, 4]
        out[1][taken] = facts[node, 0]
        above = taken
    return nodes
