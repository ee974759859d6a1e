"""Where the rows come from that steering looks at beside the target's own (`sampling.steering`).

States of layers come with the scoring pass. Second sequences are scored over the same trees and committed by the same
paths: those of the target are a part of its pass, those of other models have a pass of their own behind it. Their
caches are made and filled when rows are first wanted, and whenever they lag behind, so that they can be given up with
those of the first sequences at any time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np
import torch

from paceline import registry
from paceline.engine.companion import Companion, Second
from paceline.errors import CapabilityError, ConfigError
from paceline.models import HasHead, Runner, SequenceCache
from paceline.models.loading import is_adapter
from paceline.sampling.steering import Steering, parse_steering
from paceline.tree import Scores, TokenTree, Verdict
from paceline.utils import choice, need

if TYPE_CHECKING:
    from paceline.drafters import Models
    from paceline.engine.request import Request
    from paceline.engine.sequence import Sequence as Decoding

logger = logging.getLogger("paceline.engine")

T = TypeVar("T")

MOST_ROWS: Final = 128
"""Rows of layers' states that go through the head together."""

Others = Iterable[torch.Tensor]
"""Rows that a method looks at, one tensor after the other; may be gone through again."""


@dataclass(frozen=True, slots=True)
class Added:
    """What steering adds to a scoring pass of the target.

    Attributes:
        caches, roots, trees: of second sequences. taps: layers.
    """

    caches: Sequence[SequenceCache] = ()
    roots: Sequence[int] = ()
    trees: Sequence[TokenTree] = ()
    taps: Sequence[int] = ()

    def split(self, scores: Scores) -> tuple[Scores, Sequence[torch.Tensor]]:
        """The scores without what was added, and the (1 + n, v) logits of each second sequence."""
        if not self.caches:
            return scores, ()
        first = len(scores.rows) - 1 - len(self.caches)
        end = scores.rows[first]
        taps = {layer: tap[:end] for layer, tap in scores.taps.items()}
        best = None if scores.best is None else scores.best[:end]
        own = Scores(scores.logits[:end], scores.rows[: first + 1], taps, best)
        return own, [scores.of(first + i) for i in range(len(self.caches))]


NOTHING_ADDED: Final = Added()


@dataclass(frozen=True, slots=True)
class Beside(Generic[T]):
    """A second sequence, the one that it goes along with, and what a step has of that one: its tree or verdict."""

    first: Decoding
    second: Second
    beside: T


