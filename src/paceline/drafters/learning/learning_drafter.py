"""A drafter in several versions: each request is drafted for by the one that was current when it began."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.config import LearnConfig, cores
from paceline.drafters.base import Context, Drafter
from paceline.drafters.heads.tapped_states import of_pass, of_prompt
from paceline.drafters.learning.learner import Learner
from paceline.drafters.learning.records import TrafficRecord
from paceline.drafters.learning.trainer_process import TrainerProcess
from paceline.drafters.learning.versions import TenantVersions, Version, outcome
from paceline.errors import CapabilityError
from paceline.models import HasEmbedding, HasHead, Runner
from paceline.models.heads import target_rows
from paceline.tree import Budget, Scores, TokenTree, Verdict


@dataclass(frozen=True, slots=True)
class LearningStatus:
    """Says how far a drafter has learned.

    Attributes:
        drafter: its name.
        version: the one that drafts for requests that begin, the highest of all tenants.
        rounds, promoted, rolled_back: how often there was one, of all tenants.
        requests, bytes: that are kept to learn from.
        running: the trainer has not ended. accepted: share of the drafts of current versions.
    """

    drafter: str
    version: int
    rounds: int
    promoted: int
    rolled_back: int
    requests: int
    bytes: int
    running: bool
    accepted: float

    @property
    def words(self) -> str:
        """For people."""
        version = f"version {self.version}, learned from requests" if self.version else "version 0, as it was loaded"
        back = f", {self.rolled_back} taken back" if self.rolled_back else ""
        return f"{version} ({self.rounds} rounds{back})" + ("" if self.running else "; its trainer has ended")


class LearnedState:
    """Keeps one sequence: the version that drafts for it with its state there, and what the request teaches."""

    __slots__ = ("context", "inner", "record", "version", "versions")

    def __init__(
        self, context: Context, versions: TenantVersions, version: Version, inner: Any, record: TrafficRecord | None
    ) -> None:
        self.context, self.versions, self.version = context, versions, version
        self.inner, self.record = inner, record


class LearningDrafter(Drafter):
    """Drafts with versions of another drafter, and keeps what they get wrong for its trainer.

    Args:
        first: what is served at first. folder: of its weights.
        rebuild: makes the same drafter of the weights in another folder.
        index: of `DrafterArgs`. target: the runner. learn: how it learns.
    Attributes:
        learner: keeps versions and records, and has the trainer.
    Raises:
        ConfigError: what it drafts with cannot be trained.
        CapabilityError: a head, and a target that does not give what its trainer needs.
    """

    shares_state = True

    def __init__(
        self,
        first: Drafter,
        folder: Path,
        rebuild: Callable[[Path], Drafter],
        *,
        index: int,
        target: Runner,
        learn: LearnConfig,
    ) -> None:
        self.first, self.name, self._learn = first, first.name, learn
        self.taps, self.tap_window, self.tap_reread = first.taps, first.tap_window, first.tap_reread
        self.catches_up, self.plain_every = first.catches_up, first.plain_every
        self.keeps_trajectory, self.takes_back = first.keeps_trajectory, first.takes_back
        self.foretells, self.tree_policy, self._index = first.foretells, first.tree_policy, index
        info = target.info
        self._none = torch.empty(0, len(self.taps) * info.hidden_size, device=info.device, dtype=info.dtype)
        self._alive, self._pauses = 0, _pauses(learn, target)
        opening = {"trainer": first.learns, "folder": str(folder), "name": first.name, "target": _facts(target)}
        tensors = {}
        if (tokens := first.learned_tokens) is not None:
            tensors["tokens"] = tokens.cpu()
        if self.taps:
            if not (isinstance(target, HasEmbedding) and isinstance(target, HasHead)):
                raise CapabilityError(
                    f"learn needs embeddings and head of {info.name}, which it does not give; leave it out"
                )
            wanted = torch.arange(info.vocab_size) if tokens is None else tokens.cpu()
            tensors["rows"] = target_rows(target, info, wanted).float().cpu()
        process = TrainerProcess(opening, {name: one.contiguous() for name, one in tensors.items()})
        embed = target.embed if self.taps and isinstance(target, HasEmbedding) else None
        self.learner = Learner(self.name, (first, folder), rebuild, embed=embed, config=learn, process=process)

    @property
    def note(self) -> str:  # type: ignore[override]
        """How it was set up, and its version."""
        return "; ".join(words for words in (self.first.note, self.status().words) if words)

    def status(self, counts: Callable[[str], bool] = lambda tenant: True) -> LearningStatus:
        """How far it has learned.

        Args:
            counts: whether a tenant is looked at.
        """
        mine = {tenant: one for tenant, one in self.learner.tenants().items() if counts(tenant)}
        records = [record for tenant in mine for record in list(self.learner.buffer.of(tenant))]
        current = {id(one.current): one.current.outcomes for one in mine.values()}.values()
        tried, accepted = sum(one.tried for one in current), sum(one.accepted for one in current)
        return LearningStatus(
            drafter=self.name,
            version=max((one.current.number for one in mine.values()), default=0),
            rounds=sum(one.rounds for one in mine.values()),
            promoted=sum(one.promoted for one in mine.values()),
            rolled_back=sum(one.rolled_back for one in mine.values()),
            requests=len(records),
            bytes=sum(record.bytes for record in records),
            running=self.learner.running,
            accepted=accepted / tried if tried else 0.0,
        )

    def begin(self, contexts: Sequence[Context]) -> list[LearnedState]:
        states = []
        for context in contexts:
            record = self._record(context)
            versions = self.learner.of(context.tenant)
            version = self.learner.choose(versions)
            (inner,) = version.drafter.begin([context])
            states.append(LearnedState(context, versions, version, inner, record))
        self._count(len(states))
        return states

    def fork(self, state: LearnedState, context: Context) -> LearnedState:
        inner = state.version.drafter.fork(state.inner, context)
        self._count(1)
        return LearnedState(context, state.versions, state.version, inner, self._record(context))

    def catch_up(self, states: Sequence[LearnedState]) -> None:
        for state in states:
            if state.version.withdrawn:
                self._move(state)
        self._each(states, lambda drafter, part: drafter.catch_up(_inner(states, part)))

    def propose(
        self, states: Sequence[LearnedState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        trees: dict[int, TokenTree] = {}

        def ask(drafter: Drafter, part: Sequence[int]) -> None:
            inner, limits, before = _inner(states, part), [budgets[i] for i in part], [so_far[i] for i in part]
            found = drafter.propose(inner, limits, before)
            trees.update(zip(part, found, strict=True))

        self._each(states, ask)
        return [trees[i] for i in range(len(states))]

    def observe(
        self,
        states: Sequence[LearnedState],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        scores: Scores | None,
    ) -> None:
        def tell(drafter: Drafter, part: Sequence[int]) -> None:
            rows = scores if scores is None or len(part) == len(states) else scores.pick(part)
            drafted, judged = [trees[i] for i in part], [verdicts[i] for i in part]
            drafter.observe(_inner(states, part), drafted, judged, rows)

        self._each(states, tell)
        for i, (state, tree, verdict) in enumerate(zip(states, trees, verdicts, strict=True)):
            self._learn_from(state, tree, verdict, scores, i)

    def _learn_from(
        self, state: LearnedState, tree: TokenTree, verdict: Verdict, scores: Scores | None, index: int
    ) -> None:
        """Take in what became of one tree."""
        tried, accepted, rejected = outcome(tree, verdict, self._index) if len(tree) else (0, 0, False)
        if tried:
            self.learner.count(state.versions, state.version, tried, accepted)
        record = state.record
        if record is None:
            return
        passed = of_pass(scores, index, verdict, self.taps) if self.taps else None
        kept = record.grow(state.context.tokens, len(verdict.tokens), passed)
        if kept and rejected and scores is not None:
            row = verdict.path[-1] + 1 if verdict.path else 0
            record.reject(scores.of(index)[row], self._learn.top_logits)

    def end(self, states: Sequence[LearnedState]) -> None:
        self._each(states, lambda drafter, part: drafter.end(_inner(states, part)))
        for state in states:
            if state.record is not None and state.record.enough:
                state.record.close()
                self.learner.add(state.context.tenant, state.record)
        self._count(-len(states))

    def close(self) -> None:
        self.learner.close()

    @property
    def draws_tokens(self) -> bool:
        return self.first.draws_tokens

    def runners(self) -> Sequence[Runner]:
        return self.first.runners()

    def held_bytes(self, tokens: int) -> int:
        most, width = min(tokens, self._learn.record_tokens), self._none.shape[1] * self._none.itemsize
        return self.first.held_bytes(tokens) + most * (width + 8)

    @property
    def row_bytes(self) -> int:
        return self.first.row_bytes

    def _record(self, context: Context) -> TrafficRecord | None:
        """What is kept of a request that begins; None where nothing is learned any more."""
        if not self.learner.running or context.inputs:
            return None
        text, most = context.tokens, self._learn.record_tokens
        if not self.taps:
            return TrafficRecord(text, max(0, len(text) - most // 2), context.prompt_length, None, most)
        states = of_prompt(context, self.taps, most // 2, self._none)
        return TrafficRecord(text, len(text) - 1 - len(states), context.prompt_length, states, most)

    def _move(self, state: LearnedState) -> None:
        """Let the current version go on for a sequence whose own was taken back, with the text alone."""
        state.version.drafter.end([state.inner])
        state.version = state.versions.current
        (state.inner,) = state.version.drafter.begin([state.context])

    def _each(self, states: Sequence[LearnedState], work: Callable[[Drafter, Sequence[int]], None]) -> None:
        """Do it for the sequences of each drafter, by their numbers; usually all have the same."""
        parts: dict[int, list[int]] = {}
        for i, state in enumerate(states):
            parts.setdefault(id(state.version.drafter), []).append(i)
        for part in parts.values():
            work(states[part[0]].version.drafter, part)

    def _count(self, more: int) -> None:
        """So many more sequences are drafted for; the trainer waits or goes on."""
        before, self._alive = self._alive, self._alive + more
        if self._pauses and bool(before) is not bool(self._alive):
            self.learner.pause(bool(self._alive))


def _inner(states: Sequence[LearnedState], part: Sequence[int]) -> list[Any]:
    """The drafter's own states of some sequences."""
    return [states[i].inner for i in part]


def _pauses(learn: LearnConfig, target: Runner) -> bool:
    """Whether the trainer waits while requests run."""
    if learn.pause != "auto":
        return learn.pause == "always"
    decoding = torch.get_num_threads() if target.info.device.type == "cpu" else 1
    return cores() <= decoding


def _facts(target: Runner) -> dict[str, Any]:
    """What a head must fit."""
    info = target.info
    return {"hidden_size": info.hidden_size, "vocab_size": info.vocab_size, "num_layers": info.num_layers,
            "max_context": info.max_context, "stored_rows": info.stored_rows, "dtype": str(info.dtype)[6:],
            "name": info.name, "family": info.family, "fingerprint": info.fingerprint}  # fmt: skip
