"""ADED: a table of tri-grams learned from the target's output, and a tree search in it that balances exploring and
exploiting.

The table counts prompts and what the target has committed; tokens that were drafted and rejected never enter it. It
starts empty (the paper counts a corpus first; `tables` keeps it between runs instead), and requests of one tenant learn
from each other. A row belongs to a pair of tokens and holds its `width` most frequent followers. A new follower takes
the place of the weakest; each update multiplies the row's other weights by `DECAY`, so that the row follows the present
text and model. Rows lie in sets of `WAYS` by a hash of their pair; in a full set a new pair takes the place of the one
that was updated longest ago. So the table never grows beyond 8 + 8 + 8 * width bytes a row. (The paper's table is
neither bounded nor forgets; both are our choice.)

Every simulation walks down from the root, to the child with the highest

    value + exploration * chance * sqrt(N) / (1 + n) * (C1 + log((N + C2 + 1) / C2))

(N: visits of all siblings, n: of the child), to a node that was not visited yet. That node gets the followers of its
row as children, and all on the path count a visit. A node's *value* is the mean, over the visits through it, of the
tokens that the target is expected to take along the path from its parent down, the best follower of the last node
included, as a share of the depth that is left to it. Visits without an effect (a row that is not there, the depth is
reached) count too: a node's visits are those of its children and the one that made it.

Source: ADED: Adaptive Draft-Verification for Efficient LLM Decoding (arXiv:2407.12021). The score is that of MuZero
(arXiv:1911.08265, C1 = 1.25, C2 = 19652), which ADED has too; the paper's constants and value are not known to us.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import CountingDrafter, SingleDrafter
from paceline.drafters.common.chains import tree_of
from paceline.drafters.common.tables import MAX_TENANTS, Arrays, OtherOptionError, TenantTables
from paceline.tree import EMPTY_TREE, Budget, TokenTree
from paceline.utils import MAX_COUNT, compiled, integer, number, part_of_compiled

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
Rows = tuple[LongArray, LongArray, IntArray, FloatArray]
"""Pairs as first * 2**32 + second, -1 for none (r,); times of the last update (r,); followers, -1 for none, and weights
(r, w).
"""

WAYS: Final = 8
DECAY: Final = 0.9
DOUBT: Final = 0.5
"""Added to a row's weights when they become chances: what a follower that was never seen counts. With 0.5, chances are
right within 0.1 on prose, word problems and Python sources.
"""

DTYPES: Final = {"pairs": np.int64, "times": np.int64, "followers": np.int32, "weights": np.float32}


@compiled
def find_trigram(rows: Rows, first: int, second: int) -> int:
    """The row of a pair, or -1."""
    pairs = rows[0]
    pair = (int(first) << 32) + int(second)
    start = _set(pair, len(pairs))
    for r in range(start, start + WAYS):
        if pairs[r] == pair:
            return r
    return -1


@part_of_compiled
def _set(pair: int, count: int) -> int:
    """Where the set of a pair begins (the finaliser of SplitMix64, Steele et al., 2014)."""
    value = np.uint64(pair) + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return int(value % np.uint64(count // WAYS)) * WAYS


@compiled
def row_of(rows: Rows, pair: int) -> int:
    """The row of a pair, made if need be, in place of the set's oldest."""
    pairs, times, followers, weights = rows
    start = _set(pair, len(pairs))
    oldest = start
    for r in range(start, start + WAYS):
        if pairs[r] == pair:
            return r
        if times[r] < times[oldest]:
            oldest = r
    pairs[oldest], followers[oldest], weights[oldest] = pair, -1, 0.0
    return oldest


@compiled
def learn(rows: Rows, text: LongArray, time: int) -> None:
    """Count every three tokens in a row of `text`; `time` is that of the first, and each is one later."""
    followers, weights = rows[2], rows[3]
    for i in range(2, len(text)):
        row = row_of(rows, (text[i - 2] << 32) + text[i - 1])
        rows[1][row] = time + i
        weakest, place = 0, -1
        for k in range(followers.shape[1]):
            weights[row, k] *= DECAY
            if followers[row, k] == text[i]:
                place = k
            if weights[row, k] < weights[row, weakest]:
                weakest = k
        if place < 0:
            place = weakest
            followers[row, place], weights[row, place] = text[i], 0.0
        weights[row, place] += 1.0


