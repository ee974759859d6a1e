"""Predicted outputs: followed while they hold, found again after every kind of edit, counted as OpenAI counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engine.harness import engine
from hypothesis import given
from hypothesis import strategies as st
from toys import ToyRunner

from paceline import SamplingParams
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.lookup import prediction
from paceline.drafters.lookup.prediction import LOST, NEAR, PREDICTION_CONFIDENCE, PredictionDrafter
from paceline.engine import Request, check_prompt
from paceline.errors import ConfigError
from paceline.tree import EMPTY_TREE, Budget, TokenTree

ARGS = DrafterArgs(vocab_size=1000, index=1, max_context=1000)
PROMPT = [900, 901]


def begun(expected: Sequence[int], output: Sequence[int] = (), **options: Any) -> tuple[PredictionDrafter, Any]:
    drafter = PredictionDrafter(ARGS, **options)
    (state,) = drafter.begin([Context("r", [*PROMPT, *output], len(PROMPT), prediction=expected)])
    return drafter, state


def proposal(expected: Sequence[int], output: Sequence[int] = (), nodes: int = 4, **options: Any) -> TokenTree:
    drafter, state = begun(expected, output, **options)
    return drafter.propose([state], [Budget(nodes, nodes)], [EMPTY_TREE])[0]


def steps(expected: Sequence[int], output: Sequence[int], nodes: int = 8) -> int:
    """How many steps a model that says `output` takes."""
    drafter, state = begun(expected)
    count, written = 0, 0
    while written < len(output):
        (tree,) = drafter.propose([state], [Budget(nodes, nodes)], [EMPTY_TREE])
        right = 0
        while right < len(tree) and written + right < len(output) and tree.tokens[right] == output[written + right]:
            right += 1
        state.context.tokens.extend(output[written : written + right + 1])
        count, written = count + 1, written + right + 1
    return count


def words(count: int, seed: int = 0) -> list[int]:
    """Text in which single tokens come often and pairs seldom, as in language."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, 200, count)]


def test_the_prediction_is_drafted_from_its_first_token() -> None:
    assert proposal([5, 6, 7, 8, 9]).tokens.tolist() == [5, 6, 7, 8]
    assert proposal([5, 6, 7, 8, 9], [5, 6]).tokens.tolist() == [7, 8, 9]
    assert proposal([5, 6, 7, 8, 9], [5, 6, 7, 8, 9]) is EMPTY_TREE
    assert proposal([5, 6, 7, 8, 9], nodes=9, num_speculative_tokens=2).tokens.tolist() == [5, 6]


def test_after_a_difference_nothing_is_said_until_the_text_is_found_again() -> None:
    expected = list(range(10, 30))
    assert proposal(expected, [10, 11, 500]) is EMPTY_TREE
    assert proposal(expected, [10, 11, 500, 13]).tokens.tolist() == [14, 15, 16, 17], "replaced: 12 by 500"
    assert proposal(expected, [10, 11, 500, 501, 12]).tokens.tolist() == [13, 14, 15, 16], "inserted: 500, 501"
    assert proposal(expected, [10, 11, 15]).tokens.tolist() == [16, 17, 18, 19], "deleted: 12 to 14"


def test_two_tokens_are_found_anywhere_and_one_only_near() -> None:
    expected = list(range(10, 110))
    far = 13 + NEAR + 20
    assert proposal(expected, [10, 11, 12, far]) is EMPTY_TREE
    assert proposal(expected, [10, 11, 12, far, far + 1]).tokens.tolist() == [far + 2 + i for i in range(4)]
    late = [*range(10, 60), 500, 20, 21]
    assert proposal(expected, late).tokens.tolist() == [22, 23, 24, 25], "a block that moved back"
    assert proposal(expected, late[:-1]) is EMPTY_TREE


def test_the_nearest_place_after_the_last_sure_one_counts() -> None:
    expected = [1, 2, 77, 3, 4, 5, 6, 1, 2, 88, 7, 8, 1, 2, 99]
    assert proposal(expected, [1, 2, 77, 3, 4, 5, 50, 1, 2], 1).tokens.tolist() == [88]
    assert proposal(expected, [1, 2, 77, 3, 4, 5, 6, 1, 2, 88, 7, 60, 1, 2], 1).tokens.tolist() == [99]
    assert proposal([1, 2, 77, 3, 4, 5, 6], [1, 2, 77, 3, 4, 5, 60, 1, 2], 1).tokens.tolist() == [77], (
        "the nearest before it"
    )


def test_a_lucky_match_of_one_token_does_not_move_the_sure_place() -> None:
    """The model says something new that holds one token of further on; what comes next is found behind that place all
    the same.
    """
    expected = list(range(10, 40))
    assert proposal(expected, [10, 11, 12, 30, 500, 13], 2).tokens.tolist() == [14, 15]


