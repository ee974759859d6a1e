"""SuffixDecoding: what followed the last tokens in this text and in past ones, in the order of how often it did.

Every request has a suffix tree of its prompt and output. When it ends, its output goes into the global tree, with as
much of its prompt before it as a match can be long (or the whole, with `suffix_decoding_cache_prompts`). For every
length m of a match of the text's end at most `factor * m` tokens are drafted; of all lengths and both trees the draft
with the highest expected number of accepted tokens is proposed, of equal ones that of the longer match.

A path starts with probability 1, which is multiplied by count(child) / count(node) where edges meet and stays as it is
inside an edge; paths below `min_prob` are not followed. A draft's score is the sum of its probabilities. With width 1
only the most frequent child is followed, which makes a chain; otherwise the most probable of all open paths goes on,
which makes a tree. An edge that reaches the end of the text goes on with what has been drafted from it, so that
periodic text is continued periodically. A node's chance is its probability at its parent, corrected for how little a
count can say: count / (count of the parent + scarce[tokens matched]), times PARTED where the text went on in more than
one way before, which says that more is to come.

Source: SuffixDecoding (arXiv:2411.04975); names and defaults of options are vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import SingleDrafter
from paceline.drafters.common.chains import chain_of
from paceline.drafters.common.tables import MAX_TENANTS, TenantTables
from paceline.drafters.suffix.nodes import (
    ACTIVE,
    CHILD,
    COUNT,
    EDGE,
    MAX_DEPTH,
    MAX_VOCAB,
    NEXT,
    POS,
    Floats,
    Int,
    Ints,
    Longs,
    Singles,
    TreeArrays,
    child_of,
    float_table,
    floats,
    int_table,
    ints,
    longs,
    record_of,
    singles,
)
from paceline.drafters.suffix.tree import OPEN, SuffixCache, SuffixTree, extend
from paceline.errors import ConfigError
from paceline.tree import EMPTY_TREE, Budget, TokenTree
from paceline.utils import compiled, integer, need, number, part_of_compiled

TOKEN: Final = 0
"""Columns of work and best; ABOVE is the parent's row, AT and MATCHED the position in the suffix tree."""
ABOVE: Final = 1
LEVEL: Final = 2
AT: Final = 3
MATCHED: Final = 4
COLUMNS: Final = 5
PROB: Final = 0
"""Columns of work_f and best_f: probability of the path, chance of the node at its parent."""
CHANCE: Final = 1
MOST_CHILDREN: Final = 16
"""Children that are looked at where a node branches, most frequent first."""
PARTED: Final = 0.6
"""Fitted with the numbers of `suffix` on Python sources and Markdown: 29,000 drafted tokens; chances within 0.07 of the
truth.
"""
NODES: Final = 0
"""In limits: most nodes, most levels, children to follow, depth of the trees."""
LEVELS: Final = 1
WIDTH: Final = 2
DEPTH: Final = 3
FACTOR: Final = 0
"""In rules: tokens to draft by tokens matched, least probability of a path."""
LEAST: Final = 1


class SuffixWorkspace(NamedTuple):
    """Settings and room to work in, one for all lookups of a drafter.

    Attributes:
        limits: (4,) int64, see NODES and the like.
        rules: (2,) float64, see FACTOR and LEAST.
        scarce: (depth + 1,) float64 by tokens matched.
        points: (depth + 1, 2) int32, nodes and tokens matched on their edges, longest match first.
        best, best_f: (rows, 5) int32 and (rows, 2) float64: row 0 is the root of the draft, then come its nodes.
        work, work_f: the same for the draft being made; behind its nodes come the paths that are still open.
        tokens, parents, chances: (rows,) int32, int32, float32 of the best draft's nodes, as a `TokenTree` has them; by
            `step`.
    """

    limits: Longs
    rules: Floats
    scarce: Floats
    points: Ints
    best: Ints
    best_f: Floats
    work: Ints
    work_f: Floats
    tokens: Ints
    parents: Ints
    chances: Singles


class View(NamedTuple):
    """What is read of one tree: `points` of the matches.

    The first `waiting` of them are suffixes that nothing has followed yet.
    """

    text: Ints
    nodes: Ints
    points: Ints
    size: Int
    waiting: Int