class Companions:
    """The companions of all sequences of an engine.

    Args:
        runner: of the target. chunk: tokens of a pass that fills caches.
        tokenizer: for prompts given as text; None for token ids only.
        models: opens other models; None where there are none.
        branches: drafts may have some.
    """

    def __init__(
        self, runner: Runner, chunk: int, *, tokenizer: Any = None, models: Models | None = None, branches: bool
    ) -> None:
        self.runner, self._chunk, self._tokenizer, self._models = runner, chunk, tokenizer, models
        self._branches = branches

    def of(self, request: Request) -> Companion | None:
        """What `SamplingParams.steering` asks for, its model opened; None without.

        Raises:
            ConfigError: a method, an option or a model that cannot be used here.
            CapabilityError: a model that lacks what the method needs.
            PromptError: a second sequence that its model has no room for.
        """
        if request.params.steering is None:
            return None
        method = parse_steering(request.params.steering)
        found = Companion(method, _taps(method, self.runner))
        for kind in method.companions:
            choice(f"companions of steering method {method.name!r}", kind, ("prompt", "model"))
            if kind == "prompt":
                second = Second(method.name, self.runner, self._prompt(method, request))
            else:
                runner = self._open(method)
                second = Second(method.name, runner, list(request.prompt_ids), _taps(method, runner))
            second.check(request.max_tokens)
            found.seconds += (second,)
        return found

    def _prompt(self, method: Steering, request: Request) -> list[int]:
        given, own = request.prompt_ids[-1:] if method.prompt is None else method.prompt, list(request.prompt_ids)
        if isinstance(given, str):
            need(self._tokenizer is not None, "prompt of steering", "be token ids where there is no tokenizer", given)
            given = self._tokenizer.encode(given)
        if not method.prepended:
            return list(given)
        twice = self._tokenizer is not None and [*given[:1]] == own[:1] == [self._tokenizer.bos_id]
        return [*given, *own[twice:]]

    def _open(self, method: Steering) -> Runner:
        if self._models is None:
            raise ConfigError(f"steering method {method.name!r} needs a second model, and none can be opened here")
        if method.model is None:
            runner = self._models.base_of_target()
        elif is_adapter(method.model):
            runner = self._models.target_with(method.model)
        else:
            runner = self._models.open(method.model)
        if self._branches:
            _need_ability(method, "trees", runner)
        return runner

    def added(self, batch: Sequence[Decoding], trees: Sequence[TokenTree]) -> Added:
        """What the next scoring pass of the target must hold for these sequences besides."""
        if all(sequence.companion is None for sequence in batch):
            return NOTHING_ADDED
        taps = {layer for sequence in batch if sequence.companion is not None for layer in sequence.companion.taps}
        own = [one for runner, some in _by_runner(zip(batch, trees, strict=True)) if runner is self.runner
               for one in some]  # fmt: skip
        if not (taps or own):
            return NOTHING_ADDED
        caches, roots = self._filled(self.runner, own), [_root(one) for one in own]
        return Added(caches, roots, [one.beside for one in own], sorted(taps))

    def shape(
        self, batch: Sequence[Decoding], trees: Sequence[TokenTree], scores: Scores, second: Sequence[torch.Tensor]
    ) -> Scores:
        """The scores, with shaped float32 rows for sequences that are steered; the same object where none is.

        Args:
            second: logits of the target's second sequences, in the order of `added`.
        """
        steered = [i for i, sequence in enumerate(batch) if sequence.companion is not None]
        if not steered:
            return scores
        logits = scores.logits.to(torch.float32, copy=True)
        rows = self._elsewhere([(batch[i], trees[i]) for i in steered])
        rows[id(self.runner)] = iter([[[one]] for one in second])
        for i in steered:
            companion, span = _companion(batch[i]), slice(scores.rows[i], scores.rows[i + 1])
            others = [next(rows[id(one.runner)]) for one in companion.seconds]
            early = _Early(companion.method, self.runner, companion.taps, scores, span)
            _shape_rows(companion, logits[span], scores.logits[span], [early, *chain(*others)])
        return replace(scores, logits=logits, best=None)

    def _elsewhere(self, pairs: Sequence[tuple[Decoding, TokenTree]]) -> dict[int, Iterator[Sequence[Others]]]:
        """Logits of the second sequences of other models, and what their layers predict, by the id of their runner."""
        found = dict[int, Iterator[Sequence[Others]]]()
        for runner, some in _by_runner(pairs):
            if runner is not self.runner:
                caches, roots = self._filled(runner, some), [_root(one) for one in some]
                trees = [_known(one.beside, runner.info.vocab_size) for one in some]
                taps = sorted({layer for one in some for layer in one.second.taps})
                found[id(runner)] = _each(some, runner.score(caches, roots, trees, taps=taps))
        return found

    def commit(self, batch: Sequence[Decoding], verdicts: Sequence[Verdict]) -> None:
        """Second sequences keep the accepted paths of these, which go on."""
        for runner, some in _by_runner(zip(batch, verdicts, strict=True)):
            runner.commit([one.second.cache for one in some], [one.beside.path for one in some])

    def fork(self, first: Decoding, others: Sequence[Decoding]) -> None:
        """Let others, which begin as `first` does, share what its second sequence has seen."""
        if not others or first.companion is None:
            return
        for i, second in enumerate(first.companion.seconds):
            if second.runner.capabilities.fork:
                (cache,) = self._filled(second.runner, [Beside(first, second, None)])
                for other in others:
                    _companion(other).seconds[i].hold(second.runner.fork(cache))

    def _filled(self, runner: Runner, seconds: Sequence[Beside[Any]]) -> list[SequenceCache]:
        """Caches of second sequences, with all but the last token of their texts."""
        caches = [one.second.cache for one in seconds]
        left = {i: one.second.missing(one.first.context) for i, one in enumerate(seconds)}
        while left := {i: tokens for i, tokens in left.items() if tokens}:
            chunks, room = dict[int, list[int]](), self._chunk
            for i, tokens in left.items():
                if room > 0:
                    chunks[i] = tokens[:room]
                    room -= len(chunks[i])
            runner.extend([caches[i] for i in chunks], list(chunks.values()))
            left |= {i: left[i][len(chunk) :] for i, chunk in chunks.items()}
        return caches


def _need_ability(method: Steering, ability: str, runner: Runner) -> None:
    if not getattr(runner.capabilities, ability):
        raise CapabilityError(
            f"steering method {method.name!r} needs a model that {registry.ABILITIES[ability]}; {runner.info.name} is "
            "not one as it runs here; choose another method"
        )


