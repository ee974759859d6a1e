"""Adaptive draft length of DiffuSpec: as long as drafts have been lately, and more while they are accepted as a whole.

Source: DiffuSpec: Unlocking Diffusion Language Models for Speculative Decoding (arXiv:2510.02358), "adaptive draft
length": k = clip(floor(L_gen) + delta [L_acc >= L_gen], k_min, k_max), both L being exponential averages. For any
drafter, the generated length is the depth of what it proposed; the paper's drafter, which always fills k positions,
counts up to its end-of-text token.
Where the paper is silent: both averages begin with the first step's lengths, the first draft has k_min tokens; steps
without a proposal and steps that the end of the sequence cut short say nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.controllers.explanations import count
from paceline.controllers.policies.base import MAX_LENGTH, LengthController, PolicyState
from paceline.utils import integer, number

if TYPE_CHECKING:
    from paceline.tree import TokenTree, Verdict


@dataclass(slots=True)
class _Averages:
    generated: float
    accepted: float
    begun: bool = False


class DiffuSpecController(LengthController[_Averages]):
    """Length from exponential averages of generated and accepted lengths.

    Args:
        k_min, k_max: bounds of the length; 20 and 30, the paper's for a drafter whose time does not grow with the
            length.
        delta: tokens added while the accepted length keeps up with the generated one.
        rho: weight of the latest step in both averages, 0..1.
        num_speculative_tokens: most tokens of a draft, below `k_min` too; None sets no further limit.
        disable_by_batch_size: no drafts at or above this number of sequences.
    Raises:
        ConfigError: a value outside its range.
    Source: DiffuSpec (arXiv:2510.02358).
    """

    name = "diffuspec"

    def __init__(
        self,
        *,
        k_min: int = 20,
        k_max: int = 30,
        delta: int = 10,
        rho: float = 0.5,
        num_speculative_tokens: int | None = None,
        disable_by_batch_size: int | None = None,
    ) -> None:
        integer("k_max", k_max, 1, MAX_LENGTH)
        integer("k_min", k_min, 1, k_max)
        integer("delta", delta, 0, MAX_LENGTH)
        number("rho", rho, 0.0, 1.0, "be in 0..1")
        super().__init__(num_speculative_tokens, disable_by_batch_size)
        self.k_min, self.k_max, self.delta, self.rho = k_min, k_max, delta, rho

    def _remember(self, greedy: bool) -> _Averages:
        return _Averages(float(self.k_min), 0.0)

    def _length(self, memory: _Averages) -> int:
        more = self.delta if memory.accepted >= memory.generated else 0
        return min(max(int(memory.generated) + more, self.k_min), self.k_max)

    def _learn(self, state: PolicyState[_Averages], tree: TokenTree, verdict: Verdict) -> None:
        if state.limited:
            return
        memory, rho = state.memory, self.rho if state.memory.begun else 1.0
        memory.begun = True
        memory.generated += rho * (tree.max_depth - memory.generated)
        memory.accepted += rho * (len(verdict.path) - memory.accepted)

    def _why(self, state: PolicyState[_Averages]) -> str:
        return (
            f"Up to {count(state.length, 'token')}, by the lengths drafted and accepted lately "
            f"({self.k_min}..{self.k_max})."
        )

    def _policy(self) -> str:
        return f"{self.k_min}..{self.k_max} tokens by averages of drafted and accepted lengths"
