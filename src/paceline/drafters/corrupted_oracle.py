"""The acceptance dial: the true continuation, each token wrong with a chosen probability.

In: recorded continuations of known prompts. Out: chains of point proposals whose tokens are right with probability `acceptance`.
Not here: recording them (`paceline bench` does, by plain decoding).

It measures an engine's speed at any acceptance, without a drafter that would reach it. Whether the token at a position is wrong
depends on (seed, prompt, position) alone: a position is drafted right or wrong however often it is drafted, and at temperature 0
the chance that the next level stands, given that the levels above it stood, is `acceptance` at every depth. Text that has left
the record (at a near tie) gets no guesses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from paceline.checking import need, number
from paceline.drafters.base import Context, DrafterArgs
from paceline.errors import DrafterError
from paceline.tree.token_tree import EMPTY_TREE, TokenTree
from paceline.tree.types import Budget, Scores, Verdict

_MASK: Final = 2**64 - 1
_WEYL: Final = 0x9E3779B97F4A7C15

Continuations = Mapping[tuple[int, ...], Sequence[int]]


class _State:
    """A sequence with its record, which begins at token `start` of the text; `key` names its prompt in the noise; `followed` tokens
    of the record are known to stand."""

    __slots__ = ("context", "followed", "key", "record", "start")

    def __init__(self, context: Context, record: Sequence[int], start: int, key: int, followed: int = 0) -> None:
        self.context, self.record, self.start, self.key, self.followed = context, record, start, key, followed


class CorruptedOracleDrafter:
    """Drafts the recorded continuation with mistakes.

    Args:
        continuations: what plain decoding said: {prompt token ids as a tuple: continuation}, a list of pairs
            {"prompt": [...], "continuation": [...]}, or the path of a JSON file with such a list. Prompts without a record get no
            guesses.
        acceptance: chance that a drafted token is the recorded one, 0..1.
        seed: of the mistakes.
        num_speculative_tokens: most tokens to propose; None leaves it to the budget.
    Raises:
        DrafterError: no continuations. ConfigError: a value outside its range.
    """

    name = "corrupted_oracle"
    taps: Sequence[int] = ()

    def __init__(
        self,
        args: DrafterArgs,
        *,
        continuations: Any = None,
        acceptance: float = 0.8,
        seed: int = 0,
        num_speculative_tokens: int | None = None,
    ) -> None:
        if continuations is None:
            raise DrafterError("corrupted_oracle needs 'continuations', a record of plain decoding; `paceline bench` makes one")
        number("acceptance", acceptance, 0.0, 1.0, "be in 0..1")
        need(isinstance(seed, int) and not isinstance(seed, bool), "seed", "be an integer", seed)
        limit = num_speculative_tokens
        need(limit is None or (isinstance(limit, int) and limit >= 0), "num_speculative_tokens", "be 0 or more", limit)
        self.records = read_continuations(continuations)
        self._lengths = sorted({len(prompt) for prompt in self.records}, reverse=True)
        self.index, self.vocab_size = args.index, args.vocab_size
        self.acceptance, self.seed, self.limit = float(acceptance), seed, limit

    def begin(self, contexts: Sequence[Context]) -> list[_State]:
        return [self._begin_one(context) for context in contexts]

    def _begin_one(self, context: Context) -> _State:
        """The record with the longest prompt that the text begins with; the noise is keyed by that prompt."""
        for length in self._lengths:
            prompt = tuple(context.tokens[:length])
            if len(prompt) == length and prompt in self.records:
                return _State(context, self.records[prompt], length, _hash(self.seed, prompt))
        return _State(context, (), len(context.tokens), 0)

    def propose(self, states: Sequence[_State], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        return [self._propose_one(state, budget) for state, budget in zip(states, budgets, strict=True)]

    def observe(
        self, states: Sequence[_State], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores | None
    ) -> None:
        return None

    def fork(self, state: _State, context: Context) -> _State:
        return _State(context, state.record, state.start, state.key, state.followed)

    def end(self, states: Sequence[_State]) -> None:
        for state in states:
            state.record = ()

    def _propose_one(self, state: _State, budget: Budget) -> TokenTree:
        steps = min(budget.nodes, budget.depth)
        steps = steps if self.limit is None else min(steps, self.limit)
        done = len(state.context.tokens) - state.start
        if steps <= 0 or done >= len(state.record) or not _follows(state, done):
            return EMPTY_TREE
        tokens = [self.guess(state.key, done + i, token) for i, token in enumerate(state.record[done : done + steps])]
        return TokenTree.chain(tokens, confidence=[self.acceptance] * len(tokens), source=self.index)

    def guess(self, key: int, position: int, true: int) -> int:
        """The drafted token at a position of the continuation: the true one, or another one, uniformly."""
        coin = _mix(key ^ _mix(position + _WEYL))
        if (coin >> 11) * 2.0**-53 < self.acceptance or self.vocab_size < 2:
            return true
        return (true + 1 + _mix(coin) % (self.vocab_size - 1)) % self.vocab_size


def _follows(state: _State, done: int) -> bool:
    """Whether the output so far is the record's; what was compared once is not compared again."""
    start = state.start
    if list(state.record[state.followed : done]) != state.context.tokens[start + state.followed : start + done]:
        state.record = ()
        return False
    state.followed = done
    return True


def read_continuations(given: Any) -> Continuations:
    """Records as a mapping from prompt to continuation.

    Raises:
        ConfigError: neither a mapping, a list of pairs, nor the path of a JSON file with one.
    """
    rule = 'be a mapping of prompts, a list of {"prompt": ids, "continuation": ids}, or the path of a JSON file with such a list'
    if isinstance(given, str | Path):
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            need(False, "continuations", f"{rule} ({error})", str(given))
    if isinstance(given, Mapping):
        need(all(isinstance(key, tuple) for key in given), "continuations", "have tuples of token ids as keys", list(given)[:1])
        return given
    need(isinstance(given, Sequence) and not isinstance(given, str | bytes), "continuations", rule, given)
    made = {}
    for pair in given:
        fine = isinstance(pair, Mapping) and _ids(pair.get("prompt")) and _ids(pair.get("continuation"))
        need(fine, "continuations", rule, pair)
        made[tuple(pair["prompt"])] = tuple(pair["continuation"])
    return made


def _ids(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str) and all(isinstance(token, int) for token in value)


def _mix(value: int) -> int:
    """SplitMix64's finaliser (Steele et al., 2014)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _hash(seed: int, tokens: Sequence[int]) -> int:
    state = _mix(seed + _WEYL)
    for token in tokens:
        state = _mix((state ^ token) + _WEYL)
    return state
