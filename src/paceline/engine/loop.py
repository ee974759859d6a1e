"""The loop: one step for a batch of sequences, each with its own tree. Plain decoding is this loop with empty trees.

budgets -> trees -> select -> ONE scoring pass -> verdicts -> commit -> observe"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paceline.config import EngineConfig
from paceline.controllers import Controller, Outcome, Plan, StepTimes
from paceline.controllers.policies import FixedController
from paceline.drafters import Models
from paceline.engine.drafter_set import DrafterSet
from paceline.engine.outputs import StreamChunk
from paceline.engine.overlap import with_none
from paceline.engine.record import StepRecord, TimeSplit, Watcher
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Sequence, no_text
from paceline.errors import NumericsError
from paceline.models import Runner
from paceline.tree import EMPTY_TREE, Scores, TokenTree, Verdict
from paceline.utils import described
from paceline.verifiers import GreedyVerifier, Verifier

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("paceline.engine")


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of.

    Attributes:
        greedy: the verifier at temperature 0 (equal or reject).
        sampled: the verifier above it.
    """

    runner: Runner
    drafter_set: DrafterSet
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
        models: opens models beside the target for steering; None where there are none.

    Attributes:
        times: seconds spent since the start, by what they were spent on.
        watchers: called after every decoding step (see `record.watching`).
    """

    def __init__(
        self,
        parts: Parts,
        config: EngineConfig,
        *,
        tokenizer: Any = None,
        eos_ids: Seq[int] = (),
        models: Models | None = None,
    ) -> None:
        self.parts = parts
        self.times = TimeSplit()
        self.watchers: list[Watcher] = []
        self._plan = Plan.nothing(0)
        self._keys: list[int] = []  # of the sequences that it is for, in its order
        self._left = 0  # steps that it still holds for
        self._outcome: Outcome | None = None  # what came of it so far
        self._made: list[StreamChunk] = []  # in a step that has not come to its end
        self._learning = 0.0  # seconds that the controller took to learn since the last step
        self.scheduler = Scheduler(
            parts.runner, parts.drafter_set, config, tokenizer=tokenizer, eos_ids=eos_ids, models=models
        )

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
        """End every request that has started, after a step that raised.

        Its texts, caches and drafters may be out of step. May be called again where it raises itself.

        Args:
            interrupted: ids of the requests whose own caller stopped the step (Ctrl-C); they end as "abort".
        Returns:
            What the step had made, and the last chunks of what has not ended in it, as "error".
        """
        self.parts.drafter_set.helper.rest()
        why = f"a step was cut short by {described(error)}"
        ended = self.scheduler.take_started()
        told = {(chunk.output.request_id, chunk.index) for chunk in self._made if chunk.finish_reason is not None}
        for sequence in ended:
            if (sequence.request.id, sequence.index) not in told:
                stopped = sequence.request.id in interrupted
                self._made.append(sequence.close("abort") if stopped else sequence.close("error", why))
        for sequence in ended:
            self.parts.drafter_set.end(sequence)
            self.scheduler.remove(sequence, spoiled=True)
        self._outcome, self._left = None, 0
        self._forget(ended)
        made, self._made = self._made, []
        return made

    def close(self) -> list[StreamChunk]:
        """Abort all requests; returns the last chunks."""
        for request in list(self.scheduler.waiting):
            self.scheduler.take(request.id)
        ended = [(sequence, sequence.close("abort")) for sequence in self.scheduler.started()]
        self._finish(ended)
        return [chunk for _, chunk in ended]

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[StreamChunk]:
        """One prefill chunk if a prompt waits, then one decoding step of all running sequences; what it added.

        If it raises (Ctrl-C, no memory), call `fail` before the next step.
        """
        start, scheduler = perf_counter(), self.scheduler
        scheduler.prefill()
        filled = perf_counter()
        self.times.prefill += filled - start
        members = list(scheduler.batch())
        chunks = self.decode(members) if members else []
        scheduler.count(members, chunks, filled - start, perf_counter() - filled)
        return chunks

    def decode(self, running: Seq[Sequence]) -> list[StreamChunk]:
        """One step: draft, score, verify, commit, observe."""
        batch, parts, companions = list(running), self.parts, self.scheduler.companions
        start = perf_counter()
        plan = self._planned(batch)
        planned = perf_counter()
        roots, lengths = [s.context.tokens[-1] for s in batch], [len(s.context.tokens) for s in batch]
        proposed, draft_seconds = parts.drafter_set.propose(batch, plan)
        trees = self.scheduler.fit(batch, self._select(proposed))
        drafted = perf_counter()
        with parts.drafter_set.ahead(batch, trees) as beside:
            added = companions.added(batch, trees)
            scores, second = added.split(parts.drafter_set.score(parts.runner, batch, roots, trees, added))
            scored = perf_counter()
        joined = perf_counter()
        shaped = companions.shape(batch, trees, scores, second)
        verdicts = self._verify(batch, trees, shaped, beside.longer)
        verified = perf_counter()
        chunks = self._commit(batch, trees, verdicts, scores)
        committed = perf_counter()
        caught_up = tuple(parts.drafter_set.catching_up)
        reading = sum(caught_up)
        aside, planning = drafted - planned - sum(draft_seconds) - reading, planned - start + self._learning
        draft_seconds = beside.billed(draft_seconds, joined - scored)
        draft, score, verify, other = (
            sum(draft_seconds),
            scored - drafted,
            verified - joined,
            committed - verified + aside,
        )
        times = StepTimes(draft_seconds, score, verify, other, scores.rows[-1], caught_up)
        self._count(proposed, trees, verdicts, times, committed - start + self._learning)
        self._explain(batch)
        ended = [(one, chunk) for one, chunk in zip(batch, chunks, strict=True) if one.output.finish_reason is not None]
        self._forget([sequence for sequence, _ in ended])
        learned = perf_counter()
        self._learning = learned - committed
        self._finish(ended)
        self.scheduler.park(batch)
        commit, other = committed - verified + perf_counter() - learned, aside + planning
        split = TimeSplit(0.0, draft + reading, score, verify, commit, other)
        self.times.add(split)
        names, took = parts.drafter_set.names, [one + read for one, read in zip(draft_seconds, caught_up, strict=True)]
        for watcher in list(self.watchers):
            watcher(StepRecord(batch, roots, lengths, proposed, trees, shaped, verdicts, names, took, split))
        self._made = []
        return chunks

    def _planned(self, batch: Seq[Sequence]) -> Plan:
        """The plan for this step: the last one while it holds and the same sequences run, else a new one."""
        keys = [sequence.key for sequence in batch]
        if self._left < 1 or keys != self._keys:
            self._end_plan()
            self._plan, self._keys = Plan.nothing(len(batch)), keys
            with self._guarded("plan"):
                self._plan = self._sound(
                    self.parts.controller.plan([sequence.signal() for sequence in batch]), len(batch)
                )
            self._left = self._plan.steps
        self._left -= 1
        return self._plan

    def _sound(self, plan: Plan, sequences: int) -> Plan:
        """The plan, which has budgets for every sequence, and for every drafter or none.

        Raises:
            ValueError: it has not.
        """
        drafters = len(self.parts.drafter_set.drafters)
        if len(plan.budgets) != sequences:
            raise ValueError(f"budgets for {len(plan.budgets)} sequences instead of {sequences}")
        for budgets in plan.budgets:
            if drafters and len(budgets) not in (0, drafters):
                raise ValueError(f"budgets for {len(budgets)} drafters instead of {drafters}")
        return plan

    def _select(self, proposed: Seq[TokenTree]) -> Seq[TokenTree]:
        """The proposed trees as the controller cuts them; none where it fails."""
        if any(map(len, proposed)):
            with self._guarded("select"):
                trees = self.parts.controller.select(proposed)
                if len(trees) != len(proposed):
                    raise ValueError(f"{len(trees)} trees instead of {len(proposed)}")
                return trees
        return [EMPTY_TREE] * len(proposed)

    def _count(
        self,
        proposed: Seq[TokenTree],
        trees: Seq[TokenTree],
        verdicts: Seq[Verdict | NumericsError],
        times: StepTimes,
        seconds: float,
    ) -> None:
        """Add a step to what came of the plan."""
        sound = [verdict for verdict in verdicts if isinstance(verdict, Verdict)]
        if len(sound) < len(verdicts):  # no outcome to learn from
            self._left, self._outcome = 0, None
            return
        tokens = sum(len(verdict.tokens) for verdict in sound)
        made = Outcome(1, tokens, seconds, proposed, trees, sound, times)
        self._outcome = made if self._outcome is None else made.merged(self._outcome)
        if self._left < 1:
            self._end_plan()

    def _end_plan(self) -> None:
        """The plan has ended: let the controller learn what came of it."""
        outcome, self._outcome, self._left = self._outcome, None, 0
        if outcome is not None:
            with self._guarded("observe"):
                self.parts.controller.observe(outcome)

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """An error of the controller ends its drafting, not the request: decoding is plain from then on."""
        try:
            yield
        except Exception as error:
            name = self.parts.controller.name
            said = described(error)
            logger.warning("controller %s failed to %s (%s); decoding goes on without drafts", name, what, said)
            logger.debug("the error of the controller", exc_info=error)
            self.parts = replace(self.parts, controller=FixedController(0))
            self._left, self._outcome = 0, None

    def _explain(self, batch: Seq[Sequence]) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            with self._guarded("explain"):
                for index, sequence in enumerate(batch):
                    logger.debug(
                        "request %s: %s", sequence.request.id, self.parts.controller.explain(index).replace("\n", " ")
                    )

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
                lazy = verifier.row_by_row and scores.logits.device.type == "cpu"
                rows: list[Any] = [
                    (batch[i].rules.by_row if lazy else batch[i].rules.apply)(scores.of(i), trees[i]) for i in picked
                ]
                if longer:
                    rows = [
                        with_none(one, longer[i]) if i in longer else one for i, one in zip(picked, rows, strict=True)
                    ]
                found = verifier.verify(
                    [longer.get(i, trees[i]) for i in picked], rows, [batch[i].draws() for i in picked]
                )
                verdicts.update(zip(picked, found, strict=True))
        return [_with_reason(verdicts[i], sequence, scores.of(i)[:1]) for i, sequence in enumerate(batch)]

    def _commit(
        self, batch: Seq[Sequence], trees: Seq[TokenTree], verdicts: Seq[Verdict | NumericsError], scores: Scores
    ) -> list[StreamChunk]:
        """Extend every sequence by its verdict and keep the accepted path of those that go on."""
        chunks = self._made
        going: list[int] = []
        picked: list[Verdict] = []
        for i, (sequence, tree, verdict) in enumerate(zip(batch, trees, verdicts, strict=True)):
            if isinstance(verdict, NumericsError):
                chunks.append(sequence.close("error", str(verdict)))
                continue
            try:
                chunks.append(sequence.advance(tree, verdict, scores, i, self.parts.drafter_set.names))
            except Exception as error:  # of the tokenizer, about this text
                chunks.append(sequence.close("error", no_text(error)))
            if sequence.output.finish_reason is None:
                going.append(i)
                picked.append(verdict)
        if len(going) == len(batch):
            self._keep(batch, trees, picked, scores, going)
        elif going:
            self._keep([batch[i] for i in going], [trees[i] for i in going], picked, scores, going)
        return chunks

    def _keep(
        self, batch: Seq[Sequence], trees: Seq[TokenTree], verdicts: Seq[Verdict], scores: Scores, numbers: Seq[int]
    ) -> None:
        """Commit the accepted paths of sequences that go on, and tell the drafters; `numbers`: of these sequences in
        `scores`.
        """
        self.parts.runner.commit([sequence.cache for sequence in batch], [verdict.path for verdict in verdicts])
        self.scheduler.companions.commit(batch, verdicts)
        self.parts.drafter_set.observe(batch, trees, verdicts, scores, numbers)

    def _forget(self, ended: Seq[Sequence]) -> None:
        """These sequences are over, and with them the plan."""
        if ended:
            self._end_plan()
        for sequence in ended:
            with self._guarded("forget"):
                self.parts.controller.forget(sequence.key)

    def _finish(self, ended: Seq[tuple[Sequence, StreamChunk]]) -> None:
        """End these sequences. The controller is told nothing of the time: it is the same however a sequence was
        decoded.
        """
        for sequence, chunk in ended:
            self.parts.drafter_set.end(sequence)
            self.scheduler.remove(sequence)
            if chunk.finish_reason == "abort":
                self._forget([sequence])
            logger.debug("request %s output %d: %s", sequence.request.id, sequence.index, chunk.finish_reason)


def _with_reason(
    verdict: Verdict | NumericsError, sequence: Sequence, logits_1v: torch.Tensor
) -> Verdict | NumericsError:
    """The error of a sequence whose root has no distribution, where its request is to blame and not the model."""
    if not isinstance(verdict, NumericsError) or (why := sequence.rules.blame(logits_1v)) is None:
        return verdict
    return NumericsError(why)
