"""Think coarse, critic fine: two phases, two block lengths, the same weights."""

import numpy as np
import pytest
import torch

from paceline.diffusion.tccf import Phases, ReblockedDenoiser, think_then_answer
from paceline.errors import ConfigError
from paceline.models import Call
from tests.diffusion.decoding import Watched, fill
from tests.diffusion.toys import Independent, t4

PROMPTS = [[3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13, 14]]


def by_hand(toy, tokens: list[int], length: int) -> list[int]:
    """Autoregressive: the next token from a mask right of the text, every slot seeing itself and those before it."""
    tokens = list(tokens)
    for _ in range(length):
        ids = np.array([*tokens, toy.mask_token_id])
        mask = np.tri(ids.size, dtype=bool)
        [logits] = toy.forward([Call(ids, np.arange(ids.size), mask=mask)])
        tokens.append(int(logits[-1].argmax()))
    return tokens[-length:]


@pytest.mark.parametrize("length", [8, 7, 3, 1])
def test_phase_two_is_autoregressive_decoding_of_the_same_model(length: int) -> None:
    toy = t4("block", block_length=4, seed=3)
    phases = Phases(
        thinking_length=length, answer_length=6, check_prompt=[1, 2], thinking={"method": "bacd", "block_length": 4}
    )
    answers = think_then_answer(PROMPTS, toy, phases)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        whole = fill(toy, {"method": "bacd", "block_length": 4}, 8 if length > 4 else 4, prompt).canvas.output
        assert answer.thoughts == whole[:length]
        assert answer.answer == by_hand(toy, [*prompt, *answer.thoughts, 1, 2], 6)
        assert answer.answering.trajectory.calls == 6
    if length == 8:
        given = (*PROMPTS[0], *answers[0].thoughts, 1, 2)
        coarse = fill(toy, {"method": "static", "cache": "none"}, 6, given).canvas.output
        assert coarse != answers[0].answer


def test_phase_one_is_the_method_with_its_blocks() -> None:
    toy = t4("block", block_length=4)
    phases = Phases(
        thinking_length=8, answer_length=4, check_prompt=[1], thinking={"method": "static", "block_length": 4}
    )
    [answer] = think_then_answer(PROMPTS[:1], toy, phases)
    assert answer.thoughts == fill(toy, {"method": "static", "block_length": 4}, 8, PROMPTS[0]).canvas.output


def test_thinking_ends_at_its_marker_which_stays() -> None:
    toy = Independent([0.9, 0.8, 0.7, 0.95, 0.6, 0.5] + [0.9] * 12, tokens=[0, 1, 5, 2, 2, 2] + [1] * 12)
    phases = Phases(
        thinking_length=6,
        answer_length=3,
        check_prompt=[4, 4],
        end_of_thinking=[5],
        thinking={"method": "static", "block_length": 3},
    )
    [answer] = think_then_answer([[]], toy, phases)
    assert answer.thoughts == [0, 1, 5]
    assert answer.answering.canvas.tokens[:5].tolist() == [0, 1, 5, 4, 4]
    assert answer.answering.canvas.start == 5
    assert len(answer.answer) == 3


def test_an_end_of_text_ends_thinking_and_is_taken_out() -> None:
    toy = Independent([0.9, 0.8, 0.7, 0.6] + [0.9] * 8, tokens=[0, 6, 1, 1] + [1] * 8)
    toy.eos_token_ids = (6,)
    [answer] = think_then_answer([[]], toy, Phases(thinking_length=4, answer_length=2, check_prompt=[4]))
    assert answer.thoughts == [0]


def test_prompts_do_not_depend_on_each_other() -> None:
    toy = t4("block", block_length=4)
    phases = Phases(
        thinking_length=8,
        answer_length=4,
        check_prompt=[1, 2, 0, 0],
        thinking={"method": "bacd", "temperature": 0.7},
        answering={"method": "static", "temperature": 0.7},
    )
    both = think_then_answer(PROMPTS, toy, phases)
    alone = think_then_answer(PROMPTS[1:], toy, phases, seed=1)
    assert both[1].thoughts == alone[0].thoughts
    assert both[1].answer == alone[0].answer
    assert think_then_answer(PROMPTS[1:], toy, phases, seed=5)[0].answer != alone[0].answer


def test_other_blocks_are_another_mask() -> None:
    toy = t4("block", block_length=4)
    watched = Watched(toy)
    ids, slots = np.arange(8), np.arange(8)
    fine = ReblockedDenoiser(watched, 2)
    fine.forward([Call(ids, slots)])
    mask = watched.passes[0][0][0].mask
    assert (mask == (slots[None, :] // 2 <= slots[:, None] // 2)).all()
    [same] = ReblockedDenoiser(toy, 4).forward([Call(ids, slots)])
    [own] = toy.forward([Call(ids, slots)])
    assert torch.allclose(same, own, atol=1e-12, rtol=0)
    assert fine.block_length == 2


def test_wrong_use_is_one_line() -> None:
    with pytest.raises(ConfigError, match="attention must be causal between blocks"):
        ReblockedDenoiser(t4(), 1)
    phases = Phases(
        thinking_length=4, answer_length=4, check_prompt=[1], answering={"method": "static", "block_length": 2}
    )
    with pytest.raises(ConfigError, match="block_length of phase two must be 1"):
        think_then_answer(PROMPTS[:1], t4(), phases)