class TrigramTable:
    """Counts which tokens follow pairs in one tenant's texts.

    Args:
        rows: pairs of tokens that are kept, a multiple of `WAYS`. width: followers of a pair. vocab_size: ids lie below
            it.
    """

    def __init__(self, rows: int, width: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.rows: Rows = (
            np.full(rows, -1, np.int64),
            np.zeros(rows, np.int64),
            np.full((rows, width), -1, np.int32),
            np.zeros((rows, width), np.float32),
        )
        self.time = 1

    @property
    def nbytes(self) -> int:
        """Most memory that the table ever takes."""
        return sum(array.nbytes for array in self.rows)

    def learn(self, text: Sequence[int]) -> None:
        """Count every three tokens in a row."""
        if len(text) > 2:
            learn(self.rows, np.asarray(text, np.int64), self.time)
            self.time += len(text)

    def to_arrays(self) -> Arrays:
        """Give the rows in use, oldest first."""
        used = np.flatnonzero(self.rows[0] >= 0)
        used = used[np.argsort(self.rows[1][used], kind="stable")]
        return {name: array[used] for name, array in self._by_name().items()}

    def _by_name(self) -> dict[str, npt.NDArray[Any]]:
        return dict(zip(DTYPES, self.rows, strict=True))

    def read_arrays(self, arrays: Arrays, stored: int | None = None) -> None:
        """Take over rows; of more than the table holds, the newest.

        Args:
            stored: see `tables.TenantTable`.
        Raises:
            OtherOptionError: rows of another width.
            ValueError: arrays that are missing, of another dtype, or out of range.
        """
        stored_arrays: dict[str, npt.NDArray[Any]] = {name: arrays[name] for name in DTYPES if name in arrays}
        count = len(stored_arrays["pairs"]) if "pairs" in stored_arrays else -1
        present, width = self._by_name(), self.rows[2].shape[1]
        kept = (
            stored_arrays["followers"].shape[-1] or width
            if "followers" in stored_arrays and stored_arrays["followers"].ndim == 2
            else width
        )
        shapes = {name: (count, *[kept] * (array.ndim - 1)) for name, array in present.items()}
        for name, dtype in DTYPES.items():
            if (
                name not in stored_arrays
                or stored_arrays[name].dtype != dtype
                or stored_arrays[name].shape != shapes[name]
            ):
                raise ValueError(f"{name} is missing, or not of dtype {np.dtype(dtype).name} and shape {shapes[name]}")
        _check(stored_arrays, stored or self.vocab_size)
        if kept != width:
            raise OtherOptionError("table_width", kept, width)
        beyond = stored_arrays["followers"] >= self.vocab_size
        stored_arrays["followers"] = np.where(beyond, np.int32(-1), stored_arrays["followers"])
        stored_arrays["weights"] = np.where(beyond, np.float32(0.0), stored_arrays["weights"])
        for index, pair in enumerate(stored_arrays["pairs"].tolist()):
            if max(pair >> 32, pair & 0xFFFFFFFF) >= self.vocab_size:
                continue
            row = row_of(self.rows, pair)
            for name in ("times", "followers", "weights"):
                present[name][row] = stored_arrays[name][index]
        self.time = int(stored_arrays["times"].max(initial=0)) + 1


def _check(arrays: Mapping[str, npt.NDArray[Any]], vocab_size: int) -> None:
    """Raises ValueError for values that no table has."""
    pairs, followers, weights, times = (arrays[name] for name in ("pairs", "followers", "weights", "times"))
    tokens = np.concatenate([pairs >> 32, pairs & 0xFFFFFFFF])
    if ((tokens < 0) | (tokens >= vocab_size)).any() or ((followers < -1) | (followers >= vocab_size)).any():
        raise ValueError(f"token ids must lie in 0..{vocab_size - 1}")
    if not np.isfinite(weights).all() or (weights < 0).any() or (times < 1).any():
        raise ValueError("weights and times must be finite and positive")
    if (times > MAX_COUNT).any():
        raise ValueError(f"times must be at most {MAX_COUNT}")
    ordered = np.sort(followers, axis=1)
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        raise ValueError("the followers of a pair must differ")


C1: Final = 1.25
C2: Final = 19652.0


@part_of_compiled
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


@part_of_compiled
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


MOST_ROWS: Final = 2**24
MOST_FOLLOWERS: Final = 64
MOST_SIMULATIONS: Final = 4096
CONTEXT: Final = 2


class AdedState:
    """A sequence, and how many of its tokens the table has counted."""

    __slots__ = ("context", "done")

    def __init__(self, context: Context, done: int = 0) -> None:
        self.context, self.done = context, done


class AdedDrafter(CountingDrafter[AdedState], SingleDrafter[AdedState]):
    """Drafts the paths that a tree search over tri-grams visits most.

    Args:
        table_rows: pairs of tokens that a tenant's table holds; the longest unused go first.
        table_width: followers of a pair.
        simulations: of the search, in a step; None takes four for each node of the budget.
        exploration: weight of the part of the score that spreads the visits; 0 follows the likeliest path alone.
        num_speculative_tokens: most levels to draft; None leaves it to the budget.
        tables: folder where tables are read at the start and written by `LLM.save_tables`.
        shared_tables: one table for all tenants. max_tenants: most tables at a time (64), the least recently used goes
            first.
    Raises:
        ConfigError: a value outside its range.
        DrafterError: tables that do not fit or are damaged.
    """

    name = "aded"
    shares_state = True

    def __init__(
        self,
        args: DrafterArgs,
        *,
        table_rows: int = 2**16,
        table_width: int = 8,
        simulations: int | None = None,
        exploration: float = 1.0,
        num_speculative_tokens: int | None = None,
        tables: str | None = None,
        shared_tables: bool = False,
        max_tenants: int = MAX_TENANTS,
    ) -> None:
        super().__init__(args, num_speculative_tokens)
        integer("table_rows", table_rows, WAYS, MOST_ROWS)
        integer("table_width", table_width, 1, MOST_FOLLOWERS)
        if simulations is not None:
            integer("simulations", simulations, 1, MOST_SIMULATIONS)
        number("exploration", exploration, 0.0, 1e6, "be in 0..1e6")
        self.simulations, self.exploration = simulations, float(exploration)
        new = partial(TrigramTable, -(-table_rows // WAYS) * WAYS, table_width, args.vocab_size)
        self.tables: TenantTables[TrigramTable] = TenantTables(
            "aded", args, new, folder=tables, shared=shared_tables, max_tenants=max_tenants
        )
        self._compile()

    def _begin(self, context: Context) -> AdedState:
        state = AdedState(context)
        self._catch_up(state)
        return state

    def fork(self, state: AdedState, context: Context) -> AdedState:
        return AdedState(context, state.done)

    def _catch_up(self, state: AdedState) -> TrigramTable:
        """Count what the text has got since the last time."""
        table, text = self.tables.of(state.context.tenant), state.context.tokens
        if state.done < len(text):
            table.learn(text[max(state.done - CONTEXT, 0) :])
            state.done = len(text)
        return table

    def _propose(self, state: AdedState, budget: Budget) -> TokenTree:
        table = self._catch_up(state)
        if len(state.context.tokens) < CONTEXT:
            return EMPTY_TREE
        first, second = state.context.tokens[-CONTEXT:]
        return self._search(table, first, second, budget.nodes, self._steps(budget))

    def _search(self, table: TrigramTable, first: int, second: int, nodes: int, depth: int) -> TokenTree:
        simulations = min(4 * nodes, MOST_SIMULATIONS) if self.simulations is None else self.simulations
        links, chances = np.empty((nodes, 3), np.int32), np.empty(nodes, np.float32)
        limits, want = (simulations, depth), (nodes, self.chains_only)
        count = grow(table.rows, (first, second), limits, self.exploration, want, (links, chances))
        return tree_of(links[:count], chances[:count], self.index)

    def _compile(self) -> None:
        """Compile, or read what was compiled, before the first request."""
        table = TrigramTable(WAYS, 1, self.vocab_size)
        table.learn([0, 0, 0])
        self._search(table, 0, 0, 1, 1)
