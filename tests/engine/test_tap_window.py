"""Drafters that want the states of a prompt's end get these, and cost no more of its beginning than that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tap_readers import CONTEXTS, SEEN
from tiny_checkpoint import write

from paceline import LLM, SamplingParams
from paceline.models.state.window_slots import BLOCK

PROMPT = [5 + (7 * i) % 90 for i in range(100)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write(Path(tmp_path_factory.mktemp("tiny")), max_position_embeddings=512)
    options = {"speculative_config": None, "exactness": "strict", "threads": 1, "max_num_batched_tokens": 40}
    return LLM(str(folder), **options)


@pytest.fixture(scope="module")
def states(plain: LLM) -> torch.Tensor:
    """Of every token of the prompt but the last, behind layer 1."""
    return plain.runner.extend([plain.runner.open()], [PROMPT[:-1]], taps=(1,)).taps[1]


def read(
    plain: LLM, window: int | None, prompts: Sequence[Sequence[int]], again: int | None = None
) -> list[int | None]:
    """Cached tokens of each prompt, one after the other; what drafters saw is in SEEN."""
    SEEN.clear()
    CONTEXTS.clear()
    llm = plain.with_speculative_config(
        {"method": "tap_readers:Reader", "window": window, "again": again, "num_speculative_tokens": 2}
    )
    found = [llm.generate([{"prompt_token_ids": list(ids)}], PARAMS)[0] for ids in prompts]
    assert not any(one.metrics.dropped_drafters for one in found)
    return [one.num_cached_tokens for one in found]


@pytest.mark.parametrize("window", [0, 1, 30, 99, 500, None])
def test_the_windows_states_are_those_of_a_whole_pass(plain: LLM, states: torch.Tensor, window: int | None) -> None:
    """The prompt is fed in three chunks, the second time behind what is kept of it."""
    kept = read(plain, window, [PROMPT, PROMPT])[1]
    count = 99 if window is None else min(window, 99)
    assert kept == (99 - count) // BLOCK * BLOCK
    assert len(SEEN) == 2
    for found in SEEN:
        assert torch.equal(found, states[99 - count :])
        assert not torch.equal(found, states[98 - count : 98]) or not count  # one token off shows


@pytest.mark.parametrize(("window", "again"), [(80, 10), (None, 30)])
def test_of_a_kept_prompt_less_is_read_again(plain: LLM, window: int | None, again: int) -> None:
    prompt = [token + again for token in PROMPT]  # which no other test has read
    kept = read(plain, window, [prompt, prompt], again)[1]
    assert kept == (99 - again) // BLOCK * BLOCK > 0
    states = plain.runner.extend([plain.runner.open()], [prompt[:-1]], taps=(1,)).taps[1]
    first, second = SEEN
    assert torch.equal(first, states if window is None else states[-window:])
    assert torch.equal(second, states[kept:])


def test_prompts_that_begin_alike_share_what_lies_before_the_window(plain: LLM) -> None:
    other = [*PROMPT[:80], *(token + 1 for token in PROMPT[80:])]
    shared = read(plain, 10, [PROMPT, other])[1]
    assert shared == 80 // BLOCK * BLOCK > 0
    assert read(plain, None, [PROMPT, other])[1] == 0


def test_states_are_given_up_when_drafters_have_begun(plain: LLM) -> None:
    read(plain, None, [PROMPT])
    assert len(CONTEXTS) == 1
    assert not CONTEXTS[0].taps
