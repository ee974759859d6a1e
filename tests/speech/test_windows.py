"""Windows are cut into segments, and the next one begins, as published and as transformers does."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from speech.toy_whisper import T0, TOKENS, A, B, time, words
from transformers import WhisperForConditionalGeneration

from paceline.speech import windows
from paceline.speech.fallback import Attempt
from paceline.speech.transcript import Segment
from paceline.speech.windows import PreviousText, split_window, window_segments


def test_a_window_is_cut_where_two_times_meet() -> None:
    pieces, step = split_window([time(0), A, time(5), time(5), B, time(9)], TOKENS, 3000)
    assert pieces == [(0, 10, (time(0), A, time(5))), (10, 18, (time(5), B, time(9)))]
    assert step == 3000, "nobody speaks behind the last time"


def test_what_does_not_end_in_a_window_is_decoded_again_in_the_next() -> None:
    pieces, step = split_window([time(0), A, time(5), time(5), B], TOKENS, 3000)
    assert pieces == [(0, 10, (time(0), A, time(5)))]
    assert step == 10


def test_a_window_without_a_pair_is_one_segment() -> None:
    assert split_window([time(0), A, time(7)], TOKENS, 3000) == ([(0, 14, (time(0), A, time(7)))], 3000)
    assert split_window([time(0), A], TOKENS, 1234) == ([(0, 1234, (time(0), A))], 1234)
    assert split_window([A, B], TOKENS, 3000) == ([(0, 3000, (A, B))], 3000)
    assert split_window([], TOKENS, 500) == ([(0, 500, ())], 500)


def test_the_next_window_always_begins_later() -> None:
    assert split_window([time(0), time(0), A], TOKENS, 700)[1] == 700


def published(sampled: Sequence[int], frames: int) -> tuple[list[tuple[float, float, list[int]]], int]:
    """transformers' segments; it leaves the second time of an unfinished pair on the segment before."""
    cut = WhisperForConditionalGeneration._retrieve_segment  # private: the published algorithm
    segments, step = cut(
        seek_sequence=torch.tensor(sampled),
        seek_outputs=[torch.tensor(sampled)],
        time_offset=torch.tensor([0.0], dtype=torch.float64),
        timestamp_begin=T0,
        seek_num_frames=torch.tensor([frames]),
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 3),
    )
    found = [(float(one["start"]), float(one["end"]), one["tokens"].tolist()) for one in segments]
    is_time = [token >= T0 for token in sampled]
    if [True, True] in [is_time[place : place + 2] for place in range(len(sampled))] and is_time[-2:] != [False, True]:
        found[-1][2].pop()
    return found, int(step)


def sample(draw: random.Random) -> list[int]:
    """Some segments, and an ending: of a pair, of a single time, or of text."""
    step, found = draw.randint(0, 40), []
    for _ in range(draw.randint(0, 4)):
        found += [time(step), A, B]
        step += draw.randint(1, 200)
        found.append(time(step))
    rest = [time(step), *([B] * draw.randint(0, 3))]
    return found + draw.choice(([time(step)], rest, [*rest, B, time(step + 9)], [time(step), B] if not found else []))


def different(count: int = 300) -> int:
    draw, wrong = random.Random(2), 0
    for _ in range(count):
        sampled, frames = sample(draw), draw.choice((3000, 2999, 1500))
        pieces, step = split_window(sampled, TOKENS, frames)
        mine = [(begin / 100, end / 100, list(tokens)) for begin, end, tokens in pieces]
        theirs, their_step = published(sampled, frames)
        wrong += step != their_step or len(mine) != len(theirs)
        wrong += any(
            a[2] != b[2] or abs(a[0] - b[0]) > 0.011 or abs(a[1] - b[1]) > 0.011
            for a, b in zip(mine, theirs, strict=False)
        )
    return wrong


def test_segments_are_those_of_transformers() -> None:
    assert different() == 0


def test_the_check_catches_steps_that_are_taken_for_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "FRAMES_PER_STEP", 1)
    assert different() > 100


ATTEMPT = Attempt(
    tokens=(time(0), A, time(50), time(50), time(50), B, time(100)),
    text=" w3 w4",
    temperature=0.2,
    avg_logprob=-0.5,
    no_speech_prob=0.1,
)


def test_segments_carry_times_of_the_whole_audio_and_their_window() -> None:
    first, second = window_segments(ATTEMPT, TOKENS, words, 6000, 3000)[0]
    assert (first.start, first.end, first.text) == (60.0, 61.0, " w3")
    assert (second.start, second.end, second.text) == (61.0, 62.0, " w4")
    assert (first.seek, first.temperature, first.avg_logprob) == (6000, 0.2, -0.5)
    assert first.compression_ratio == ATTEMPT.compression_ratio
    assert first.tokens == (time(0), A, time(50))


def segment(*tokens: int) -> Segment:
    return Segment(start=0.0, end=1.0, text="", tokens=tokens)


def test_a_window_is_told_of_the_text_before_it() -> None:
    previous = PreviousText([7])
    previous.add([segment(time(0), A), segment(B)], 0.0)
    assert previous.tokens == [7, time(0), A, B]
    previous.add([segment(A)], 0.6)
    assert previous.tokens == [], "what was decoded at a high temperature is not told"
    previous.add([segment(B)], 0.4)
    assert previous.tokens == [B]


def test_windows_can_be_told_nothing() -> None:
    previous = PreviousText([7], kept=False)
    assert previous.tokens == [7]
    previous.add([segment(A)], 0.0)
    assert previous.tokens == []
