"""CopySpec: the first place is copied, never the text's own end, and the running index equals a search of the whole
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from engine.harness import engine, run
from hypothesis import given
from hypothesis import strategies as st
from toys import ToyRunner

from paceline import SamplingParams
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.lookup.copyspec import COPY_CONFIDENCE, CopySpecDrafter
from paceline.errors import ConfigError
from paceline.tree import EMPTY_TREE, Budget, TokenTree, Verdict

ARGS = DrafterArgs(vocab_size=1000, index=1, max_context=1000)


def context(tokens: Sequence[int]) -> Context:
    return Context("r", list(tokens), len(tokens))


def proposal(tokens: Sequence[int], nodes: int = 6, **options: Any) -> TokenTree:
    drafter = CopySpecDrafter(ARGS, **options)
    return drafter.propose(drafter.begin([context(tokens)]), [Budget(nodes, nodes)], [EMPTY_TREE])[0]


def searched(text: Sequence[int], gamma: int, steps: int) -> list[int]:
    """The definition: the first place before the end where the last gamma tokens stand; copy what follows."""
    for start in range(len(text) - gamma):
        if text[start : start + gamma] == text[-gamma:]:
            found = list(text)
            for i in range(steps):
                found.append(found[start + gamma + i])
            return found[len(text) :]
    return []


def test_of_equal_matches_the_first_counts() -> None:
    text = [1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3]
    assert proposal(text, 1).tokens.tolist() == [7]
    assert proposal(text, 4).tokens.tolist() == [7, 1, 2, 3]


def test_the_copy_has_ten_tokens_at_most_by_default() -> None:
    text = [*range(100, 140), 100, 101, 102]
    assert proposal(text, 30).tokens.tolist() == list(range(103, 113))
    assert proposal(text, 30, num_speculative_tokens=20).tokens.tolist() == list(range(103, 123))
    assert proposal(text, 4).tokens.tolist() == [103, 104, 105, 106]


@pytest.mark.parametrize("gamma", [1, 2, 3, 5])
def test_a_text_that_does_not_repeat_itself_is_not_its_own_match(gamma: int) -> None:
    """The gram at the end stands in the text: at the end. That is no place to copy from."""
    assert proposal(list(range(1, 30)), copyspec_gamma=gamma) is EMPTY_TREE
    assert proposal(list(range(1, gamma + 1)), copyspec_gamma=gamma) is EMPTY_TREE


def test_gamma_longer_than_any_repeat_drafts_nothing() -> None:
    text = [1, 2, 3, 9, 1, 2, 3]
    assert len(proposal(text, copyspec_gamma=3))
    assert proposal(text, copyspec_gamma=4) is EMPTY_TREE


def test_a_copy_that_reaches_the_end_goes_on_with_what_it_copied() -> None:
    assert proposal([5, 1, 2, 3, 1, 2, 3], 8).tokens.tolist() == [1, 2, 3, 1, 2, 3, 1, 2]


def test_longer_matches_are_trusted_more() -> None:
    short, long = proposal([3, 4, 5, 8, 9, 3, 4, 5], 2), proposal([1, 2, 3, 4, 5, 8, 9, 7, 1, 2, 3, 4, 5], 2)
    assert short.confidence.tolist() == pytest.approx(COPY_CONFIDENCE[2:4]), "every accepted token lengthens the match"
    assert long.confidence.tolist() == pytest.approx(COPY_CONFIDENCE[4:6])


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=8),
    st.integers(1, 4),
)
def test_the_running_index_equals_a_search_of_the_whole_text(
    prompt: list[int], added: list[list[int]], gamma: int
) -> None:
    drafter = CopySpecDrafter(ARGS, copyspec_gamma=gamma)
    own = context(prompt)
    states = drafter.begin([own])
    for tokens in [*added, []]:
        (tree,) = drafter.propose(states, [Budget(5, 5)], [EMPTY_TREE])
        assert tree.tokens.tolist() == searched(own.tokens, gamma, 5)
        own.tokens.extend(tokens)
        drafter.observe(states, [tree], [Verdict((), (), None)], None)


def test_the_search_check_catches_a_drafter_that_takes_the_latest_place() -> None:
    """Negative control of the equality above: prompt lookup, which takes the latest place, differs from the
    definition.
    """
    from paceline.drafters.lookup.ngram import NgramDrafter

    text, latest = [1, 2, 7, 1, 2, 8, 1, 2], NgramDrafter(ARGS)
    (tree,) = latest.propose(latest.begin([context(text)]), [Budget(1, 1)], [EMPTY_TREE])
    assert tree.tokens.tolist() != searched(text, 2, 1) == proposal(text, 1, copyspec_gamma=2).tokens.tolist()


class Repeater(ToyRunner):
    """A model that says its prompt again: what followed a token there follows it always."""

    def _key(self, text: Sequence[int]) -> tuple[int, ...]:
        return tuple(text[-1:])

    def _row(self, key: tuple[int, ...]) -> Any:
        row = super()._row(key).copy()
        row[(key[-1] + 1) % self.vocab_size] = 50.0
        return row


def test_a_model_that_repeats_its_prompt_accepts_all_that_is_copied() -> None:
    runner = Repeater(40, seed=1)
    prompt = [*range(1, 40), 0, 1, 2, 3]
    params = SamplingParams(temperature=0.0, max_tokens=33, ignore_eos=True)
    drafter = CopySpecDrafter(DrafterArgs(vocab_size=40, index=0, max_context=4096))
    (request,) = run(engine(runner, [drafter], tokens=16), [prompt], params)
    assert request.outputs[0].token_ids == [(4 + i) % 40 for i in range(33)]
    assert request.metrics.num_steps == 3, "ten copied tokens and one of the model's own, three times"
    assert request.metrics.acceptance_rate == 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"copyspec_gamma": 0},
        {"copyspec_gamma": 33},
        {"copyspec_gamma": 2.5},
        {"copyspec_gamma": True},
        {"num_speculative_tokens": -1},
    ],
)
def test_bad_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"must be"):
        CopySpecDrafter(ARGS, **options)
