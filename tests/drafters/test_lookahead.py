"""Lookahead and Jacobi: trajectories are the target's own, windows keep their place in the text, outputs are plain
decoding's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from engine.harness import engine, run, tokens
from toys import ToyRunner

from paceline.config import SamplingParams
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.lookup.jacobi import JacobiDrafter
from paceline.drafters.lookup.lookahead import LookaheadDrafter
from paceline.engine import StepRecord
from paceline.errors import ConfigError
from paceline.tree import CANDIDATE, EMPTY_TREE, PROBE, Budget, Scores, TokenTree, Verdict

VOCAB = 12
ARGS = DrafterArgs(vocab_size=VOCAB, index=0, max_context=4096)
PROMPT = [3, 1, 4, 1, 5]


class Alone:
    """One drafter on one greedy sequence of a toy target, step by step."""

    def __init__(self, drafter: Any, target: ToyRunner, prompt: Sequence[int] = PROMPT) -> None:
        self.drafter, self.target = drafter, target
        self.context = Context("r", list(prompt), len(prompt))
        (self.state,) = drafter.begin([self.context])
        self.accepted: list[int] = []

    def step(self, nodes: int, depth: int = 16, spoil: Callable[[Any], Any] | None = None) -> TokenTree:
        (tree,) = self.drafter.propose([self.state], [Budget(nodes, depth)], [EMPTY_TREE])
        cache = self.target.open()
        if len(self.context.tokens) > 1:
            self.target.extend([cache], [self.context.tokens[:-1]])
        scores = self.target.score([cache], [self.context.tokens[-1]], [tree])
        best = scores.logits.argmax(-1).tolist()
        path: list[int] = []
        node = -1
        while (child := next((c for c in tree.children(node) if tree.tokens[c] == best[node + 1]), None)) is not None:
            path.append(child)
            node = child
        verdict = Verdict(tuple(path), tuple(int(tree.tokens[c]) for c in path), best[node + 1])
        self.context.tokens.extend(verdict.tokens)
        self.accepted.append(len(path))
        logits = scores.logits if spoil is None else spoil(scores.logits)
        self.drafter.observe([self.state], [tree], [verdict], Scores(logits, scores.rows))
        self.target.release(cache)
        return tree


class Late(ToyRunner):
    """A target whose next token depends on the third last one alone: a wrong guess harms none of the next two."""

    def _key(self, text: Sequence[int]) -> tuple[int, ...]:
        return tuple(text[-3:-2])


def trajectories(drafter: LookaheadDrafter, target: ToyRunner, spoil: Callable[[Any], Any] | None = None) -> list[bool]:
    """Of every n-gram in the pool, whether the target itself would go on so (it looks at the last token only)."""
    alone = Alone(drafter, target)
    for _ in range(12):
        alone.step(48, spoil=spoil)
    grams = [(first, *rest) for first, after in alone.state.pool.items() for rest in after]
    assert grams
    return [all(target.greedy([a], 1) == [b] for a, b in pairwise(gram)) for gram in grams]


def test_n_grams_of_the_pool_are_the_targets_own() -> None:
    """A target that looks at one token only answers each column rightly, whatever stands before it."""
    drafter = LookaheadDrafter(ARGS, pool_from_text=False)
    assert all(trajectories(drafter, ToyRunner(VOCAB, order=1, seed=2)))
    shifted = trajectories(drafter, ToyRunner(VOCAB, order=1, seed=2), spoil=lambda logits: logits.roll(1, 0))
    assert not all(shifted), "rows of other nodes must show"


def test_the_window_moves_with_the_text() -> None:
    """Columns begin right after the root and follow each other; none lies behind the text."""
    alone = Alone(LookaheadDrafter(ARGS, max_window_size=5), ToyRunner(VOCAB, order=1, seed=4))
    for _ in range(20):
        alone.step(48)
        assert all(position >= len(alone.context.tokens) for position in alone.state.columns)
        assert all(1 <= len(column) < 4 for column in alone.state.columns.values())
    assert sum(alone.accepted) > 15, "a target that repeats itself is foreseen"


def test_a_target_that_looks_back_is_still_foreseen() -> None:
    alone = Alone(LookaheadDrafter(ARGS, pool_from_text=False), ToyRunner(8, order=2, seed=0))
    for _ in range(60):
        alone.step(48)
    assert sum(alone.accepted) > 10


def test_probes_are_inputs_only() -> None:
    drafter = LookaheadDrafter(ARGS)
    alone = Alone(drafter, ToyRunner(VOCAB, order=1, seed=3))
    for _ in range(6):
        tree = alone.step(48)
    probes = [node for node, kind in enumerate(tree.kinds.tolist()) if kind == PROBE]
    assert len(probes) > 10
    assert tree.confidence[probes].sum() == 0
    assert not set(probes) & {child for parent in (-1, *range(len(tree))) for child in tree.children(parent)}


def test_probes_do_not_count_as_draft_tokens() -> None:
    runner, rows = ToyRunner(VOCAB, order=1, seed=3), [0, 0]
    live = engine(runner, [LookaheadDrafter(ARGS)], 24)

    def count(record: StepRecord) -> None:
        for kind in record.trees[0].kinds.tolist():
            rows[kind] += 1

    live.watchers.append(count)
    (request,) = run(live, [PROMPT], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    guesses, probes = rows[CANDIDATE], rows[PROBE]
    assert guesses > 10 < probes
    assert request.metrics.num_draft_tokens == request.metrics.drafters["lookahead"].num_draft_tokens == guesses


@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (2, 5), (5, 2), (6, 16), (13, 16), (48, 4), (100, 16)])
def test_small_budgets(nodes: int, depth: int) -> None:
    alone = Alone(LookaheadDrafter(ARGS), ToyRunner(VOCAB, order=1, seed=3))
    for _ in range(10):
        tree = alone.step(nodes, depth)
        tree.check(VOCAB, nodes)
        assert tree.max_depth <= depth


def test_the_pool_is_bounded_and_reads_the_text() -> None:
    drafter = LookaheadDrafter(ARGS, max_verification_set_size=2, max_ngram_size=3)
    (state,) = drafter.begin([Context("r", [1, 2, 3, 1, 4, 5, 1, 6, 7], 9)])
    assert list(state.pool[1]) == [(4, 5), (6, 7)]
    state.context.tokens += [1, 8]
    drafter.observe([state], [EMPTY_TREE], [Verdict((), (), 8)], None)
    assert list(state.pool[7]) == [(1, 8)]
    (empty,) = LookaheadDrafter(ARGS, pool_from_text=False).begin([Context("r", [1, 2, 3, 1, 2, 3], 6)])
    assert not empty.pool


def test_a_jacobi_guess_that_is_the_greedy_text_stands_whole() -> None:
    target = ToyRunner(VOCAB, seed=5)
    alone = Alone(JacobiDrafter(ARGS), target)
    alone.state.guess, alone.state.end = target.greedy(PROMPT, 6), len(PROMPT)
    assert len(alone.step(6)) == 6
    assert alone.accepted == [6]


@pytest.mark.parametrize("plain", [0, 3])
def test_steps_without_drafts_need_not_be_told(plain: int) -> None:
    """What the text got meanwhile is read when drafts are next asked for; what was foreseen for another place is
    forgotten.
    """
    target = ToyRunner(VOCAB, seed=5)
    ahead, fixed = Alone(LookaheadDrafter(ARGS), target), Alone(JacobiDrafter(ARGS), target)
    for alone in (ahead, fixed):
        alone.step(24)
        alone.context.tokens.extend([7, 8, 9, 7, 8, 9][: 2 * plain])
    kept = list(fixed.state.guess)
    assert kept
    proposed = fixed.step(24).tokens.tolist()
    assert (proposed[: len(kept)] == kept) is (plain == 0)
    ahead.step(24)
    grams = {(first, *rest)[:3] for first, after in ahead.state.pool.items() for rest in after}
    assert ((7, 8, 9) in grams) is (plain > 0)
    assert min(ahead.state.columns, default=len(ahead.context.tokens)) >= len(ahead.context.tokens)


def test_an_outcome_that_is_not_of_the_last_question_teaches_nothing() -> None:
    """Nothing of the tree was scored, and another drafter's tree was in the step after."""
    target = ToyRunner(VOCAB, seed=5)
    for late in (0, 1):
        fixed = Alone(JacobiDrafter(ARGS), target)
        (tree,) = fixed.drafter.propose([fixed.state], [Budget(6, 6)], [EMPTY_TREE])
        fixed.context.tokens.extend([2] * late + [4])
        logits = torch.zeros(1 + len(tree), VOCAB)
        fixed.drafter.observe([fixed.state], [tree], [Verdict((), (), 4)], Scores(logits, (0, len(logits))))
        assert (fixed.state.guess == []) is (late == 1)


