"""Where the rows come from that steering looks at beside the target's own (`sampling.steering`).

States of layers come with the scoring pass. Second sequences are scored over the same trees and committed by the same
paths: those of the target are a part of its pass, those of other models have a pass of their own behind it. Their
caches are made and filled when rows are first wanted, and whenever they lag behind, so that they can be given up with
those of the first sequences at any time.

What fails of a second sequence ends the one that it goes along with (`DecodingSequence.fail_next_step`), and no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np
import torch

from paceline import registry
from paceline.checkpoints import is_adapter
from paceline.engine.companion import Companion, Second
from paceline.engine.filling import fill_caches
from paceline.errors import CapabilityError, ConfigError, PromptError
from paceline.models import HasHead, Runner, SequenceCache, has_ability
from paceline.sampling import given_rows
from paceline.sampling.steering import Steering, parse_steering
from paceline.tree import Scores, TokenTree, Verdict
from paceline.utils import choice, need

if TYPE_CHECKING:
    from paceline.drafters import Models
    from paceline.engine.request import Request
    from paceline.engine.sequence import DecodingSequence

T = TypeVar("T")

MOST_ROWS: Final = 128
"""Rows of layers' states that go through the head together."""

Others = Iterable[torch.Tensor]
"""Rows that a method looks at, one tensor after the other; may be gone through again."""


@dataclass(frozen=True, slots=True)
class SteeringRows:
    """Lists what steering adds to a scoring pass of the target.

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
        target = Scores(scores.logits[:end], scores.rows[: first + 1], taps, best)
        return target, [scores.of(first + i) for i in range(len(self.caches))]


NOTHING_ADDED: Final = SteeringRows()


@dataclass(frozen=True, slots=True)
class SecondInStep(Generic[T]):
    """Joins a second sequence, the one that it goes along with, that one's companion, and what a step has of that one:
    its tree or verdict.
    """

    first: DecodingSequence
    companion: Companion
    second: Second
    of_first: T


class Companions:
    """Serves the companions of all sequences of an engine: makes them, fills their caches, and shapes rows.

    Args:
        runner: runs the target.
        chunk: most tokens of a pass that fills caches.
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
        if method.companions and request.inputs:
            raise PromptError(
                f"steering method {method.name!r} has a second sequence, which gets tokens only, but the prompt has "
                f"{request.inputs.described()}; leave one of them out"
            )
        companion = Companion(method, _taps(method, self.runner))
        for kind in method.companions:
            choice(f"companions of steering method {method.name!r}", kind, ("prompt", "model"))
            if kind == "prompt":
                second = Second(method.name, self.runner, self._prompt(method, request))
            else:
                runner = self._open(method)
                second = Second(method.name, runner, list(request.prompt_ids), _taps(method, runner))
            second.check(request.max_tokens)
            companion.seconds += (second,)
        return companion

    def _prompt(self, method: Steering, request: Request) -> list[int]:
        prompt, first_prompt = request.prompt_ids[-1:] if method.prompt is None else method.prompt, request.prompt_ids
        if isinstance(prompt, str):
            need(self._tokenizer is not None, "prompt of steering", "be token ids where there is no tokenizer", prompt)
            prompt = self._tokenizer.encode(prompt)
        if not method.prepended:
            return list(prompt)
        twice = self._tokenizer is not None and [*prompt[:1]] == first_prompt[:1] == [self._tokenizer.bos_id]
        return [*prompt, *first_prompt[twice:]]

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

    def added(self, batch: Sequence[DecodingSequence], trees: Sequence[TokenTree]) -> SteeringRows:
        """What the next scoring pass of the target must hold for these sequences besides."""
        if all(sequence.companion is None for sequence in batch):
            return NOTHING_ADDED
        self._fill(self.runner, _seconds(self.runner, zip(batch, trees, strict=True)))
        seconds = _seconds(self.runner, zip(batch, trees, strict=True))
        taps = {layer for sequence in batch if (by := _steering(sequence)) is not None for layer in by.taps}
        if not (taps or seconds):
            return NOTHING_ADDED
        roots, second_trees = [_root(item) for item in seconds], [item.of_first for item in seconds]
        return SteeringRows(_caches(seconds), roots, second_trees, sorted(taps))

    def shape(
        self,
        batch: Sequence[DecodingSequence],
        trees: Sequence[TokenTree],
        scores: Scores,
        second: Sequence[torch.Tensor],
    ) -> Scores:
        """The scores, with shaped float32 rows for sequences that are steered; the same object where none is.

        Args:
            second: logits of the target's second sequences, in the order of `added`.
        """
        if all(sequence.companion is None for sequence in batch):
            return scores
        pairs = list(zip(batch, trees, strict=True))
        with_rows = zip(_seconds(self.runner, pairs), second, strict=True)
        others: dict[int, Sequence[Others]] = {id(item.second): [[rows]] for item, rows in with_rows}
        others |= self._elsewhere(pairs)
        steered = [(i, by) for i, sequence in enumerate(batch) if (by := _steering(sequence)) is not None]
        if not steered:
            return scores
        logits = scores.logits.to(torch.float32, copy=True)
        for i, companion in steered:
            span = slice(scores.rows[i], scores.rows[i + 1])
            early = _Early(companion.method, self.runner, companion.taps, scores, span)
            seen = [early, *chain(*(others[id(each)] for each in companion.seconds))]
            raw_rv, shaped_rv = scores.logits[span], logits[span]
            failure = _shape_rows(companion, shaped_rv, raw_rv, seen)
            failure = failure or _blame(companion, raw_rv, shaped_rv, seen)
            if failure is not None:
                batch[i].fail_next_step(failure)
        return replace(scores, logits=logits, best=None)

    def _elsewhere(self, pairs: Sequence[tuple[DecodingSequence, TokenTree]]) -> dict[int, Sequence[Others]]:
        """Logits of the second sequences of other models, and what their layers predict, by the id of each."""
        others: dict[int, Sequence[Others]] = {}
        for runner in _runners(pairs):
            if runner is not self.runner:
                self._fill(runner, _seconds(runner, pairs))
                _each(_seconds(runner, pairs), partial(_score, runner, others))
        return others

    def commit(self, batch: Sequence[DecodingSequence], verdicts: Sequence[Verdict]) -> None:
        """Second sequences keep the accepted paths of these, which go on."""
        pairs = list(zip(batch, verdicts, strict=True))
        for runner in _runners(pairs):
            seconds = _seconds(runner, pairs)
            try:
                runner.commit(_caches(seconds), [item.of_first.path for item in seconds])
            except Exception as error:
                for item in seconds:
                    _end(item, error)

    def fork(self, first: DecodingSequence, others: Sequence[DecodingSequence]) -> None:
        """Let others, which begin as `first` does, share what its second sequence has seen."""
        if not others or first.companion is None:
            return
        companions = [other.companion for other in others if other.companion is not None]
        for i, second in enumerate(first.companion.seconds):
            if second.runner.capabilities.fork:
                self._fill(second.runner, [SecondInStep(first, first.companion, second, None)])
                for companion in () if first.failing else companions:
                    companion.seconds[i].hold(second.runner.fork(second.cache))

    def _fill(self, runner: Runner, seconds: Sequence[SecondInStep[Any]]) -> None:
        """Give caches of second sequences all but the last token of their texts."""
        _each(seconds, lambda some: self._filled(runner, some))

    def _filled(self, runner: Runner, seconds: Sequence[SecondInStep[Any]]) -> None:
        missing = [item.second.missing(item.first.context) for item in seconds]
        fill_caches(runner, _caches(seconds), missing, self._chunk)