@compiled
def step(  # noqa: PLR0917 - compiled code has no keyword arguments
    text_record: Longs, start: Int, size: Int, past: Longs, past_size: Int, workspace: Longs, nodes: Int, levels: Int
) -> Int:
    """Take `text[start:size]` into the tree of a text, then `draft` within limits.

    A step of a decoding loop in one call.

    `text_record`, `past` and `workspace` are records (`nodes.record_of`) of `TreeArrays` and of a `SuffixWorkspace`.
    """
    tree, room = arrays_of(text_record), workspace_of(workspace)
    room.limits[NODES], room.limits[LEVELS] = nodes, levels
    if size > start:
        extend(tree, start, size, np.int64(OPEN), room.limits[DEPTH])
    count = draft_from_trees(tree, size, arrays_of(past), past_size, room)
    for k in range(count):
        room.tokens[k], room.parents[k] = room.best[k + 1, TOKEN], room.best[k + 1, ABOVE] - 1
        room.chances[k] = room.best_f[k + 1, CHANCE]
    return count


@part_of_compiled
def arrays_of(record: Longs) -> TreeArrays:
    """Read the arrays of a tree from its record."""
    return TreeArrays(ints(record, 0), int_table(record, 1), ints(record, 2), longs(record, 3), int_table(record, 4))


@part_of_compiled
def workspace_of(record: Longs) -> SuffixWorkspace:
    """Read the arrays of a workspace from its record."""
    return SuffixWorkspace(
        longs(record, 0),
        floats(record, 1),
        floats(record, 2),
        int_table(record, 3),
        int_table(record, 4),
        float_table(record, 5),
        int_table(record, 6),
        float_table(record, 7),
        ints(record, 8),
        ints(record, 9),
        singles(record, 10),
    )


@part_of_compiled
def draft_from_trees(tree: TreeArrays, size: Int, past: TreeArrays, past_size: Int, workspace: SuffixWorkspace) -> Int:
    """The best draft from the tree of a text, `size` tokens long, and from a tree of other texts.

    `past_size` 0 leaves the other tree out. Returns the number of nodes, which are in `workspace.best` from row 1 on.
    """
    count = tree.meta[ACTIVE]
    score, nodes, match = best_of(View(tree.text, tree.nodes, tree.active, size, count), workspace, count, 0.0, 0)
    if past_size and past.nodes[0, COUNT]:
        points = find_points(tree.text, size, past, workspace.points, workspace.limits[DEPTH] - 1)
        other = best_of(View(past.text, past.nodes, workspace.points, past_size, 0), workspace, points, score, match)[1]
        nodes = other if other else nodes
    return nodes


