"""Trees of drafts from a one-layer model in compiled code, for many sequences in one call, and rows of trees that others grow.

In: the tables of models.one_layer_tables, caches, tokens to feed, plans. Out: grown trees; logits of rows. Not here: compiled code
(models.kernels.draft_tree, models.kernels.draft_grow), the same step by step in Python (drafters.grow, models.one_layer).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import ConfigError, DrafterError
from paceline.models.kernels import draft_frame as of
from paceline.models.kernels import frame as at
from paceline.models.kernels.draft_grow import RANKS
from paceline.models.kernels.program import ROWS
from paceline.models.kernels.vectors import LANES
from paceline.models.one_layer_tables import MOST_DEPTH, MOST_FED, DraftTables, integers
from paceline.models.tree_plan import STATIC, THRESHOLD, GrownTree, Stop, TreePlan

if TYPE_CHECKING:
    from paceline.models.one_layer_cache import OneLayerCache
    from paceline.tree.token_tree import TokenTree

Ints = npt.NDArray[np.int64]

MOST_NODES: Final = 256
"""Most nodes of a tree."""
ROOM: Final = 4096
"""Most nodes under construction: those that will not stay count as well."""
MORE: Final = 64
"""Slots that a cache gets at a time."""

_SEQUENCE, _ROW, _GROWTH = (fields // at.FIELD for fields in (of.SEQUENCE_FIELDS, of.ROW_FIELDS, of.GROWTH_FIELDS))
_HEAD, _STATE = of.ASKS // at.FIELD, of.STATE // at.FIELD
_QUESTION, _REACH, _ANSWER = of.QUESTION // at.FIELD, of.QUESTION_REACH // at.FIELD, of.ANSWER // at.FIELD
_FED, _FRONT, _OUT = of.FED_COUNT // at.FIELD, of.FRONT_COUNT // at.FIELD, of.OUT_COUNT // at.FIELD
_CAPACITY, _FIRST = of.CAPACITY // at.FIELD, of.FIRST_ROW // at.FIELD
_COUNT_OF = of.COUNT_OF // at.FIELD

_START: Final = np.zeros(_FRONT - _STATE + 1, np.int64)
_START[-1] = 1  # the front is the root


@lru_cache(maxsize=256)
def _head(plan: TreePlan) -> Ints:
    """The fields of a record that say what a plan says."""
    head = np.zeros(_HEAD, np.int64)
    values = {
        of.KIND: plan.kind, of.NODES: plan.nodes, of.DEPTH: plan.depth, of.CHILDREN: plan.children, of.FRONT_ROWS: plan.rows,
        of.LEVELWISE: int(plan.levelwise),
    }  # fmt: skip
    if plan.shape is not None:
        parents, ranks = plan.shape.parents_n, plan.shape.ranks_n
        values |= {of.SHAPE_PARENTS: parents.ctypes.data, of.SHAPE_RANKS: ranks.ctypes.data, of.SHAPE_COUNT: len(parents)}
    for offset, value in values.items():
        head[offset // at.FIELD] = value
    head.view(np.float64)[of.LEAST // at.FIELD] = plan.least
    return head


class _Plot:
    """Memory for one growing tree, and its addresses in its record."""

    def __init__(self, record: Ints) -> None:
        self.ints = np.zeros((8, ROOM), np.int64)
        self.doubles = np.zeros((2, ROOM), np.float64)
        self.largest, self.front = np.zeros(MOST_NODES, np.float64), np.zeros(ROWS, np.int64)
        self.rank_tokens, self.rank_chances = np.zeros(max(RANKS, ROWS), np.int64), np.zeros(max(RANKS, ROWS), np.float64)
        self.columns, self.chances = np.zeros(3 * MOST_NODES, np.int32), np.zeros(MOST_NODES, np.float32)
        columns = (of.NODE_TOKENS, of.NODE_PARENTS, of.NODE_DEPTHS, of.NODE_PLACES, of.NODE_FED, of.WAITING)
        places: dict[int, npt.NDArray[Any]] = dict(zip((*columns, of.FED_TOKENS, of.FED_PARENTS), self.ints, strict=True))
        places |= {of.NODE_CHANCES: self.doubles[0], of.NODE_REACHES: self.doubles[1], of.LARGEST: self.largest}
        places |= {of.FRONT: self.front, of.RANK_TOKENS: self.rank_tokens, of.RANK_CHANCES: self.rank_chances}
        places |= {of.OUT_COLUMNS: self.columns, of.OUT_CHANCES: self.chances}
        for field, array in places.items():
            record[field // at.FIELD] = array.ctypes.data
        record[of.ROOM // at.FIELD] = ROOM
        self.fed_tokens, self.fed_parents = integers(self.ints[6]), integers(self.ints[7])

    def grown(self, nodes: int, count: int, fed: int, root: int) -> GrownTree:
        """What was grown, copied."""
        columns = self.columns[: 3 * nodes].reshape(3, nodes)[:, :count].copy()
        tokens, parents = [root, *self.fed_tokens[:fed].tolist()], [-1, *self.fed_parents[:fed].tolist()]
        return GrownTree(columns, self.chances[:count].copy(), tokens, parents)


class Trees:
    """Grows trees of up to `ROWS` rows a level."""

    def __init__(self, tables: DraftTables) -> None:
        self.tables = tables
        self._plots: list[_Plot] = []
        self._growths = integers(tables.growths.fields)
        self._reaches = tables.growths.fields.view(np.float64)

    @staticmethod
    def fits(plan: TreePlan) -> bool:
        """Whether tables are large enough for a plan, and its ranks for the scratch."""
        shape = plan.shape
        sized = shape is None or (0 < len(shape) <= min(plan.nodes, ROWS) and int(shape.ranks_n.max()) < RANKS)
        rows = 1 <= plan.rows <= ROWS and (plan.kind != THRESHOLD or plan.rows >= plan.nodes)
        return (
            0 < plan.nodes <= MOST_NODES
            and 0 < plan.depth <= MOST_DEPTH
            and rows
            and sized
            and (shape is None) == (plan.kind != STATIC)
        )

    def grow(
        self,
        caches: Sequence[OneLayerCache],
        feeds: Sequence[Sequence[int]],
        plans: Sequence[TreePlan],
        stops: Sequence[Stop | None],
    ) -> list[GrownTree]:
        """See `models.tree_plan.TreeRunner`; any number of sequences."""
        found: list[GrownTree] = []
        first = 0
        while first < len(caches):
            stop, rows = first + 1, plans[first].rows
            while stop < len(caches) and rows + plans[stop].rows <= ROWS:
                stop, rows = stop + 1, rows + plans[stop].rows
            part = slice(first, stop)
            found += self._grow(caches[part], feeds[part], plans[part], stops[part])
            first = stop
        return found

    def _grow(
        self,
        caches: Sequence[OneLayerCache],
        feeds: Sequence[Sequence[int]],
        plans: Sequence[TreePlan],
        stops: Sequence[Stop | None],
    ) -> list[GrownTree]:
        tables, mode, count = self.tables, of.TREES, len(caches)
        tables.ready()
        for index, each in enumerate(zip(caches, feeds, plans, stops, strict=True)):
            self._plant(index, *each)
        tables.data[_COUNT_OF], rows = count, count
        while True:
            tables.run(mode, rows)
            if not self._answer(caches, stops):
                break
            mode, rows = of.GO_ON, 0
        found = []
        for index, (cache, feed, plan) in enumerate(zip(caches, feeds, plans, strict=True)):
            fields = self._growths[index * _GROWTH : (index + 1) * _GROWTH]
            if fields[_STATE] == of.BROKEN:
                raise DrafterError("the draft model gave NaN; check its checkpoint")
            cache.length += len(feed) - 1
            found.append(self._plots[index].grown(plan.nodes, fields[_OUT], fields[_FED], feed[-1]))
        return found

    def _plant(self, index: int, cache: OneLayerCache, feed: Sequence[int], plan: TreePlan, stop: Stop | None) -> None:
        """A tree's record with its root as the first row."""
        length, fed, growths = cache.length + len(feed), self.tables.fed, self.tables.growths.fields
        if length + plan.depth - 1 > self.tables.context:
            raise ConfigError(f"position {length + plan.depth - 2} lies outside the context of {self.tables.context} tokens")
        if index == len(self._plots):
            self._plots.append(_Plot(growths[index]))
        cache.reserve(length + MORE)
        self._sequence(index, cache, len(feed), index, 1)
        for i, token in enumerate(feed, index * MOST_FED):
            fed[i] = token
        self._row(index, feed[-1], length - 1, length - 1, 0)
        record = growths[index]
        record[:_HEAD], record[_STATE : _FRONT + 1] = _head(plan), _START
        record[_HEAD], record[of.LARGEST_COUNT // at.FIELD] = stop is not None, 0
        self._plots[index].front[0] = -1

    def _sequence(self, index: int, cache: OneLayerCache, count: int, first: int, rows: int) -> None:
        records, record = self.tables.records, index * _SEQUENCE
        records[record], records[record + 1], records[record + 2] = cache.places
        records[record + 3], records[record + 5] = cache.length, count
        records[record + _CAPACITY], records[record + _FIRST], records[record + _FIRST + 1] = cache.keys.shape[1], first, rows

    def _row(self, row: int, token: int, position: int, slot: int, own: int) -> None:
        laid, record = self.tables.laid, row * _ROW
        laid[record], laid[record + 1], laid[record + 2], laid[record + 3] = token, position, slot, own

    def _answer(self, caches: Sequence[OneLayerCache], stops: Sequence[Stop | None]) -> bool:
        """Answer what trees ask and enlarge caches that are full; whether any tree waited for that."""
        waited = False
        for index, (cache, stop) in enumerate(zip(caches, stops, strict=True)):
            at_, state = index * _GROWTH, self._growths[index * _GROWTH + _STATE]
            if state == of.ASKING and stop is not None:
                reach = float(self._reaches[index, _REACH])
                self._growths[at_ + _ANSWER] = int(not stop(self._growths[at_ + _QUESTION], reach))
                waited = True
            elif state == of.FULL:
                cache.reserve(cache.keys.shape[1] + MORE)
                records, record = self.tables.records, index * _SEQUENCE
                records[record], records[record + 1], records[record + 2] = cache.places
                records[record + _CAPACITY] = cache.keys.shape[1]
                waited = True
        return waited

    def score(
        self, caches: Sequence[OneLayerCache], roots: Sequence[int], trees: Sequence[TokenTree], computed: Sequence[int]
    ) -> torch.Tensor | None:
        """(r, v) float32 logits of the inputs behind the first `computed` of each tree; None for more than the tables hold."""
        rows = sum(1 + len(tree) for tree in trees) - sum(computed)
        if rows > ROWS or len(caches) > ROWS or max(tree.max_depth for tree in trees) >= MOST_DEPTH:
            return None
        tables, first = self.tables, 0
        tables.ready()
        for index, (cache, root, tree, done) in enumerate(zip(caches, roots, trees, computed, strict=True)):
            inputs = 1 + len(tree)
            if (last := cache.length + tree.max_depth) >= tables.context:
                raise ConfigError(f"position {last} lies outside the context of {tables.context} tokens")
            cache.reserve(cache.length + inputs + LANES)
            self._sequence(index, cache, 0, first, inputs - done)
            self._lay(cache.length, [root, *tree.tokens.tolist()], tree.parents.tolist(), done, first)
            first += inputs - done
        tables.data[_COUNT_OF] = len(caches)
        tables.run(of.ROWS_ONLY, rows)
        return tables.logits(rows)

    def _lay(self, length: int, tokens: list[int], parents: list[int], done: int, first: int) -> None:
        """Rows of the inputs from number `done` on."""
        paths = [[length]]
        for i, parent in enumerate(parents, 1):
            paths.append([*paths[parent + 1], length + i])
        for row, i in enumerate(range(done, len(tokens)), first):
            own = paths[i]
            self._row(row, tokens[i], length + len(own) - 1, length + i, len(own))
            self.tables.own_ro[row, : len(own) + LANES] = own + [0] * LANES

    def last_rows(self, caches: Sequence[OneLayerCache], feeds: Sequence[Sequence[int]]) -> torch.Tensor | None:
        """Append `feeds`; (r, v) float32 logits after the last token of each. None for more than the tables hold."""
        if len(caches) > ROWS or max(map(len, feeds)) > MOST_FED:
            return None
        tables = self.tables
        tables.ready()
        for index, (cache, feed) in enumerate(zip(caches, feeds, strict=True)):
            length = cache.length + len(feed)
            if length > tables.context:
                raise ConfigError(f"position {length - 1} lies outside the context of {tables.context} tokens")
            cache.reserve(length)
            self._sequence(index, cache, len(feed), index, 1)
            self._row(index, feed[-1], length - 1, length - 1, 0)
            for i, token in enumerate(feed, index * MOST_FED):
                tables.fed[i] = token
        tables.data[_COUNT_OF] = len(caches)
        tables.run(of.ROWS_ONLY, len(caches))
        for cache, feed in zip(caches, feeds, strict=True):
            cache.length += len(feed)
        return tables.logits(len(caches))
