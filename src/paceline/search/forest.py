"""The caches of branches: shared as far as their texts are, made when they are asked for, freed when they are not.

A branch that was scored has all its tokens in its cache, which its children fork. Where a cache was given up, because
nobody wanted it or memory ran short, the branch is computed anew from the nearest ancestor that has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Final

import torch

from paceline.engine import fill_caches
from paceline.errors import NumericsError, PromptError
from paceline.models import ALL_LAYERS, EncodesInputs, HasEmbedding, HasHead, RunsLayers, memory_of
from paceline.search.branch import Branch, BranchRows
from paceline.tree import EMPTY_TREE
from paceline.verifiers import bad_row

if TYPE_CHECKING:
    from paceline.models import Runner, SequenceCache

MOST_ROWS: Final = 256
"""Branches of a pass."""

Errors = Mapping[Branch, NumericsError]
"""Why what may follow a branch is no distribution: what plain decoding says there."""


class DeadEndError(NumericsError):
    """The request's rules allow no token."""


class Forest:
    """The branches of all searches that run.

    Args:
        chunk: tokens of a pass that fills caches.
        share_prompts: what prompts have in common at their beginning is computed once, and kept for later calls.
            Models with sliding windows share nothing: what is behind a window may be gone.
    """

    def __init__(self, runner: Runner, chunk: int, *, share_prompts: bool = False) -> None:
        self._runner, self._memory, self._chunk = runner, memory_of(runner), chunk
        memory = self._memory
        shares = share_prompts and memory is not None and memory.can_share_prefixes and not memory.has_windows
        self._prefixes = memory if shares else None
        self._seated: dict[Branch, None] = {}  # those with a cache, in the order in which they got it
        self._shaped: set[Branch] = set()  # those that may have rules
        self._begins: dict[Branch, tuple[str | bytes, ...]] = {}  # of prompts that are read: what they make known

    def rows(
        self, branches: Sequence[Branch], kept: Sequence[Branch] = (), taps: Sequence[int] = ()
    ) -> tuple[BranchRows, Errors]:
        """What may follow branches, none of which is named twice: a pass over their last tokens, which are then in
        their caches.

        Args:
            kept: branches whose caches stay; those of all others are freed.
            taps: layers whose states are wanted; not of mixtures.
        Returns:
            Their rows, and the errors of those that hold no distribution (see `shaped`).
        Raises:
            PromptError: memory for keys and values that they do not fit into.
        """
        self._share_blocks()
        asked = set(branches)
        stay = asked | set(kept)
        near = [
            branch for branch in kept if not branch.has_cache and branch.parent is not None and branch.parent.has_cache
        ]
        self._seat([*branches, *(branch for branch in near if branch not in asked)], stay)
        self._free([branch for branch in self._seated if branch not in stay])
        if not branches:
            return BranchRows(torch.empty(0, 0), torch.empty(0, 0)), {}
        self._make_room(branches)
        parts, states = [], {layer: list[torch.Tensor]() for layer in taps}
        for start in range(0, len(branches), MOST_ROWS):
            part = branches[start : start + MOST_ROWS]
            caches = [branch.cache for branch in part]
            logits, tapped = self._logits(part, caches, taps)
            for layer, some in states.items():
                some.append(tapped[layer].to("cpu", torch.float32, copy=True))
            self._runner.commit(caches, [()] * len(part))
            parts.append(logits.to(torch.float32, copy=True))
        logits = torch.cat(parts).cpu()
        logprobs, errors = self._shape(branches, logits, stay)
        return BranchRows(logits, logprobs, {layer: torch.cat(some) for layer, some in states.items()}), errors

    def _shape(
        self, branches: Sequence[Branch], logits: torch.Tensor, stay: Collection[Branch]
    ) -> tuple[torch.Tensor, Errors]:
        """Log-probabilities under each branch's rules, of which only those of branches in `stay` are kept."""
        logprobs_and_errors = shaped(branches, logits)
        self._shaped |= set(branches)
        for branch in self._shaped.difference(stay):
            branch.forget_rules()
        self._shaped.intersection_update(stay)
        return logprobs_and_errors

    def _share_blocks(self) -> None:
        """Let branches share what they have in common, however short it is."""
        if self._memory is not None:
            self._memory.allocate_single_blocks(True)

    def room(self) -> int | None:
        """Blocks that prompts to come may take; None where caches are not counted."""
        return None if self._memory is None else self._memory.left()

    def blocks(self, tokens: int) -> int:
        """That so many tokens take."""
        return 0 if self._memory is None else self._memory.blocks_for(tokens)

    def _logits(
        self, part: Sequence[Branch], caches: Sequence[SequenceCache], taps: Sequence[int]
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """(b, v), and states by layer: one pass, of tokens or, where one of them is a mixture, of embeddings."""
        runner, tokens, trees = self._runner, [branch.token for branch in part], [EMPTY_TREE] * len(part)
        if all(branch.mixture is None for branch in part):
            scores = runner.score(caches, tokens, trees, taps=taps)
            return scores.logits, scores.taps
        layers, head, embedder = runner, runner, runner
        assert isinstance(layers, RunsLayers)
        assert isinstance(head, HasHead)
        assert isinstance(embedder, HasEmbedding)
        inputs = []
        for branch in part:
            mixture = branch.mixture or {branch.token: 1.0}
            embeddings = embedder.embed(list(mixture))
            weights = torch.tensor(list(mixture.values()), device=embeddings.device)
            inputs.append((weights @ embeddings.float()).to(embeddings.dtype))
        result = layers.run_layers(caches, tokens, trees, plan=ALL_LAYERS, hidden=torch.stack(inputs), taps=taps)
        return head.head(result.states), result.taps

    def close(self, request_id: str | None = None) -> None:
        """Free the caches of a request's branches, or of all."""
        self._free([branch for branch in self._seated if request_id in (None, branch.request.id)])

    def _seat(self, branches: Sequence[Branch], stay: Collection[Branch]) -> None:
        """Give each a cache of its text without the last token: a fork of its nearest ancestor's, or where the parent
        is not in `stay`, for the last of its children the parent's own.
        """
        prompts = [branch for branch in branches if branch.parent is None and not branch.has_cache]
        while prompts and self._prefixes is not None:
            prompts = self.read(prompts)
        waiting = Counter(branch.parent for branch in branches if not branch.has_cache)
        for branch in branches:
            if not branch.has_cache:
                waiting[branch.parent] -= 1
                parent = branch.parent
                self._seated[branch] = None  # first: what cuts in leaves no cache that nobody knows
                if parent is not None and parent.has_cache and parent not in stay and not waiting[parent]:
                    branch.cache = parent.give_up_cache()
                    del self._seated[parent]
                else:
                    branch.cache = self._forked(branch)
            if branch.cache.length >= branch.size:
                self._runner.truncate(branch.cache, branch.size - 1)
        self._fill([branch for branch in branches if branch.cache.length < branch.size - 1])

    def read(self, prompts: Sequence[Branch]) -> list[Branch]:
        """Read on in prompts, in a pass of at most `chunk` tokens; those that are not in their caches by then.

        One that begins as another of them does, as far as is not known yet, waits for that.

        Raises:
            PromptError: memory for keys and values that they do not fit into.
        """
        self._share_blocks()
        self._open_prompts(prompts)
        fed: list[SequenceCache] = []
        pieces: list[list[int]] = []
        room = self._chunk
        for branch in prompts:
            if branch.has_cache and room and (piece := branch.text()[branch.cache.length : -1][:room]):
                fed.append(branch.cache)
                pieces.append(piece)
                room -= len(piece)
        if fed:
            self._runner.extend(fed, pieces)
        left = []
        for branch in prompts:
            if not branch.has_cache or branch.cache.length < branch.size - 1:
                left.append(branch)
                continue
            self._begins.pop(branch, None)
            if self._prefixes is not None:
                self._prefixes.retain(
                    branch.cache, branch.request.prefix_key, branch.request.block_keys(self._prefixes)
                )
        return left

    def _open_prompts(self, prompts: Sequence[Branch]) -> None:
        """Give prompts caches, unless they wait for another."""
        memory = self._prefixes
        read = {self._begins[branch] for branch in prompts if branch.has_cache and branch in self._begins}
        for branch in prompts:
            if branch.has_cache:
                continue
            if memory is not None:
                keys, owner = branch.request.block_keys(memory), branch.request.prefix_key
                known = memory.known(owner, keys)
                begins: tuple[str | bytes, ...] = (owner, *keys[: known + 1])
                if begins in read:
                    continue
                if known < len(keys):
                    self._begins[branch] = begins
                    read.add(begins)
            self._seated[branch] = None
            branch.cache = self._opened(branch)
            if memory is not None:
                branch.request.note_cached(branch.cache.length)

    def _opened(self, branch: Branch) -> SequenceCache:
        """A cache with what is known of the prompt."""
        request, memory = branch.request, self._prefixes
        cache = self._runner.open(len(request.prompt_ids), request.inputs)
        if isinstance(self._runner, EncodesInputs):
            self._runner.encode([cache])
        if memory is not None:
            memory.adopt(request.prefix_key, request.block_keys(memory), cache)
        return cache

    def _forked(self, branch: Branch) -> SequenceCache:
        for ancestor in branch.ancestors():
            if ancestor.has_cache:
                cache = self._runner.fork(ancestor.cache)
                if cache.length >= branch.size:
                    self._runner.truncate(cache, branch.size - 1)
                return cache
        return self._opened(branch)

    def _fill(self, branches: Sequence[Branch]) -> None:
        """Compute what is not in their caches, all but the last token.

        Raises:
            PromptError: there is a mixture among it.
        """
        for branch in branches:
            gone = branch.size - 1 - branch.cache.length
            if any(above.mixture is not None for above in islice(branch.ancestors(), 1, gone + 1)):
                raise PromptError("the keys and values of a mixture were given up; ask for its branch in every step")
        caches = [branch.cache for branch in branches]
        missing = [branch.text()[cache.length : -1] for branch, cache in zip(branches, caches, strict=True)]
        fill_caches(self._runner, caches, missing, self._chunk)

    def _make_room(self, branches: Sequence[Branch]) -> None:
        if self._memory is None:
            return
        wanted = set(branches)
        needed = sum(self._memory.need(branch.cache, 1) for branch in branches)
        for branch in [branch for branch in self._seated if branch not in wanted]:
            if needed <= self._memory.left():
                return
            self._free([branch])
        if needed > self._memory.left():
            raise PromptError(
                f"{len(branches)} branches need more memory for keys and values than there is; let fewer go on at once,"
                " shorten the prompt or raise kv_cache_memory_bytes"
            )

    def _free(self, branches: Iterable[Branch]) -> None:
        for branch in branches:
            self._seated.pop(branch, None)
            self._begins.pop(branch, None)
            if branch.has_cache:
                self._runner.release(branch.give_up_cache())


def shaped(branches: Sequence[Branch], logits: torch.Tensor) -> tuple[torch.Tensor, Errors]:
    """What may follow branches, as their requests' parameters shape it.

    Args:
        logits: (b, v) of the model.
    Returns:
        (b, v) log-probabilities; and errors of the branches whose row is no distribution. Such a row is -inf throughout
        at a `DeadEndError`, NaN where the model or a rule failed.
    """
    weights = logits
    if not all(branch.origin.rules.trivial for branch in branches):
        weights = torch.cat([_weights(branch, logits[i : i + 1]) for i, branch in enumerate(branches)])
    logprobs, largest, errors = weights.log_softmax(-1), weights.amax(-1).tolist(), dict[Branch, NumericsError]()
    for i, (branch, top) in enumerate(zip(branches, largest, strict=True)):
        if not isfinite(top):
            why = branch.rules.blame(logits[i : i + 1]) or str(bad_row(top, 0))
            errors[branch] = DeadEndError(why) if top == -inf else NumericsError(why)
            logprobs[i] = top if top == -inf else nan
    return logprobs, errors


def _weights(branch: Branch, logits: torch.Tensor) -> torch.Tensor:
    """(1, v) log-weights from the logits (1, v); there are no rules for what follows a mixture."""
    return logits if branch.mixture is not None else branch.rules.apply(logits, EMPTY_TREE)


def raise_failure(errors: Errors) -> None:
    """Raise the first error that is no dead end."""
    for error in errors.values():
        if not isinstance(error, DeadEndError):
            raise error
