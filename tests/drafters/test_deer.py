"""DEER's drafts: what they are recorded with, and that the output distribution is the target's whatever the denoiser
says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from drafters.denoisers import Says, Scripted, args, random_rows, rows_of_a_runner
from engine.harness import engine, run, tokens
from tools.enumerate_draws import Choices, Distribution, distance, output_distribution, target_distribution
from tools.gtest import ERROR, g_test
from toys import ToyRunner

from paceline.config import SamplingParams
from paceline.drafters import Context
from paceline.drafters.common import draft_rows
from paceline.drafters.diffusion.deer import DeerDrafter
from paceline.errors import ConfigError, DrafterError
from paceline.tree import EMPTY_TREE, Budget, TokenTree, Trial
from paceline.verifiers import RecursiveRejection

VOCAB = 11
PROMPT = [1, 2, 3, 4, 1, 2]
COIN = np.array([0.7, 0.3])
EXACT, WRONG = 1e-7, 1e-3
"""Recorded rows are float32."""

LUCKS = (0.125, 0.375, 0.625, 0.875)
"""For distributions in quarters, each stands for a quarter of all draws."""


def drafter(says: Says, vocab_size: int = VOCAB, *, ends: tuple[int, ...] = (), **options: Any) -> DeerDrafter:
    denoiser = Scripted(says, vocab_size, ends=ends, max_length=options.pop("max_length", 4096))
    return DeerDrafter(args(denoiser, vocab_size), **{"model": "toy", **options})


def tree_of(one: DeerDrafter, text: Sequence[int] = PROMPT, nodes: int = 4, **context: Any) -> TokenTree:
    (state,) = one.begin([Context("r", list(text), len(text), **{"temperature": 1.0, "seed": 5, **context})])
    (tree,) = one.propose([state], [Budget(nodes, nodes)], [EMPTY_TREE])
    tree.check(one.vocab_size, nodes)
    return tree


def test_every_token_is_recorded_with_the_row_that_it_was_drawn_from() -> None:
    says = random_rows(VOCAB)
    tree = tree_of(drafter(says), temperature=0.5)
    assert len(tree) == 4
    for node in range(4):
        (trial,) = tree.trials_of(node - 1)
        q = np.array(says(PROMPT, node)) ** 2  # temperature 0.5
        assert trial.row is not None
        assert np.allclose(trial.row.numpy(), q / q.sum(), atol=1e-6)
        assert tree.confidence[node] == pytest.approx(float(trial.row[int(tree.tokens[node])]))


def test_draws_follow_their_rows_and_do_not_depend_on_each_other() -> None:
    rows = [[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]]
    one = drafter(lambda text, position: rows[position], 3, draft_masks=0)
    seen = Counter(tuple(tree_of(one, [1], 2, seed=seed).tokens.tolist()) for seed in range(1500))
    pairs = list(product(range(3), repeat=2))
    assert g_test([seen[pair] for pair in pairs], [rows[0][a] * rows[1][b] for a, b in pairs]) > ERROR


def test_rules_of_the_request_shape_every_row_along_the_drafted_path() -> None:
    paths: list[list[int]] = []

    def shape(logits: torch.Tensor, given: Sequence[Sequence[int]]) -> torch.Tensor:
        paths.extend(list(path) for path in given)
        out = logits.float().clone()
        for row, path in zip(out, given, strict=True):
            row[list(path)] = float("-inf")  # no token twice
        return out

    tree = tree_of(drafter(lambda text, position: [0.9, 0.05, 0.05], 3), [1], 3, apply_rules=shape)
    drafted = tree.tokens.tolist()
    assert sorted(drafted) == [0, 1, 2]
    assert paths == [drafted[:i] for i in range(3)]
    rows = [tree.trials_of(i - 1)[0].row for i in range(3)]
    assert all(float(row[drafted[:i]].sum()) == 0.0 for i, row in enumerate(rows) if row is not None)


@pytest.mark.parametrize(
    ("options", "context"),
    [({}, {"temperature": 0.0}), ({}, {"seeded": True}), ({"draft_sample_method": "greedy"}, {})],
)
def test_points_are_the_likeliest_tokens(options: dict[str, Any], context: dict[str, Any]) -> None:
    says = random_rows(VOCAB)
    tree = tree_of(drafter(says, **options), **context)
    assert tree.tokens.tolist() == [int(np.argmax(says(PROMPT, position))) for position in range(4)]
    assert not tree.trials


def test_nothing_is_drafted_behind_an_end_token() -> None:
    rows = [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    for temperature in (0.0, 1.0):
        tree = tree_of(
            drafter(lambda text, position: rows[position], 3, ends=(0,), draft_masks=0), [1], 3, temperature=temperature
        )
        assert tree.tokens.tolist() == [1, 0]


def test_a_separator_stands_before_the_masks() -> None:
    one = drafter(random_rows(VOCAB), separator_token_id=9, draft_masks=6)
    tree_of(one)
    assert one.denoiser.canvases == [[*PROMPT, 9, *[VOCAB] * 6]]  # type: ignore[attr-defined]


def every_draft(one: DeerDrafter, nodes: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[Choices], TokenTree]:
    """The drafter's own trees; its luck is a choice of four."""

    def propose(choices: Choices) -> TokenTree:
        monkeypatch.setattr(draft_rows, "uniform", lambda *key: LUCKS[choices.choose([0.25] * 4)])
        return tree_of(one, [1], nodes)

    return propose


