"""Prompt tokens guess what the target makes of their embeddings, behind the input that was accepted last; which inputs
have how many is as the paper says.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from engine.harness import engine, run, tokens
from tiny_llama import close, runner_of, tiny_llama
from toys import ToyRunner, plain_decode

from benchmarks.stand_ins import written_head
from paceline.config import SamplingParams
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.heads.ppd import PPDDrafter
from paceline.engine.scheduler import Scheduler
from paceline.errors import CheckpointError, ConfigError
from paceline.models import AddedRows
from paceline.models.heads import HeadConfig
from paceline.tree import EMPTY_TREE, Budget, TokenTree, Verdict, best_shapes, last_accepted, prompt_counts

LEVELS = 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def drafter_for(target: Any, *, virtual_tokens: int = 1, index: int = 0, **options: Any) -> PPDDrafter:
    info = target.info
    args = DrafterArgs(vocab_size=info.vocab_size, index=index, max_context=info.max_context, target=target)
    size = {"hidden_size": info.hidden_size, "vocab_size": info.vocab_size, "draft_vocab_size": info.vocab_size}
    head = HeadConfig(method="ppd", num_heads=LEVELS, virtual_tokens=virtual_tokens, **size)  # type: ignore[arg-type]
    return PPDDrafter(args, model=written_head(head), **options)


# ------------------------------------------------------------------------------------------------ what is guessed


@pytest.mark.parametrize("virtual_tokens", [1, 2])
def test_guesses_are_those_behind_the_last_accepted_input(virtual_tokens: int) -> None:
    """Means of chains that do not see each other, in a pass over text, path and prompt tokens."""
    target = runner_of(tiny_llama())
    drafter = drafter_for(target, virtual_tokens=virtual_tokens, prompt_rows=12 * virtual_tokens)
    text, tree = [7, 3, 9, 4, 1], TokenTree.build([5, 6, 8], [-1, 0, -1], confidence=[0.4, 0.5, 0.3])
    cache, (state,) = target.open(), drafter.begin([Context("a", list(text), 5)])
    target.extend([cache], [text[:-1]])
    added = drafter.added_rows([state], [tree], [99])
    _, said = target.score_added([cache], text[-1:], [tree], added)
    drafter.read_rows([state], [said.of(0)])
    state.context.tokens += [5, 6, 2]
    assert drafter.propose([state], [Budget(3, 3)], [EMPTY_TREE]) == [EMPTY_TREE], "of the text before"
    drafter.observe([state], [tree], [Verdict((0, 1), (5, 6), 2)], None)
    assert len(state.guesses) == LEVELS

    def guessed(path: Sequence[int], order: Sequence[int]) -> torch.Tensor:
        """(levels, v) from passes of their own."""
        embedded, found = target.embed([*text, *path]), []
        for copy in range(virtual_tokens):
            prompts = drafter.prompts[list(order), copy]
            fed = torch.cat([embedded, prompts])
            found.append(target.extend_embeddings([target.open()], [fed], all_logits=True).logits[-LEVELS:])
        return torch.stack(found).mean(0)

    assert close(state.guesses, guessed([5, 6], range(LEVELS)))
    assert not close(state.guesses, guessed([5], range(LEVELS))), "of another input"
    assert not close(state.guesses, guessed([5, 6], [1, 0, 2])), "of prompt tokens in another order"
    (drafted,) = drafter.propose([state], [Budget(3, 3)], [EMPTY_TREE])
    assert drafted.tokens.tolist() == state.guesses.argmax(-1).tolist()


def test_of_virtual_tokens_none_sees_another() -> None:
    """Two that are alike say what one says; in one chain they would not."""
    target = runner_of(tiny_llama())
    alone, both = drafter_for(target, prompt_rows=3), drafter_for(target, virtual_tokens=2, prompt_rows=6)
    both.prompts = alone.prompts.expand(LEVELS, 2, -1)
    found = []
    for drafter, in_one_chain in ((alone, False), (alone, True), (both, False), (both, True)):
        (state,) = drafter.begin([Context("a", [7, 3, 9], 3)])
        cache = target.open()
        target.extend([cache], [[7, 3]])
        (rows,) = drafter.added_rows([state], [EMPTY_TREE], [6])
        after = [list(range(-1, len(rows.nodes[0]) - 1))] if in_one_chain else rows.after
        _, said = target.score_added([cache], [9], [EMPTY_TREE], [AddedRows(0, rows.nodes, after, rows.make)])
        drafter.read_rows([state], [said.of(0)])
        drafter.observe([state], [EMPTY_TREE], [Verdict((), (), 1)], None)
        found.append(state.guesses)
    assert close(found[0], found[2])
    assert not close(found[1], found[3])


# ------------------------------------------------------------------------------------------------ how many, and where


def test_the_least_worth_are_left_out_one_after_the_other() -> None:
    last, gains = np.array([0.1, 0.4, 0.2, 0.3]), [0.8, 0.5, 0.1]
    counts = [len(gains)] * len(last)
    for most in reversed(range(13)):
        kept = prompt_counts(last, gains, most)
        assert sum(kept) == most
        worth = sum(chance * sum(gains[:count]) for chance, count in zip(last, kept, strict=True))
        assert worth == pytest.approx(sum(c * sum(gains[:n]) for c, n in zip(last, counts, strict=True)))
        some = [one for one in product(range(4), repeat=4) if sum(one) == most]
        every = [sum(c * sum(gains[:n]) for c, n in zip(last, one, strict=True)) for one in some]
        assert worth == pytest.approx(max(every))
        assert most in (0, 12) or min(every) < worth
        if most:
            losses = [c * gains[n - 1] if n else np.inf for c, n in zip(last, counts, strict=True)]
            counts[int(np.argmin(losses))] -= 1


def test_a_level_gains_by_its_own_drafts_alone() -> None:
    """What another drafter had accepted says nothing of prompt tokens."""
    drafter, verdict = drafter_for(runner_of(tiny_llama()), index=1), Verdict((0,), (5,), 2)
    (state,) = drafter.begin([Context("a", [7, 3, 9], 3)])
    before = drafter.gains
    drafter.observe([state], [TokenTree.build([5], [-1], sources=[0])], [verdict], None)
    assert drafter.gains == before
    drafter.observe([state], [TokenTree.build([5], [-1], sources=[1])], [verdict], None)
    assert drafter.gains[0] > before[0]
    now = drafter.gains
    drafter.observe([state], [TokenTree.build([5, 6], [-1, -1], sources=[0, 1])], [verdict], None)
    assert drafter.gains[0] < now[0], "another one's was accepted in the place of its own"


def test_the_chances_to_be_accepted_last_are_those_of_the_paths() -> None:
    tree = TokenTree.build([1, 2, 3, 4], [-1, -1, 0, 2], confidence=[0.5, 0.3, 0.6, 0.25])
    assert last_accepted(tree) == pytest.approx([0.2, 0.2, 0.3, 0.225, 0.075])
    assert last_accepted(EMPTY_TREE).tolist() == [1.0]


CHANCES = np.array([[0.5, 0.2, 0.1], [0.4, 0.25, 0.1], [0.3, 0.2, 0.1]])
"""By level and rank, whatever came before."""
GAINS = [0.8, 0.6, 0.36]
NODES, ROWS, VOCAB = 5, 4, 8
SHAPE = best_shapes(CHANCES, NODES, max_depth=LEVELS)


def guesses_of(levels: int) -> torch.Tensor:
    """(levels, v) logits of which the likeliest tokens have these chances."""
    rest = np.repeat((1 - CHANCES.sum(1, keepdims=True)) / (VOCAB - 3), VOCAB - 3, axis=1)
    return torch.from_numpy(np.log(np.concatenate([CHANCES, rest], 1)))[:levels].float()


def states_by_hand() -> tuple[np.ndarray, np.ndarray]:
    """(4, 4) chances from the levels that can be drafted to those of the next step, and (4,) tokens a step."""
    moves, tokens = np.zeros((LEVELS + 1, LEVELS + 1)), np.ones(LEVELS + 1)
    for levels in range(LEVELS + 1):
        shape = SHAPE.cut(NODES, levels)
        reached = np.ones(1 + len(shape))
        for node, (parent, rank, depth) in enumerate(shape.columns().T):
            reached[1 + node] = reached[1 + parent] * CHANCES[depth - 1, rank]
        last = reached.copy()
        for node, parent in enumerate(shape.parents_n):
            last[1 + parent] -= reached[1 + node]
        tokens[levels] += reached[1:].sum()
        for chance, count in zip(last, prompt_counts(last, GAINS, ROWS), strict=True):
            moves[levels, count] += chance
    return moves, tokens


def accepted(tree: TokenTree, rng: np.random.Generator) -> tuple[int, ...]:
    """A path, by the chances of ranks and levels."""
    path, parent = list[int](), -1
    while children := tree.children(parent):
        rank = int(np.searchsorted(CHANCES[len(path)].cumsum(), rng.random()))
        if rank >= len(children):
            break
        parent = children[rank]
        path.append(parent)
    return tuple(path)


def test_tokens_a_step_are_those_of_the_chain_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steady state of the levels that can be drafted says how many tokens a step brings."""
    moves, tokens = states_by_hand()
    assert moves.sum(1) == pytest.approx(np.ones(LEVELS + 1))
    steady = np.linalg.matrix_power(moves, 200)[0]
    assert np.count_nonzero(steady > 0.05) >= 3, "of several states"
    monkeypatch.setattr(PPDDrafter, "gains", GAINS)
    drafter = drafter_for(ToyRunner(VOCAB), prompt_rows=ROWS)
    (state,) = drafter.begin([Context("a", [1, 2], 2)])
    rng, brought, steps = np.random.default_rng(0), 0, 1500
    for _ in range(steps):
        (tree,) = drafter.propose([state], [Budget(NODES, LEVELS, shape=SHAPE)], [EMPTY_TREE])
        drafter.added_rows([state], [tree], [ROWS])
        guesses, said = guesses_of(LEVELS), torch.zeros(ROWS, VOCAB)
        for own in state.rows.numbers:
            said[[row for (row,) in own]] = guesses[: len(own)]
        drafter.read_rows([state], [said])
        path = accepted(tree, rng)
        state.context.tokens += [1] * (1 + len(path))
        drafter.observe([state], [tree], [Verdict(path, (1,) * len(path), 1)], None)
        brought += 1 + len(path)
    assert brought / steps == pytest.approx(steady @ tokens, abs=0.06)
    assert brought / steps < tokens[LEVELS] - 0.12, "which is not what a step with all levels brings"


