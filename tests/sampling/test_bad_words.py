"""Bad words: which token sequences a word is, and which tokens would complete one."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from sampling.slow_rules import TEXTS, VOCAB, WORDS
from transformers import NoBadWordsLogitsProcessor

from paceline.checkpoints import Tokenizer
from paceline.errors import ConfigError
from paceline.llm import BUNDLED
from paceline.sampling import bad_word_token_ids
from paceline.sampling.logit_rules import BadWords


def forbidden(words: Sequence[Sequence[int]], generated: Sequence[int], path: Sequence[int]) -> list[int]:
    """Tokens at -inf at the end of a path."""
    rows = torch.zeros(1, VOCAB)
    BadWords(words).apply(rows, [path], generated)
    return (rows[0] == -math.inf).nonzero()[:, 0].tolist()


TABLE = {"cat": [3], " cat": [4], "Dursley": [5, 6, 7], " Dursley": [8, 7], "x": [9], " x": [9]}


def test_words_are_forbidden_with_and_without_a_space_before() -> None:
    assert bad_word_token_ids(["cat"], TABLE.__getitem__) == [(3,), (4,)]
    assert bad_word_token_ids(["  cat"], TABLE.__getitem__) == [(3,), (4,)]


def test_spellings_of_different_length_are_both_kept_and_equal_ones_once() -> None:
    assert bad_word_token_ids(["Dursley", "x", "x"], TABLE.__getitem__) == [(5, 6, 7), (8, 7), (9,)]


def test_a_word_of_spaces_is_taken_as_it_is() -> None:
    assert bad_word_token_ids(["  "], {"  ": [1]}.__getitem__) == [(1,)]


def test_no_tokenizer_and_no_tokens_are_rejected() -> None:
    with pytest.raises(ConfigError, match="bad_words needs a tokenizer"):
        bad_word_token_ids(["cat"], None)
    with pytest.raises(ConfigError, match="bad_words must have tokens"):
        bad_word_token_ids(["\u0000"], lambda text: [])


def test_a_word_that_is_no_unicode_is_named() -> None:
    with pytest.raises(ConfigError, match=r"bad_words must be valid Unicode, got '\\ud800'"):
        bad_word_token_ids(["cat", "\ud800"], Tokenizer.load(BUNDLED / "target").encode)


def test_the_prefix_may_reach_from_the_text_into_the_path() -> None:
    words = [(1,), (1, 2, 3), (2, 4), (5, 5)]
    assert forbidden(words, [9, 1], [2]) == [1, 3, 4]
    assert forbidden(words, [1, 9], [2]) == [1, 4]
    assert forbidden(words, [5], []) == [1, 5]
    assert forbidden(words, [], []) == [1]
    assert forbidden(words, [], [1, 2, 9]) == [1]


@settings(max_examples=100, deadline=None)
@given(words=WORDS.filter(bool), text=TEXTS.filter(bool))
def test_the_forbidden_tokens_are_those_of_transformers(words, text) -> None:
    theirs = NoBadWordsLogitsProcessor([list(word) for word in words])(torch.tensor([text]), torch.zeros(1, VOCAB))
    half = len(text) // 2
    assert forbidden(words, text[:half], text[half:]) == (theirs[0] == -math.inf).nonzero()[:, 0].tolist()