def _need_ability(method: Steering, ability: str, runner: Runner) -> None:
    if not has_ability(runner, ability):
        raise CapabilityError(
            f"steering method {method.name!r} needs a model that {registry.ABILITIES[ability]}; {runner.info.name} is "
            "not one as it runs here; choose another method"
        )


def _taps(method: Steering, runner: Runner) -> tuple[int, ...]:
    """The layers of a model that a method looks at; the model must have them and give their states."""
    size = runner.info.num_layers
    taps = tuple(method.taps(size))
    known = all(isinstance(layer, int) and -1 <= layer < size for layer in taps)
    need(known, f"taps of steering method {method.name!r}", f"be layers in -1..{size - 1}", taps)
    for ability in ("taps", "head") if taps else ():
        _need_ability(method, ability, runner)
    return taps


def _root(item: SecondInStep[Any]) -> int:
    return item.second.root(item.first.context)


def _steering(sequence: DecodingSequence) -> Companion | None:
    """The companion, if rows are to be shaped; those of a sequence that is failing are not looked at."""
    return None if sequence.failing else sequence.companion


def _runners(pairs: Iterable[tuple[DecodingSequence, Any]]) -> list[Runner]:
    """Those of second sequences, each once."""
    seconds = (second for first, _ in pairs if (by := _steering(first)) is not None for second in by.seconds)
    return list({id(second.runner): second.runner for second in seconds}.values())