@part_of_compiled
def find_points(text: Ints, size: Int, past: TreeArrays, points: Ints, longest: Int) -> Int:
    """Where the last 1, 2, 3, ... tokens of `text[:size]` are in a tree, into `points`.

    Returns how many there are.
    """
    nodes, count, longest = past.nodes, 0, min(longest, size)
    while count < longest:
        node: Int = np.int64(0)
        matched, fits = np.int64(0), True
        for at in range(size - count - 1, size):
            if matched < nodes[node, EDGE] & 255:
                fits = int(past.text[nodes[node, POS] + matched]) == int(text[at])
                matched += 1
            else:
                node, matched = child_of(nodes, past.heads, node, np.int64(text[at])), np.int64(1)
                fits = int(node) >= 0
            if not fits:
                break
        if not fits:
            break
        points[count, 0], points[count, 1] = node, matched
        count += 1
    for k in range(count // 2):
        for column in range(2):
            points[k, column], points[count - 1 - k, column] = points[count - 1 - k, column], points[k, column]
    return count


@part_of_compiled
def best_of(view: View, workspace: SuffixWorkspace, count: Int, score: float, match: Int) -> tuple[float, Int, Int]:
    """The best draft over the `count` match lengths of one tree, if it beats `score`, reached from `match` tokens.

    The longest match with the most room goes first, since its score often rules out most of the others.

    Returns its score, its number of nodes (0 if none beats it) and the length of its match.
    """
    most: Int = np.int64(0)
    first = 0
    nodes: Int = np.int64(0)
    for k in range(count):
        room = room_of(workspace, count - k)
        if room > most:
            most, first = room, k
    for turn in range(-1, count):
        k = first if turn < 0 else turn
        length = count - k
        room = room_of(workspace, length)
        if room < 1 or room < score or (room == score and length <= match):
            continue
        workspace.work[0, LEVEL], workspace.work[0, AT], workspace.work[0, MATCHED] = (
            0,
            view.points[k, 0],
            view.points[k, 1],
        )
        got, rows = expand(view, workspace, length, room)
        if got > score or (got == score and length > match):
            score, nodes, match = got, rows, length
            for row in range(1, rows + 1):  # not by slices, whose lengths compiled code would compare
                for column in range(COLUMNS):
                    workspace.best[row, column] = workspace.work[row, column]
                workspace.best_f[row, PROB], workspace.best_f[row, CHANCE] = (
                    workspace.work_f[row, PROB],
                    workspace.work_f[row, CHANCE],
                )
    return score, nodes, match


@part_of_compiled
def room_of(workspace: SuffixWorkspace, length: Int) -> Int:
    """Most nodes of a draft from a match of `length` tokens, which is as much as it can score."""
    limits = workspace.limits
    room: Int = min(np.int64(limits[NODES]), np.int64(workspace.rules[FACTOR] * length + 1e-6))
    if limits[WIDTH] == 1:
        room = min(room, np.int64(limits[LEVELS]), np.int64(limits[DEPTH] - length))
    return room


@part_of_compiled
def expand(view: View, workspace: SuffixWorkspace, length: Int, room: Int) -> tuple[float, Int]:
    """The most probable continuations of row 0 of `work`, parents first; returns their score and number."""
    work, work_f = workspace.work, workspace.work_f
    score, deepest = 0.0, min(workspace.limits[LEVELS], workspace.limits[DEPTH] - length)
    work_f[0, PROB], nodes = 1.0, 0
    known = follow(view, workspace, length, 0, 1)
    while nodes < room and nodes + 1 < known and deepest > 0:
        nodes += 1
        top = nodes
        for i in range(nodes + 1, known):
            if work_f[i, PROB] > work_f[top, PROB]:
                top = i
        if top != nodes:
            for column in range(COLUMNS):
                work[top, column], work[nodes, column] = work[nodes, column], work[top, column]
            for column in range(2):
                work_f[top, column], work_f[nodes, column] = work_f[nodes, column], work_f[top, column]
        score += work_f[nodes, PROB]
        if work[nodes, LEVEL] < deepest and nodes < room:
            known = follow(view, workspace, length, nodes, known)
    return score, nodes


@part_of_compiled
def follow(view: View, workspace: SuffixWorkspace, length: Int, row: Int, known: Int) -> Int:
    """Append what may follow `row`, from row `known` on; returns how many rows there are then."""
    work, limits, nodes = workspace.work, workspace.limits, view.nodes
    node, matched, prob = np.int64(work[row, AT]), np.int64(work[row, MATCHED]), workspace.work_f[row, PROB]
    seen = np.int64(nodes[node, COUNT])
    for k in range(view.waiting):
        seen -= view.points[k, 0] == node
    doubt = workspace.scarce[min(length + work[row, LEVEL], limits[DEPTH])]
    if matched < nodes[node, EDGE] & 255:
        at = nodes[node, POS] + matched
        token = np.int64(view.text[at]) if at < view.size else drafted(work, row, at - view.size + 1)
        sure = max(seen, 1)
        return put(workspace, known, row, (token, node, matched + 1), (prob, sure / (sure + doubt)))
    child, tried, most = np.int64(nodes[node, CHILD]), 0, min(limits[WIDTH], MOST_CHILDREN)
    trust = PARTED if child >= 0 and nodes[child, NEXT] >= 0 else 1.0
    while child >= 0 and tried < most:
        count = nodes[child, COUNT]
        if prob * count / seen < workspace.rules[LEAST]:
            break
        token = np.int64(nodes[child, EDGE] >> 8)
        known = put(
            workspace, known, row, (token, child, np.int64(1)), (prob * count / seen, trust * count / (seen + doubt))
        )
        child = np.int64(nodes[child, NEXT])
        tried += 1
    return known


@part_of_compiled
def put(
    workspace: SuffixWorkspace, row: Int, above: Int, at: tuple[Int, Int, Int], chances: tuple[float, float]
) -> Int:
    """Write a row of `work`: token, node and tokens matched on its edge; probability and chance.

    Returns the next row.
    """
    work = workspace.work
    work[row, ABOVE], work[row, LEVEL] = above, work[above, LEVEL] + 1
    work[row, TOKEN], work[row, AT], work[row, MATCHED] = at
    workspace.work_f[row, PROB], workspace.work_f[row, CHANCE] = chances[0], min(chances[1], 1.0)
    return row + 1


@part_of_compiled
def drafted(work: Ints, row: Int, level: Int) -> Int:
    """The token at `level` on the way to `row`."""
    while work[row, LEVEL] > level:
        row = np.int64(work[row, ABOVE])
    return np.int64(work[row, TOKEN])


_MATCH: Final = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32)
_SCARCE: Final = (4.3, 1.6, 1.0, 0.7, 0.59, 0.35, 0.2, 0.11, 0.064, 0.031)
"""By tokens matched: how many unseen continuations the counts of a match stand for."""

