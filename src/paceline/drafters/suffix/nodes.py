"""The nodes of a suffix tree in flat arrays: edges found by hashing, children in order of their counts.

A node is an edge of one or more tokens and its lower end; node 0 is the root. Its tokens are `text[POS : POS +
length]`, an occurrence of them. Children of a node form a list with the most frequent first: exactly in order up to
REACH children, beyond that the first is still the most frequent as long as nothing is removed. An edge is found by its
parent and first token.

A *record* hands several arrays to compiled code as one: every array that is passed costs a step as much as copying some
hundred tokens, and a tuple of arrays as much again. Whoever makes a record keeps its arrays alive, and makes a new one
where an array is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import carray, types  # type: ignore[attr-defined]  # listed by numba at run time
from numba.extending import intrinsic

from paceline.utils import compiled, part_of_compiled

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Int = int | np.int64

PARENT: Final = 0
EDGE: Final = 1
"""First token and length of the edge, as token * 256 + length."""
CHAIN: Final = 2
"""Next node of the same hash value; next free node where the node is free."""
COUNT: Final = 3
"""Suffixes that entered the edge; -1 where the node is free."""
POS: Final = 4
CHILD: Final = 5
NEXT: Final = 6
PREV: Final = 7
"""Previous sibling; that of the first child is the last child."""
FIELDS: Final = 8

USED: Final = 0
"""In meta: rows that have ever been in use."""
FREE: Final = 1
"""In meta: first free row below USED, or -1."""
LIVE: Final = 2
"""In meta: nodes in use, the root included."""
ACTIVE: Final = 3
"""In meta: suffixes of the growing sequence that still run along older ones."""

MAX_DEPTH: Final = 255
MAX_VOCAB: Final = 2**23
REACH: Final = 8
"""Siblings that a child passes at most when its count changes."""


class TreeArrays(NamedTuple):
    """Holds all arrays of a tree, for compiled functions.

    Attributes:
        text: (capacity,) int32 tokens.
        nodes: (capacity, 8) int32, one row a node.
        heads: (a power of two,) int32, first node of each hash chain, or -1.
        meta: (4,) int64 counters.
        active: (depth + 1, 2) int32, the active points of `tree.extend`; scratch space between sequences.
    """

    text: Ints
    nodes: Ints
    heads: Ints
    meta: Longs
    active: Ints


@part_of_compiled
def slot_of(parent: Int, token: Int, size: Int) -> Int:
    """Position of an edge in a hash table of `size` (a power of two) chains."""
    mixed = parent * 0x9E3779B1 + token * 0x85EBCA6B
    mixed ^= mixed >> 15
    mixed *= 0x2C1B3C6D
    return (mixed ^ (mixed >> 19)) & (size - 1)


@compiled
def child_of(nodes: Ints, heads: Ints, parent: Int, token: Int) -> Int:
    """The child of `parent` whose edge begins with `token`, or -1."""
    node = np.int64(heads[slot_of(parent, token, len(heads))])
    while node >= 0 and not (nodes[node, PARENT] == parent and nodes[node, EDGE] >> 8 == token):
        node = np.int64(nodes[node, CHAIN])
    return node


@part_of_compiled
def enter(nodes: Ints, heads: Ints, node: Int) -> None:
    """Put a node into its hash chain."""
    slot = slot_of(np.int64(nodes[node, PARENT]), nodes[node, EDGE] >> 8, len(heads))
    nodes[node, CHAIN] = heads[slot]
    heads[slot] = node


@part_of_compiled
def leave(nodes: Ints, heads: Ints, node: Int) -> None:
    """Take a node out of its hash chain."""
    slot = slot_of(np.int64(nodes[node, PARENT]), nodes[node, EDGE] >> 8, len(heads))
    at = heads[slot]
    if at == node:
        heads[slot] = nodes[node, CHAIN]
        return
    while nodes[at, CHAIN] != node:
        at = nodes[at, CHAIN]
    nodes[at, CHAIN] = nodes[node, CHAIN]


@compiled
def rehash(nodes: Ints, heads: Ints, used: Int) -> None:
    """Fill an empty hash table with all nodes."""
    for node in range(1, used):
        if nodes[node, COUNT] >= 0:
            enter(nodes, heads, node)


@part_of_compiled
def unlist(nodes: Ints, node: Int) -> None:
    """Take a node out of its parent's list of children."""
    parent, after, before = nodes[node, PARENT], nodes[node, NEXT], nodes[node, PREV]
    first = nodes[parent, CHILD]
    if first == node:
        nodes[parent, CHILD] = after
    else:
        nodes[before, NEXT] = after
    if after >= 0:
        nodes[after, PREV] = before
    elif first != node:
        nodes[first, PREV] = before