def _companion(sequence: Decoding) -> Companion:
    assert sequence.companion is not None
    return sequence.companion


def _taps(method: Steering, runner: Runner) -> tuple[int, ...]:
    """The layers of a model that a method looks at; the model must have them and give their states."""
    size = runner.info.num_layers
    found = tuple(method.taps(size))
    known = all(isinstance(one, int) and -1 <= one < size for one in found)
    need(known, f"taps of steering method {method.name!r}", f"be layers in -1..{size - 1}", found)
    for ability in ("taps", "head") if found else ():
        _need_ability(method, ability, runner)
    return found


def _root(one: Beside[Any]) -> int:
    return one.second.root(one.first.context)


def _by_runner(pairs: Iterable[tuple[Decoding, T]]) -> Iterable[tuple[Runner, list[Beside[T]]]]:
    """The second sequences, in order, by their runner."""
    found: dict[int, tuple[Runner, list[Beside[T]]]] = {}
    for first, beside in pairs:
        for second in () if first.companion is None else first.companion.seconds:
            found.setdefault(id(second.runner), (second.runner, []))[1].append(Beside(first, second, beside))
    return found.values()


def _each(seconds: Sequence[Beside[TokenTree]], scores: Scores) -> Iterator[Sequence[Others]]:
    """Of each second sequence of another model its rows, and what its layers predict."""
    for i, one in enumerate(seconds):
        method, runner, taps = _companion(one.first).method, one.second.runner, one.second.taps
        yield [scores.of(i)], _Early(method, runner, taps, scores, slice(scores.rows[i], scores.rows[i + 1]))


@dataclass(frozen=True, slots=True)
class _Early:
    """What layers predict, one after the other; the head's weights are read once for several of them."""

    method: Steering
    runner: Runner
    layers: Sequence[int]
    scores: Scores
    span: slice

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.layers:
            return
        assert isinstance(self.runner, HasHead)
        rows = self.span.stop - self.span.start
        together = max(1, MOST_ROWS // rows)
        for start in range(0, len(self.layers), together):
            states = [self.scores.taps[layer][self.span] for layer in self.layers[start : start + together]]
            yield from self.runner.head(torch.cat(states), norm=self.method.norm).split(rows)


def _shape_rows(companion: Companion, rows_rv: torch.Tensor, logits_rv: torch.Tensor, others: Sequence[Others]) -> None:
    """Shape float32 rows in place; tokens that a second sequence's model does not have are forbidden.

    Where the method fails, each row is shaped alone, and those on which it fails again hold NaN: off the accepted path
    nobody looks at them, as plain decoding never comes there; the root's ends the request, and `failure` says why.

    Args:
        logits_rv: what `rows_rv` holds, of any dtype; not written to.
    """
    width = min([rows_rv.shape[-1], *(one.runner.info.vocab_size for one in companion.seconds)])

    def shaped(rows: slice) -> str | None:
        """Shape some; returns what went wrong."""
        own_rv = rows_rv[rows, :width]
        fitted = (other_rv[rows, :width].to(own_rv.device, torch.float32) for other_rv in chain(*others))
        try:
            own_rv.copy_(_checked(companion.method.shape(own_rv, fitted), own_rv))
        except Exception as error:  # whatever a class of the user's own raises
            logger.debug("the error of steering method %s", companion.method.name, exc_info=error)
            own_rv.fill_(math.nan)
            return f"steering method {companion.method.name!r} failed ({type(error).__name__}: {error})"
        return None

    companion.failure = shaped(slice(None))
    if companion.failure is not None and len(rows_rv) > 1:
        rows_rv.copy_(logits_rv)
        root, *_ = [shaped(slice(row, row + 1)) for row in range(len(rows_rv))]
        companion.failure = root
    rows_rv[:, width:] = -math.inf


def _checked(found: Any, rows_rv: torch.Tensor) -> torch.Tensor:
    """What a method returned, if it is rows."""
    if not isinstance(found, torch.Tensor) or found.shape != rows_rv.shape:
        got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise TypeError(f"shape must return logits of shape {tuple(rows_rv.shape)}, got {got}")
    return found


def _known(tree: TokenTree, width: int) -> TokenTree:
    """The tree for a model of so many tokens: drafted ones beyond, which are forbidden, become others."""
    if not len(tree) or int(tree.tokens.max()) < width:
        return tree
    return tree.replace(tokens=np.minimum(tree.tokens, width - 1))
