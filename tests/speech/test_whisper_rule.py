"""Whisper's rules: the published cases, transformers' processors on random logits, and every path of a tree."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from speech.toy_whisper import END, NO_TIMES, T0, TOKENS, VOCAB, A, B, time
from transformers import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from paceline import SamplingParams
from paceline.sampling import Rules
from paceline.speech import whisper_rule
from paceline.speech.whisper_rule import WhisperRule, forbidden_ranges
from paceline.tree import TokenTree

TEXT = {token for token in range(10) if token != 1}


def possible(sampled: Sequence[int]) -> tuple[set[int], set[int]]:
    """Text and end, and steps of time, that ids alone permit."""
    rows = torch.zeros(1, VOCAB)
    rows[0, T0:] = -30.0  # so unlikely together that no time must come
    WhisperRule(TOKENS).apply(rows, [sampled], ())
    found = (rows[0] > -math.inf).nonzero()[:, 0].tolist()
    return {token for token in found if token <= END}, {token - T0 for token in found if token >= T0}


def test_the_first_token_is_an_early_time() -> None:
    assert possible([]) == (set(), set(range(51)))


def test_text_follows_the_first_time() -> None:
    assert possible([time(0)]) == (TEXT | {END}, set())


def test_behind_text_comes_text_the_end_or_a_later_time() -> None:
    assert possible([time(0), A]) == (TEXT | {END}, set(range(1, 1501)))


def test_a_time_behind_text_is_repeated_or_ends_the_window() -> None:
    assert possible([time(0), A, time(5)]) == ({END}, set(range(5, 1501)))


def test_behind_a_pair_comes_text_again() -> None:
    assert possible([time(0), A, time(5), time(5)]) == (TEXT | {END}, set())
    assert possible([time(0), A, time(5), time(7), B]) == (TEXT | {END}, set(range(8, 1501)))


def test_without_times_only_lists_count() -> None:
    rows = torch.zeros(2, VOCAB)
    WhisperRule(TOKENS, timestamps=False).apply(rows, [(), (A,)], ())
    banned = [set((row == -math.inf).nonzero()[:, 0].tolist()) for row in rows]
    assert banned == [{*TOKENS.suppressed, 0, END}, set(TOKENS.suppressed)]


@pytest.mark.parametrize(("text", "comes"), [(2.0, "time"), (4.0, "text")])
def test_a_time_comes_where_all_times_together_are_likelier_than_every_text_token(text: float, comes: str) -> None:
    rows = torch.full((1, VOCAB), -9.0)
    rows[0, A], rows[0, time(5) : time(25)] = text, 0.0  # ln 20 is 2.996
    WhisperRule(TOKENS).apply(rows, [(time(0), B)], ())
    assert (float(rows[0, A]) == -math.inf) == (comes == "time")
    assert float(rows[0, time(7)]) == 0.0


# ------------------------------------------------------------------------------------------------ transformers


def published(logits: torch.Tensor, sampled: Sequence[int]) -> torch.Tensor:
    """What transformers makes of a row."""
    prompt = TOKENS.prompt(language="en")
    settings = SimpleNamespace(
        no_timestamps_token_id=NO_TIMES,
        eos_token_id=END,
        bos_token_id=END,
        max_initial_timestamp_index=TOKENS.max_initial,
    )
    ids, row = torch.tensor([[*prompt, *sampled]]), logits[None]
    for processor in (
        SuppressTokensAtBeginLogitsProcessor(TOKENS.suppressed_at_begin, begin_index=len(prompt)),
        SuppressTokensLogitsProcessor(TOKENS.suppressed),
        WhisperTimeStampLogitsProcessor(settings, begin_index=len(prompt)),
    ):
        row = processor(ids, row)
    return row[0]


def random_prefix(draw: random.Random) -> list[int]:
    """Mostly such as the rules permit, since a model that is held to them comes nowhere else."""
    sampled, step = [], 0
    while len(sampled) < 12 and draw.random() < 0.9:
        kind = draw.random()
        if kind < 0.5:
            sampled.append(draw.choice((A, B)))
        else:
            step += draw.choice((0, 1, 3)) if kind < 0.95 else 0
            sampled.append(time(step))
    return sampled


def cases(count: int) -> list[tuple[torch.Tensor, list[int]]]:
    draw, noise = random.Random(5), torch.Generator().manual_seed(5)
    found = []
    for _ in range(count):
        logits = torch.randn(VOCAB, generator=noise) * 3
        logits[:T0] += draw.choice((0.0, 6.0, 12.0))
        found.append((logits, random_prefix(draw)))
    return found


def wrong(count: int = 300) -> int:
    """In how many cases the rule differs from transformers."""
    different = 0
    for logits, sampled in cases(count):
        rows = logits[None].clone()
        WhisperRule(TOKENS).apply(rows, [sampled], ())
        different += not torch.equal(rows[0], published(logits, sampled))
    return different


def test_rows_are_those_of_transformers() -> None:
    assert wrong() == 0


def test_the_check_catches_segments_without_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(sampled: Sequence[int], tokens: object) -> list[tuple[int, int]]:
        *ranges, (low, high) = forbidden_ranges(sampled, TOKENS)
        return [*ranges, (low, high - 1)]

    monkeypatch.setattr(whisper_rule, "forbidden_ranges", lenient)
    assert wrong() > 10


# ------------------------------------------------------------------------------------------------ trees


def rules() -> Rules:
    params = SamplingParams(temperature=0.0)
    return Rules(params, vocab_size=VOCAB, prompt=TOKENS.prompt(language="en"), constraint=WhisperRule(TOKENS))


TREE = TokenTree.build([time(2), A, time(4), time(4), B, time(3)], [-1, 0, 1, 2, 0, 4])


def test_every_node_has_the_row_of_a_state_that_went_there() -> None:
    logits = torch.randn(1 + len(TREE), VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    logits[:, :T0] += 12.0  # or times would be likelier everywhere
    together = rules().apply(logits, TREE)
    for row in range(1 + len(TREE)):
        alone = rules()
        alone.advance([int(TREE.tokens[node]) for node in TREE.path(row - 1)] if row else [])
        assert torch.equal(together[row], alone.apply(logits[row : row + 1], TokenTree.chain([]))[0])
    assert len({tuple((row == -math.inf).tolist()) for row in together}) > 4


def test_drafts_that_cannot_come_are_cut() -> None:
    state = rules()
    tree = TokenTree.build([A, time(2), A, time(1), time(9), time(9)], [-1, -1, 1, 2, 2, 4])
    assert state.possible(tree).tokens.tolist() == [time(2), A, time(9), time(9)]
    state.advance([time(2), A])
    again = state.fork()
    state.advance([time(9)])
    assert state.possible(TokenTree.chain([time(9), A])).tokens.tolist() == [time(9), A]
    assert len(state.possible(TokenTree.chain([A]))) == 0
    assert again.possible(TokenTree.chain([A])).tokens.tolist() == [A]
    state.rewind(1)
    assert state.possible(TokenTree.chain([A])).tokens.tolist() == [A]
