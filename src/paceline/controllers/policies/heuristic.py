"""Two tokens more after a draft that was accepted as a whole, one fewer after any other.

Source: the "heuristic" schedule of assisted generation in transformers (huggingface.co/blog/assisted-generation), with
its names and steps. Where the original is silent: a tree was accepted as a whole when a node of its deepest level was
accepted; a step without any draft changes nothing; the length is kept per sequence, and has an upper limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from paceline.controllers.explanations import count
from paceline.controllers.policies.base import MAX_LENGTH, LengthController, PolicyState
from paceline.utils import integer, need

if TYPE_CHECKING:
    from paceline.tree import TokenTree, Verdict

GROW: Final = 2
SHRINK: Final = 1
LIMIT: Final = 64
SCHEDULES: Final = ("heuristic", "heuristic_transient", "constant")


@dataclass(slots=True)
class _Tokens:
    number: int


class HeuristicController(LengthController[_Tokens]):
    """Grows the draft by 2 tokens when all of it is accepted and shrinks it by 1, down to 1, when not.

    Args:
        num_assistant_tokens: length of the first draft; 5, the value that came with this schedule in transformers.
        num_assistant_tokens_schedule: "heuristic": a new sequence begins with the length that the last one left;
            "heuristic_transient": every sequence begins with the first length; "constant": the length stays.
        num_speculative_tokens: most tokens of a draft; None is 64 (the original has no limit).
        disable_by_batch_size: no drafts at or above this number of sequences.
    Raises:
        ConfigError: a value outside its range.
    Source: assisted generation of transformers, `num_assistant_tokens_schedule`.
    """

    name = "heuristic"

    def __init__(
        self,
        *,
        num_assistant_tokens: int = 5,
        num_assistant_tokens_schedule: Literal["heuristic", "heuristic_transient", "constant"] = "heuristic",
        num_speculative_tokens: int | None = None,
        disable_by_batch_size: int | None = None,
    ) -> None:
        integer("num_assistant_tokens", num_assistant_tokens, 1, MAX_LENGTH)
        schedule = num_assistant_tokens_schedule
        need(schedule in SCHEDULES, "num_assistant_tokens_schedule", f"be one of {', '.join(SCHEDULES)}", schedule)
        super().__init__(num_speculative_tokens, disable_by_batch_size)
        self.first, self.schedule = num_assistant_tokens, schedule
        self._limit = (
            max(LIMIT, num_assistant_tokens) if num_speculative_tokens is None else max(num_speculative_tokens, 1)
        )
        self._latest = num_assistant_tokens

    def _remember(self, greedy: bool) -> _Tokens:
        return _Tokens(self._latest if self.schedule == "heuristic" else self.first)

    def _length(self, memory: _Tokens) -> int:
        return memory.number

    def _learn(self, state: PolicyState[_Tokens], tree: TokenTree, verdict: Verdict) -> None:
        if self.schedule == "constant":
            return
        number = state.memory.number + (GROW if len(verdict.path) == tree.max_depth else -SHRINK)
        state.memory.number = self._latest = min(max(number, 1), self._limit)

    def _why(self, state: PolicyState[_Tokens]) -> str:
        return (
            f"Up to {count(state.length, 'token')}: {GROW} more after each draft that was accepted whole, "
            f"{SHRINK} fewer after others."
        )

    def _policy(self) -> str:
        return f"{self.first} tokens at first, {GROW} more after full acceptance, {SHRINK} fewer after a rejection"
