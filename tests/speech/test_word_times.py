"""Word times: the warped path of the published code, transformers' times of tokens, words made of tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration
from transformers.models.whisper import generation_whisper
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from paceline.speech.transcript import Word
from paceline.speech.word_times import (
    FloatArray,
    IntArray,
    median_filter,
    split_words,
    text_starts,
    timed_words,
    token_matrix,
    token_starts,
    warp,
    within_audio,
)

WEIGHTS = np.array([[3, 3, 0, 0, 0], [0, 0, 3, 0, 0], [0, 0, 0, 3, 3]], dtype=np.float64)

# ------------------------------------------------------------------------------------------------ warping


def test_the_path_of_equal_costs_goes_right_first() -> None:
    tokens, positions = warp(-WEIGHTS)
    assert list(zip(tokens.tolist(), positions.tolist(), strict=True)) == [
        *((0, 0), (0, 1), (1, 1), (1, 2)),
        *((2, 2), (2, 3), (2, 4)),
    ]
    assert token_starts(WEIGHTS).tolist() == pytest.approx([0.0, 0.02, 0.04])


def published(cost: FloatArray) -> tuple[IntArray, IntArray]:
    tokens, positions = generation_whisper._dynamic_time_warping(cost)  # private: the published algorithm
    return tokens, positions


def diagonal_first(cost: FloatArray) -> tuple[IntArray, IntArray]:
    """Wrong on purpose: of equal costs the step to the next token and position is taken."""
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0
    came = {}
    for i in range(1, rows + 1):
        for j in range(1, columns + 1):
            before = [(i - 1, j - 1), (i - 1, j), (i, j - 1)]
            came[i, j] = min(before, key=lambda cell: total[cell])
            total[i, j] = cost[i - 1, j - 1] + total[came[i, j]]
    cell, path = (rows, columns), []
    while cell != (0, 0):
        path.append((cell[0] - 1, cell[1] - 1))
        cell = came[cell]
    tokens, positions = np.array(path[::-1]).T
    return tokens, positions


def matrices() -> list[FloatArray]:
    """Random ones, half of them with many equal values."""
    noise = np.random.default_rng(0)
    shapes = [(1, 1), (1, 7), (6, 1), (5, 5), (4, 30), (20, 8), (12, 60)] * 3
    return [
        np.round(noise.normal(size=shape)) if place % 2 else noise.normal(size=shape)
        for place, shape in enumerate(shapes)
    ]


def same(one: tuple[IntArray, IntArray], other: tuple[IntArray, IntArray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_paths_are_those_of_transformers() -> None:
    assert all(same(warp(cost), published(cost)) for cost in matrices())


def test_the_check_catches_another_order_of_equal_costs() -> None:
    assert not same(diagonal_first(-WEIGHTS), published(-WEIGHTS))
    assert sum(not same(diagonal_first(cost), published(cost)) for cost in matrices()) > 3


@pytest.mark.parametrize("length", [1, 3, 4, 9, 50])
def test_medians_are_those_of_transformers(length: int) -> None:
    values = torch.randn(2, 3, length, generator=torch.Generator().manual_seed(length))
    expected = generation_whisper._median_filter(values, 7)  # private: the published filter
    assert torch.equal(median_filter(values, 7), expected)


def attention(heads: int, rows: int, columns: int) -> torch.Tensor:
    """Random attention that moves on with the tokens."""
    noise = torch.randn(heads, rows, columns, generator=torch.Generator().manual_seed(rows))
    near = torch.arange(columns)[None] - torch.arange(rows)[:, None] * columns / rows
    return (noise - near.abs() / 3).softmax(-1)


@pytest.mark.parametrize(("prompt", "frames"), [(0, 200), (4, 200), (4, 120)])
def test_times_of_tokens_are_those_of_transformers(prompt: int, frames: int) -> None:
    weights = attention(3, 17, 100)
    heads = [[0, 1], [1, 0], [1, 1]]
    layers = torch.zeros(2, 1, 2, 17, 100)
    for head, (layer, place) in enumerate(heads):
        layers[layer, 0, place] = weights[head]
    outputs = SimpleNamespace(cross_attentions=[tuple(layers)], sequences=torch.zeros(1, 18))
    model = SimpleNamespace(config=SimpleNamespace(decoder_layers=2, median_filter_width=7))
    times = WhisperForConditionalGeneration._extract_token_timestamps  # private: the published times
    expected = times(model, _Outputs(outputs), heads, num_frames=frames, num_input_ids=prompt)[0, prompt:-1]
    found = token_starts(token_matrix(weights[:, prompt:, : frames // 2]))
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert len(set(found.tolist())) > 7


class _Outputs:
    """What transformers asks of the outputs of a generation."""

    def __init__(self, values: SimpleNamespace) -> None:
        self.cross_attentions, self.sequences = values.cross_attentions, values.sequences

    def __contains__(self, key: str) -> bool:
        return False


def test_a_text_begins_where_the_token_before_it_looks() -> None:
    """Six rows: two of the prompt, the second of which sees the first word; three of text; the end."""
    weights = torch.full((2, 6, 400), 1e-4)
    for row, (low, high) in enumerate([(0, 400), (0, 100), (100, 150), (150, 200), (200, 300), (300, 400)]):
        weights[:, row, low:high] = 1.0
    weights /= weights.sum(-1, keepdim=True)
    starts = text_starts(weights, 2, 600)
    assert starts.tolist() == pytest.approx([0.0, 2.0, 3.0, 4.0], abs=0.1)


def test_padding_takes_no_attention() -> None:
    weights = attention(1, 4, 50)
    cut = within_audio(weights, 60)
    assert cut.shape == (1, 4, 30)
    assert torch.allclose(cut.sum(-1), torch.ones(1, 4))
    assert torch.allclose(cut, weights[..., :30] / weights[..., :30].sum(-1, keepdim=True))


# ------------------------------------------------------------------------------------------------ words

PIECES = [piece.encode() for piece in (" Hel", "lo", ",", " world", ".", ' "', " So", '"', " na", "-")]
PIECES += ["é".encode()[:1], "é".encode()[1:], "日本".encode()[:2], "日本".encode()[2:], "語".encode()]


def decode(tokens: Sequence[int], **options: object) -> str:
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


def test_words_are_parts_between_blanks() -> None:
    assert split_words([0, 1, 2, 3, 4], decode, "en") == [(" Hello", 2), (",", 1), (" world", 1), (".", 1)]
    assert split_words([8, 10, 11], decode, "en") == [(" naé", 3)], "half characters are put together"
    assert split_words([8, 10], decode, "en") == [(" na\ufffd", 2)]
    assert split_words([12, 13, 14], decode, "ja") == [("日本", 2), ("語", 1)]


@pytest.mark.parametrize(("code", "name"), [("en", "english"), ("ja", "japanese")])
def test_words_with_their_signs_are_those_of_transformers(code: str, name: str) -> None:
    tokenizer = SimpleNamespace(decode=decode, eos_token_id=100, language=name)
    draw = random.Random(1)
    joined = 0
    for _ in range(300):
        tokens = [draw.randrange(len(PIECES)) for _ in range(draw.randint(1, 9))]
        expected, *_ = _combine_tokens_into_words(tokenizer, list(tokens), name)
        count = len(tokens)
        (found,) = timed_words([tokens], np.arange(count + 1.0), np.ones(count), decode, language=code)
        assert [word.text for word in found] == expected
        joined += len(found) < len(split_words(tokens, decode, code))
    assert joined > 20


def test_words_begin_with_their_first_token_and_end_where_the_next_begins() -> None:
    starts, chances = [0.0, 0.3, 0.5, 0.6, 1.2, 1.4], [0.5, 0.7, 0.9, 0.4, 0.8]
    first, second = timed_words([[0, 1, 2], [3, 4]], starts, chances, decode, language="en", offset=30.0)
    assert first == (Word(" Hello,", 30.0, 30.5, probability=pytest.approx(0.6)),)
    assert second == (Word(" world.", 30.6, 31.2, probability=pytest.approx(0.4)),)


def test_a_pause_behind_a_sentence_belongs_to_no_word() -> None:
    tokens, chances = [0, 1, 3, 4, 6, 8], [1.0] * 6
    starts = [0.0, 0.2, 0.4, 0.8, 4.8, 9.0, 9.4]  # the full stop lasts 4 s and the word after it as long
    (words,) = timed_words([tokens], starts, chances, decode, language="en")
    assert [(word.text, word.start, word.end) for word in words] == [
        (" Hello", 0.0, 0.4),
        (" world.", 0.4, 0.8),
        (" So", pytest.approx(9.0 - 0.8), 9.0),
        (" na", 9.0, 9.4),
    ]


def test_no_text_has_no_words() -> None:
    assert timed_words([[], []], [0.0], [], decode, language="en") == [(), ()]