def recorded_as_drawn(one: DeerDrafter, rows: Sequence[Sequence[float]]) -> Callable[[Choices], TokenTree]:
    """Likeliest tokens with the formula of drawn ones."""
    drawn = {node - 1: (Trial(node, torch.tensor(row, dtype=torch.float32)),) for node, row in enumerate(rows)}
    return lambda choices: tree_of(one, [1], len(rows), temperature=0.0).replace(trials=drawn)


def two_symbols(path: tuple[int, ...]) -> np.ndarray:
    """A target that depends on what came before."""
    return COIN if sum(path) % 2 == 0 else COIN[::-1]


@pytest.mark.parametrize("rows", [[[0.75, 0.25], [0.25, 0.75]], [[0.5, 0.5]] * 2, [[0.25, 0.75], [1.0, 0.0]]])
def test_the_output_distribution_is_the_targets_by_enumeration(
    rows: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second case is a uniform q."""
    one = drafter(lambda text, position: rows[position], 2, draft_masks=0)
    wanted = target_distribution(two_symbols, 3)
    distribution = output_distribution(RecursiveRejection(), every_draft(one, 2, monkeypatch), two_symbols, 3)
    assert distance(distribution, wanted) < EXACT
    points = output_distribution(
        RecursiveRejection(), lambda choices: tree_of(one, [1], 2, temperature=0.0), two_symbols, 3
    )
    assert distance(points, wanted) < EXACT


def test_likeliest_tokens_with_the_formula_of_drawn_ones_break_the_distribution() -> None:
    """Negative control: the pitfall of the method."""
    rows = [[0.75, 0.25], [0.25, 0.75]]
    one = drafter(lambda text, position: rows[position], 2, draft_masks=0)
    distribution: Distribution = output_distribution(RecursiveRejection(), recorded_as_drawn(one, rows), two_symbols, 3)
    assert distance(distribution, target_distribution(two_symbols, 3)) > WRONG


class Argmax(DeerDrafter):
    """Records likeliest tokens as drawn; the negative control of the statistic."""

    def _tree(self, state: Any, logits: torch.Tensor) -> TokenTree:
        tree = super()._tree(state, logits)
        best = logits.argmax(-1)[: len(tree)].tolist()
        return TokenTree.chain(best, source=self.index).replace(trials=tree.trials)


def p_value(kind: type[DeerDrafter], says: Says, vocab_size: int = 2, *, requests: int = 600) -> float:
    """Of "three tokens of a sampling engine have the target's distribution"."""
    runner = ToyRunner(vocab_size, seed=3, sharpness=0.7)
    one = kind(args(Scripted(says, vocab_size), vocab_size), model="toy", draft_masks=0)
    params = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True)
    found = run(engine(runner, [one], 3, max_num_seqs=64), [[1]] * requests, params, 1000)
    seen = Counter(tuple(output[0]) for output in tokens(found))
    distribution = target_distribution(lambda path: runner.logits([1, *path]).double().softmax(-1).numpy(), 3)
    return g_test([seen[text] for text in distribution], list(distribution.values()))


@pytest.mark.parametrize("says", [random_rows(2), lambda text, position: [0.5, 0.5], lambda text, position: [0.9, 0.1]])
def test_the_output_distribution_is_the_targets_by_sampling(says: Says) -> None:
    assert p_value(DeerDrafter, says) > ERROR


def test_the_statistic_catches_likeliest_tokens_recorded_as_drawn() -> None:
    assert p_value(Argmax, lambda text, position: [0.7, 0.3]) < ERROR


class Constant(ToyRunner):
    """Says the same after every text."""

    def _key(self, text: Sequence[int]) -> tuple[int, ...]:
        return ()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_denoiser_that_says_the_targets_own_distribution_is_always_right(temperature: float) -> None:
    """T1: the target's distribution is the same at every place, whatever stands before."""
    runner = Constant(VOCAB, seed=3)
    one = drafter(rows_of_a_runner(runner))
    params = SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True)
    found = run(engine(runner, [one], 5), [PROMPT] * 3, params)
    for request in found:
        assert request.metrics.num_accepted_tokens == request.metrics.num_draft_tokens > 20
    other = run(engine(runner, [drafter(random_rows(VOCAB))], 5), [PROMPT], params)[0].metrics
    assert other.num_accepted_tokens < 0.6 * other.num_draft_tokens


@pytest.mark.parametrize("says", [random_rows(VOCAB), rows_of_a_runner(ToyRunner(VOCAB, seed=3, noise=0.7))])
def test_the_text_is_that_of_greedy_decoding(says: Says) -> None:
    runner = ToyRunner(VOCAB, seed=3)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [PROMPT, [5], PROMPT * 3]
    assert tokens(run(engine(runner, [drafter(says)], 6), prompts, params)) == tokens(
        run(engine(runner), prompts, params)
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"model": None},
            "speculative_config model must be the folder or hub id of a diffusion language model for method 'deer'",
        ),
        ({"draft_max_length": 0}, "draft_max_length must be an integer of 1 or more"),
        ({"draft_masks": -1}, "draft_masks must be an integer of 0 or more"),
        ({"draft_context": 0}, "draft_context must be an integer of 1 or more"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be an integer of 0 or more"),
        ({"draft_sample_method": "best"}, "draft_sample_method must be one of probabilistic, greedy"),
        ({"separator_token_id": VOCAB}, "separator_token_id must be an integer in 0..10"),
    ],
)
def test_wrong_options_are_rejected_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        drafter(random_rows(VOCAB), **options)
    assert "\n" not in str(caught.value)


def test_a_text_that_the_denoiser_has_no_tokens_for() -> None:
    with pytest.raises(DrafterError, match=r"the text holds token 12, and the diffusion model of 'deer' has only 12"):
        tree_of(drafter(random_rows(VOCAB)), [1, 12])
