"""Ctrl-C at any bytecode of a generation: every cache block is free again, and the next generation is right."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from interrupts import bytecodes, interrupt
from tiny_checkpoint import write

from paceline import LLM, SamplingParams
from paceline.drafters.draft_model.drafter import DraftModelDrafter
from paceline.engine.scheduler import Scheduler
from paceline.models.state import NativeCache
from paceline.models.state.arena import Arena

FILES = ("engine/scheduler.py", "engine/cache_room.py", "engine/prefix_cache.py", "engine/loop.py",
         "engine/planning.py", "engine/scoring.py", "engine/drafter_set.py", "engine/driver.py",
         "models/state/cache.py", "models/state/arena.py", "models/state/cache_memory.py", "models/state/block_pool.py",
         "models/runners/native.py", "drafters/draft_model/drafter.py", "drafters/common/draft_state.py")  # fmt: skip
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # an interrupt inside __del__

BLOCKS = (
    "models/state/cache.py",
    "models/state/arena.py",
    "models/state/cache_memory.py",
    "models/state/block_pool.py",
)
PROMPTS = [[5, 6, 7, 8] * 5, [9, 10, 11]]


def params(length: int = 8) -> list[SamplingParams]:
    return [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, n=n) for n in (1, 2)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = str(write(tmp_path_factory.mktemp("tiny")))
    config = {"method": ["ngram", "draft_model"], "model": folder, "num_speculative_tokens": 4}
    threads = torch.get_num_threads()
    yield LLM(folder, threads=1, speculative_config=config)
    torch.set_num_threads(threads)


def small(arena: Arena, limit: int | None = None) -> None:
    """Few blocks, so that the arena grows and sequences move, or make way where it must not."""
    arena.__init__(
        len(arena.layers), arena.kv_heads, arena.kv.shape[3], dtype=arena.kv.dtype, device=arena.kv.device, slots=32
    )  # type: ignore[misc]
    arena.limit = limit


def arenas(llm: LLM) -> list[Arena]:
    draft = next(d for d in llm.engine.parts.drafter_set.drafters if isinstance(d, DraftModelDrafter))
    found: list[Any] = [llm.runner, draft.runner]
    assert len({id(runner) for runner in found}) == 2
    return [runner.arena for runner in found]


def generation(llm: LLM, length: int = 8) -> list[list[list[int]]]:
    return [[output.token_ids for output in out.outputs] for out in llm.generate(PROMPTS, params(length))]


def held(llm: LLM) -> list[int]:
    """Blocks that somebody holds, in the caches of target and draft; kept prefixes do not count."""
    for collect in (False, True):
        if collect:
            gc.collect()
        found = [in_use(arena) for arena in arenas(llm)]
        if not any(found):
            break
    return found


def in_use(arena: Arena) -> int:
    arena.pool.recount()
    counts = arena.pool.counts.copy()
    np.subtract.at(counts, arena.prefixes.blocks, 1)
    return int((counts[1:] != 0).sum())


def shrink(llm: LLM, limit: int | None) -> None:
    """A new, small arena for target and draft; `limit` is the target's."""
    target, draft = arenas(llm)
    small(target, limit)
    small(draft)


def leaks(llm: LLM, files: tuple[str, ...], points: int, *, length: int = 8, limit: int | None = None) -> list[str]:
    """Where the first interrupt, at `points` random bytecodes of these files, left something behind."""
    expected = generation(llm, length)
    shrink(llm, limit)
    total = bytecodes(lambda: generation(llm, length), files)
    assert all(arena.version > 0 for arena in arenas(llm))
    for at in random.Random(0).sample(range(1, total), points):
        shrink(llm, limit)
        where = interrupt(lambda: generation(llm, length), files, at)
        if llm.engine.has_work or held(llm) != [0, 0] or generation(llm, length) != expected or held(llm) != [0, 0]:
            return [where]
    return []


@pytest.mark.parametrize(
    ("files", "points"), [(FILES, 60), (BLOCKS, 60)], ids=["anywhere", "while blocks change hands"]
)
def test_an_interrupt_leaks_nothing(llm: LLM, files: tuple[str, ...], points: int) -> None:
    assert leaks(llm, files, points) == []


def test_an_interrupt_leaks_nothing_where_sequences_make_way(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[int] = []
    pause = Scheduler.pause
    monkeypatch.setattr(Scheduler, "pause", lambda self, sequence: paused.append(sequence.key) or pause(self, sequence))
    assert leaks(llm, FILES, 20, length=24, limit=6) == []
    assert len(paused) > 20
    shrink(llm, None)


def test_without_recounting_it_would_leak(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.models.state.block_pool.BlockPool.recount", lambda self: None)
    assert leaks(llm, BLOCKS, 30) != []
    monkeypatch.undo()
    shrink(llm, None)


def test_other_streams_end_with_an_error_and_all_later_ones_are_right(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (alone,) = llm.generate([PROMPTS[0]], params()[0])
    stream = llm.stream(PROMPTS[0], params()[0])
    chunks = [next(stream)]
    score = llm.runner.score

    def interrupted(*given: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.runner, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPTS[1]], params()[0])
    monkeypatch.setattr(llm.runner, "score", score)
    chunks += stream
    assert chunks[-1].finish_reason == "error"
    assert "KeyboardInterrupt" in str(chunks[-1].output.outputs[0].error)
    assert held(llm) == [0, 0]
    assert llm.generate([PROMPTS[0]], params()[0])[0].outputs == alone.outputs


def test_a_lost_handle_gives_its_blocks_back(llm: LLM) -> None:
    arena = arenas(llm)[0]
    cache = NativeCache(arena)
    cache.reserve(40)
    assert held(llm)[0] > 0
    del cache
    assert held(llm) == [0, 0]
