"""Trees of a fixed shape, whose nodes are named by rank: the best ones under given chances, and the size that pays on a
machine.

Where acceptance depends on depth and rank alone, a node is reached with the product of the chances along its path, a
tree is expected to add the sum over its nodes, and so the best tree of n nodes is made of the n nodes with the largest
products. Since a child's product is never above its parent's, these nest: one order of nodes holds the best tree of
every size.

Source: the greedy choice of candidate trees in Medusa (arXiv:2401.10774), and Hardware-Aware Parallel Prompt Decoding
(arXiv:2405.18628), which chooses the size by expected tokens over the measured time of a pass. Its prompt tokens are
counted in `tree.prompt_tokens`.

Axes in this file: n = nodes, d = depths from 1 on, r = ranks from 0 on.
"""

from __future__ import annotations

import ast
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError
from paceline.utils import need, shortened

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Ranks = tuple[int, ...]

RANKS: Final = 8
DEPTHS: Final = 16
MAX_NODES: Final = 1024
"""Most nodes of a shape that a user writes down."""

PRIOR: Final = (0.65, 0.11, 0.05, 0.02, 0.012, 0.009, 0.007, 0.005)
"""By rank, before anything was seen: about what the bundled draft model reaches (greedy, 12 of its prompts)."""


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """A tree without tokens, most likely reached nodes first, so that the first n nodes are its best part of that size.

    Attributes:
        parents_n: (n,) int32, -1 at the root, parents first.
        ranks_n: (n,) int32: the node is its parent's candidate of this rank, 0 the most likely.
        depths_n: (n,) int32 from 1 on.
        reach_n: (n,) float64 chance that the node is reached, by the chances that the shape was made for.
    """

    parents_n: Ints
    ranks_n: Ints
    depths_n: Ints
    reach_n: Floats

    def __len__(self) -> int:
        return len(self.parents_n)

    def cut(self, nodes: int, depth: int) -> Shape:
        """The best part with at most so many nodes and levels."""
        if len(self) <= nodes and (not len(self) or int(self.depths_n.max()) <= depth):
            return self
        kept_n = np.flatnonzero(self.depths_n <= depth)[: max(nodes, 0)]
        positions_n = np.full(len(self) + 1, -1, np.int32)  # the last entry stands for the root
        positions_n[kept_n] = np.arange(len(kept_n), dtype=np.int32)
        return Shape(
            positions_n[self.parents_n[kept_n]], self.ranks_n[kept_n], self.depths_n[kept_n], self.reach_n[kept_n]
        )

    def columns(self) -> Ints:
        """(3, n) int32: parent, rank and depth of every node."""
        return np.stack([self.parents_n, self.ranks_n, self.depths_n])

    def paths(self) -> list[Ranks]:
        """Every node as the ranks that lead to it."""
        found: list[Ranks] = []
        for parent, rank in zip(self.parents_n.tolist(), self.ranks_n.tolist(), strict=True):
            found.append((rank,) if parent < 0 else (*found[parent], rank))
        return found


class StaticTreeSize(NamedTuple):
    """How large a static tree should be.

    Attributes:
        nodes, depth: 0 where plain decoding is fastest.
        rate: expected tokens per second; plain: the same without drafts.
    """

    nodes: int
    depth: int
    rate: float
    plain: float


def monotone(acceptance_dr: npt.ArrayLike) -> Floats:
    """(d, r) chances lowered so that they never grow with the rank and the ranks sum to at most 1."""
    chances_dr = np.minimum.accumulate(np.clip(np.atleast_2d(np.asarray(acceptance_dr, np.float64)), 0.0, 1.0), axis=1)
    return np.asarray(chances_dr / np.maximum(chances_dr.sum(axis=1, keepdims=True), 1.0))


