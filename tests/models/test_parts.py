"""What a sequence keeps is a list of parts: a recurrent state beside keys and values follows chains, forks and commits,
and goes back to its checkpoints alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from tiny_llama import tokens
from toy_parts import (
    EncoderMemory,
    EncoderRunner,
    ForgetfulHash,
    HybridReference,
    HybridRunner,
    ReplayedHash,
    RunningHash,
    recurrent_of,
)

from paceline.engine.prefix_cache import PrefixCache
from paceline.errors import CapabilityError, ConfigError, PromptError
from paceline.models import Inputs, PartAbilities, Rollback
from paceline.models.state import NativeCache
from paceline.models.state.parts import CompositeState
from paceline.tree import EMPTY_TREE, TokenTree

PROMPT = tokens(21, seed=3)
STEPS = 24


@pytest.fixture(scope="module")
def reference() -> HybridReference:
    return HybridReference()


@pytest.fixture(scope="module")
def wanted(reference: HybridReference) -> list[int]:
    return reference.greedy(PROMPT, STEPS)


def prefilled(runner: HybridRunner, prompt: list[int] = PROMPT) -> CompositeState:
    state = runner.open(len(prompt))
    for start in range(0, len(prompt) - 1, 8):
        runner.extend([state], [prompt[start : min(start + 8, len(prompt) - 1)]])
    return state


def decode(runner: HybridRunner, state: CompositeState, text: list[int], wanted: list[int], right: int) -> list[int]:
    """Greedy tokens behind a text, drafting four at a time, the first `right` of which are those that are wanted."""
    found: list[int] = []
    while len(found) < len(wanted):
        draft = wanted[len(found) : len(found) + 4]
        draft = [token if i < right else (token + 1) % 64 for i, token in enumerate(draft)]
        tree = TokenTree.chain(draft)
        best = runner.score([state], [[*text, *found][-1]], [tree]).logits.argmax(-1).tolist()
        agreed = next((i for i, (token, own) in enumerate(zip(draft, best, strict=False)) if token != own), len(draft))
        runner.commit([state], [tuple(range(agreed))])
        found += [*draft[:agreed], best[agreed]]
    return found[: len(wanted)]


@pytest.mark.parametrize("right", [0, 2, 4])
@pytest.mark.parametrize("kind", [RunningHash, ReplayedHash])
def test_chains_give_the_tokens_of_a_text_computed_from_scratch(
    kind: type[RunningHash], right: int, wanted: list[int]
) -> None:
    runner = HybridRunner(kind)
    assert decode(runner, prefilled(runner), PROMPT, wanted, right) == wanted


@pytest.mark.parametrize("right", [0, 2])
def test_the_comparison_catches_a_part_that_does_not_go_back(right: int, wanted: list[int]) -> None:
    runner = HybridRunner(ForgetfulHash)
    assert decode(runner, prefilled(runner), PROMPT, wanted, right) != wanted


def test_a_growing_chain_is_scored_in_pieces(reference: HybridReference) -> None:
    runner = HybridRunner()
    state, draft = prefilled(runner), [5, 6, 7]
    runner.score([state], PROMPT[-1:], [TokenTree.chain(draft[:1])])
    rows = runner.score([state], PROMPT[-1:], [TokenTree.chain(draft)], computed=[2]).logits
    expected = torch.stack([reference.logits([*PROMPT, *draft[:count]]) for count in (2, 3)])
    assert torch.allclose(rows, expected, atol=1e-4)


def test_forks_go_their_own_ways(reference: HybridReference) -> None:
    runner = HybridRunner()
    first = prefilled(runner)
    others = [runner.fork(first) for _ in range(2)]
    for root, state in enumerate([first, *others]):
        text = [*PROMPT[:-1], root]
        expected = reference.greedy(text, 8)
        assert decode(runner, state, text, expected, 2) == expected
    for state in (first, *others, first):
        runner.release(state)
    assert runner.memory.used == 0


def test_it_goes_back_to_checkpoints_and_nowhere_else(reference: HybridReference) -> None:
    runner = HybridRunner()
    state = prefilled(runner)
    decode(runner, state, PROMPT, [1, 2, 3], 0)
    length = state.length
    with pytest.raises(ConfigError, match=r"can go back to 0, 8, 16, 20, \d+ tokens only, got 17"):
        runner.truncate(state, 17)
    assert state.length == recurrent_of(state).length == length, "a part went back where another could not"
    with pytest.raises(ConfigError, match="length must lie in"):
        runner.truncate(state, length + 1)
    runner.truncate(state, length)
    runner.truncate(state, 16)
    assert state.length == recurrent_of(state).length == 16
    row = runner.extend([state], [PROMPT[16:]]).logits[0]
    assert torch.allclose(row, reference.logits(PROMPT), atol=1e-4)


def test_trees_that_branch_are_rejected() -> None:
    runner = HybridRunner()
    state = prefilled(runner)
    assert not runner.capabilities.trees
    with pytest.raises(CapabilityError, match="recurrent state, which scores chains only"):
        runner.score([state], PROMPT[-1:], [TokenTree.build([1, 2], [-1, -1])])
    runner.score([state], PROMPT[-1:], [TokenTree.chain([1, 2, 3])])
    with pytest.raises(ConfigError, match=r"path \[1\] does not lie in a chain"):
        runner.commit([state], [(1,)])


def test_a_state_can_what_all_of_its_parts_can() -> None:
    anything, nothing = PartAbilities(), PartAbilities(rollback=Rollback.NONE, branches=False, shared=False)
    assert NativeCache.abilities == anything
    assert PartAbilities.common([anything, RunningHash.abilities]) == RunningHash.abilities
    assert PartAbilities.common([RunningHash.abilities, nothing, anything]) == nothing
    runner = HybridRunner()
    assert prefilled(runner).abilities == RunningHash.abilities
    assert not runner.capabilities.truncate
    assert not runner.memory.can_share_prefixes
    assert runner.native.capabilities.truncate
    assert runner.native.memory.can_share_prefixes


def test_memory_counts_the_keys_and_shares_nothing() -> None:
    runner = HybridRunner()
    state = prefilled(runner)
    memory, pieces = runner.memory, runner.memory.pieces(PROMPT)
    assert len(pieces) == 1
    assert (memory.need(state, 1), memory.need(state, 12), memory.need(state, 29)) == (0, 0, 2)
    assert memory.blocks_present(state, 1) == 0
    memory.retain(state, "a", pieces)
    assert memory.known("a", pieces) == 0
    runner.native.memory.retain(state.cache, "a", pieces)
    assert memory.known("a", pieces) == 1, "the control: keys and values alone are shared"


def test_inputs_are_rejected_where_a_model_takes_none() -> None:
    runner = HybridRunner()
    for open_one in (runner.open, runner.native.open):
        with pytest.raises(PromptError, match=r"tiny takes tokens as inputs, got encoder_tokens \(2 ids\)"):
            open_one(5, Inputs(encoder_tokens=[1, 2]))
    runner.score([runner.open()], [1], [EMPTY_TREE])


class CountedMemory(EncoderMemory):
    """Counts those that were opened and not released."""

    live = 0

    def __init__(self, inputs: Inputs, hidden_size: int) -> None:
        super().__init__(inputs, hidden_size)
        CountedMemory.live, self._held = CountedMemory.live + 1, True

    def release(self) -> None:
        CountedMemory.live, self._held = CountedMemory.live - self._held, False


def test_a_sequence_that_begins_as_a_running_one_keeps_the_parts_it_was_opened_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: it does begin with the other's blocks, and with its own length of the prompt."""
    monkeypatch.setattr("toy_parts.EncoderMemory", CountedMemory)
    runner = EncoderRunner()
    source, cache = runner.open(48), runner.open(60)
    runner.extend([source], [tokens(47, seed=1)])
    opened, parts = CountedMemory.live, cache.others
    sequence = SimpleNamespace(cache=cache, request=Mock(prefix_key="a", prompt_ids=[*tokens(47, seed=1), 1, 2]))
    sequence.request.params.prompt_logprobs, sequence.begun = None, False
    sequence.request.block_keys = lambda memory: memory.pieces(sequence.request.prompt_ids[:-1])
    running = SimpleNamespace(cache=source, request=sequence.request)
    assert PrefixCache(runner.memory).begin(sequence, [], [running])  # type: ignore[arg-type, list-item]
    assert (sequence.cache.length, sequence.cache.cache.prompt_length) == (32, 60)
    assert sequence.cache.others == parts
    for state in (source, sequence.cache):
        runner.release(state)
    assert (opened, CountedMemory.live, runner.memory.used) == (2, 0, 0)
