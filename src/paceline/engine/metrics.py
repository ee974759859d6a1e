"""Counters of one request: what was drafted, what stood, where the time went.

In: trees and verdicts as they pass. Out: RequestMetrics under vLLM's metric names. Not here: decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.tree import PROBE, TokenTree, lone_source


@dataclass(slots=True)
class DrafterMetrics:
    """One drafter's share: nodes it proposed that were verified, and those of them that were accepted and kept."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class RequestMetrics:
    """Counts and times of one request, its outputs together.

    Attributes:
        num_steps: scoring passes of the target that this request took part in (prefill not counted).
        num_drafts: those with a tree that was not empty.
        num_draft_tokens: verified nodes, whatever became of them; Lookahead's probes, which are no guesses, do not
        count.
        num_accepted_tokens: accepted nodes whose tokens are in the output; what a stop or a limit cut off does not
        count.
        num_accepted_tokens_per_pos: those by depth, from depth 1.
        num_generation_tokens, num_prompt_tokens: text sizes.
        drafters: name -> counts; a node that several drafters proposed counts for the first of them.
        dropped_drafters: name -> why a drafter was dropped for this request.
        time_to_first_token, generation_time: seconds since arrival, and from the first step to the end; what the
            controller takes to plan and to measure is in both.
        arrival_time, first_step_time: clock readings (`time.perf_counter`).
    """

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    drafters: dict[str, DrafterMetrics] = field(default_factory=dict)
    dropped_drafters: dict[str, str] = field(default_factory=dict)
    time_to_first_token: float | None = None
    generation_time: float = 0.0
    arrival_time: float = 0.0
    first_step_time: float | None = None

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / steps: tokens per pass of the target, by the target's own counts; 1 without drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_steps if self.num_steps else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted nodes per verified node; 0 without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second from the first step to the end."""
        return self.num_generation_tokens / self.generation_time if self.generation_time else 0.0

    def add_step(self, tree: TokenTree, path: Sequence[int], names: Sequence[str]) -> None:
        """Count one step of one output.

        Args:
            tree: what was verified.
            path: its accepted nodes as far as the output kept their tokens.
            names: the drafters' names by source index.
        """
        self.num_steps += 1
        nodes = len(tree.tokens)
        if not nodes:
            return
        self.num_drafts += 1
        self.num_accepted_tokens += len(path)
        per_pos, accepted = self.num_accepted_tokens_per_pos, len(path)
        if accepted > len(per_pos):
            per_pos.extend([0] * (accepted - len(per_pos)))
        for depth in range(accepted):
            per_pos[depth] += 1
        if (only := lone_source(tree)) >= 0:
            self.num_draft_tokens += nodes
            drafter = self.drafter(names[only])
            drafter.num_draft_tokens += nodes
            drafter.num_accepted_tokens += accepted
            return
        sources = tree.sources.tolist()
        for source, kind in zip(sources, tree.kinds.tolist(), strict=True):
            drafter = self.drafter(names[source])
            if kind != PROBE:
                self.num_draft_tokens += 1
                drafter.num_draft_tokens += 1
        for node in path:
            self.drafter(names[sources[node]]).num_accepted_tokens += 1

    def drafter(self, name: str) -> DrafterMetrics:
        """The counts of one drafter, made on first use."""
        found = self.drafters.get(name)
        if found is None:
            found = self.drafters[name] = DrafterMetrics()
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_generation_tokens": self.num_generation_tokens,
            "num_steps": self.num_steps,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_accepted_tokens_per_pos": list(self.num_accepted_tokens_per_pos),
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "drafters": {
                name: {"num_draft_tokens": d.num_draft_tokens, "num_accepted_tokens": d.num_accepted_tokens}
                for name, d in self.drafters.items()
            },
            "dropped_drafters": dict(self.dropped_drafters),
            "time_to_first_token": self.time_to_first_token,
            "generation_time": self.generation_time,
            "tokens_per_second": round(self.tokens_per_second, 2),
        }
