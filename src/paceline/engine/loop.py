"""The loop: one step for a batch of sequences, each with its own tree. Plain decoding is this loop with empty trees.

In: requests. Out: stream chunks, filled requests. Not here: any method (drafters, verifiers, controllers), any model, text.

    budgets -> trees -> select -> ONE scoring pass -> verdicts -> commit -> observe
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from paceline.config import EngineConfig
from paceline.controllers.base import Controller, StepTimes
from paceline.controllers.fixed import FixedController
from paceline.engine.crew import Crew
from paceline.engine.outputs import StreamChunk
from paceline.engine.overlap import with_none
from paceline.engine.record import StepRecord, TimeSplit, Watcher
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Sequence
from paceline.errors import NumericsError
from paceline.models.base import Runner
from paceline.tree.token_tree import EMPTY_TREE, TokenTree
from paceline.tree.types import Scores, Verdict
from paceline.verifiers.base import Verifier
from paceline.verifiers.greedy import GreedyVerifier

logger = logging.getLogger("paceline.engine")


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of.

    Attributes:
        greedy: the verifier at temperature 0 (equal or reject).
        sampled: the verifier above it.
    """

    runner: Runner
    crew: Crew
    controller: Controller
    greedy: GreedyVerifier
    sampled: Verifier


class Engine:
    """Serves many requests over one target.

    Args:
        parts: runner, drafters, verifiers, controller.
        config: sizes.
        tokenizer: for stop strings and text; None decodes token ids only.
        eos_ids: end tokens of the checkpoint.

    Attributes:
        times: seconds spent since the start, by what they were spent on.
        watchers: called after every decoding step (see `record.watching`).
    """

    def __init__(self, parts: Parts, config: EngineConfig, *, tokenizer: Any = None, eos_ids: Seq[int] = ()) -> None:
        self.parts = parts
        self.times = TimeSplit()
        self.watchers: list[Watcher] = []
        self._planned: list[int] = []  # keys of the sequences that the controller planned for last
        self._same = False  # they run in this step too
        self._learning = 0.0  # seconds that the controller took to learn from the step before
        self.scheduler = Scheduler(parts.runner, parts.crew, config, tokenizer=tokenizer, eos_ids=eos_ids)

    def check(self, request: Request) -> None:
        """Raise ConfigError if the request's parameters do not fit this model."""
        self.scheduler.check(request)

    def add(self, request: Request) -> None:
        """Queue a request; it starts when there is room."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request now; what it produced is kept, its finish reason is "abort"."""
        self._finish([(sequence, sequence.close("abort")) for sequence in self.scheduler.take(request_id)])

    def fail(self, error: BaseException, interrupted: Collection[str] = ()) -> list[StreamChunk]:
        """End every request that has started, after a step that raised: its texts, caches and drafters may be out of step.

        Args:
            interrupted: ids of the requests whose own caller stopped the step (Ctrl-C); they end as "abort".
        Returns:
            The last chunks; the finish reason of all others is "error".
        """
        self.parts.crew.helper.rest()
        why = f"a step was cut short by {type(error).__name__}" + (f": {error}" if str(error) else "")
        ended = self.scheduler.take_started()
        for sequence in ended:
            self.parts.crew.end(sequence)
            self.scheduler.remove(sequence)
            self.parts.controller.forget(sequence.key)
        reasons = [s.output.finish_reason or ("abort" if s.request.id in interrupted else "error") for s in ended]
        return [s.close(reason, why if reason == "error" else None) for s, reason in zip(ended, reasons, strict=True)]

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[StreamChunk]:
        """One prefill chunk if a prompt waits, then one decoding step of all running sequences; what it added.

        If it raises (Ctrl-C, no memory), call `fail` before the next step.
        """
        start = perf_counter()
        self.scheduler.prefill()
        self.times.prefill += perf_counter() - start
        return self.decode(self.scheduler.running) if self.scheduler.running else []

    def decode(self, running: Seq[Sequence]) -> list[StreamChunk]:
        """One step: draft, score, verify, commit, observe."""
        batch, parts = list(running), self.parts
        start = perf_counter()
        rests = self._rests(batch)
        roots, lengths = [s.context.tokens[-1] for s in batch], [len(s.context.tokens) for s in batch]
        if rests:
            trees: Seq[TokenTree] = [EMPTY_TREE] * len(batch)
            proposed, draft_seconds = trees, (0.0,) * len(parts.crew.names)
        else:
            trees, proposed, draft_seconds = self._draft(batch)
        drafted = perf_counter()
        with parts.crew.ahead(batch, trees) as beside:
            scores = parts.crew.score(parts.runner, batch, roots, trees)
            scored = perf_counter()
        joined = perf_counter()
        verdicts = self._verify(batch, trees, scores, beside.longer)
        verified = perf_counter()
        chunks = self._commit(batch, trees, verdicts, scores)
        committed = perf_counter()
        aside = drafted - start - sum(draft_seconds) + self._learning
        draft_seconds = beside.billed(draft_seconds, joined - scored)
        draft, score, verify, other = sum(draft_seconds), scored - drafted, verified - joined, committed - verified + aside
        if rests:
            self.parts.controller.passed(score, verify + other)
        else:
            self._observe(batch, trees, verdicts, StepTimes(draft_seconds, score, verify, other, scores.rows[-1]))
        ended = [(one, chunk) for one, chunk in zip(batch, chunks, strict=True) if one.output.finish_reason is not None]
        self._forget(ended)
        learned = perf_counter()
        self._learning = learned - committed
        self._finish(ended)
        times = TimeSplit(0.0, draft, score, verify, committed - verified + perf_counter() - learned, aside)
        self.times.add(times)
        if self.watchers:
            names = parts.crew.names
            record = StepRecord(batch, roots, lengths, proposed, trees, scores, verdicts, names, draft_seconds, times)
            for watcher in list(self.watchers):
                watcher(record)
        return chunks

    def _rests(self, batch: Seq[Sequence]) -> bool:
        """Whether the controller asked to be left alone in this step; counted down here."""
        controller, keys = self.parts.controller, [sequence.key for sequence in batch]
        self._same = keys == self._planned
        if self._same and controller.resting > 0:
            controller.resting -= 1
            return True
        self._planned = keys
        return False

    def _draft(self, batch: Seq[Sequence]) -> tuple[Seq[TokenTree], Seq[TokenTree], tuple[float, ...]]:
        """The trees to score, those proposed, and the seconds that each drafter took."""
        crew, controller, start = self.parts.crew, self.parts.controller, perf_counter()
        try:
            if steady := self._same and controller.steady > 0:
                controller.steady -= 1
            else:
                controller.plan([sequence.signal() for sequence in batch])
                self._start_clocks(batch, perf_counter() - start)
            proposed, seconds = crew.propose(batch, controller)
            return self.scheduler.fit(batch, proposed if steady else controller.select(proposed)), proposed, seconds
        except Exception as error:
            self._drop_controller(error)
            none = [EMPTY_TREE] * len(batch)
            return none, none, (0.0,) * len(crew.names)

    def _drop_controller(self, error: Exception) -> None:
        """Decode plainly from now on."""
        logger.warning(
            "controller %s failed (%s: %s); decoding goes on without drafts",
            self.parts.controller.name,
            type(error).__name__,
            error,
        )
        logger.debug("the error of the controller", exc_info=error)
        self.parts = replace(self.parts, controller=FixedController(0))

    def _start_clocks(self, batch: Seq[Sequence], planning: float) -> None:
        """Leave the first planning out of the generation time: it is when a new machine is measured."""
        for sequence in batch:
            metrics = sequence.request.metrics
            if sequence.index == 0 and metrics.num_steps == 0 and metrics.first_step_time is not None:
                metrics.first_step_time += planning

    def _verify(
        self, batch: Seq[Sequence], trees: Seq[TokenTree], scores: Scores, longer: Mapping[int, TokenTree]
    ) -> list[Verdict | NumericsError]:
        """Every sequence's verdict, by the verifier of its request; rules are applied here, once.

        Args:
            longer: trees with a last node that was drafted while they were scored (`engine.overlap`).
        """
        parts = self.parts
        for sequence in batch:
            if not sequence.plain:
                break
        else:
            return parts.greedy.verify_scores(trees, scores)
        verdicts: dict[int, Verdict | NumericsError] = {}
        greedy = [i for i, sequence in enumerate(batch) if sequence.greedy]
        sampled = [i for i, sequence in enumerate(batch) if not sequence.greedy]
        pairs: list[tuple[Verifier, list[int]]] = [(parts.greedy, greedy), (parts.sampled, sampled)]
        for verifier, picked in pairs:
            if picked:
                lazy = getattr(verifier, "row_by_row", False) and scores.logits.device.type == "cpu"
                rows: list[Any] = [
                    (batch[i].rules.by_row if lazy else batch[i].rules.apply)(scores.of(i), trees[i]) for i in picked
                ]
                if longer:
                    rows = [with_none(one, longer[i]) if i in longer else one for i, one in zip(picked, rows, strict=True)]
                found = verifier.verify([longer.get(i, trees[i]) for i in picked], rows, [batch[i].draws() for i in picked])
                verdicts.update(zip(picked, found, strict=True))
        return [verdicts[i] for i in range(len(batch))]

    def _commit(
        self, batch: Seq[Sequence], trees: Seq[TokenTree], verdicts: Seq[Verdict | NumericsError], scores: Scores
    ) -> list[StreamChunk]:
        """Extend every sequence by its verdict and keep the accepted path of those that go on."""
        chunks: list[StreamChunk] = []
        going: list[int] = []
        picked: list[Verdict] = []
        for i, (sequence, tree, verdict) in enumerate(zip(batch, trees, verdicts, strict=True)):
            if isinstance(verdict, NumericsError):
                chunks.append(sequence.close("error", str(verdict)))
                continue
            chunks.append(sequence.advance(tree, verdict, scores, i, self.parts.crew.names))
            if sequence.output.finish_reason is None:
                going.append(i)
                picked.append(verdict)
        if len(going) == len(batch):
            self._keep(batch, trees, picked, scores, going)
        elif going:
            self._keep([batch[i] for i in going], [trees[i] for i in going], picked, scores, going)
        return chunks

    def _keep(self, batch: Seq[Sequence], trees: Seq[TokenTree], verdicts: Seq[Verdict], scores: Scores, numbers: Seq[int]) -> None:
        """Commit the accepted paths of sequences that go on, and tell the drafters; `numbers`: of these sequences in `scores`."""
        self.parts.runner.commit([sequence.cache for sequence in batch], [verdict.path for verdict in verdicts])
        self.parts.crew.observe(batch, trees, verdicts, scores, numbers)

    def _observe(
        self, batch: Seq[Sequence], trees: Seq[TokenTree], verdicts: Seq[Verdict | NumericsError], times: StepTimes
    ) -> None:
        sound = [verdict for verdict in verdicts if isinstance(verdict, Verdict)]
        if len(sound) == len(verdicts):
            try:
                self.parts.controller.observe(trees, sound, times)
            except Exception as error:
                self._drop_controller(error)
        if logger.isEnabledFor(logging.DEBUG):
            for index, sequence in enumerate(batch):
                logger.debug("request %s: %s", sequence.request.id, self.parts.controller.explain(index).replace("\n", " "))

    def _forget(self, ended: Seq[tuple[Sequence, StreamChunk]]) -> None:
        for sequence, _ in ended:
            try:
                self.parts.controller.forget(sequence.key)
            except Exception as error:
                self._drop_controller(error)

    def _finish(self, ended: Seq[tuple[Sequence, StreamChunk]]) -> None:
        """End these sequences. The controller is told nothing of the time: it is the same however a sequence was decoded."""
        for sequence, chunk in ended:
            self.parts.crew.end(sequence)
            self.scheduler.remove(sequence)
            if chunk.finish_reason == "abort":
                self.parts.controller.forget(sequence.key)
            logger.debug("request %s output %d: %s", sequence.request.id, sequence.index, chunk.finish_reason)
