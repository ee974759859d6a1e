"""Where the rows come from that steering looks at beside the target's own (`sampling.steering`).

States of layers come with the scoring pass. Second sequences are scored over the same trees and committed by the same
paths: those of the target are a part of its pass, those of other models have a pass of their own behind it. Their
caches are made and filled when rows are first wanted, and whenever they lag behind, so that they can be given up with
those of the first sequences at any time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch

from paceline import registry
from paceline.engine.companion import Companion
from paceline.errors import CapabilityError, ConfigError
from paceline.models import HasHead, Runner, SequenceCache
from paceline.sampling.steering import Steering, parse_steering
from paceline.tree import Scores, TokenTree, Verdict
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.drafters import Models
    from paceline.engine.request import Request
    from paceline.engine.sequence import Sequence as Decoding

T = TypeVar("T")

MOST_ROWS: Final = 128
"""Rows of layers' states that go through the head together."""


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
        if method.companion == "layers":
            for ability in ("taps", "head"):
                _need_ability(method, ability, self.runner)
            return Companion(method, method.taps(self.runner.info.num_layers))
        if method.companion == "prompt":
            found = Companion(method, (), self.runner, self._prompt(method, request))
        else:
            found = Companion(method, (), self._open(method), list(request.prompt_ids))
        found.check(request.max_tokens)
        return found

    def _prompt(self, method: Steering, request: Request) -> list[int]:
        given = request.prompt_ids[-1:] if method.prompt is None else method.prompt
        if isinstance(given, str):
            need(self._tokenizer is not None, "negative_prompt", "be token ids where there is no tokenizer", given)
            given = self._tokenizer.encode(given)
        return list(given)

    def _open(self, method: Steering) -> Runner:
        if self._models is None:
            raise ConfigError(f"steering method {method.name!r} needs a second model, and none can be opened here")
        runner = self._models.base_of_target() if method.model is None else self._models.open(method.model)
        if self._branches:
            _need_ability(method, "trees", runner)
        return runner

    def added(self, batch: Sequence[Decoding], trees: Sequence[TokenTree]) -> Added:
        """What the next scoring pass of the target must hold for these sequences besides."""
        if all(sequence.companion is None for sequence in batch):
            return NOTHING_ADDED
        taps = {layer for sequence in batch if sequence.companion is not None for layer in sequence.companion.taps}
        pairs = [pair for runner, some in _by_runner(zip(batch, trees, strict=True)) if runner is self.runner
                 for pair in some]  # fmt: skip
        if not (taps or pairs):
            return NOTHING_ADDED
        sequences = [sequence for sequence, _ in pairs]
        caches = self._filled(self.runner, sequences)
        return Added(caches, [_root(one) for one in sequences], [tree for _, tree in pairs], sorted(taps))

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
        rows = self._elsewhere([(batch[i], trees[i]) for i in steered]) | {id(self.runner): iter(second)}
        for i in steered:
            companion, span = _companion(batch[i]), slice(scores.rows[i], scores.rows[i + 1])
            if companion.runner is None:
                _shape_rows(companion, logits[span], self._early(companion, scores, span))
            else:
                _shape_rows(companion, logits[span], [next(rows[id(companion.runner)])])
        return replace(scores, logits=logits, best=None)

    def _early(self, companion: Companion, scores: Scores, span: slice) -> Iterator[torch.Tensor]:
        """What layers predict, one after the other; the head's weights are read once for several of them."""
        assert isinstance(self.runner, HasHead)
        layers, rows = companion.taps, span.stop - span.start
        together = max(1, MOST_ROWS // rows)
        for start in range(0, len(layers), together):
            states = torch.cat([scores.taps[layer][span] for layer in layers[start : start + together]])
            yield from self.runner.head(states, norm=companion.method.norm).split(rows)

    def _elsewhere(self, pairs: Sequence[tuple[Decoding, TokenTree]]) -> dict[int, Iterator[torch.Tensor]]:
        """Logits of the second sequences of other models, by the id of their runner."""
        found = {}
        for runner, some in _by_runner(pairs):
            if runner is not self.runner:
                sequences, trees = [sequence for sequence, _ in some], [tree for _, tree in some]
                caches, roots = self._filled(runner, sequences), [_root(one) for one in sequences]
                scores = runner.score(caches, roots, [_known(tree, runner.info.vocab_size) for tree in trees])
                found[id(runner)] = iter([scores.of(i) for i in range(len(some))])
        return found

    def commit(self, batch: Sequence[Decoding], verdicts: Sequence[Verdict]) -> None:
        """Second sequences keep the accepted paths of these, which go on."""
        for runner, some in _by_runner(zip(batch, verdicts, strict=True)):
            runner.commit([_companion(sequence).cache for sequence, _ in some], [verdict.path for _, verdict in some])

    def fork(self, first: Decoding, others: Sequence[Decoding]) -> None:
        """Let others, which begin as `first` does, share what its second sequence has seen."""
        companion = first.companion
        if not others or companion is None or companion.runner is None or not companion.runner.capabilities.fork:
            return
        (cache,) = self._filled(companion.runner, [first])
        for other in others:
            _companion(other).hold(companion.runner.fork(cache))

    def _filled(self, runner: Runner, sequences: Sequence[Decoding]) -> list[SequenceCache]:
        """Caches of second sequences, with all but the last token of their texts."""
        caches = [_companion(sequence).cache for sequence in sequences]
        left = {i: _companion(sequence).missing(sequence.context) for i, sequence in enumerate(sequences)}
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


def _root(sequence: Decoding) -> int:
    return _companion(sequence).root(sequence.context)


def _by_runner(pairs: Iterable[tuple[Decoding, T]]) -> Iterable[tuple[Runner, list[tuple[Decoding, T]]]]:
    """Those of sequences with a second one, by its runner."""
    found: dict[int, tuple[Runner, list[tuple[Decoding, T]]]] = {}
    for sequence, other in pairs:
        if sequence.companion is not None and (runner := sequence.companion.runner) is not None:
            found.setdefault(id(runner), (runner, []))[1].append((sequence, other))
    return found.values()


def _shape_rows(companion: Companion, rows_rv: torch.Tensor, others: Iterable[torch.Tensor]) -> None:
    """Shape float32 rows in place; tokens that the second sequence's model does not have are forbidden."""
    width = rows_rv.shape[-1]
    if companion.runner is not None:
        width = min(width, companion.runner.info.vocab_size)
    fitted = (other_rv[:, :width].to(rows_rv.device, torch.float32) for other_rv in others)
    rows_rv[:, :width] = companion.method.shape(rows_rv[:, :width], fitted)
    rows_rv[:, width:] = -math.inf


def _known(tree: TokenTree, width: int) -> TokenTree:
    """The tree for a model of so many tokens: drafted ones beyond, which are forbidden, become others."""
    if not len(tree) or int(tree.tokens.max()) < width:
        return tree
    return tree.replace(tokens=np.minimum(tree.tokens, width - 1))