@pytest.mark.parametrize("span", [1, 3, 12])
@pytest.mark.parametrize("kind", ["identity", "replace", "insert", "delete", "move"])
def test_an_edit_costs_a_few_steps(kind: str, span: int) -> None:
    old = words(200)
    new = [500 + i for i in range(span)]
    edited = {
        "identity": old,
        "replace": [*old[:90], *new, *old[90 + span :]],
        "insert": [*old[:90], *new, *old[90:]],
        "delete": [*old[:90], *old[90 + span :]],
        "move": [*old[:50], *old[120:160], *old[50:120], *old[160:]],
    }[kind]
    ideal = -(-len(edited) // 9)
    written = span if kind in ("replace", "insert") else 0
    cuts = {"identity": 0, "move": 3}.get(kind, 1)
    assert steps(old, edited) <= ideal + written + 3 * cuts


def test_the_step_count_catches_a_drafter_that_never_finds_its_place_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(prediction.PredictionState, "search", lambda self, text: (LOST, 0))
    with pytest.raises(AssertionError):
        test_an_edit_costs_a_few_steps("replace", 1)


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=16), st.data())
def test_the_place_does_not_depend_on_how_the_tokens_came(
    expected: list[int], output: list[int], data: st.DataObject
) -> None:
    drafter, state = begun([*expected, 3])
    written = 0
    while written < len(output):
        more = data.draw(st.integers(1, 5))
        state.context.tokens.extend(output[written : written + more])
        written += more
        drafter.propose([state], [Budget(2, 2)], [EMPTY_TREE])
    _, fresh = begun([*expected, 3], output)
    for one in (state, fresh):
        one.follow()
    assert (state.position, state.run, state.anchor) == (fresh.position, fresh.run, fresh.anchor)


def test_longer_runs_are_trusted_more() -> None:
    assert proposal([5, 6, 7, 8, 9], [5, 6], 2).confidence.tolist() == pytest.approx(PREDICTION_CONFIDENCE[2:4])
    assert proposal(list(range(60)), range(50), 3).confidence.tolist() == pytest.approx([PREDICTION_CONFIDENCE[-1]] * 3)


def test_ids_beyond_the_vocabulary_end_a_draft_and_match_nothing() -> None:
    expected: Any = [5, 6, 1000, 7, 8, -1, "x", 9]
    assert proposal(expected).tokens.tolist() == [5, 6]
    assert proposal([1000, 1001]) is EMPTY_TREE
    assert proposal(expected, [5, 6, 50, 7]).tokens.tolist() == [8]


def test_requests_without_a_prediction_have_no_state() -> None:
    drafter = PredictionDrafter(ARGS)
    assert drafter.begin([Context("a", [1], 1), Context("b", [1], 1, prediction=(7,))])[0] is None


def decoded(runner: ToyRunner, expected: Sequence[int], count: int, nodes: int = 8) -> Request:
    loop = engine(runner, [PredictionDrafter(DrafterArgs(vocab_size=16, index=0, max_context=4096))], tokens=nodes)
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    request = Request("r", None, [1, 2], params, 7, check_prompt([1, 2], 16, 4096, count), prediction=list(expected))
    loop.add(request)
    while loop.has_work:
        loop.step()
    return request


def test_openais_counts_are_in_the_metrics() -> None:
    runner = ToyRunner(16, order=None, seed=2)
    truth = runner.greedy([1, 2], 36)
    full = decoded(runner, truth, 36)
    counts = full.metrics.drafters["prediction"]
    assert full.outputs[0].token_ids == truth
    assert (full.metrics.num_steps, counts.num_accepted_tokens, counts.num_draft_tokens) == (4, 32, 32)
    wrong = [*truth[:4], (truth[4] + 1) % 16, *truth[5:]]
    edited = decoded(runner, wrong, 36)
    counts = edited.metrics.drafters["prediction"]
    assert edited.outputs[0].token_ids == truth
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
    assert counts.num_draft_tokens - counts.num_accepted_tokens >= 4, "the rest of the first draft was rejected"


def test_no_prediction_leaves_no_trace() -> None:
    runner = ToyRunner(16, seed=2)
    request = decoded(runner, [], 12)
    assert request.outputs[0].token_ids == runner.greedy([1, 2], 12)
    assert not request.metrics.drafters
    assert not request.metrics.dropped_drafters


@pytest.mark.parametrize("limit", [-1, 2.5, True])
def test_bad_options_are_rejected(limit: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be"):
        PredictionDrafter(ARGS, num_speculative_tokens=limit)