@part_of_compiled
def enlist(nodes: Ints, node: Int, after: Int) -> None:
    """Put a node into its parent's list of children, behind `after`, or first if that is -1."""
    parent = nodes[node, PARENT]
    first = nodes[parent, CHILD]
    if after < 0:
        nodes[node, NEXT], nodes[node, PREV] = first, node
        if first >= 0:
            nodes[node, PREV] = nodes[first, PREV]
            nodes[first, PREV] = node
        nodes[parent, CHILD] = node
        return
    following = nodes[after, NEXT]
    nodes[node, NEXT], nodes[node, PREV], nodes[after, NEXT] = following, after, node
    if following >= 0:
        nodes[following, PREV] = node
    else:
        nodes[first, PREV] = node


@part_of_compiled
def promote(nodes: Ints, node: Int) -> None:
    """Move a child whose count has grown before those that are not more frequent."""
    count, first = nodes[node, COUNT], nodes[nodes[node, PARENT], CHILD]
    if node == first:
        return
    if count >= nodes[first, COUNT]:
        unlist(nodes, node)
        enlist(nodes, node, -1)
        return
    at, steps = np.int64(nodes[node, PREV]), 0
    while nodes[at, COUNT] <= count and steps < REACH:
        at = np.int64(nodes[at, PREV])
        steps += 1
    if steps:
        unlist(nodes, node)
        enlist(nodes, node, at)


@part_of_compiled
def demote(nodes: Ints, node: Int) -> None:
    """Move a child whose count has shrunk behind those that are more frequent."""
    count, steps, at, following = nodes[node, COUNT], 0, np.int64(-1), np.int64(nodes[node, NEXT])
    while following >= 0 and nodes[following, COUNT] > count and steps < REACH:
        at, following = following, np.int64(nodes[following, NEXT])
        steps += 1
    if at >= 0:
        unlist(nodes, node)
        enlist(nodes, node, at)


@part_of_compiled
def predecessor(nodes: Ints, node: Int) -> Int:
    """The sibling before a node, or -1 for the first."""
    return -1 if nodes[nodes[node, PARENT], CHILD] == node else np.int64(nodes[node, PREV])


@part_of_compiled
def new_node(nodes: Ints, meta: Longs) -> Int:
    """A row of its own; there must be one."""
    node = np.int64(meta[FREE])
    if node >= 0:
        meta[FREE] = nodes[node, CHAIN]
    else:
        node = np.int64(meta[USED])
        meta[USED] += 1
    meta[LIVE] += 1
    nodes[node, CHILD] = -1
    return node


@part_of_compiled
def free_node(nodes: Ints, meta: Longs, node: Int) -> None:
    """Give a row back that is in no chain and no list."""
    nodes[node, COUNT] = -1
    nodes[node, CHAIN] = meta[FREE]
    meta[FREE] = node
    meta[LIVE] -= 1


Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]


def record_of(arrays: Iterable[npt.NDArray[Any]]) -> Longs:
    """(arrays, 3) int64: address, rows and columns of each; of one row of numbers the columns are 1.

    Raises:
        ValueError: an array that is not contiguous.
    """
    rows = []
    for array in arrays:
        if not array.flags.c_contiguous:
            raise ValueError("only contiguous arrays can be read by their address")
        rows.append((array.ctypes.data, len(array), array.shape[1] if array.ndim > 1 else 1))
    return np.array(rows, np.int64)


def _pointer(kind: Any) -> Any:
    """A function of compiled code: an address as a pointer to numbers of a kind."""

    def pointer(typing: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), codegen  # type: ignore[no-untyped-call]  # numba's

    return intrinsic(pointer)


_int32, _int64, _float32, _float64 = (
    _pointer(kind) for kind in (types.int32, types.int64, types.float32, types.float64)
)


@part_of_compiled
def ints(record: Longs, at: Int) -> Ints:
    """Read (rows,) int32, array number `at` of a record."""
    array: Ints = carray(_int32(record[at, 0]), (record[at, 1],))
    return array


@part_of_compiled
def int_table(record: Longs, at: Int) -> Ints:
    """Read (rows, columns) int32."""
    array: Ints = carray(_int32(record[at, 0]), (record[at, 1], record[at, 2]))
    return array


@part_of_compiled
def longs(record: Longs, at: Int) -> Longs:
    """Read (rows,) int64."""
    array: Longs = carray(_int64(record[at, 0]), (record[at, 1],))
    return array


@part_of_compiled
def singles(record: Longs, at: Int) -> Singles:
    """Read (rows,) float32."""
    array: Singles = carray(_float32(record[at, 0]), (record[at, 1],))
    return array


@part_of_compiled
def floats(record: Longs, at: Int) -> Floats:
    """Read (rows,) float64."""
    array: Floats = carray(_float64(record[at, 0]), (record[at, 1],))
    return array


@part_of_compiled
def float_table(record: Longs, at: Int) -> Floats:
    """Read (rows, columns) float64."""
    array: Floats = carray(_float64(record[at, 0]), (record[at, 1], record[at, 2]))
    return array
