"""A thought is what the thinker has at the slot, and enters there alone: as transformers computes it, however a prompt
is read, and beside drafts and other texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import close, runner_of, tiny_llama, tokens
from transformers import LlamaForCausalLM

from paceline.errors import CapabilityError, CheckpointError
from paceline.models.runners import ThoughtRunner, ThoughtSlot
from paceline.models.runners.hidden_thoughts import HiddenThoughts
from paceline.tree import EMPTY_TREE, TokenTree

SLOT = 63
TEXT = [*tokens(12, seed=2, vocab=60), SLOT, *tokens(8, seed=3, vocab=60)]
AT = TEXT.index(SLOT)


@pytest.fixture(scope="module")
def models() -> list[LlamaForCausalLM]:
    """What answers, and what thinks."""
    return [tiny_llama(seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def slot() -> ThoughtSlot:
    generator = torch.Generator().manual_seed(0)
    embedding, bias = torch.randn(2, 32, generator=generator)
    return ThoughtSlot(SLOT, embedding, torch.randn(32, 32, generator=generator) / 8, bias)


def made(models: list[LlamaForCausalLM], slot: ThoughtSlot) -> ThoughtRunner:
    return ThoughtRunner(*(runner_of(model, compiled=False) for model in models), slot)


def decoded(runner: Any, cache: Any, start: int, width: int = 1) -> torch.Tensor:
    """Logits of the text from `start` on, scored in chains of `width`."""
    rows = []
    for at in range(start, len(TEXT), width):
        part = TEXT[at : at + width]
        rows.append(runner.score([cache], part[:1], [TokenTree.chain(part[1:]) if width > 1 else EMPTY_TREE]).logits)
        runner.commit([cache], [range(len(part) - 1)])
    return torch.cat(rows)


@torch.inference_mode()
def by_transformers(models: list[LlamaForCausalLM], slot: ThoughtSlot, thought: torch.Tensor | None) -> torch.Tensor:
    """(21, v) logits of the text; with its own thought, or another one (32,)."""
    answers, thinks = models
    if thought is None:
        read = thinks.model.embed_tokens(torch.tensor([TEXT]))
        read[0, AT] = slot.embedding
        thought = slot.projection @ thinks.model(inputs_embeds=read).last_hidden_state[0, AT] + slot.bias
    read = answers.model.embed_tokens(torch.tensor([TEXT]))
    read[0, AT] = thought
    return answers(inputs_embeds=read).logits[0]


def test_the_thinkers_state_at_the_slot_is_what_is_read_there(models: Any, slot: ThoughtSlot) -> None:
    expected, runner = by_transformers(models, slot, None), made(models, slot)
    assert close(runner.extend([runner.open()], [TEXT], all_logits=True).logits, expected, 1e-3)
    cache = runner.open()
    for part in (TEXT[:5], TEXT[5:AT]):
        runner.extend([cache], [part])
    fork = runner.fork(cache)
    assert close(decoded(runner, cache, AT), expected[AT:], 1e-3)  # the slot is a root
    assert close(decoded(runner, fork, AT, width=4), expected[AT:], 1e-3)
    other = by_transformers(models, slot, torch.randn(32, generator=torch.Generator().manual_seed(5)))
    assert not close(other[AT:], expected[AT:], 0.1), "the control: another thought"
    assert close(other[:AT], expected[:AT], 1e-4)


def test_without_a_thought_it_is_the_model_without_one_to_the_bit(models: Any, slot: ThoughtSlot) -> None:
    nothing = made(models, ThoughtSlot(SLOT, slot.embedding, torch.zeros(32, 32), torch.zeros(32)))
    plain = runner_of(models[0], compiled=False)
    rows = plain.embed(TEXT).clone()
    rows[AT] = 0
    expected = plain.extend_embeddings([plain.open()], [rows], all_logits=True).logits
    assert torch.equal(nothing.extend([nothing.open()], [TEXT], all_logits=True).logits, expected)
    runner = made(models, slot)
    assert not close(runner.extend([runner.open()], [TEXT], all_logits=True).logits, expected, 0.1), "the control"


def test_batches_taps_and_what_is_taken_back(models: Any, slot: ThoughtSlot) -> None:
    runner, expected = made(models, slot), by_transformers(models, slot, None)
    cache, other = runner.open(), runner.open()
    runner.extend([cache, other], [TEXT[:AT], TEXT[:4]])
    scores = runner.score(
        [cache, other], [SLOT, TEXT[4]], [TokenTree.chain(TEXT[AT + 1 : AT + 3]), EMPTY_TREE], taps=[1]
    )
    assert (scores.rows, scores.taps[1].shape) == ((0, 3, 4), (4, 32))
    assert close(scores.logits, expected[[AT, AT + 1, AT + 2, 4]], 1e-3)
    assert close(runner.score([cache], [SLOT], [EMPTY_TREE]).logits, expected[[AT]], 1e-3)  # thought once
    runner.commit([cache], [()])
    runner.truncate(cache, 4)
    runner.extend([cache], [TEXT[4:AT]])
    assert close(decoded(runner, cache, AT), expected[AT:], 1e-3)
    with pytest.raises(CapabilityError, match="can have no other one behind tokens that it has written itself"):
        runner.extend([cache], [[1, SLOT]])
    runner.extend([cache], [[1]])


def test_two_slots_have_a_thought_each(models: Any, slot: ThoughtSlot) -> None:
    runner = made(models, slot)
    text = [*TEXT[: AT + 3], SLOT, 5]
    found = runner.extend([runner.open()], [text], all_logits=True).logits
    alone = runner.extend([runner.open()], [text[AT + 3 :]], all_logits=True).logits
    assert close(found[: AT + 3], by_transformers(models, slot, None)[: AT + 3], 1e-3)
    assert not close(found[-1:], alone[-1:], 0.1)


def test_a_slot_is_kept_in_a_file(models: Any, slot: ThoughtSlot, tmp_path: Path) -> None:
    slot.write(tmp_path)
    read = ThoughtSlot.read(tmp_path, 32, name="tiny", whole=True)
    assert read.token == SLOT
    assert torch.equal(read.embedding, slot.embedding)
    assert read.projection is not None
    assert read.bias is not None
    with pytest.raises(CheckpointError, match="holds the slot of another model than tiny"):
        ThoughtSlot.read(tmp_path, 64, name="tiny", whole=True)
    ThoughtSlot(SLOT, slot.embedding).write(tmp_path)
    with pytest.raises(CheckpointError, match="`paceline train hcot` writes it"):
        ThoughtSlot.read(tmp_path, 32, name="tiny", whole=True)
    with pytest.raises(CheckpointError, match=r"no hcot\.safetensors in .*; `paceline train hcot` makes one"):
        HiddenThoughts(path=str(tmp_path / "none")).open(lambda **options: runner_of(models[0]), name="tiny")  # type: ignore[arg-type,return-value]
