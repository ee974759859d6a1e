"""From a match in a datastore to a tree of drafts: candidates' continuations in a trie of frequencies, pruned to a
budget.

For each text the longest tail of at most `max_match_length` tokens that occurs in the datastore with a token after it
is found by halving (where n tokens occur, n - 1 do), each probe a binary search. What follows its places goes into a
trie with counts; of more than `max_matches` positions, as many spread evenly over the sorted range, which samples every
continuation by its share. Then nodes are taken one by one, most likely reached first.

A child's chance is its share of the count at its parent, times `TRUST`: how often the next token of unseen text was in
the datastore at all after a match so long and so often seen. Shares sum to at most 1, hence so do the chances of
siblings.

Source: REST (arXiv:2311.08252): matches of 16 tokens and fewer, continuations of 10 tokens, 64 nodes, up to 5000
places. Longer matches (they tell sure places from others), fewer places, and chances in place of its raw counts are our
choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.drafters.common.chains import tree_of
from paceline.drafters.retrieval.suffix_arrays import IntArray, LongArray, occurs, suffix_bound
from paceline.tree import TokenTree
from paceline.utils import compiled, part_of_compiled

FloatArray = npt.NDArray[np.float32]
FirstTokens = tuple[Sequence[int], Sequence[float]]  # what branches may begin with, and the chances

LONGEST_MATCH: Final = 32
NO_RULE: Final = -1

_LENGTHS: Final = (1, 2, 3, 6, 12, 24, 32)
_SEEN: Final = (
    (0.05, 0.08, 0.20, 0.50, 0.77, 0.90, 0.96),
    (0.10, 0.15, 0.35, 0.55, 0.79, 0.91, 0.97),
    (0.18, 0.25, 0.38, 0.65, 0.84, 0.91, 0.97),
    (0.25, 0.35, 0.42, 0.70, 0.85, 0.92, 0.97),
    (0.27, 0.39, 0.62, 0.78, 0.92, 0.93, 0.97),
)
TRUST: Final[FloatArray] = np.array(
    [np.interp(np.arange(LONGEST_MATCH + 1), _LENGTHS, seen) for seen in _SEEN], np.float32
)
"""[how often seen: once, 2, 4, 8, 16 times and more][tokens in the match]: how often the next token was among those
seen there, on 40,000 positions of prose, word problems and Python sources beside 0.9 million tokens of the same kinds
(`benchmarks/datastore.py FOLDER --calibrate SOURCES`), smoothed so that it falls in neither direction.
"""


@compiled
def longest_match(data: IntArray, shards: LongArray, tail: IntArray, low: int) -> int:
    """Most tokens at the end of `tail` that occur in a shard with a token after them, or 0 if that is fewer than `low`.

    Args:
        data: tokens and suffix arrays of all shards. shards: (s, 3) int64: where a shard's tokens and its suffix array
            begin in `data`, and their number.
    """
    high, least = len(tail), low
    while low <= high:
        middle = (low + high) // 2
        matched = False
        for s in range(len(shards)):
            text, order, n = shards[s, 0], shards[s, 1], shards[s, 2]
            if occurs(data[text : text + n], data[order : order + n], tail, middle):
                matched = True
                break
        if matched:
            low = middle + 1
        else:
            high = middle - 1
    return high if high >= least else 0


@part_of_compiled
def _ranges(data: IntArray, shards: LongArray, tail: IntArray, length: int, ranges: LongArray) -> int:
    """Per shard the range of positions of a match, into `ranges`; returns their number."""
    total = 0
    for s in range(len(shards)):
        text, order, n = shards[s, 0], shards[s, 1], shards[s, 2]
        ranges[s, 0] = suffix_bound(data[text : text + n], data[order : order + n], tail, length, 0)
        ranges[s, 1] = suffix_bound(data[text : text + n], data[order : order + n], tail, length, 1)
        total += ranges[s, 1] - ranges[s, 0]
    return total


@part_of_compiled
def _child(trie: IntArray, node: int, token: int, free: int) -> int:
    """The child of `node` with this token; if there is none yet, `free` becomes it, the last of its siblings."""
    child, last = trie[node, 2], 0
    while child and trie[child, 0] != token:
        child, last = trie[child, 3], child
    if child:
        return int(child)
    trie[free, 0], trie[free, 1] = token, node
    if last:
        trie[last, 3] = free
    else:
        trie[node, 2] = free
    return free


@part_of_compiled
def _grow(  # noqa: PLR0917 - compiled code has no keyword arguments
    data: IntArray,
    shards: LongArray,
    ranges: LongArray,
    picks: LongArray,
    length: int,
    limits: tuple[int, int],
    trie: IntArray,
) -> int:
    """Put the continuations of the picked positions into a trie; returns its number of nodes, the root included.

    Args:
        picks: (m,) int64, ascending: which of all positions, counted through the ranges. limits: depth, vocabulary
            size.
        trie: (m * depth + 1, 5) int32 of zeros: token, parent, first child, next sibling (0 for none), count.
    """
    nodes, shard, passed = 1, 0, 0
    trie[0, 4] = len(picks)
    for pick in picks:
        while pick >= passed + ranges[shard, 1] - ranges[shard, 0]:
            passed += ranges[shard, 1] - ranges[shard, 0]
            shard += 1
        text, n = shards[shard, 0], shards[shard, 2]
        at = data[shards[shard, 1] + ranges[shard, 0] + pick - passed] + length
        node = 0
        for i in range(at, min(at + limits[0], n)):
            token = data[text + i]
            if token < 0 or token >= limits[1]:
                break
            node = _child(trie, node, token, nodes)
            nodes = max(nodes, node + 1)
            trie[node, 4] += 1
    return nodes


@part_of_compiled
def _spread(total: int, most: int) -> LongArray:
    """All of `total` positions, or `most` of them, evenly."""
    picks = np.empty(min(total, most), np.int64)
    for i in range(len(picks)):
        picks[i] = i if total <= most else (2 * i + 1) * total // (2 * most)
    return picks


@part_of_compiled
def _ruled(chance: float, token: int, rule: tuple[IntArray, FloatArray, int]) -> float:
    """The mean of a first token's chance and the one that a rule gives it; 0 if it is not among the tokens that the
    rule names.
    """
    for k in range(rule[2]):
        if rule[0][k] == token and rule[1][k] > 0:
            return (chance + float(rule[1][k])) / 2
    return 0.0


@part_of_compiled
def _likeliest(front: LongArray, reach: FloatArray, size: int) -> int:
    """Position in `front` of the node that is most likely reached."""
    best = 0
    for k in range(1, size):
        if reach[front[k, 0]] > reach[front[best, 0]]:
            best = k
    return best


@part_of_compiled
def _trusted(trust: FloatArray, seen: int, length: int) -> float:
    """How far a position is trusted that was seen so often after a match of so many tokens."""
    bucket = 0
    while bucket < len(trust) - 1 and seen >= 2 << bucket:
        bucket += 1
    return trust[bucket, min(length, trust.shape[1] - 1)]  # type: ignore[no-any-return]  # a float


@part_of_compiled
def _take(  # noqa: PLR0917 - compiled code has no keyword arguments
    trie: IntArray,
    trust: FloatArray,
    length: int,
    limits: tuple[int, bool],
    rule: tuple[IntArray, FloatArray, int],
    out: tuple[IntArray, FloatArray],
) -> int:
    """Take nodes of the trie, most likely reached first, into `out` (columns as in `draft`); returns their number.

    A rule cuts the first tokens that it does not name; those it names get the mean of both chances.
    """
    (links, chances), (nodes, chain) = out, limits
    front = np.empty((len(trie), 2), np.int64)  # (node of the trie, its parent in the tree)
    chance, reach = np.empty(len(trie), np.float32), np.empty(len(trie), np.float32)
    size, taken, node, above = 0, 0, 0, -1
    reach[0] = 1.0
    while True:
        seen, depth = trie[node, 4], links[above, 2] if above >= 0 else 0
        trusted = _trusted(trust, seen, length + depth)
        child = trie[node, 2]
        while child:
            chance[child] = trusted * trie[child, 4] / seen
            if above < 0 and rule[2] >= 0:
                chance[child] = _ruled(chance[child], trie[child, 0], rule)
            reach[child] = reach[node] * chance[child]
            if reach[child] > 0:
                front[size, 0], front[size, 1], size = child, above, size + 1
            child = trie[child, 3]
        if size == 0 or taken == nodes:
            return taken
        best = _likeliest(front, reach, size)
        node, parent = front[best, 0], front[best, 1]
        links[taken, 0], links[taken, 1], chances[taken] = trie[node, 0], parent, chance[node]
        links[taken, 2] = links[parent, 2] + 1 if parent >= 0 else 1
        above, taken, size = taken, taken + 1, size - 1
        if chain:
            size = 0
        else:
            front[best, 0], front[best, 1] = front[size, 0], front[size, 1]


@compiled
def draft(  # noqa: PLR0917 - compiled code has no keyword arguments
    data: IntArray,
    shards: LongArray,
    trust: FloatArray,
    tails: tuple[IntArray, LongArray],
    wants: LongArray,
    options: tuple[int, int, int, bool],
    rules: tuple[IntArray, FloatArray, LongArray],
    out: tuple[IntArray, FloatArray, LongArray],
) -> None:
    """Draft for a batch; see `drafted`.

    Args:
        tails: (b, L) int32 with the texts' last tokens at the right, and (b,) how many they are. wants: (b, 2) nodes
            and depth.
        options: fewest tokens of a match, most positions, vocabulary size, chains only.
        rules: first tokens (b, k) with their chances and (b,) their number, or NO_RULE.
        out: links (b, nodes, 3) int32: token, parent, depth; chances (b, nodes) float32; (b, 2) number of nodes, match
            length.
    """
    lowest, most, vocabulary, chain = options
    ranges = np.zeros((len(shards), 2), np.int64)
    for b in range(len(wants)):
        nodes, depth = wants[b, 0], wants[b, 1]
        tail = tails[0][b, tails[0].shape[1] - tails[1][b] :]
        length = longest_match(data, shards, tail, lowest) if nodes > 0 and depth > 0 else 0
        out[2][b, 0], out[2][b, 1] = 0, length
        if length > 0:
            picks = _spread(_ranges(data, shards, tail, length, ranges), most)
            trie = np.zeros((len(picks) * depth + 1, 5), np.int32)
            size = _grow(data, shards, ranges, picks, length, (depth, vocabulary), trie)
            rule = (rules[0][b], rules[1][b], rules[2][b])
            out[2][b, 0] = _take(trie[:size], trust, length, (nodes, chain), rule, (out[0][b], out[1][b]))


def drafted(
    data: IntArray,
    shards: LongArray,
    tails: Sequence[Sequence[int]],
    wants: LongArray,
    options: tuple[int, int, int, bool],
    *,
    rules: Sequence[FirstTokens | None],
    source: int = 0,
) -> list[TokenTree]:
    """Draft one tree per text.

    Args:
        data, shards, options: as in `draft`. tails: last tokens of each text. wants: (b, 2) nodes and depth.
        rules: per text the first tokens that are allowed, with their chances; None allows all.
        source: of the nodes.
    """
    batch, longest = len(tails), max(map(len, tails), default=0)
    tails_bl, lengths_b = np.zeros((batch, longest), np.int32), np.zeros(batch, np.int64)
    for row, tail in enumerate(tails):
        tails_bl[row, longest - len(tail) :] = tail
        lengths_b[row] = len(tail)
    most = max(int(wants[:, 0].max(initial=0)), 1)
    links, chances = np.empty((batch, most, 3), np.int32), np.empty((batch, most), np.float32)
    counts = np.zeros((batch, 2), np.int64)
    draft(data, shards, TRUST, (tails_bl, lengths_b), wants, options, _as_arrays(rules), (links, chances, counts))
    return [tree_of(links[b, :n], chances[b, :n], source) for b, n in enumerate(counts[:, 0].tolist())]


def _as_arrays(rules: Sequence[FirstTokens | None]) -> tuple[IntArray, FloatArray, LongArray]:
    widest = max((len(rule[0]) for rule in rules if rule is not None), default=0)
    tokens, chances = np.zeros((len(rules), widest), np.int32), np.zeros((len(rules), widest), np.float32)
    counts = np.full(len(rules), NO_RULE, np.int64)
    for row, rule in enumerate(rules):
        if rule is not None:
            counts[row] = len(rule[0])
            tokens[row, : len(rule[0])], chances[row, : len(rule[1])] = rule
    return tokens, chances, counts
