"""Rules: order of the steps, what is trivial, contradictions, errors. Rows along paths have their own file beside this
one.
"""

import math

import pytest
import torch
from sampling.slow_rules import VOCAB, random_logits
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from paceline.config import SamplingParams
from paceline.errors import ConfigError
from paceline.sampling import Rules
from paceline.tree import EMPTY_TREE, TokenTree


def test_order_matches_transformers_where_both_have_the_rule() -> None:
    params = SamplingParams(temperature=0.6, top_k=5, repetition_penalty=1.4)
    prompt, output = [1, 2, 3], [4, 5, 4]
    rules = Rules(params, vocab_size=VOCAB, prompt=prompt)
    rules.advance(output)
    theirs = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.4), TemperatureLogitsWarper(0.6), TopKLogitsWarper(5)]
    )
    for seed in range(20):
        logits = torch.from_numpy(random_logits(seed, 1, ties=False))
        expected = theirs(torch.tensor([prompt + output]), logits.clone())
        torch.testing.assert_close(rules.apply(logits, EMPTY_TREE), expected)


def test_min_p_comes_before_top_p_and_top_k_before_top_p() -> None:
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1]])

    def kept(**options: float) -> list[int]:
        rules = Rules(SamplingParams(**options), vocab_size=4, prompt=[])
        return (rules.apply(probabilities.log(), EMPTY_TREE)[0] > -math.inf).nonzero()[:, 0].tolist()

    assert kept(top_p=0.55) == [0, 1]
    assert kept(top_p=0.55, top_k=2) == [0]  # 0.4 of 0.7 left is above 0.55
    assert kept(top_p=0.55, min_p=0.6) == [0]
    assert kept(top_p=0.75) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "trivial"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 1e-6, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, True),
        ({"temperature": 0.0, "min_tokens": 2, "stop_token_ids": [5]}, False),
        ({"temperature": 0.0, "min_tokens": 2}, True),
        ({"temperature": 0.0, "logit_bias": {1: 2.0}}, False),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, False),
        ({"temperature": 0.0, "presence_penalty": 0.1}, False),
        ({"temperature": 0.0, "frequency_penalty": 0.1}, False),
        ({"temperature": 1.0}, False),
    ],
)
def test_trivial_is_greedy_without_rules(options: dict, trivial: bool) -> None:
    params = SamplingParams(**options)
    rules = Rules(params, vocab_size=VOCAB, prompt=[1], stop_ids=params.stop_token_ids)
    assert rules.trivial == trivial
    if trivial:
        logits = torch.from_numpy(random_logits(0, 1, ties=False))
        assert rules.apply(logits, EMPTY_TREE) is not None
        assert rules.apply(logits, EMPTY_TREE).data_ptr() == logits.data_ptr()
    assert not Rules(SamplingParams(temperature=0.0), vocab_size=VOCAB, prompt=[], bad_word_ids=[(3,)]).trivial


def test_min_tokens_counts_the_path() -> None:
    rules = Rules(SamplingParams(temperature=0.0, min_tokens=3), vocab_size=VOCAB, prompt=[1, 2], stop_ids=[7, 8])
    rules.advance([4])
    rows = rules.apply(torch.zeros(4, VOCAB), TokenTree.chain([1, 2, 3]))
    assert (rows == -math.inf).nonzero().tolist() == [[0, 7], [0, 8], [1, 7], [1, 8]]


def test_min_tokens_beats_a_bias_on_the_stop_token() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=1, logit_bias={7: 100.0}, stop_token_ids=[7])
    rules = Rules(params, vocab_size=VOCAB, prompt=[], stop_ids=[7])
    assert float(rules.apply(torch.zeros(1, VOCAB), EMPTY_TREE)[0, 7]) == -math.inf
    rules.advance([1])
    assert int(rules.apply(torch.zeros(1, VOCAB), EMPTY_TREE).argmax()) == 7


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_contradictory_rules_give_rows_of_nothing_but_minus_infinity(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=1, min_p=0.5, logit_bias={0: 100.0})
    rules = Rules(params, vocab_size=3, prompt=[], bad_word_ids=[(0,), (1,), (2,)])
    assert (rules.apply(torch.zeros(2, 3), TokenTree.chain([1])) == -math.inf).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_stay_in_their_row(bad: float) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.5, top_k=3, min_p=0.1)
    rules = Rules(params, vocab_size=VOCAB, prompt=[])
    logits = torch.from_numpy(random_logits(0, 2, ties=False))
    clean = rules.apply(logits, TokenTree.chain([1]))
    logits[0, 4] = bad
    rows = rules.apply(logits, TokenTree.chain([1]))
    assert torch.equal(rows[1], clean[1])
    assert not math.isfinite(float(rows[0, 4]))
    assert float(rows[0, 4]) != -math.inf


@pytest.mark.parametrize(
    ("options", "words", "name"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, (), "logit_bias"),
        ({"stop_token_ids": [VOCAB + 3]}, (), "stop_token_ids"),
        ({}, ((1, VOCAB),), "bad_words"),
        ({}, ((),), "bad_words"),
    ],
)
def test_ids_outside_the_vocabulary_are_rejected_by_name(options: dict, words: tuple, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} must "):
        Rules(SamplingParams(**options), vocab_size=VOCAB, prompt=[], bad_word_ids=words)


def test_end_tokens_that_the_vocabulary_lacks_are_left_out() -> None:
    rules = Rules(SamplingParams(temperature=0.0, min_tokens=1), vocab_size=VOCAB, prompt=[], stop_ids=[VOCAB + 1, 2])
    assert (rules.apply(torch.zeros(1, VOCAB), EMPTY_TREE) == -math.inf).nonzero().tolist() == [[0, 2]]


def test_misuse_is_an_error() -> None:
    rules = Rules(SamplingParams(), vocab_size=VOCAB, prompt=[])
    with pytest.raises(ValueError, match="cannot rewind 1 of 0"):
        rules.rewind(1)
    with pytest.raises(ValueError, match=r"must have shape \(2, 23\)"):
        rules.apply(torch.zeros(1, VOCAB), TokenTree.chain([1]))
    with pytest.raises(ValueError, match=r"must have shape \(1, 23\)"):
        rules.apply_paths(torch.zeros(1, VOCAB + 1), [()])


def test_tensors_of_inference_mode_and_views_are_fine() -> None:
    rules = Rules(SamplingParams(temperature=0.5, top_p=0.9, logit_bias={1: 1.0}), vocab_size=VOCAB, prompt=[])
    plain = torch.from_numpy(random_logits(0, 3, ties=False))
    with torch.inference_mode():
        inside = plain.clone()
    wide = torch.stack([plain, plain], dim=-1)[..., 0]
    tree = TokenTree.chain([1, 2])
    expected = rules.apply(plain, tree)
    for logits in (inside, wide, plain.clone().requires_grad_()):
        assert torch.equal(rules.apply(logits, tree), expected)


def test_min_tokens_reached_by_every_path_forbids_nothing() -> None:
    rules = Rules(SamplingParams(temperature=0.0, max_tokens=9, min_tokens=3), vocab_size=8, prompt=[1], stop_ids=[2])
    rows = rules.apply_paths(torch.zeros(2, 8), [(1, 3, 4), (5, 6, 7, 3)])
    assert torch.isfinite(rows).all()
    assert torch.isinf(rules.apply_paths(torch.zeros(2, 8), [(1, 3), (5, 6, 7)])[0, 2])
