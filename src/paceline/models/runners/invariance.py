"""The self-test of strict mode: has a row the same bits whatever is fed beside it, on this machine, for this model's
shapes?

A short random text is fed as plain decoding feeds it: a prompt, then token by token. Then the same text is fed in other
ways: the prompt in other pieces, and beside other prompts; tokens in chains of every width, in trees, at every place
among rows of other sequences, in forked sequences; accepted paths are committed and decoding goes on behind them.
Hidden states, logits and the keys and values in the cache must be the same bits every time. The text crosses borders at
which sums are cut (models.attention.strict_attention). Where a model reads sources, the text's is read alone and beside
another one, which the other sequences have.

Layers of one kind run the same code, so the pass stops behind the first layers among which every kind is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle
from typing import Any

import torch

from paceline.models.attention.strict_attention import CHUNK
from paceline.models.base import LayerPlan
from paceline.models.inputs import NO_INPUTS, Inputs
from paceline.models.runners.encoder_decoder import EncoderDecoderRunner, source_of
from paceline.models.runners.native import NativeRunner
from paceline.models.runners.recurrent import RecurrentRunner
from paceline.models.spec import EncoderSpec, ModelSpec
from paceline.models.state.parts import State, keys_of
from paceline.models.state.window_slots import BLOCK
from paceline.tree import EMPTY_TREE, TokenTree

STEPS = 24
"""Tokens behind the prompt, decoded in every way."""
BEFORE = 12
"""Of them, tokens before the border between two chunks."""
WIDTHS = (*range(2, 18), 24, 31, 33, 64, 65, 130)
"""Rows of a pass. All numbers that steps of few sequences have, and those around which kernels change."""
PIECES = (1, 7, 64, 2, 130, 33, 15)
"""Lengths, in turn, of the pieces in which the prompt is fed again."""
SOURCE_ROWS = (530, 37)
"""Of the text's source, which fills more than one piece of attention, and of the other; where models take so many."""
SIBLINGS = 3

Rows = torch.Tensor
Tested = NativeRunner | RecurrentRunner | EncoderDecoderRunner


@dataclass(frozen=True, slots=True)
class _Plain:
    """What plain decoding left: states (STEPS, hidden), logits of the first rows (few, v), keys and values of all
    positions.
    """

    states: Rows
    logits: Rows
    cached: torch.Tensor


def what_varies(runner: Tested, *, seed: int = 0) -> str | None:
    """The first way of feeding a text that changes bits of its rows, in words; None if there is none.

    Args:
        runner: its other sequences are not touched.
        seed: of the random text.
    """
    trial = _InvarianceTrial(runner, seed)
    try:
        return next(trial.failures(), None)
    finally:
        for cache in trial.opened:
            trial.runner.release(cache)


def depth_of_all_kinds(spec: ModelSpec) -> int:
    """How many first layers hold every kind of layer that the model has."""
    kinds = list(dict.fromkeys(spec.layers))
    return 1 + max(spec.layers.index(kind) for kind in kinds)


def random_source(source: EncoderSpec, rows: int, generator: torch.Generator) -> Inputs:
    """A source that becomes so many rows of an encoder, or as many as it takes."""
    wanted = min(rows, source.model.max_context)
    steps = next(steps for steps in count(1) if source.rows(steps) >= wanted)
    if source.reads == "encoder_tokens":
        ids = torch.randint(source.model.vocab_size, (steps,), generator=generator)
        return Inputs(encoder_tokens=ids.tolist())
    channels = source.convolutions[0].inputs
    array = torch.randn((channels, steps) if channels > 1 else (steps,), generator=generator)
    return Inputs(features={source.reads: array.numpy()})