def best_shapes(acceptance_dr: npt.ArrayLike, max_nodes: int, *, max_depth: int = DEPTHS) -> Shape:
    """The best static tree of every size up to `max_nodes`: the first n nodes of the result are the one of n nodes.

    Args:
        acceptance_dr: (d, r) chance that the target takes the candidate of rank r at depth d + 1, given that it took
            its parent; deeper levels have the last row's chances. One row may be given as (r,). Made `monotone` first.
        max_depth: most levels.
    Returns:
        At most `max_nodes` nodes; none that can never be reached.
    """
    chances = monotone(acceptance_dr).tolist()
    columns: list[tuple[int, int, int, float]] = []
    heap: list[tuple[float, int, int, int, float]] = []

    def offer(parent: int, rank: int, depth: int, above: float) -> None:
        row = chances[min(depth, len(chances)) - 1]
        if depth <= max_depth and rank < len(row) and above * row[rank] > 0.0:
            heapq.heappush(heap, (-above * row[rank], depth, parent, rank, above))

    offer(-1, 0, 1, 1.0)
    while heap and len(columns) < max_nodes:
        negative, depth, parent, rank, above = heapq.heappop(heap)
        columns.append((parent, rank, depth, -negative))
        offer(parent, rank + 1, depth, above)
        offer(len(columns) - 1, 0, depth + 1, -negative)
    return _shape(columns)


def choose_shape(
    shape: Shape, seconds: Sequence[float], *, level_seconds: Sequence[float] | None = None, size: int = 1
) -> StaticTreeSize:
    """The number of nodes and levels with the most expected tokens per second.

    Args: as of `expected_rates`.
    """
    plain = size / seconds[min(size, len(seconds) - 1)]
    rates_dn = expected_rates(shape, seconds, level_seconds=level_seconds, size=size)
    best = int(rates_dn.argmax()) if rates_dn.size else 0
    if not rates_dn.size or not rates_dn.flat[best] > plain:
        return StaticTreeSize(0, 0, plain, plain)
    depth, nodes = divmod(best, len(shape))
    return StaticTreeSize(nodes + 1, depth + 1, float(rates_dn.flat[best]), plain)


def expected_rates(
    shape: Shape, seconds: Sequence[float], *, level_seconds: Sequence[float] | None = None, size: int = 1
) -> Floats:
    """Expected tokens per second with the best part of every number of nodes and levels.

    Args:
        shape: from `best_shapes`.
        seconds: of a step apart from drafting, by rows; index 0 is not used, the last entry stands for all larger ones.
        level_seconds: of drafting so many levels, index 0 being none; the last entry stands for all larger ones. None:
            no time.
        size: sequences of the batch, which all get such a tree; `seconds` are those of the whole batch.
    Returns:
        (d, n) for up to d + 1 levels and n + 1 nodes; 0 where the shape has fewer nodes on so many levels.
    """
    times = np.asarray(seconds, np.float64)
    drafting = np.zeros(1) if level_seconds is None else np.asarray(level_seconds, np.float64)
    rates_dn = np.zeros((int(shape.depths_n.max(initial=0)), len(shape)))
    for depth, rates_n in enumerate(rates_dn, start=1):
        gains_n = 1.0 + np.cumsum(shape.reach_n[shape.depths_n <= depth])
        rows_n = np.minimum(size * (2 + np.arange(len(gains_n))), len(times) - 1)
        rates_n[: len(gains_n)] = size * gains_n / (times[rows_n] + drafting[min(depth, len(drafting) - 1)])
    return rates_dn