# ------------------------------------------------------------------------------------------------ in the engine


@pytest.mark.parametrize("rows", [0, 9])
def test_without_prompt_tokens_decoding_is_plain(rows: int) -> None:
    target = ToyRunner(16, order=3)
    drafting = engine(target, [drafter_for(target, prompt_rows=rows)], 3)
    (one,) = run(drafting, [[1, 2, 3]], GREEDY)
    assert tokens([one]) == [[plain_decode(target, [1, 2, 3], 24)]]
    assert one.metrics.num_draft_tokens == 0 if rows == 0 else one.metrics.num_accepted_tokens > 5


def test_no_row_is_added_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory, or in the context, up to whose end a text is decoded."""
    target = ToyRunner(16, order=3, max_context=20)
    drafting = engine(target, [drafter_for(target)], 3)
    (one,) = run(drafting, [[1, 2, 3]], GREEDY)
    assert tokens([one]) == [[plain_decode(target, [1, 2, 3], 17)]]
    assert one.metrics.num_draft_tokens > 0
    drafter = drafter_for(target, virtual_tokens=2)
    (state,) = drafter.begin([Context("a", [1, 2], 2)])
    assert drafter.added_rows([state], [EMPTY_TREE], [1]) == ()
    (rows,) = drafter.added_rows([state], [EMPTY_TREE], [5])
    assert len(rows.nodes[0]) == 4
    monkeypatch.setattr(Scheduler, "fit", lambda self, batch, trees: [EMPTY_TREE] * len(trees))
    drafting = engine(target, [drafter_for(target)], 3)
    (one,) = run(drafting, [[1, 2, 3]], GREEDY)
    assert one.metrics.num_draft_tokens == 0


@pytest.mark.parametrize("method", ["added_rows", "read_rows"])
def test_prompt_tokens_that_fail_are_dropped_and_the_text_goes_on(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any) -> Any:
        raise ValueError("not today")

    target = ToyRunner(16, order=3)
    drafter = drafter_for(target)
    monkeypatch.setattr(drafter, method, failing)
    (one,) = run(engine(target, [drafter], 3), [[1, 2, 3]], GREEDY)
    assert tokens([one]) == [[plain_decode(target, [1, 2, 3], 24)]]
    assert "not today" in one.metrics.dropped_drafters["ppd"]


def test_what_cannot_add_rows_is_named() -> None:
    target = ToyRunner(16)
    with pytest.raises(ConfigError, match=r"name one method at most that adds rows to the model's passes, got \['ppd'"):
        engine(target, [drafter_for(target), drafter_for(target, index=1)], 3)
    with pytest.raises(ConfigError, match="prompt_rows must be"):
        drafter_for(target, prompt_rows=-1)
    args = DrafterArgs(vocab_size=16, index=0, max_context=99, target=target)
    sizes = {"hidden_size": 8, "vocab_size": 16, "draft_vocab_size": 16}
    with pytest.raises(CheckpointError, match="is of method 'medusa', not 'ppd'"):
        PPDDrafter(args, model=written_head(HeadConfig(method="medusa", **sizes)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="draft_vocab_size must be"):
        HeadConfig(method="ppd", hidden_size=8, vocab_size=16, draft_vocab_size=9)
