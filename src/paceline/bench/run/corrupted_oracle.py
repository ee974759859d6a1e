"""The acceptance dial: the true continuation, each token wrong with a chosen probability.

In: recorded continuations of known prompts. Out: chains or trees of points whose first candidates are right with
probability
`acceptance`. Not here: recording them (`paceline bench` does, by plain decoding), trees and the noise itself
(`oracle_tree`).

It measures an engine's speed at any acceptance, without a drafter that would reach it. Whether the token at a position
is wrong depends on (seed, prompt, position) alone: a position is drafted right or wrong however often it is drafted,
and at temperature 0 the chance that the next level stands, given that the levels above it stood, is `acceptance` at
every depth. Text that has left the record (at a near tie) gets no guesses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.bench.run.oracle_tree import Known, Noise, OracleTrees, key_of
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.common import SingleDrafter
from paceline.drafters.growth import PolicyName
from paceline.drafters.growth import tree_policy as policy_of
from paceline.errors import DrafterError
from paceline.tree import EMPTY_TREE, Budget, TokenTree
from paceline.utils import need, number

Continuations = Mapping[tuple[int, ...], Sequence[int]]


class _State:
    """A sequence with its record, which begins at token `start` of the text; `key` names its prompt in the noise;
    `followed` tokens of the record are known to stand.
    """

    __slots__ = ("context", "followed", "key", "record", "start")

    def __init__(self, context: Context, record: Sequence[int], start: int, key: int, followed: int = 0) -> None:
        self.context, self.record, self.start, self.key, self.followed = context, record, start, key, followed


class CorruptedOracleDrafter(SingleDrafter[_State]):
    """Drafts the recorded continuation with mistakes.

    Args:
        continuations: what plain decoding said: {prompt token ids as a tuple: continuation}, a list of pairs
            {"prompt": [...], "continuation": [...]}, or the path of a JSON file with such a list. Prompts without a
            record get no guesses.
        acceptance: chance that a drafted token is the recorded one, 0..1.
        confidence: what it says of every first candidate, 0..1; None tells the truth (`acceptance`, if `spread` is 0).
        spread: how far chances differ from place to place, evenly around `acceptance`: 1 reaches 0 or 1, whichever is
        nearer.
        seed: of the mistakes.
        num_speculative_tokens: most tokens to propose; None leaves it to the budget.
        tree_policy, tree_width, tree_threshold, speculative_token_tree: how trees grow, as for `draft_model`; chains
            without them. The second candidate is right with `acceptance` of what the first leaves, and so on.
    Raises:
        DrafterError: no continuations. ConfigError: a value outside its range, an option that the policy does not have.
    """

    name = "corrupted_oracle"

    def __init__(
        self,
        args: DrafterArgs,
        *,
        continuations: Any = None,
        acceptance: float = 0.8,
        confidence: float | None = None,
        spread: float = 0.0,
        seed: int = 0,
        num_speculative_tokens: int | None = None,
        tree_policy: PolicyName | None = None,
        tree_width: int | None = None,
        tree_threshold: float | None = None,
        speculative_token_tree: str | Sequence[Sequence[int]] | None = None,
    ) -> None:
        if continuations is None:
            raise DrafterError(
                "corrupted_oracle needs 'continuations', a record of plain decoding; `paceline bench` makes one"
            )
        number("acceptance", acceptance, 0.0, 1.0, "be in 0..1")
        if confidence is not None:
            number("confidence", confidence, 0.0, 1.0, "be in 0..1")
        number("spread", spread, 0.0, 1.0, "be in 0..1")
        need(isinstance(seed, int) and not isinstance(seed, bool), "seed", "be an integer", seed)
        super().__init__(args, num_speculative_tokens)
        self.records = read_continuations(continuations)
        self._lengths = sorted({len(prompt) for prompt in self.records}, reverse=True)
        self.seed = seed
        self.noise = Noise(
            float(acceptance), float(spread), None if confidence is None else float(confidence), self.vocab_size
        )
        policy = policy_of(tree_policy, width=tree_width, threshold=tree_threshold, paths=speculative_token_tree)
        self._trees = None if policy.name == "chain" else OracleTrees(policy, self.noise, self.index)

    def _begin(self, context: Context) -> _State:
        """The record with the longest prompt that the text begins with; the noise is keyed by that prompt."""
        for length in self._lengths:
            prompt = tuple(context.tokens[:length])
            if len(prompt) == length and prompt in self.records:
                return _State(context, self.records[prompt], length, key_of(self.seed, prompt))
        return _State(context, (), len(context.tokens), 0)

    def fork(self, state: _State, context: Context) -> _State:
        return _State(context, state.record, state.start, state.key, state.followed)

    def end(self, states: Sequence[_State]) -> None:
        for state in states:
            state.record = ()

    def _propose(self, state: _State, budget: Budget) -> TokenTree:
        steps, done = self._steps(budget), len(state.context.tokens) - state.start
        steps = min(steps, len(state.record) - done)
        if steps <= 0 or not _follows(state, done):
            return EMPTY_TREE
        if self._trees is not None:
            budget = budget if budget.nodes <= self.limit else replace(budget, nodes=self.limit)
            return self._trees.tree(Known(state.context, state.record, done, state.key), budget, steps)
        tokens, told = self.noise.chain(state.key, state.record, done, steps)
        return TokenTree.chain(tokens, confidence=told, source=self.index)


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
    rule = (
        'be a mapping of prompts, a list of {"prompt": ids, "continuation": ids}, or the path of a JSON file with '
        "such a list"
    )
    if isinstance(given, str | Path):
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            need(False, "continuations", f"{rule} ({error})", str(given))
    if isinstance(given, Mapping):
        need(
            all(isinstance(key, tuple) for key in given),
            "continuations",
            "have tuples of token ids as keys",
            list(given)[:1],
        )
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