def test_jacobi_iterations_reach_the_fixed_point() -> None:
    """Answers behind a failure are right where the failure does not matter; read one row too far, they are not."""
    target = Late(VOCAB, seed=6)
    alone, spoilt = Alone(JacobiDrafter(ARGS), target), Alone(JacobiDrafter(ARGS), Late(VOCAB, seed=6))
    for _ in range(20):
        alone.step(8)
        spoilt.step(8, spoil=lambda logits: logits.roll(1, 0))
    assert alone.context.tokens[5:] == target.greedy(PROMPT, len(alone.context.tokens) - 5)
    assert sum(alone.accepted) > 2 * sum(spoilt.accepted) + 15


@pytest.mark.parametrize("kind", [LookaheadDrafter, JacobiDrafter])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_outputs_are_those_of_plain_decoding(kind: Any, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=3, ignore_eos=True, presence_penalty=0.5)
    prompts = [PROMPT, [1, 2], [7, 7, 7, 8, 9, 7, 7]]
    plain = run(engine(ToyRunner(VOCAB, seed=8)), prompts, params)
    fast = run(engine(ToyRunner(VOCAB, seed=8), [kind(ARGS)], 20), prompts, params)
    assert tokens(plain) == tokens(fast)
    other = run(engine(ToyRunner(VOCAB, seed=9), [kind(ARGS)], 20), prompts, params)
    assert tokens(plain) != tokens(other), "another target must show"


def test_wrong_sizes_are_rejected() -> None:
    for options in ({"max_ngram_size": 1}, {"max_window_size": 0}, {"max_verification_set_size": 10**6}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            LookaheadDrafter(ARGS, **options)
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        JacobiDrafter(ARGS, num_speculative_tokens=-1)
