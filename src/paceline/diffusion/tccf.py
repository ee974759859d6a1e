"""Think coarse, critic fine: think in large blocks, then check and answer token by token.

Phase one decodes a text of thoughts with the block length the model is fast at, until it writes the end of thinking or
runs out of slots. Then a fixed text is appended that asks to check the thoughts and to give the answer, and phase two
goes on with blocks of one slot, which is autoregressive decoding by the same weights. Whether the weights bear other
blocks depends on how they were trained.

Source: TDAR (arXiv:2602.09555). Where phase one ends is not stated there; a marker of the user's choice does it here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from paceline.diffusion.base import NONE
from paceline.diffusion.canvas import Canvas
from paceline.diffusion.loop import FinishedCanvas, decode
from paceline.diffusion.methods import ConfiguredMethod, options_of, part
from paceline.diffusion.schedule import whole_blocks
from paceline.models import Call, Denoiser, SlotCache
from paceline.utils import need


class ReblockedDenoiser:
    """A block-causal model with other blocks than it was loaded with.

    Every call gets the mask of the new blocks, by which a slot sees its own block and those before it. Blocks of one
    slot are the autoregressive model.

    Caches are those of the model, but keys and values stored under other blocks differ; begin with an empty one.

    Raises:
        ConfigError: a model with full attention, a length below 1.
    """

    def __init__(self, inner: Denoiser, block_length: int) -> None:
        rule = "be causal between blocks to be given others"
        need(inner.attention == "block", "the model's attention", rule, inner.attention)
        need(block_length >= 1, "block_length", "be at least 1", block_length)
        self.inner = inner
        self.block_length: int | None = block_length
        self.attention = inner.attention
        self.vocab_size, self.mask_token_id = inner.vocab_size, inner.mask_token_id
        self.eos_token_ids, self.max_length = inner.eos_token_ids, inner.max_length
        self.needs_left = inner.needs_left

    @property
    def slot_bytes(self) -> int:
        return self.inner.slot_bytes

    def new_cache(self, length: int) -> SlotCache:
        return self.inner.new_cache(length)

    def forward(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        return self.inner.forward([call if call.mask is not None else self._masked(call) for call in calls])

    def _masked(self, call: Call) -> Call:
        assert self.block_length is not None
        read = call.read if call.read is not None else NONE
        keys = np.concatenate([read, call.slots]) // self.block_length
        return replace(call, mask=keys[None, :] <= (call.slots // self.block_length)[:, None])


def thinking(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `diffusion_config` of phase one: that of the answer without its constraint."""
    constraint = options_of(part("check", "grammar"))
    return {key: value for key, value in config.items() if key not in constraint} | {"check": None}


def answering(config: Mapping[str, Any], denoiser: Denoiser) -> dict[str, Any]:
    """That of phase two: slot by slot, with the constraint."""
    constraint = options_of(part("check", "grammar"))
    kept = {key: value for key, value in config.items() if key in constraint}
    cache = "block" if denoiser.attention == "block" else "none"
    return {"method": "static", "block_length": 1, "cache": cache, **kept}


def answering_denoiser(denoiser: Denoiser) -> Denoiser:
    """What phase two is decoded by: the same weights, with blocks of one slot where they have blocks."""
    return ReblockedDenoiser(denoiser, 1) if denoiser.attention == "block" else denoiser


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """How to think and how to answer.

    Attributes:
        thinking_length: most tokens of thoughts; decoded in whole blocks, what is beyond is cut off.
        answer_length: most tokens of the answer.
        check_prompt: tokens appended after the thoughts.
        end_of_thinking: tokens, any of which ends phase one; it stays in the text. The end of a text ends phase one
            too, and is taken out of it.
        thinking: a `diffusion_config` for phase one, its block length among the options.
        answering: a `diffusion_config` for phase two; its block length is 1.
    """

    thinking_length: int
    answer_length: int
    check_prompt: Sequence[int]
    end_of_thinking: Sequence[int] = ()
    thinking: Mapping[str, Any] | str = "bacd"
    answering: Mapping[str, Any] | str = "static"


@dataclass(frozen=True, slots=True)
class TwoPhaseAnswer:
    """Both phases of one prompt.

    Attributes:
        thoughts: tokens of phase one.
        answer: tokens of phase two.
        thinking: canvas and cost of phase one.
        answering: of phase two.
    """

    thoughts: list[int]
    answer: list[int]
    thinking: FinishedCanvas
    answering: FinishedCanvas


def think_then_answer(
    prompts: Sequence[Sequence[int]], denoiser: Denoiser, phases: Phases, *, seed: int = 0
) -> list[TwoPhaseAnswer]:
    """Both phases for each prompt; prompts are decoded side by side and do not depend on each other.

    `SamplingParams.think` is the same for texts, with the ends and limits of any request.

    Args:
        prompts: token ids.
        denoiser: block-causal for autoregressive answers; with full attention phase two goes from left to right, one
            slot a round.
        seed: of the first prompt, the next one for the next.
    Raises:
        ConfigError: as `ConfiguredMethod`; a block length other than 1 for answering; a phase one that failed raises
            its own error.
    """
    ends = tuple(phases.end_of_thinking) + tuple(denoiser.eos_token_ids)
    coarse = {"stop": "end_of_text", "end_token_ids": ends, **_mapping(phases.thinking)}
    thought = _decode(prompts, phases.thinking_length, denoiser, coarse, seed)
    texts = [_thoughts(outcome, denoiser, phases) for outcome in thought]
    contexts = [[*prompt, *text, *phases.check_prompt] for prompt, text in zip(prompts, texts, strict=True)]
    fine = {"stop": "end_of_text", "block_length": 1, **_mapping(phases.answering)}
    need(fine["block_length"] == 1, "block_length of phase two", "be 1", fine["block_length"])
    answered = _decode(contexts, phases.answer_length, answering_denoiser(denoiser), fine, seed)
    each = zip(texts, thought, answered, strict=True)
    return [TwoPhaseAnswer(text, after.canvas.output, before, after) for text, before, after in each]


def _decode(
    prompts: Sequence[Sequence[int]], length: int, denoiser: Denoiser, config: Mapping[str, Any], seed: int
) -> list[FinishedCanvas]:
    method, mask, ends = ConfiguredMethod(config), denoiser.mask_token_id, denoiser.eos_token_ids
    sizes = [whole_blocks(len(prompt), length, denoiser, method.options.get("block_length")) for prompt in prompts]
    canvases = [
        Canvas.of(prompt, size, mask_token_id=mask, eos_token_ids=ends)
        for prompt, size in zip(prompts, sizes, strict=True)
    ]
    parts = [method.parts(denoiser, canvas, seed=seed + i) for i, canvas in enumerate(canvases)]
    outcomes = decode(canvases, denoiser, parts)
    for outcome in outcomes:
        if outcome.error:
            raise outcome.error
    return outcomes


def _thoughts(outcome: FinishedCanvas, denoiser: Denoiser, phases: Phases) -> list[int]:
    """Without what is beyond their length, and without an end of text that is no end of thinking."""
    text = outcome.canvas.output[: phases.thinking_length]
    if text and text[-1] in denoiser.eos_token_ids and text[-1] not in phases.end_of_thinking:
        return text[:-1]
    return text


def _mapping(config: Mapping[str, Any] | str) -> dict[str, Any]:
    return {"method": config} if isinstance(config, str) else dict(config)
