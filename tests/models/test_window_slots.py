"""Layers with a sliding window give back the keys behind it: rows keep their bits, memory stays bounded, prefixes are
taken over only where the window before their end is still there.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from tiny_llama import runner_of, tiny_llama, tokens

from paceline.errors import ConfigError
from paceline.models.runners import NativeRunner
from paceline.models.state import NativeCache
from paceline.models.state.window_slots import BLOCK
from paceline.tree import TokenTree

WINDOW = 16
TREE = TokenTree.build([5, 6, 7, 8, 9, 1], [-1, 0, 0, 2, 3, 1])
MODES: dict[str, dict[str, Any]] = {
    "compiled": {},
    "eager": {"compiled": False},
    "strict": {"compiled": False, "strict": True},
}
KINDS = [(WINDOW, None), (WINDOW,), (WINDOW, 40, None)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(hidden_size=64, head_dim=32, max_position_embeddings=2048)


def pair(model: Any, windows: tuple[int | None, ...], **options: Any) -> tuple[NativeRunner, NativeRunner]:
    """One that gives back, whose places grow by no more than is needed, and one that keeps all."""
    one = runner_of(model, windows=windows, cache_slots=32, **options)
    other = runner_of(model, windows=windows, cache_slots=32, forget_behind_windows=False, **options)
    assert other.arena.windowed is None
    assert one.arena.windowed is not None
    one.arena.windowed.most = 0
    return one, other


def opened(runner: NativeRunner) -> NativeCache:
    cache = runner.open()
    runner.memory.forget_behind_windows(cache)
    return cache


def places(runner: NativeRunner) -> int:
    """Tokens that layers with a window have room for."""
    windowed = runner.arena.windowed
    assert windowed is not None
    return windowed.places * BLOCK


def decoded(runner: NativeRunner, cache: NativeCache, text: list[int], steps: int) -> list[torch.Tensor]:
    """Logits of greedy steps, of which each has a tree; the path of its nodes that is taken changes."""
    for start in range(0, len(text), 8):
        runner.extend([cache], [text[start : start + 8]])
    root, found = 1, []
    for step in range(steps):
        scores = runner.score([cache], [root], [TREE])
        path = [(), (0, 1), (0, 2, 3), (0,)][step % 4]
        runner.commit([cache], [path])
        found.append(scores.logits)
        root = int(scores.logits[0].argmax())
    return found


def differ(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("windows", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_rows_keep_their_bits_and_memory_stays_bounded(model: Any, mode: str, windows: tuple[int | None, ...]) -> None:
    one, other = pair(model, windows, **MODES[mode])
    found = [decoded(runner, opened(runner), tokens(40), 100) for runner in (one, other)]
    assert not differ(*found)
    assert places(one) <= 96
    assert other.arena.slots > 250
    assert one.arena.nbytes < other.arena.nbytes


@pytest.mark.parametrize("mode", MODES)
def test_a_block_that_is_given_back_too_early_is_noticed(model: Any, mode: str) -> None:
    one, other = pair(model, (WINDOW, None), **MODES[mode])
    assert one.arena.windowed is not None
    one.arena.windowed.window -= BLOCK
    assert differ(*(decoded(runner, opened(runner), tokens(60), 40) for runner in (one, other)))


def test_sequences_that_may_be_shortened_keep_everything(model: Any) -> None:
    one, other = pair(model, (WINDOW, None))
    found = []
    for runner in (one, other):
        cache = runner.open()
        decoded(runner, cache, tokens(40), 100)
        runner.truncate(cache, 30)
        found.append(decoded(runner, cache, [3, 4], 20))
    assert not differ(*found)


def test_shortening_a_sequence_that_let_go_is_rejected(model: Any) -> None:
    one, _ = pair(model, (WINDOW, None))
    cache = opened(one)
    decoded(one, cache, tokens(40), 100)
    one.truncate(cache, cache.length - 1)
    with pytest.raises(ConfigError, match="given back"):
        one.truncate(cache, 40)
    one.truncate(cache, 0)
    assert one.extend([cache], [[1, 2, 3]]).logits.isfinite().all()


class Walk:
    """The same random life in both runners: chunks, trees, forks, ends, and texts that begin like others."""

    def __init__(self, runners: tuple[NativeRunner, NativeRunner], seed: int) -> None:
        self.runners, self.random = runners, random.Random(seed)
        # a beginning that is taken over was fed in other pieces, and only these passes keep a row's bits then
        self.same = torch.equal if runners[0].passes.row_invariant else partial(torch.allclose, atol=1e-3)
        self.live: list[tuple[list[int], tuple[NativeCache, NativeCache]]] = []
        self.ended: list[list[int]] = []
        self.hits = 0

    def step(self) -> bool:
        """One operation; whether the rows were equal."""
        kinds = ["open", "chunk", "chunk", "tree", "tree", "tree", "fork", "end", "again"]
        kind = self.random.choice(kinds) if self.live else "open"
        if kind in {"open", "again"} and len(self.live) > 3:
            kind = "end"
        return bool(getattr(self, kind)())

    def open(self) -> bool:
        one, other = self.runners
        self.live.append(([], (opened(one), opened(other))))
        return self.chunk()

    def again(self) -> bool:
        """Begin with a kept text, as far as it can be gone on from."""
        if not self.ended:
            return True
        text = self.random.choice(self.ended)
        pieces = self.runners[0].memory.pieces(text[: self.random.randint(1, len(text))])
        own = self.runners[0].open()
        self.runners[0].memory.adopt("", pieces, own)
        self.hits += own.length > 0
        other = opened(self.runners[1])
        if own.length:
            self.runners[1].extend([other], [text[: own.length]])
        self.live.append((text[: own.length], (own, other)))
        return self.chunk()

    def chunk(self) -> bool:
        text, caches = self.live[-1]
        fed = [self.random.randrange(64) for _ in range(self.random.choice([1, 3, 20, 50]))]
        text += fed
        one, other = (runner.extend([cache], [fed]).logits for runner, cache in zip(self.runners, caches, strict=True))
        return self.same(one, other)

    def tree(self) -> bool:
        """One step of all sequences."""
        path = self.random.choice([(), (0, 1), (0, 2, 3)])
        rows = []
        for i, runner in enumerate(self.runners):
            caches = [caches[i] for _, caches in self.live]
            rows.append(runner.score(caches, [1] * len(caches), [TREE] * len(caches)).logits)
            runner.commit(caches, [path] * len(caches))
        for text, _ in self.live:
            text += [1, *(int(TREE.tokens[node]) for node in path)]
        return self.same(*rows)

    def fork(self) -> bool:
        text, caches = self.random.choice(self.live)
        forks = [runner.fork(cache) for runner, cache in zip(self.runners, caches, strict=True)]
        if self.random.random() < 0.7:
            for runner, cache in zip(self.runners, forks, strict=True):
                runner.memory.forget_behind_windows(cache)
        self.live.append((text.copy(), (forks[0], forks[1])))
        return True

    def end(self) -> bool:
        text, caches = self.live.pop(self.random.randrange(len(self.live)))
        memory = self.runners[0].memory
        memory.retain(caches[0], "", memory.pieces(text))
        self.ended.append(text)
        for runner, cache in zip(self.runners, caches, strict=True):
            runner.release(cache)
        return True


@pytest.mark.parametrize("limit", [None, 60])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_changes_in_a_random_life(model: Any, mode: str, limit: int | None) -> None:
    hits = 0
    for seed, windows in enumerate(KINDS, 3):
        runners = pair(model, windows, copy_limit=64, **MODES[mode])
        if limit is not None:
            runners[0].memory.set_limit(limit * runners[0].memory.block_bytes, 2)
            runners[0].memory.allocate_single_blocks(True)
        walk = Walk(runners, seed)
        for _ in range(60):
            assert walk.step()
        hits += walk.hits
    assert hits > 0
