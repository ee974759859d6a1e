"""SuffixDecoding: what followed the last tokens in this text and in past ones, in the order of how often it did.

In: the text so far; texts of past requests of the same tenant. Out: a chain or a tree of point proposals. Not here: the
trees and their look-ups (`suffix_tree`, `suffix_lookup`), the store of past texts (`suffix_cache`).

Every request has a suffix tree of its prompt and output. When it ends, its output goes into the global tree, with as
much of its prompt before it as a match can be long (or the whole, with `suffix_decoding_cache_prompts`). For every
length of a match of the text's end the continuation is drafted that the counts favour, at most
`suffix_decoding_max_spec_factor` tokens for each token matched; of all lengths and both trees the draft with the
highest expected number of accepted tokens is proposed. Where nothing matches, nothing is drafted.

Source: SuffixDecoding (arXiv:2411.04975); names and defaults of options are vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.chains import chain_of
from paceline.drafters.common.tables import MAX_TENANTS, Tables
from paceline.drafters.common.text import SingleDrafter
from paceline.drafters.suffix.global_tree import SuffixCache
from paceline.drafters.suffix.lookup import COLUMNS, MOST_CHILDREN, Desk, step
from paceline.drafters.suffix.nodes import MAX_DEPTH, MAX_VOCAB
from paceline.drafters.suffix.record import record_of
from paceline.drafters.suffix.tree import SuffixTree
from paceline.errors import ConfigError
from paceline.tree import EMPTY_TREE, Budget, TokenTree
from paceline.utils import integer, need, number

_MATCH: Final = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32)
_SCARCE: Final = (4.3, 1.6, 1.0, 0.7, 0.59, 0.35, 0.2, 0.11, 0.064, 0.031)
"""By tokens matched: how many unseen continuations the counts of a match stand for."""

ROOM: Final = 512
"""Tokens beyond the prompt for which a text's own tree has room at once: to grow in the midst of a text takes as long
as half a step of a small model.
"""

MAX_CACHED_TOKENS: Final = 500_000
NO_TREE: Final = SuffixTree(1)


class _State:
    """One sequence: its text, its suffix tree, the store of its tenant."""

    __slots__ = ("cache", "context", "tree")

    def __init__(self, context: Context, tree: SuffixTree, cache: SuffixCache | None) -> None:
        self.context, self.tree, self.cache = context, tree, cache


class SuffixDrafter(SingleDrafter[_State]):
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
        self.tables: Tables[SuffixCache] = Tables(
            "suffix", args, new, folder=tables, shared=shared_tables, max_tenants=max_tenants
        )
        self._limits = np.array([0, 0, MOST_CHILDREN if self.branches else 1, depth], np.int64)
        self._rules = np.array([factor, least], np.float64)
        self._make_room(64)

    def _begin(self, context: Context) -> _State:
        state = _State(context, SuffixTree(self.depth, ROOM + len(context.tokens)), self._cache(context))
        _catch_up(state)
        return state

    def fork(self, state: _State, context: Context) -> _State:
        return _State(context, state.tree.copy(), self._cache(context))

    def end(self, states: Sequence[_State]) -> None:
        """Keep the outputs of these requests for later ones of their tenants."""
        for state in states:
            text, prompt = state.context.tokens, state.context.prompt_length
            if state.cache is not None and (self.whole or len(text) > prompt):
                first = 0 if self.whole else max(0, prompt - self.depth + 1)
                state.cache.add(np.array(text[first:], np.int32))
            state.tree, state.cache = NO_TREE, None

    def _cache(self, context: Context) -> SuffixCache | None:
        return self.tables.of(context.tenant) if self.keeps else None

    def _propose(self, state: _State, budget: Budget) -> TokenTree:
        tree, past = state.tree, NO_TREE if state.cache is None else state.cache.tree
        most = min(budget.nodes, self.limit, 16 * self.depth)
        if most > self._most:
            self._make_room(most)
        start, desk = tree.write(state.context.tokens[tree.size :]), self._desk
        made = step(tree.record, start, tree.size, past.record, past.size, self._record, most, budget.depth)
        if not made:
            return EMPTY_TREE
        tokens, chances = desk.tokens[:made].copy(), desk.chances[:made].copy()
        if not self.branches:
            return chain_of(tokens, chances, self.index)
        return TokenTree.build(tokens, desk.parents[:made].copy(), confidence=chances, sources=self.index)

    def _make_room(self, most: int) -> None:
        """Rows for drafts of so many nodes and the paths that they leave open."""
        drafted, opened = most + 2, most + 2 + (most + 1) * (MOST_CHILDREN if self.branches else 1)
        self._most = most
        self._desk = Desk(
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
        self._record = record_of(self._desk)


def _flag(name: str, value: object) -> None:
    need(isinstance(value, bool), name, "be True or False", value)


def _catch_up(state: _State) -> None:
    """Take what is new in the text into its tree."""
    state.tree.grow(np.array(state.context.tokens[state.tree.size :], np.int32))