class RankAcceptance:
    """How often the target takes a candidate, by depth and rank, learned from what became of trees.

    Args:
        decay: of what was seen, at each new sight of its depth; 1 forgets nothing.
    Attributes:
        hits_dr, tries_dr: (d, r) decayed counts; ranks beyond the last are not counted, depths beyond the last belong
            to it.
    """

    __slots__ = ("_decay", "hits_dr", "tries_dr")

    _STRENGTH, _LEVEL = 16.0, 16.0

    def __init__(self, depths: int = DEPTHS, ranks: int = RANKS, *, decay: float = 0.995) -> None:
        self._decay = decay
        self.hits_dr, self.tries_dr = np.zeros((depths, ranks)), np.zeros((depths, ranks))

    def learn(self, depth: int, ranks: int, taken: int | None) -> None:
        """An accepted node had children of ranks 0 .. ranks - 1 at this depth.

        The target took one of them, or (None) none.
        """
        d, known = min(depth, len(self.hits_dr)) - 1, min(ranks, self.hits_dr.shape[1])
        self.hits_dr[d, :known] *= self._decay
        self.tries_dr[d, :known] *= self._decay
        self.tries_dr[d, :known] += 1.0
        if taken is not None and taken < known:
            self.hits_dr[d, taken] += 1.0

    def chances(self) -> Floats:
        """(d, r) estimates: each depth leans on all depths together, and these on PRIOR, as far as little was seen."""
        ranks = self.hits_dr.shape[1]
        prior_r = np.array([PRIOR[min(r, len(PRIOR) - 1)] for r in range(ranks)])
        k, own = self._STRENGTH, self._LEVEL
        all_r = (self.hits_dr.sum(0) + k * prior_r) / (self.tries_dr.sum(0) + k)
        return monotone((self.hits_dr + own * all_r) / (self.tries_dr + own))


def from_paths(paths: Iterable[Ranks]) -> Shape:
    """A shape with exactly these nodes, sorted by the chances of PRIOR.

    Raises:
        ConfigError: a path whose beginning is not among them, or twice the same.
    """
    chances = monotone(PRIOR)
    found: dict[Ranks, float] = {}
    for path in sorted(paths, key=len):
        need(path not in found, "speculative_token_tree", "name every path once", list(path))
        rule = f"hold {shortened(path[:-1], 60)}, the beginning of {shortened(path, 60)}"
        need(len(path) == 1 or path[:-1] in found, "speculative_token_tree", rule, path)
        d, r = min(len(path), len(chances)) - 1, min(path[-1], chances.shape[1] - 1)
        above = found[path[:-1]] if len(path) > 1 else 1.0
        found[path] = above * float(chances[d, r]) * 0.5 ** (path[-1] - r)
    order = sorted(found, key=lambda path: (-found[path], len(path), path))
    where = {path: position for position, path in enumerate(order)}
    return _shape([(where.get(path[:-1], -1), path[-1], len(path), found[path]) for path in order])


def parse_paths(given: object, *, max_rank: int) -> list[Ranks]:
    """vLLM's `speculative_token_tree`: paths of ranks, as a list or as the text of one, such as "[(0,), (1,), (0, 0)]".

    Raises:
        ConfigError: text or values of another kind, ranks outside 0..max_rank, more than MAX_NODES paths.
    """
    rule = f'be a list of paths of ranks in 0..{max_rank}, such as "[(0,), (1,), (0, 0)]"'
    value: Any = given
    if isinstance(given, str):
        try:
            value = ast.literal_eval(given)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError) as error:
            raise ConfigError(f"speculative_token_tree must {rule}, got {given[:200]!r}") from error
    fine = isinstance(value, list | tuple) and 0 < len(value) <= MAX_NODES
    need(fine and all(isinstance(path, list | tuple) and path for path in value), "speculative_token_tree", rule, given)
    paths = [tuple(path) for path in value]
    whole = all(
        isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank <= max_rank
        for path in paths
        for rank in path
    )
    need(whole, "speculative_token_tree", rule, given)
    return paths


def _shape(columns: Sequence[tuple[int, int, int, float]]) -> Shape:
    parents, ranks, depths, reach = zip(*columns, strict=True) if columns else ((), (), (), ())
    return Shape(
        np.array(parents, np.int32), np.array(ranks, np.int32), np.array(depths, np.int32), np.array(reach, np.float64)
    )