class _InvarianceTrial:
    """One text and the ways of feeding it."""

    def __init__(self, runner: Tested, seed: int) -> None:
        self.runner: Any = runner  # either takes its own states alone
        self.arena = runner.arena if isinstance(runner, NativeRunner) else runner.native.arena
        spec = runner.spec
        self.plan = LayerPlan(stop=min(spec.num_layers, max(2, depth_of_all_kinds(spec))))
        self.prompt = max(1, min(CHUNK - BEFORE, (runner.info.max_context - STEPS) // 2))
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(spec.vocab_size, (2, self.prompt + STEPS + max(WIDTHS)), generator=generator)
        self.text, self.noise = ids.tolist()
        self.opened: list[State] = []
        self.sources = [NO_INPUTS, NO_INPUTS]
        if isinstance(runner, EncoderDecoderRunner):
            self.sources = [random_source(runner.source, rows, generator) for rows in SOURCE_ROWS]

    def open(self, *, length: int = 0, tokens: Sequence[int] = (), other: bool = False) -> State:
        """A sequence with the first `length` tokens, or other ones, in its cache; `other`: of the other source, which
        sequences with other tokens have, too.
        """
        cache: State = self.runner.open(0, self.sources[1 if tokens or other else 0])
        self.opened.append(cache)
        if any(self.sources):
            self.runner.encode([cache])
        if fed := list(tokens) or self.text[:length]:
            self.feed([cache], [fed])
        return cache

    def copied(self, cache: State) -> State:
        """A sequence with the same tokens in slots of its own, as soon as one of both goes on."""
        other: State = self.runner.fork(cache)
        self.opened.append(other)
        return other

    def close(self, *caches: State) -> None:
        """Give caches back early, so that the model's does not grow for the test's sake."""
        for cache in caches:
            self.runner.release(cache)

    def feed(self, caches: Sequence[State], parts: Sequence[Sequence[int]]) -> Rows:
        """Append tokens to sequences, in one pass."""
        trees = [TokenTree.chain(part[1:]) if len(part) > 1 else EMPTY_TREE for part in parts]
        states = self.score(caches, [part[0] for part in parts], trees)
        self.runner.commit(caches, [range(len(part) - 1) for part in parts])
        return states

    def score(self, caches: Sequence[State], roots: Sequence[int], trees: Sequence[TokenTree]) -> Rows:
        states: Rows = self.runner.run_layers(caches, roots, trees, plan=self.plan).states
        return states

    def cached(self, cache: State, length: int) -> torch.Tensor:
        """Keys and values of the first `length` positions, of all layers that are run."""
        layers = zip(self.arena.layers[: self.plan.stop], self.runner.spec.layers, strict=False)
        with_keys = [(kv, layer.window) for kv, layer in layers if layer.keeps_keys]
        slots = [torch.from_numpy(keys_of(cache).slots_of_kind(0, length, window)) for _, window in with_keys]
        found = [kv[at] for (kv, _), at in zip(with_keys, slots, strict=True)]
        return torch.stack(found) if found else torch.empty(0, length)

    def failures(self) -> Iterator[str]:
        """What changed, in words, way by way."""
        yield from self._sources()
        start = self.open(length=self.prompt)
        fork, scattered = self.copied(start), self._scattered(start)
        states = torch.cat([self.feed([start], [[token]]) for token in self.text[self.prompt :][:STEPS]])
        few = torch.cat([self.runner.head(states[i : i + 1]) for i in range(2)])
        plain = _Plain(states, few, self.cached(start, self.prompt + STEPS))
        self.close(start)
        yield from self._prompts(plain)
        again = self.open(length=self.prompt)
        for cache, name in (
            (again, ""),
            (fork, " of a forked sequence"),
            (scattered, " of a sequence in scattered blocks"),
        ):
            for width in WIDTHS if cache is again else (1, 2, 5, 16):
                if not torch.equal(self._chain(cache, width), plain.states[:width]):
                    yield f"a chain of {width} rows{name}"
        self.close(fork, scattered)
        yield from self._beside(again, plain)
        yield from self._trees(again, plain)
        yield from self._going_on(again, plain)
        yield from self._heads(plain)

    def _sources(self) -> Iterator[str]:
        """The text's source beside the other, which is read before it."""
        if not any(self.sources):
            return
        cache = self.open()
        alone = self._attended(cache)
        self.close(cache)
        caches = [self.runner.open(0, inputs) for inputs in reversed(self.sources)]
        self.opened += caches
        self.runner.encode(caches)
        if not torch.equal(self._attended(caches[1]), alone):
            yield "a source that is read beside another one"
        self.close(*caches)

    def _attended(self, cache: Any) -> torch.Tensor:
        """What all layers attend to of a sequence's source, copied."""
        memory = source_of(cache).read()
        return torch.stack([memory.read(layer) for layer in range(self.runner.spec.num_layers)])

    def _scattered(self, start: State) -> State:
        """The same prompt, of which all full blocks are another sequence's, as behind a shared prefix; the rest is
        computed. States of mixers cannot go back, so that all of it is the other's.
        """
        if not self.runner.capabilities.truncate:
            return self.copied(start)
        shared = (self.prompt - 1) // BLOCK * BLOCK
        cache, arena = start.fork(), self.arena
        cache.truncate(shared)
        self.opened.append(cache)
        limit, arena.copy_limit = arena.copy_limit, 0
        try:
            self.feed([cache], [self.text[shared : self.prompt]])
        finally:
            arena.copy_limit = limit
        return cache

    def _chain(self, cache: State, width: int) -> Rows:
        """The first rows behind the prompt in a chain of `width`; nothing is committed."""
        tokens = self.text[self.prompt : self.prompt + width]
        room = self.runner.info.max_context - self.prompt
        return self.score([cache], tokens[:1], [TokenTree.chain(tokens[1:room]) if width > 1 else EMPTY_TREE])[
            : min(width, STEPS)
        ]

    def _prompts(self, plain: _Plain) -> Iterator[str]:
        cache, pieces, at = self.open(), cycle(PIECES), 0
        while at < self.prompt:
            stop = min(self.prompt, at + next(pieces))
            self.feed([cache], [self.text[at:stop]])
            at = stop
        if not torch.equal(self.cached(cache, self.prompt), plain.cached[:, : self.prompt]):
            yield "a prompt in other pieces"
        self.close(cache)
        other, mixed, half = self.open(other=True), self.open(), max(1, self.prompt // 2)
        self.feed([other, mixed], [self.noise[:half], self.text[:half]])
        if half < self.prompt:
            self.feed([mixed, other], [self.text[half : self.prompt], self.noise[:3]])
        if not torch.equal(self.cached(mixed, self.prompt), plain.cached[:, : self.prompt]):
            yield "a prompt beside another one"
        self.close(other, mixed)

    def _beside(self, cache: State, plain: _Plain) -> Iterator[str]:
        """One row of the sequence among rows of others, first and last."""
        first, second = self.open(tokens=self.noise[:21]), self.open(tokens=self.noise[:5])
        root = self.text[self.prompt]
        room = self.runner.info.max_context - 22
        for width in WIDTHS:
            rest = width - 1
            near, far = min(rest // 2, room), min(rest - rest // 2, room)
            trees = [TokenTree.chain(self.noise[1:count]) if count > 1 else EMPTY_TREE for count in (near, far)]
            trio = [(first, self.noise[0], trees[1]), (cache, root, EMPTY_TREE)]
            trio += [(second, self.noise[0], trees[0])] if near else []
            rows = self.score(*zip(*trio, strict=True))
            if not torch.equal(rows[far], plain.states[0]):
                yield f"a row among {width} rows of other sequences"
        self.close(first, second)

    def _trees(self, prompted: State, plain: _Plain) -> Iterator[str]:
        """The text's own path through trees that hold other tokens as well, from several positions behind the
        prompt.
        """
        for back in (0, BEFORE - 2, BEFORE + 1):
            cache = self.copied(prompted)
            if back:
                self.feed([cache], [self.text[self.prompt : self.prompt + back]])
            depth = min(STEPS - 2 - back, 14)
            tree, path = self._tree(self.prompt + back + 1, depth)
            rows = self.score([cache], self.text[self.prompt + back :][:1], [tree])[[0, *(1 + node for node in path)]]
            if not torch.equal(rows, plain.states[back : back + 1 + depth]):
                yield f"a tree of {1 + len(tree)} rows"
            self.runner.commit([cache], [path])
            done = back + 1 + depth
            rows = self.feed([cache], [self.text[self.prompt + done :][:1]])
            if not torch.equal(rows[0], plain.states[done]):
                yield "a row behind an accepted path"
            if not torch.equal(self.cached(cache, self.prompt + done + 1), plain.cached[:, : self.prompt + done + 1]):
                yield "the cache behind an accepted path"
            self.close(cache)

    def _tree(self, start: int, depth: int) -> tuple[TokenTree, list[int]]:
        """`depth` tokens of the text from `start`, each with SIBLINGS others of which one goes on, and their nodes."""
        tokens: list[int] = []
        parents: list[int] = []
        path: list[int] = []
        at = -1
        for real_token in self.text[start : start + depth]:
            others = [token for token in dict.fromkeys(self.noise) if token != real_token][:SIBLINGS]
            level = len(tokens)
            tokens += [*others[:-1], real_token, others[-1]]
            parents += [at] * (SIBLINGS + 1)
            tokens.append(real_token)
            parents.append(level)
            at = level + SIBLINGS - 1
            path.append(at)
        return TokenTree.build(tokens, parents), path

    def _going_on(self, prompted: State, plain: _Plain) -> Iterator[str]:
        """Accelerated decoding: chains of many widths, of which a part is accepted each time."""
        cache, at = self.copied(prompted), 0
        for width, kept in cycle(((3, 2), (1, 1), (6, 1), (8, 7), (2, 2), (5, 3))):
            tokens = self.text[self.prompt + at : self.prompt + at + width]
            drafted = [*tokens[1:kept], *self.noise[: width - kept]]
            rows = self.score([cache], tokens[:1], [TokenTree.chain(drafted) if drafted else EMPTY_TREE])
            self.runner.commit([cache], [range(kept - 1)])
            until = min(kept, STEPS - at)
            if not torch.equal(rows[:until], plain.states[at : at + until]):
                yield "a row behind accepted tokens"
            at += kept
            if at >= STEPS:
                break
        length = self.prompt + STEPS
        if not torch.equal(self.cached(cache, length), plain.cached[:, :length]):
            yield "the cache behind accepted tokens"

    def _heads(self, plain: _Plain) -> Iterator[str]:
        many = torch.cat([plain.states] * (1 + max(WIDTHS) // STEPS))
        for width in WIDTHS:
            logits = self.runner.head(many[:width])
            if not torch.equal(logits[:2], plain.logits) or not torch.equal(logits[-1], logits[(width - 1) % STEPS]):
                yield f"logits of {width} rows"
