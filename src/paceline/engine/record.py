"""What one decoding step did, for those who watch: benchmark, explanation, doctor.

with watching(llm.engine, records.append):
    llm.generate(...)"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from paceline.engine.sequence import DecodingSequence
    from paceline.errors import NumericsError
    from paceline.tree import Scores, TokenTree, Verdict


@dataclass(slots=True)
class TimeSplit:
    """Seconds by what they were spent on.

    Attributes:
        prefill: filling caches with prompts, and with texts whose caches were given up.
        draft: proposing, with what verdicts waited for of work beside the scoring pass.
        score: the target's passes over roots and trees, with filling second sequences of its own that steer.
        verify: sampling rules and verdicts; where a request is steered, also passes of other models and shaping.
        commit: growing texts and caches, telling drafters, and giving up what ended or is parked.
        other: the step's remainder: planning, merging and selecting trees, learning.
    """

    prefill: float = 0.0
    draft: float = 0.0
    score: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    other: float = 0.0

    def add(self, more: TimeSplit) -> None:
        """Sum up."""
        self.prefill += more.prefill
        self.draft += more.draft
        self.score += more.score
        self.verify += more.verify
        self.commit += more.commit
        self.other += more.other

    def to_dict(self) -> dict[str, float]:
        """JSON-ready."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def total(self) -> float:
        return sum(self.to_dict().values())


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Says what one step of a batch did; all lists are in the order of `sequences`.

    Attributes:
        sequences: already advanced by this step.
        roots: each one's last committed token before the step.
        lengths: committed tokens before the step, the root included.
        proposed: merged trees as the drafters proposed them.
        trees: what selection and the room in memory left of them, which the target scored.
        scores: logits of roots and nodes as steering shapes them; sampling rules are not applied.
        verdicts: what was accepted, or why the row was no distribution.
        drafters: names by source index.
        draft_seconds: by drafter, with what it took to read the prompt.
        times: the step's seconds; `prefill` is 0.
    """

    sequences: Sequence[DecodingSequence]
    roots: Sequence[int]
    lengths: Sequence[int]
    proposed: Sequence[TokenTree]
    trees: Sequence[TokenTree]
    scores: Scores
    verdicts: Sequence[Verdict | NumericsError]
    drafters: Sequence[str]
    draft_seconds: Sequence[float]
    times: TimeSplit


Watcher = Callable[[StepRecord], None]


class Watched(Protocol):
    """Something with watchers: the engine."""

    watchers: list[Watcher]


@contextmanager
def watching(engine: Watched, watcher: Watcher) -> Iterator[None]:
    """Call `watcher` after every step of `engine` inside the block; what it raises ends the generation."""
    engine.watchers.append(watcher)
    try:
        yield
    finally:
        engine.watchers.remove(watcher)
