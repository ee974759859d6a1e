"""States of mixers in blocks of the arena: exact copies; sequences go back to them, and they make room."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from interrupts import bytecodes, interrupt
from tiny_hybrid import KINDS, hybrid
from tiny_llama import close
from tiny_llama import tokens as drawn

from paceline.errors import ConfigError
from paceline.models import cache_bytes
from paceline.models.runners import RecurrentRunner
from paceline.models.state.parts import CompositeState, states_of
from paceline.models.state.recurrent import RecurrentPart
from paceline.tree import TokenTree

TEXT = drawn(60, seed=3)


def part_of(state: CompositeState) -> RecurrentPart:
    part = states_of(state)
    assert part is not None
    return part


def read(runner: RecurrentRunner, stops: tuple[int, ...] = (32, 50)) -> CompositeState:
    """TEXT up to the last stop, with a copy of the state at each stop."""
    state = runner.open()
    for start, stop in zip((0, *stops), stops, strict=False):
        runner.extend([state], [TEXT[start:stop]])
        runner.memory.keep_state(state)
    return state


def rows(runner: RecurrentRunner, state: CompositeState, tokens: list[int]) -> torch.Tensor:
    return runner.extend([state], [tokens], all_logits=True).logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_exact_after_the_memory_has_grown(kind: str) -> None:
    runner = hybrid(kind, cache_slots=256)
    state = read(runner)
    kept = part_of(state).kept[50]
    packed, version = part_of(state).packed(), runner.native.arena.version
    other = runner.open()
    runner.extend([other], [drawn(400, seed=5)])
    assert runner.native.arena.version > version
    assert torch.equal(kept.read(), packed)
    part = part_of(runner.open())
    part.begin_with(50, kept)
    assert torch.equal(part.packed(), packed)
    assert packed.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_goes_back_to_where_a_state_is_kept_and_nowhere_else(kind: str) -> None:
    runner = hybrid(kind)
    state = read(runner, (32, 50, 57))
    wanted = rows(runner, runner.open(), TEXT)
    with pytest.raises(ConfigError, match="of 57 tokens can go back to 0, 32, 50, 57 tokens only, got 40"):
        runner.truncate(state, 40)
    assert state.length == part_of(state).length == 57, "a part went back where another could not"
    for length in (57, 50, 32, 0):
        runner.truncate(state, length)
        assert state.length == part_of(state).length == length
        copy = runner.fork(state)
        assert close(rows(runner, copy, TEXT[length:]), wanted[length:], 1e-3)
        runner.release(copy)
    assert not part_of(state).kept


def test_the_comparison_catches_the_state_of_another_place() -> None:
    runner = hybrid()
    state, wanted = read(runner), rows(runner, runner.open(), TEXT)
    part = part_of(state)
    part.kept[32] = part.kept[50]
    runner.truncate(state, 32)
    assert not close(rows(runner, state, TEXT[32:]), wanted[32:], 0.1)


def test_the_state_behind_the_last_whole_block_is_known_where_drafts_have_passed_it() -> None:
    runner = hybrid()
    state = runner.open()
    runner.extend([state], [TEXT[:29]])
    runner.memory.follow_borders(state)
    runner.score([state], TEXT[29:30], [TokenTree.build([5, *TEXT[30:36]], [-1, -1, 1, 2, 3, 4, 5])])
    runner.commit([state], [(1, 2, 3, 4, 5, 6)])
    assert state.length == 36
    runner.truncate(state, 32)
    wanted = rows(runner, runner.open(), TEXT)
    assert close(rows(runner, state, TEXT[32:]), wanted[32:], 1e-3)


def test_states_are_given_up_for_room_and_their_sequence_goes_on() -> None:
    runner = hybrid(cache_slots=32)
    memory = runner.memory
    memory.set_limit(40 * memory.block_bytes, sequences=1)
    state = read(runner)
    kept = part_of(state).kept
    assert all(one.present for one in kept.values())
    assert (memory.blocks_present(state, 2), memory.blocks_present(state, 1)) == (2, 0)
    left = memory.left()
    memory.allocate_single_blocks(True)
    others = [runner.open() for _ in range(left)]
    for seed, other in enumerate(others):
        runner.extend([other], [drawn(16, seed=seed)])
    assert not any(one.present for one in kept.values())
    assert memory.blocks_present(state, 2) == 0
    assert runner.native.arena.nbytes <= 40 * memory.block_bytes
    memory.keep_state(state)
    assert len(kept) == 2, "there is no room for another"
    assert close(rows(runner, state, TEXT[50:]), rows(runner, runner.open(), TEXT)[50:], 1e-3)


def test_states_die_with_the_sequence_that_has_them_for_itself() -> None:
    runner = hybrid()
    state = read(runner)
    runner.release(state)
    del state
    assert runner.memory.spare() == runner.memory.capacity
    assert runner.memory.used == 0


def test_a_beginning_without_a_state_is_not_taken_over() -> None:
    runner = hybrid()
    memory, pieces = runner.memory, runner.memory.pieces(TEXT)
    state = runner.open()
    runner.extend([state], [TEXT])
    memory.retain(state, "a", pieces)
    assert (memory.known("a", pieces), memory.matching("a", pieces)) == (0, 3)
    again = read(runner, (32, 60))
    memory.retain(again, "a", pieces)
    assert (memory.known("a", pieces), memory.matching("a", pieces)) == (2, 3)
    assert memory.known("a", memory.pieces(TEXT[:31])) == 0
    fresh: Any = runner.open()
    memory.adopt("a", pieces, fresh)
    assert fresh.length == part_of(fresh).length == 32
    assert close(rows(runner, fresh, TEXT[32:]), rows(runner, runner.open(), TEXT)[32:], 1e-3)


def test_blocks_that_lie_apart_take_those_of_a_run() -> None:
    arena = hybrid().native.arena
    with arena.change():
        arena.pool.add_reference(range(1, 9))
    arena.kv = torch.zeros_like(arena.kv)
    arena.kv[:] = torch.arange(arena.slots, dtype=torch.float32)[None, :, None, None]
    arena.copy([5, 6], [1, 3])
    assert torch.equal(arena.kv[:, 16:32], arena.kv[:, 80:96])
    assert torch.equal(arena.kv[:, 48:64], arena.kv[:, 96:112])


def test_a_sequence_counts_with_its_states() -> None:
    runner = hybrid()
    memory = runner.memory
    assert cache_bytes(runner, 20) == 2 * memory.block_bytes + part_of(runner.open()).nbytes
    assert cache_bytes(runner.native, 20) == 2 * memory.block_bytes


FILES = tuple(f"models/state/{name}.py" for name in ("arena", "block_pool", "cache", "cache_memory", "kept_states"))
FILES = (*FILES, "models/state/recurrent.py")


def _turns(runner: RecurrentRunner) -> torch.Tensor:
    """Texts that begin alike are read, kept and taken over, where room is short."""
    memory, found = runner.memory, []
    for turn in range(3):
        text = [*TEXT[:32], *drawn(30, seed=turn)]
        state: Any = runner.open()
        memory.adopt("a", memory.pieces(text), state)
        if not state.length:
            runner.extend([state], [text[:32]])
            memory.keep_state(state)
        begun = state.length
        found.append(runner.extend([state], [text[begun:]]).logits)
        if begun in part_of(state).kept and part_of(state).kept[begun].present:
            runner.truncate(state, begun)
            if begun < 46:
                runner.extend([state], [text[begun:46]])
        memory.follow_borders(state)
        for token in text[state.length : 50]:  # beyond a border
            runner.score([state], [token], [TokenTree.chain([1])])
            runner.commit([state], [()])
        memory.retain(state, "a", memory.pieces(text[:50]))
        runner.release(state)
    return torch.cat(found)


def _leaks(points: int) -> list[str]:
    """Where an interrupt left blocks behind, or what gives other numbers."""
    runner = hybrid("convolution", cache_slots=32)
    runner.memory.set_limit(12 * runner.memory.block_bytes, sequences=1)
    runner.memory.allocate_single_blocks(True)
    expected, total = _turns(runner), bytecodes(lambda: _turns(runner), FILES)
    found = []
    for at in random.Random(0).sample(range(1, total), points):
        where = interrupt(lambda: _turns(runner), FILES, at)
        gc.collect()
        right = close(_turns(runner), expected, 1e-3)
        gc.collect()
        runner.memory.forget()
        if not right or runner.memory.spare() != runner.memory.capacity:
            found.append(where)
    return found


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt inside __del__
def test_an_interrupt_leaks_nothing() -> None:
    assert _leaks(30) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_without_recounting_it_would_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.models.state.block_pool.BlockPool.recount", lambda self: None)
    assert _leaks(15) != []
