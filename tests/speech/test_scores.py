"""Statistics of a window: by hand, and as transformers computes them."""

from __future__ import annotations

import math

import pytest
import torch
from speech.toy_whisper import DE, EN, END, HAW, NO_SPEECH, TOKENS, VOCAB, A, B, time, write
from transformers import WhisperForConditionalGeneration

from paceline.speech.scores import average_logprob, compression_ratio, language_probabilities, no_speech_probability
from paceline.speech.whisper_rule import WhisperRule
from paceline.speech.whisper_tokens import WhisperTokens


def test_the_language_is_the_likeliest_among_languages() -> None:
    logits = torch.zeros(VOCAB)
    logits[A], logits[DE], logits[HAW], logits[EN] = 50.0, math.log(6), math.log(3), math.log(1)
    found = language_probabilities(logits, TOKENS)
    assert list(found) == ["de", "haw", "en"]
    assert list(found.values()) == pytest.approx([0.6, 0.3, 0.1])


def test_an_english_model_hears_english(tmp_path: object) -> None:
    english = WhisperTokens.load(write(tmp_path, multilingual=False))  # type: ignore[arg-type]
    assert language_probabilities(torch.zeros(VOCAB), english) == {"en": 1.0}


def test_silence_is_a_probability_among_all_tokens() -> None:
    logits = torch.full((VOCAB,), -math.inf)
    logits[NO_SPEECH], logits[A] = math.log(3), 0.0
    assert no_speech_probability(logits, TOKENS) == pytest.approx(0.75)


SAMPLED = [time(1), A, B, time(7), END]


def likely() -> torch.Tensor:
    """Random logits under which what was sampled is likely."""
    logits = torch.randn(len(SAMPLED), VOCAB, generator=torch.Generator().manual_seed(3))
    logits[torch.arange(len(SAMPLED)), SAMPLED] += 8.0
    return logits


def published(logits: torch.Tensor) -> float:
    """transformers' mean, of the rows that it sampled from."""
    rows = logits.clone()
    WhisperRule(TOKENS).apply(rows, [SAMPLED[:count] for count in range(len(SAMPLED))], ())
    mean = WhisperForConditionalGeneration._retrieve_avg_logprobs  # private: the published measure
    return float(mean(list(rows), torch.tensor(SAMPLED), 0.0))


def test_the_mean_counts_the_end_and_the_rule() -> None:
    logits = likely()
    kept = logits.clone()
    found = average_logprob(WhisperRule(TOKENS), logits, SAMPLED, TOKENS)
    assert found == pytest.approx(published(logits), rel=1e-5)
    assert torch.equal(logits, kept)
    raw = logits.log_softmax(1)[torch.arange(len(SAMPLED)), SAMPLED].mean()
    assert abs(found - float(raw)) > 0.05, "without the rule it is another number"


def test_a_text_that_was_cut_counts_its_end_all_the_same() -> None:
    logits = likely()
    whole = average_logprob(WhisperRule(TOKENS), logits, SAMPLED, TOKENS)
    cut = average_logprob(WhisperRule(TOKENS), logits[:-1], SAMPLED[:-1], TOKENS)
    rows = logits[-1:].clone()
    WhisperRule(TOKENS).apply(rows, [SAMPLED[:-1]], ())
    assert cut * 5 == pytest.approx(whole * 5 - float(rows.log_softmax(1)[0, END]), rel=1e-5)


def test_text_that_repeats_itself_is_compressed_well() -> None:
    assert compression_ratio("") == 0.0
    assert compression_ratio("The quick brown fox jumps over the lazy dog.") < 1.0
    assert compression_ratio("and then " * 50) > 2.4
    assert compression_ratio("é" * 10) == pytest.approx(20 / 12, abs=0.2), "bytes, not characters"