ROOM: Final = 512
"""Tokens beyond the prompt for which a text's own tree has room at once: to grow in the midst of a text takes as long
as half a step of a small model.
"""

MAX_CACHED_TOKENS: Final = 500_000
NO_TREE: Final = SuffixTree(1)


class SuffixState:
    """One sequence: its text, its suffix tree, the store of its tenant."""

    __slots__ = ("cache", "context", "tree")

    def __init__(self, context: Context, tree: SuffixTree, cache: SuffixCache | None) -> None:
        self.context, self.tree, self.cache = context, tree, cache


class SuffixDrafter(SingleDrafter[SuffixState]):
    """Drafts what suffix trees over this text and past texts expect.

    Args:
        num_speculative_tokens: most tokens to propose; None leaves it to the budget.
        suffix_decoding_max_tree_depth: longest match and its draft together, 2..255; 24 by default.
        suffix_decoding_max_cached_requests: most past requests kept for each tenant, the oldest dropped first; 0 keeps
            none; 10000 by default.
        suffix_decoding_max_spec_factor: most tokens to draft for each token matched; 1 by default.
        suffix_decoding_min_token_prob: least probability of a drafted path, by counts; 0.1 by default.
        suffix_decoding_use_tree_spec: propose trees instead of chains.
        suffix_decoding_cache_prompts: keep whole prompts of past requests, not only outputs and the ends of prompts.
        max_cached_tokens: most tokens of past requests kept for each tenant (55 to 85 bytes each); 500000 by default.
        tables: folder where past texts are read at the start and written by `LLM.save_tables`.
        shared_tables: one store for all tenants. max_tenants: most stores at a time (64), the least recently used goes
            first.
    Raises:
        ConfigError: a value outside its range, or a vocabulary of 2**23 tokens or more.
        DrafterError: a file in `tables` that is damaged or of another tokenizer.
    """

    name = "suffix"

    def __init__(
        self,
        args: DrafterArgs,
        *,
        num_speculative_tokens: int | None = None,
        suffix_decoding_max_tree_depth: int = 24,
        suffix_decoding_max_cached_requests: int = 10_000,
        suffix_decoding_max_spec_factor: float = 1.0,
        suffix_decoding_min_token_prob: float = 0.1,
        suffix_decoding_use_tree_spec: bool = False,
        suffix_decoding_cache_prompts: bool = False,
        max_cached_tokens: int = MAX_CACHED_TOKENS,
        tables: str | None = None,
        shared_tables: bool = False,
        max_tenants: int = MAX_TENANTS,
    ) -> None:
        super().__init__(args, num_speculative_tokens)
        depth, requests = suffix_decoding_max_tree_depth, suffix_decoding_max_cached_requests
        factor, least = suffix_decoding_max_spec_factor, suffix_decoding_min_token_prob
        integer("suffix_decoding_max_tree_depth", depth, 2, MAX_DEPTH)
        integer("suffix_decoding_max_cached_requests", requests, 0)
        number("suffix_decoding_max_spec_factor", factor, 0.0, 1e6, "be 0 or more")
        number("suffix_decoding_min_token_prob", least, 0.0, 1.0, "be in 0..1")
        _flag("suffix_decoding_use_tree_spec", suffix_decoding_use_tree_spec)
        _flag("suffix_decoding_cache_prompts", suffix_decoding_cache_prompts)
        integer("max_cached_tokens", max_cached_tokens, 0, 2**29)
        if args.vocab_size >= MAX_VOCAB:
            raise ConfigError(f"'suffix' serves vocabularies below {MAX_VOCAB} tokens, got {args.vocab_size}")
        self.depth, self.branches, self.whole = depth, suffix_decoding_use_tree_spec, suffix_decoding_cache_prompts
        self.keeps = requests > 0 and max_cached_tokens > 0
        new = partial(SuffixCache, depth, requests, max_cached_tokens, args.vocab_size)
        self.tables: TenantTables[SuffixCache] = TenantTables(
            "suffix", args, new, folder=tables, shared=shared_tables, max_tenants=max_tenants
        )
        self._limits = np.array([0, 0, MOST_CHILDREN if self.branches else 1, depth], np.int64)
        self._rules = np.array([factor, least], np.float64)
        self._make_room(64)

    def _begin(self, context: Context) -> SuffixState:
        state = SuffixState(context, SuffixTree(self.depth, ROOM + context.length_with_source), self._cache(context))
        _catch_up(state)
        return state

    def fork(self, state: SuffixState, context: Context) -> SuffixState:
        return SuffixState(context, state.tree.copy(), self._cache(context))

    def end(self, states: Sequence[SuffixState]) -> None:
        """Keep the outputs of these requests for later ones of their tenants."""
        for state in states:
            text, prompt = state.context.tokens, state.context.prompt_length
            if state.cache is not None and (self.whole or len(text) > prompt):
                first = 0 if self.whole else max(0, prompt - self.depth + 1)
                state.cache.add(np.array(text[first:], np.int32))
            state.tree, state.cache = NO_TREE, None

    def _cache(self, context: Context) -> SuffixCache | None:
        return self.tables.of(context.tenant) if self.keeps else None

    def _propose(self, state: SuffixState, budget: Budget) -> TokenTree:
        tree, past = state.tree, NO_TREE if state.cache is None else state.cache.tree
        most = min(budget.nodes, self.limit, 16 * self.depth)
        if most > self._most:
            self._make_room(most)
        start, workspace = tree.write(state.context.with_source(tree.size)), self.workspace
        nodes = step(tree.record, start, tree.size, past.record, past.size, self.record, most, budget.depth)
        if not nodes:
            return EMPTY_TREE
        tokens, chances = workspace.tokens[:nodes].copy(), workspace.chances[:nodes].copy()
        if not self.branches:
            return chain_of(tokens, chances, self.index)
        return TokenTree.build(tokens, workspace.parents[:nodes].copy(), confidence=chances, sources=self.index)

    def _make_room(self, most: int) -> None:
        """Rows for drafts of so many nodes and the paths that they leave open."""
        drafted, opened = most + 2, most + 2 + (most + 1) * (MOST_CHILDREN if self.branches else 1)
        self._most = most
        self.workspace = SuffixWorkspace(
            limits=self._limits,
            rules=self._rules,
            scarce=np.interp(np.arange(self.depth + 1), _MATCH, _SCARCE),
            points=np.zeros((self.depth + 1, 2), np.int32),
            best=np.zeros((drafted, COLUMNS), np.int32),
            best_f=np.zeros((drafted, 2)),
            work=np.zeros((opened, COLUMNS), np.int32),
            work_f=np.zeros((opened, 2)),
            tokens=np.zeros(drafted, np.int32),
            parents=np.zeros(drafted, np.int32),
            chances=np.zeros(drafted, np.float32),
        )
        self.record = record_of(self.workspace)


def _flag(name: str, value: object) -> None:
    need(isinstance(value, bool), name, "be True or False", value)


def _catch_up(state: SuffixState) -> None:
    """Take what is new in the text into its tree."""
    state.tree.grow(np.array(state.context.with_source(state.tree.size), np.int32))
