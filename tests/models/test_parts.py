"""What a sequence keeps is a list of parts: states of mixers beside keys and values follow trees, forks and commits,
and what an encoder has read stays with its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from tiny_hybrid import KINDS, hybrid
from tiny_llama import close, tokens
from toy_parts import EncoderMemory, EncoderRunner

from paceline.engine.prefix_cache import PrefixCache
from paceline.errors import ConfigError, PromptError
from paceline.models import Inputs, PartAbilities, Rollback
from paceline.models.runners import RecurrentRunner
from paceline.models.state import NativeCache
from paceline.models.state.parts import CompositeState
from paceline.models.state.recurrent import RecurrentPart
from paceline.tree import EMPTY_TREE, TokenTree

PROMPT = tokens(21, seed=3)
TREE = TokenTree.build([5, 6, 7, 8, 9], [-1, -1, 0, 1, 3])
by_kind = pytest.mark.parametrize("kind", KINDS)


def prefilled(runner: RecurrentRunner, prompt: Sequence[int] = PROMPT) -> CompositeState:
    state = runner.open(len(prompt))
    for start in range(0, len(prompt) - 1, 8):
        runner.extend([state], [prompt[start : min(start + 8, len(prompt) - 1)]])
    return state


def from_scratch(runner: RecurrentRunner, text: Sequence[int]) -> torch.Tensor:
    """(v,) logits behind a text."""
    return runner.extend([runner.open()], [list(text)]).logits[0]


def along(runner: RecurrentRunner, text: Sequence[int]) -> torch.Tensor:
    """(1 + n, v) logits behind a text and behind each node of TREE."""
    paths = [TREE.tokens[list(TREE.path(node))].tolist() for node in range(len(TREE))]
    return torch.stack([from_scratch(runner, [*text, *path]) for path in [[], *paths]])


@by_kind
def test_a_growing_tree_is_scored_in_pieces(kind: str) -> None:
    runner = hybrid(kind)
    state, wanted = prefilled(runner), along(runner, PROMPT)
    first = TokenTree.build(TREE.tokens[:2].tolist(), TREE.parents[:2].tolist())
    rows = [runner.score([state], PROMPT[-1:], [first]).logits]
    rows.append(runner.score([state], PROMPT[-1:], [TREE], computed=[3]).logits)
    assert close(torch.cat(rows), wanted, 1e-3)
    runner.commit([state], [(1, 3, 4)])
    assert close(runner.score([state], [3], [EMPTY_TREE]).logits[0], from_scratch(runner, [*PROMPT, 6, 8, 9, 3]), 1e-3)


@by_kind
def test_forks_go_their_own_ways(kind: str) -> None:
    runner = hybrid(kind)
    first = prefilled(runner)
    others = [runner.fork(first) for _ in range(2)]
    for root, state in enumerate([first, *others]):
        text = [*PROMPT[:-1], root]
        assert close(runner.score([state], [root], [TREE]).logits, along(runner, text), 1e-3)
        path = ((0, 2), (1,), ())[root]
        runner.commit([state], [path])
        text += TREE.tokens[list(path)].tolist()
        assert close(runner.score([state], [9], [EMPTY_TREE]).logits[0], from_scratch(runner, [*text, 9]), 1e-3)
    for state in (first, *others, first):
        runner.release(state)
    assert runner.memory.used == 0


def test_the_comparison_catches_a_state_of_rejected_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = hybrid()
    commit = RecurrentPart.commit
    monkeypatch.setattr(RecurrentPart, "commit", lambda self, path: commit(self, range(self.scored - 1)))
    state = prefilled(runner)
    runner.score([state], PROMPT[-1:], [TREE])
    runner.commit([state], [()])
    row = runner.score([state], [9], [EMPTY_TREE]).logits[0]
    assert not close(row, from_scratch(runner, [*PROMPT, 9]), 0.1)


def test_what_was_not_scored_cannot_be_committed() -> None:
    runner = hybrid()
    state = prefilled(runner)
    (states,) = state.others
    with pytest.raises(ConfigError, match=r"path \[\] does not lie in the 0 inputs last scored"):
        states.commit([])
    runner.score([state], PROMPT[-1:], [TREE])
    with pytest.raises(ConfigError, match=r"path \[5\] does not lie in the 6 inputs last scored"):
        runner.commit([state], [[5]])


def test_a_state_can_what_all_of_its_parts_can() -> None:
    anything, nothing = PartAbilities(), PartAbilities(rollback=Rollback.NONE, shared=False)
    copies = PartAbilities(rollback=Rollback.CHECKPOINTS, shared=False)
    assert NativeCache.abilities == anything
    assert RecurrentPart.abilities == copies
    assert PartAbilities.common([anything, copies]) == copies
    assert PartAbilities.common([copies, nothing, anything]) == nothing
    runner = hybrid()
    assert prefilled(runner).abilities == copies
    assert not runner.capabilities.truncate
    assert runner.capabilities.trees
    assert runner.memory.can_share_prefixes, "copies of states are kept beside keys and values"
    assert runner.native.capabilities.truncate


def test_inputs_are_rejected_where_a_model_takes_none() -> None:
    runner = hybrid()
    for open_one in (runner.open, runner.native.open):
        with pytest.raises(PromptError, match=r"tiny mamba2 takes tokens as inputs, got encoder_tokens \(2 ids\)"):
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
