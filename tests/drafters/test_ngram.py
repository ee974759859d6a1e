"""Prompt lookup: which place is copied, how far, and that the running index equals a search of the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters import Context, DrafterArgs
from paceline.drafters.lookup.ngram import MATCH_CONFIDENCE, NgramDrafter, index_ngrams, longest_match
from paceline.errors import ConfigError
from paceline.tree import EMPTY_TREE, Budget, TokenTree, Verdict

ARGS = DrafterArgs(vocab_size=1000, index=1, max_context=1000)


def context(tokens: Sequence[int]) -> Context:
    return Context("r", list(tokens), len(tokens))


def proposal(tokens: Sequence[int], nodes: int = 6, **options: Any) -> TokenTree:
    drafter = NgramDrafter(ARGS, **options)
    return drafter.propose(drafter.begin([context(tokens)]), [Budget(nodes, nodes)], [EMPTY_TREE])[0]


def searched(text: Sequence[int], lowest: int, highest: int, steps: int) -> list[int]:
    """The definition: for n from high to low, the latest place before the end where the last n tokens stand; copy what
    follows.
    """
    for n in range(highest, lowest - 1, -1):
        for end in range(len(text) - 2, n - 2, -1):
            if len(text) > n and text[end + 1 - n : end + 1] == text[-n:]:
                found = list(text)
                for i in range(steps):
                    found.append(found[end + 1 + i])
                return found[len(text) :]
    return []


def test_the_continuation_of_the_longest_match_is_copied() -> None:
    assert proposal([7, 1, 2, 3, 9, 8, 2, 3, 4, 5, 6, 1, 2, 3], 3).tokens.tolist() == [9, 8, 2]


def test_of_equal_matches_the_latest_counts() -> None:
    assert proposal([1, 2, 7, 1, 2, 8, 1, 2], 1).tokens.tolist() == [8]


def test_a_match_at_the_end_goes_on_periodically() -> None:
    assert proposal([5, 1, 2, 3, 1, 2, 3], 8).tokens.tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert proposal([4, 9, 9], 4).tokens.tolist() == [9, 9, 9, 9]


def test_nothing_known_is_nothing_said() -> None:
    assert proposal([1, 2, 3, 4]) is EMPTY_TREE
    assert proposal([1]) is EMPTY_TREE
    assert proposal([1, 2, 9, 3, 2], prompt_lookup_min=2) is EMPTY_TREE


def test_longer_matches_are_trusted_more() -> None:
    short, long = proposal([3, 1, 8, 9, 1], 1), proposal([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7], 1)
    assert short.confidence[0] == pytest.approx(MATCH_CONFIDENCE[0])
    assert long.confidence[0] == pytest.approx(MATCH_CONFIDENCE[6])
    chain = proposal([3, 1, 8, 9, 7, 1], 3)
    assert chain.confidence.tolist() == pytest.approx(MATCH_CONFIDENCE[:3]), "every accepted token lengthens the match"


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_num_speculative_tokens_limits_the_chain(limit: int) -> None:
    assert len(proposal([1, 2, 3, 1, 2, 3], num_speculative_tokens=limit)) == limit


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=8),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_the_running_index_equals_a_search_of_the_whole_text(
    prompt: list[int], added: list[list[int]], lowest: int, more: int
) -> None:
    drafter = NgramDrafter(ARGS, prompt_lookup_min=lowest, prompt_lookup_max=lowest + more)
    own = context(prompt)
    states = drafter.begin([own])
    for tokens in [*added, []]:
        (tree,) = drafter.propose(states, [Budget(5, 5)], [EMPTY_TREE])
        assert tree.tokens.tolist() == searched(own.tokens, lowest, lowest + more, 5)
        own.tokens.extend(tokens)
        drafter.observe(states, [tree], [Verdict((), (), tokens[-1] if tokens else None)], None)


def test_the_search_check_catches_an_index_that_keeps_the_earliest_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the equality above."""
    text = [1, 2, 7, 1, 2, 8, 1, 2]
    assert proposal(text, 1).tokens.tolist() == searched(text, 1, 5, 1) == [8]
    monkeypatch.setattr(NgramDrafter, "keep_first", True)
    assert proposal(text, 1).tokens.tolist() == [7]


@given(st.lists(st.integers(0, 2), min_size=2, max_size=9))
def test_full_tables_tell_n_grams_apart(tokens: list[int]) -> None:
    """With hardly a free slot, nearly every look-up passes other n-grams before it finds its own."""
    text, table = np.array(tokens, np.int32), np.full(32, -1, np.int64)
    index_ngrams(text, (0, len(text) - 1), (1, 3), False, table)
    position = longest_match(text, len(text), (1, 3), table)
    assert ([tokens[position + 1]] if position >= 0 else []) == searched(tokens, 1, 3, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_lookup_max": 0},
        {"prompt_lookup_min": 3, "prompt_lookup_max": 2},
        {"prompt_lookup_min": 0},
        {"prompt_lookup_max": 33},
        {"prompt_lookup_max": 2.5},
        {"prompt_lookup_max": True},
        {"num_speculative_tokens": -1},
    ],
)
def test_bad_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"must be"):
        NgramDrafter(ARGS, **options)


@pytest.mark.parametrize(
    ("options", "lengths"), [({}, (1, 5)), ({"prompt_lookup_min": 7}, (7, 7)), ({"prompt_lookup_max": 3}, (1, 3))]
)
def test_lengths_that_are_left_out(options: dict[str, Any], lengths: tuple[int, int]) -> None:
    drafter = NgramDrafter(ARGS, **options)
    assert drafter.lengths == lengths
