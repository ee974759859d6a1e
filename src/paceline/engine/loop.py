"""The loop: one step for a batch of sequences, each with its own tree. Plain decoding is this loop with empty trees
(`engine.plain_loop` is what it must agree with, in a few lines).

plan -> propose -> select -> fit -> score -> verify -> commit -> observe

A batch is scored in one call of the runner. Other models that steer it have calls of their own, and a runner may cut a
call with very many rows into several passes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from time import perf_counter
from typing import Any

from paceline.config import EngineConfig
from paceline.controllers import Controller
from paceline.drafters import Models
from paceline.engine.outputs import StreamChunk
from paceline.engine.parts import EngineParts
from paceline.engine.planning import Planner
from paceline.engine.record import StepRecord, TimeSplit, Watcher
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.scoring import Scoring
from paceline.engine.sequence import DecodingSequence, no_text
from paceline.engine.step_clock import StepClock
from paceline.engine.verification import verify
from paceline.errors import NumericsError
from paceline.tree import Scores, TokenTree, Verdict
from paceline.utils import described

logger = logging.getLogger("paceline.engine")


class Engine:
    """Decodes many requests with one target.

    Args:
        parts: what it runs, drafts, verifies and plans with.
        config: how many sequences and tokens it takes at a time, and memory for their caches.
        tokenizer: for stop strings and text; None decodes token ids only.
        eos_ids: end tokens of the checkpoint.
        models: opens models beside the target for steering; None where there are none.

    Attributes:
        watchers: called after every decoding step (see `record.watching`).
    """

    def __init__(
        self,
        parts: EngineParts,
        config: EngineConfig,
        *,
        tokenizer: Any = None,
        eos_ids: Sequence[int] = (),
        models: Models | None = None,
    ) -> None:
        self.parts = parts
        self.watchers: list[Watcher] = []
        self.scheduler = Scheduler(
            parts.runner, parts.drafter_set, config, tokenizer=tokenizer, eos_ids=eos_ids, models=models
        )
        self._planner, self._clock = Planner(parts), StepClock()
        self._scoring = Scoring(parts, self.scheduler.companions, self.scheduler.fit)
        self._chunks: list[StreamChunk] = []  # of a step that has not come to its end

    @property
    def times(self) -> TimeSplit:
        """Seconds spent since the start, by what they were spent on; the same object, which every step adds to."""
        return self._clock.total

    def use_controller(self, controller: Controller) -> None:
        """Let another controller decide from the next step on; the present one learns what came of its plan."""
        self._planner.use(controller)

    def check(self, request: Request) -> None:
        """Raise ConfigError if the request's parameters do not fit this model."""
        self.scheduler.check(request)

    def add(self, request: Request) -> None:
        """Queue a request; it starts when there is room."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request now; what it produced is kept, its finish reason is "abort"."""
        self._abort(self.scheduler.dequeue(request_id))

    def fail_started(self, error: BaseException, interrupted: Collection[str] = ()) -> list[StreamChunk]:
        """End every request that has started, after a step that raised.

        Its texts, caches and drafters may be out of step. May be called again where it raises itself.

        Args:
            interrupted: ids of the requests whose own caller stopped the step (Ctrl-C); they end as "abort".
        Returns:
            What the step had made, and the last chunks of what has not ended in it, as "error".
        """
        self.parts.drafter_set.helper.rest()
        why = f"a step was cut short by {described(error)}"
        started = self.scheduler.dequeue_started()
        closed = {(chunk.output.request_id, chunk.index) for chunk in self._chunks if chunk.finish_reason is not None}
        for sequence in started:
            if (sequence.request.id, sequence.index) not in closed:
                stopped = sequence.request.id in interrupted
                self._chunks.append(sequence.close("abort") if stopped else sequence.close("error", why))
        self._planner.forget(started, spoiled=True)
        self._remove(started, spoiled=True)
        chunks, self._chunks = self._chunks, []
        return chunks

    def close(self) -> list[StreamChunk]:
        """Abort all requests; returns the last chunks."""
        for request in list(self.scheduler.waiting):
            self.scheduler.dequeue(request.id)
        chunks = self._abort(self.scheduler.started())
        self.parts.drafter_set.close()
        return chunks

    def _abort(self, sequences: Sequence[DecodingSequence]) -> list[StreamChunk]:
        chunks = [sequence.close("abort") for sequence in sequences]
        self._planner.forget(sequences)
        self._remove(sequences)
        return chunks

    def _remove(self, sequences: Sequence[DecodingSequence], *, spoiled: bool = False) -> None:
        """Give back what sequences hold that have ended, once the planner has forgotten them.

        Args:
            spoiled: a step of theirs was cut short; nothing of their caches is kept.
        """
        for sequence in sequences:
            self.parts.drafter_set.end(sequence)
            self.scheduler.remove(sequence, spoiled=spoiled)
            reason = sequence.output.finish_reason
            logger.debug("request %s output %d: %s", sequence.request.id, sequence.index, reason)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[StreamChunk]:
        """One prefill chunk if a prompt waits, then one decoding step of all running sequences; what it added.

        If it raises (Ctrl-C, no memory), call `fail_started` before the next step.
        """
        start, scheduler = perf_counter(), self.scheduler
        scheduler.prefill()
        filled = perf_counter()
        self._clock.prefilled(filled - start)
        batch = list(scheduler.batch())
        chunks = self.decode(batch) if batch else []
        scheduler.count(batch, chunks, filled - start, perf_counter() - filled)
        return chunks

    def decode(self, batch: Sequence[DecodingSequence]) -> list[StreamChunk]:
        """One step of sequences that run: plan, propose, select, fit, score, verify, commit, observe."""
        planner, clock = self._planner, self._clock
        clock.started()
        plan = planner.plan(batch)
        clock.planned()
        roots, lengths = [s.context.tokens[-1] for s in batch], [len(s.context.tokens) for s in batch]
        proposals = self.parts.drafter_set.propose(batch, plan)
        trees = self.scheduler.fit(batch, planner.select(proposals))
        clock.drafted(proposals.draft_seconds, proposals.reading_seconds)
        scores = self._scoring.score(batch, roots, trees, clock)
        verdicts = verify(self.parts, batch, trees, scores)
        clock.verified()
        chunks = self._commit(batch, trees, verdicts, scores.raw)
        clock.committed()
        times = clock.times(scores.raw.rows[-1] + scores.added_rows)
        planner.observe(batch, proposals.trees, trees, verdicts, times=times, seconds=clock.seconds)
        split = self._end_step(batch)
        if self.watchers:
            record = StepRecord(
                sequences=batch, roots=roots, lengths=lengths, proposed=proposals.trees, trees=trees,
                scores=scores.steered, verdicts=verdicts, drafters=self.parts.drafter_set.names,
                draft_seconds=clock.drafting, times=split,
            )  # fmt: skip
            for watcher in list(self.watchers):
                watcher(record)
        self._chunks = []
        return chunks

    def _commit(
        self,
        batch: Sequence[DecodingSequence],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict | NumericsError],
        scores: Scores,
    ) -> list[StreamChunk]:
        """Extend every sequence by its verdict and keep the accepted path of those that go on."""
        chunks, names = self._chunks, self.parts.drafter_set.names
        going: list[int] = []
        kept: list[Verdict] = []
        for i, (sequence, tree, verdict) in enumerate(zip(batch, trees, verdicts, strict=True)):
            if isinstance(verdict, NumericsError):
                chunks.append(sequence.close("error", str(verdict)))
                continue
            try:
                chunks.append(sequence.advance(tree, verdict, scores, i, names))
            except Exception as error:  # of the tokenizer, about this text
                chunks.append(sequence.close("error", no_text(error)))
            if sequence.output.finish_reason is None:
                going.append(i)
                kept.append(verdict)
        if len(going) == len(batch):
            self._commit_survivors(batch, trees, kept, scores, going)
        elif going:
            self._commit_survivors([batch[i] for i in going], [trees[i] for i in going], kept, scores, going)
        return chunks

    def _commit_survivors(
        self,
        batch: Sequence[DecodingSequence],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        scores: Scores,
        numbers: Sequence[int],
    ) -> None:
        """Commit the accepted paths of sequences that go on, and tell the drafters; `numbers`: of these sequences in
        `scores`.
        """
        self.parts.runner.commit([sequence.cache for sequence in batch], [verdict.path for verdict in verdicts])
        self.scheduler.companions.commit(batch, verdicts)
        self.parts.drafter_set.observe(batch, trees, verdicts, scores, numbers)

    def _end_step(self, batch: Sequence[DecodingSequence]) -> TimeSplit:
        """Part with sequences that ended and those that are to be parked; the seconds of the step.

        The controller is told nothing of the time that this takes: it is the same however a sequence was decoded.
        """
        ended = [sequence for sequence in batch if sequence.output.finish_reason is not None]
        self._planner.forget(ended)
        self._clock.learned()
        self._remove(ended)
        self.scheduler.park(batch)
        return self._clock.ended()