def _seconds(runner: Runner, pairs: Iterable[tuple[DecodingSequence, T]]) -> list[SecondInStep[T]]:
    """The second sequences of a runner, in order."""
    return [
        SecondInStep(first, by, second, of_first)
        for first, of_first in pairs
        if (by := _steering(first)) is not None
        for second in by.seconds
        if second.runner is runner
    ]


def _caches(seconds: Sequence[SecondInStep[Any]]) -> list[SequenceCache]:
    return [item.second.cache for item in seconds]


def _each(seconds: Sequence[SecondInStep[T]], work: Callable[[Sequence[SecondInStep[T]]], None]) -> None:
    """Do it for all second sequences at once; if it raises, for one by one, ending those where it raises again."""
    try:
        if seconds:
            work(seconds)
    except Exception as error:
        if len(seconds) == 1:
            _end(seconds[0], error)
            return
        for item in seconds:
            _each([item], work)


def _end(item: SecondInStep[Any], error: Exception) -> None:
    item.first.fail_next_step(item.companion.said(error))


def _score(runner: Runner, others: dict[int, Sequence[Others]], seconds: Sequence[SecondInStep[TokenTree]]) -> None:
    """Add to `others`, by its id, the rows of each second sequence of another model, and what its layers predict."""
    trees = [_known(item.of_first, runner.info.vocab_size) for item in seconds]
    taps = sorted({layer for item in seconds for layer in item.second.taps})
    scores = runner.score(_caches(seconds), [_root(item) for item in seconds], trees, taps=taps)
    for i, item in enumerate(seconds):
        span = slice(scores.rows[i], scores.rows[i + 1])
        early = _Early(item.companion.method, runner, item.second.taps, scores, span)
        others[id(item.second)] = [[scores.of(i)], early]


@dataclass(frozen=True, slots=True)
class _Early:
    """Gives what layers predict, one after the other; the head's weights are read once for several of them."""

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


def _shape_rows(
    companion: Companion, rows_rv: torch.Tensor, logits_rv: torch.Tensor, others: Sequence[Others]
) -> str | None:
    """Shape float32 rows in place; tokens that a second sequence's model does not have are forbidden.

    Where the method fails, each row is shaped alone, and those on which it fails again hold NaN: off the accepted path
    nobody looks at them, as plain decoding never comes there.

    Args:
        logits_rv: what `rows_rv` holds, of any dtype; not written to.
    Returns:
        Why the root's row could not be shaped; None where it could.
    """
    width = min([rows_rv.shape[-1], *(second.runner.info.vocab_size for second in companion.seconds)])

    def shaped(rows: slice) -> str | None:
        """Shape some; returns what went wrong."""
        target_rv = rows_rv[rows, :width]
        fitted = (other_rv[rows, :width].to(target_rv.device, torch.float32) for other_rv in chain(*others))
        try:
            shaped_rv = companion.method.shape(target_rv, fitted)
            target_rv.copy_(given_rows(shaped_rv, target_rv, "shape must return logits"))
        except Exception as error:  # whatever a class of the user's own raises
            target_rv.fill_(math.nan)
            return companion.said(error)
        return None

    failure = shaped(slice(None))
    if failure is not None and len(rows_rv) > 1:
        rows_rv.copy_(logits_rv)
        failure, *_ = [shaped(slice(row, row + 1)) for row in range(len(rows_rv))]
    rows_rv[:, width:] = -math.inf
    return failure


def _blame(companion: Companion, raw_rv: torch.Tensor, shaped_rv: torch.Tensor, others: Sequence[Others]) -> str | None:
    """Why steering has left the root without a distribution; None where there is one, or was none before."""
    largest = float(shaped_rv[0].max())
    if math.isfinite(largest) or not math.isfinite(float(raw_rv[0].max())):
        return None
    kind = "NaN" if math.isnan(largest) else "infinity" if largest > 0 else "nothing but -inf"
    name = f"steering method {companion.method.name!r}"
    if all(math.isfinite(float(other_rv[0].max())) for other_rv in chain(*others)):
        return f"{name} made {kind} of the model's logits, which are finite; correct it"
    return f"{name} got {kind} from a second model or a layer, whose logits are no numbers; check that checkpoint"


def _known(tree: TokenTree, width: int) -> TokenTree:
    """The tree for a model of so many tokens: drafted ones beyond, which are forbidden, become others."""
    if not len(tree) or int(tree.tokens.max()) < width:
        return tree
    return tree.replace(tokens=np.minimum(tree.tokens, width - 1))
