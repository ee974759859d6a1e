"""Growing and shrinking a suffix tree, token by token and sequence by sequence.

In: the arrays of one tree (`suffix_nodes`) and a text. Out: the tree of all its suffixes, cut at a depth, with exact
counts. Not
here: allocation (`suffix_tree`).

While a sequence grows, its suffixes that occurred before run along the edges of those occurrences: the *active points*
(node, tokens matched on its edge), longest suffix first. They are always the suffixes of length 1..ACTIVE, since what
follows a longer suffix has followed the shorter ones too. A point that meets another token splits the edge and ends in
a leaf of its own, which then needs no further work: its edge reaches as far as the text will, up to the depth. So a
token costs as much as the longest match is long, at most the depth. Every suffix makes at most two nodes.

`close` ends a sequence: points within an edge split it, so that every suffix ends at a node and `remove` finds it
again. Labels point to the latest sequence that ran along the whole edge; if sequences are removed oldest first, a label
never outlives its text.

Source: Ukkonen, On-line construction of suffix trees (1995), with counts, a depth and removal added.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from paceline.drafters.suffix.nodes import (
    ACTIVE,
    CHILD,
    COUNT,
    EDGE,
    NEXT,
    PARENT,
    POS,
    PREV,
    Arrays,
    Int,
    Ints,
    Longs,
    child_of,
    demote,
    enlist,
    enter,
    free_node,
    leave,
    new_node,
    predecessor,
    promote,
    unlist,
)
from paceline.utils import compiled

OPEN: Final = 2**31 - 1
"""The end of a sequence that still grows."""


@compiled
def extend(tree: Arrays, start: Int, stop: Int, end: Int, depth: Int) -> None:
    """Take in `text[start:stop]`; the sequence will not reach beyond `end`. There must be two free rows a token and
    point.
    """
    text, nodes, heads, meta, active = tree
    for at in range(start, stop):
        token, points, kept = np.int64(text[at]), meta[ACTIVE] + 1, 0
        active[points - 1, 0] = active[points - 1, 1] = 0
        nodes[0, COUNT] += 1
        for k in range(points):
            node: Int = np.int64(active[k, 0])
            child: Int = np.int64(-1)
            matched, length = np.int64(active[k, 1]), points - 1 - k
            if matched < nodes[node, EDGE] & 255:
                if text[nodes[node, POS] + matched] == token:
                    child, matched = node, matched + 1
                else:
                    node = split(tree, k, points, at)
            else:
                child = child_of(nodes, heads, node, token)
                if child >= 0:
                    nodes[child, COUNT] += 1
                    promote(nodes, child)
                    matched = np.int64(1)
            if child < 0:
                add_leaf(tree, node, token, at, min(depth - length, end - at))
                continue
            if matched == nodes[child, EDGE] & 255:
                nodes[child, POS] = at + 1 - matched
            if length + 1 < depth:
                active[kept, 0], active[kept, 1] = child, matched
                kept += 1
        meta[ACTIVE] = kept


@compiled
def add_leaf(tree: Arrays, parent: Int, token: Int, pos: Int, length: Int) -> None:
    """A new child that one suffix has entered."""
    nodes = tree.nodes
    leaf, first = new_node(nodes, tree.meta), nodes[parent, CHILD]
    nodes[leaf, PARENT], nodes[leaf, EDGE], nodes[leaf, POS], nodes[leaf, COUNT] = parent, token * 256 + length, pos, 1
    enlist(nodes, leaf, np.int64(nodes[first, PREV]) if first >= 0 else np.int64(-1))
    promote(nodes, leaf)
    enter(nodes, tree.heads, leaf)


@compiled
def split(tree: Arrays, k: Int, points: Int, at: Int) -> Int:
    """Cut the edge under point `k` where it stands, before `text[at]`; returns the new upper node.

    The points from `k` on that stand on this edge are not beyond the cut, so that they move to the upper part.
    """
    text, nodes, heads, meta, active = tree
    lower, matched = np.int64(active[k, 0]), active[k, 1]
    upper, before = new_node(nodes, meta), predecessor(nodes, lower)
    edge, parent = nodes[lower, EDGE], nodes[lower, PARENT]
    leave(nodes, heads, lower)
    unlist(nodes, lower)
    nodes[upper, PARENT], nodes[upper, EDGE], nodes[upper, POS] = parent, (edge & ~255) + matched, at - matched
    nodes[upper, COUNT] = nodes[lower, COUNT]
    enlist(nodes, upper, before)
    enter(nodes, heads, upper)
    pos = nodes[lower, POS] + matched
    nodes[lower, PARENT], nodes[lower, EDGE], nodes[lower, POS] = upper, text[pos] * 256 + (edge & 255) - matched, pos
    enlist(nodes, lower, np.int64(-1))
    enter(nodes, heads, lower)
    for j in range(k, points):
        if active[j, 0] == lower:
            active[j, 0] = upper
            nodes[lower, COUNT] -= 1
    return upper


@compiled
def close(tree: Arrays, stop: Int) -> None:
    """End the growing sequence at `stop`: every suffix of it ends at a node."""
    points = tree.meta[ACTIVE]
    for k in range(points):
        if tree.active[k, 1] < tree.nodes[tree.active[k, 0], EDGE] & 255:
            split(tree, k, points, stop)
    tree.meta[ACTIVE] = 0


@compiled
def remove(tree: Arrays, start: Int, stop: Int, depth: Int) -> None:
    """Take the closed sequence `text[start:stop]`, the oldest one, out again."""
    text, nodes, heads, meta, path = tree
    for first in range(start, stop):
        nodes[0, COUNT] -= 1
        node: Int = np.int64(0)
        at, steps, end = first, 0, min(first + depth, stop)
        while at < end:
            node = child_of(nodes, heads, node, np.int64(text[at]))
            nodes[node, COUNT] -= 1
            path[steps, 0] = node
            steps += 1
            at += nodes[node, EDGE] & 255
        while steps and nodes[path[steps - 1, 0], COUNT] == 0:
            steps -= 1
            gone = np.int64(path[steps, 0])
            leave(nodes, heads, gone)
            unlist(nodes, gone)
            free_node(nodes, meta, gone)
        for k in range(steps):
            demote(nodes, np.int64(path[k, 0]))
        if steps:
            join(nodes, heads, meta, np.int64(path[steps - 1, 0]))


@compiled
def join(nodes: Ints, heads: Ints, meta: Longs, node: Int) -> None:
    """Make one edge of a node and its child, if it has but one and no suffix ends between."""
    child = np.int64(nodes[node, CHILD])
    if child < 0 or nodes[child, NEXT] >= 0 or nodes[child, COUNT] != nodes[node, COUNT]:
        return
    before, edge = predecessor(nodes, node), nodes[node, EDGE]
    leave(nodes, heads, child)
    leave(nodes, heads, node)
    unlist(nodes, node)
    nodes[child, PARENT], nodes[child, POS] = nodes[node, PARENT], nodes[child, POS] - (edge & 255)
    nodes[child, EDGE] = edge + (nodes[child, EDGE] & 255)
    enlist(nodes, child, before)
    enter(nodes, heads, child)
    free_node(nodes, meta, node)
