"""Which nodes of the proposed trees are worth a row: pure functions, one scale for the whole batch.

In: trees of point trials with the calibrated reach of every node. Out: the same trees, cut. Not here: estimates, and trees with
drawn trials, whose shape must not depend on what came up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import ge
from typing import TYPE_CHECKING

import numpy as np

from paceline.controllers.acceptance import BINS, DEPTH_BUCKET, EDGES
from paceline.tree.chain_columns import chain_columns, chain_sources, lone_source
from paceline.tree.merge import prune
from paceline.tree.token_tree import EMPTY_TREE

if TYPE_CHECKING:
    from paceline.tree.token_tree import TokenTree

_UNLIKELY = 0.05

Ranked = tuple[float, int, int]
Candidate = tuple[int, list[float], Sequence[int]]


def fixed_shape(tree: TokenTree) -> bool:
    """Whether a tree must stay as it is: it has drawn trials, or probes."""
    if lone_source(tree) >= 0:
        return False
    return bool(tree.trials) or any(tree.kinds.tolist())


def levels_by_source(tree: TokenTree) -> dict[int, int]:
    """Drafter -> the deepest level that it proposed."""
    if (only := lone_source(tree)) >= 0:
        return {only: len(tree.tokens)}
    deepest: dict[int, int] = {}
    for source, depth in zip(tree.sources.tolist(), tree.depths.tolist(), strict=True):
        deepest[source] = max(deepest.get(source, 0), depth)
    return deepest


def path_products(tree: TokenTree) -> list[float]:
    """Per node, the product of confidences along its path."""
    found: list[float] = []
    for parent, sure in zip(tree.parents.tolist(), tree.confidence.tolist(), strict=True):
        found.append(sure if parent < 0 else sure * found[parent])
    return found


def choose(pool: Sequence[Candidate], table: Sequence[float], rows: int, rate: float) -> dict[int, Sequence[int]]:
    """The nodes worth keeping of every tree, in node order; see `order_by_reach` and `best_count` for the arguments."""
    if len(pool) == 1:
        index, reach, forced = pool[0]
        if not forced and all(map(ge, reach, reach[1:])):  # a chain, most often: the nodes are ranked as they stand
            return {index: range(best_count(reach, 0, table, rows, rate))}
    order, first = order_by_reach(pool)
    kept: dict[int, list[int]] = {index: [] for index, _, _ in pool}
    for _, index, node in order[: best_count([reach for reach, _, _ in order], first, table, rows, rate)]:
        kept[index].append(node)
    return {index: sorted(nodes) for index, nodes in kept.items()}


def keep(
    trees: Sequence[TokenTree], known: Sequence[tuple[list[float], Sequence[int]] | None], table: Sequence[float], rate: float
) -> tuple[list[TokenTree], int]:
    """The trees of a batch, cut to what is worth its rows.

    Args:
        known: per tree the reach of its nodes and which of them must stay; None where the tree stays whole.
    Returns:
        the trees, and how many rows they take, roots included.
    """
    chosen, rows = list(trees), len(trees) + sum(len(tree) for tree, one in zip(trees, known, strict=True) if one is None)
    pool = [(i, *one) for i, one in enumerate(known) if one is not None]
    for i, nodes in (choose(pool, table, rows, rate) if pool else {}).items():
        chosen[i] = cut(trees[i], nodes, len(trees[i]))
        rows += len(nodes)
    return chosen, rows


def chain_count(known: tuple[Sequence[float], float], confidence: Sequence[float], table: Sequence[float], rate: float) -> int:
    """How many nodes of a single sequence's chain to keep: `best_count` of its reaches, found on the way.

    Args:
        known: `Acceptance.chances` of its drafter.
    """
    (chances, odds), last, base = known, len(table) - 1, table[1]
    reach, gain, best, best_worth = 1.0, 0.0, 0, 0.0
    for depth, sure in enumerate(confidence, start=1):
        chance = chances[DEPTH_BUCKET[depth] * BINS + bisect_right(EDGES, sure)]
        reach *= chance * odds / (1.0 + chance * (odds - 1.0))
        gain += reach
        worth = gain - rate * (table[depth + 1 if depth < last else last] - base)
        if worth > best_worth:
            best, best_worth = depth, worth
        elif reach < _UNLIKELY:
            break
    return best


def order_by_reach(pool: Sequence[Candidate]) -> tuple[list[Ranked], int]:
    """Rank all nodes of a batch, parents before their children.

    Args:
        pool: per tree its index, the reach of each node (never above its parent's), and the nodes that must come first, parents
            included.
    Returns:
        (reach, tree, node) from the best down, and how many nodes at the front are forced.
    """
    front = [(reach[node], i, node) for i, reach, forced in pool for node in forced]
    taken = {(i, node) for _, i, node in front}
    rest = [(value, i, node) for i, reach, _ in pool for node, value in enumerate(reach)]
    if taken:
        rest = [ranked for ranked in rest if ranked[1:] not in taken]
    rest.sort(key=_best_first)
    return front + rest, len(front)


def _best_first(ranked: Ranked) -> float:
    return -ranked[0]


def best_count(reach: Sequence[float], forced: int, table: Sequence[float], rows: int, rate: float) -> int:
    """How many of the ranked nodes to keep: the most expected tokens after the price of time.

    Args:
        reach: chances from the best node down.
        forced: at least so many.
        table: seconds of a step by rows.
        rows: rows that are fed anyway.
        rate: tokens per second, the price of a second.
    """
    last = len(table) - 1
    base = table[min(rows, last)]
    best, best_worth, gain = forced, -1e30 if forced else 0.0, 0.0
    for count, chance in enumerate(reach, start=1):
        gain += chance
        worth = gain - rate * (table[min(rows + count, last)] - base)
        if count >= forced and worth > best_worth:
            best, best_worth = count, worth
    return best


def cut(tree: TokenTree, nodes: Sequence[int], total: int) -> TokenTree:
    """The tree reduced to some of its nodes, in their order; every node's parent must be among them."""
    if len(nodes) == total:
        return tree
    if not nodes:
        return EMPTY_TREE
    if (only := lone_source(tree)) >= 0 and nodes[-1] == len(nodes) - 1:
        columns, kept = chain_columns(len(nodes)), slice(len(nodes))
        return tree.replace(
            tokens=tree.tokens[kept],
            confidence=tree.confidence[kept],
            sources=chain_sources(len(nodes), only),
            **columns._asdict(),
        )
    if nodes[-1] != len(nodes) - 1 or tree.also:
        keep_n = np.zeros(total, np.bool_)
        keep_n[list(nodes)] = True
        return prune(tree, keep_n)
    kept = slice(len(nodes))
    return tree.replace(
        tokens=tree.tokens[kept],
        parents=tree.parents[kept],
        depths=tree.depths[kept],
        sources=tree.sources[kept],
        confidence=tree.confidence[kept],
        slots=tree.slots[kept],
        kinds=tree.kinds[kept],
    )
