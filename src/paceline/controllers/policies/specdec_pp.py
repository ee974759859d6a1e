"""SpecDec++: draft until a rejection somewhere in the draft is too likely.

In: confidence, verdicts. Out: stops. Not here: the head that foretells acceptance (`accept_head`).

With c_i the chance that drafted token i stands if those before it do, drafting stops when 1 - c_1 c_2 ... c_i >
`stop_threshold`, within `bound`; under costs of a draft step and of a verification, a threshold on this chance is the
optimal policy.

Two differences from the published code. Its head reads hidden states, which come with the next token, so that it drafts
one token past the one that crosses; here that one is the last. And its head's rejections are `weight_mismatch` times as
likely as true ones; here `stop_threshold` is compared with the true chance (0.3 stops about where 0.7 does there).

Source: SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths (arXiv:2405.19715).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.controllers.policies.acceptance_head import AcceptHead, Features, features_of
from paceline.controllers.policies.lengths import MOST
from paceline.controllers.policies.stoppers import StopController, Token, tokens_of
from paceline.controllers.words import count
from paceline.utils import integer, need, number

if TYPE_CHECKING:
    from paceline.controllers.policies.lengths import Course
    from paceline.tree import TokenTree, Verdict

_RECENT = 0.05


class _Recent:
    """What one sequence remembers: the head that serves it, the share of its tokens accepted lately."""

    __slots__ = ("head", "share")

    def __init__(self, head: AcceptHead) -> None:
        self.head, self.share = head, 0.5


class SpecDecPPController(StopController[_Recent]):
    """Stops when the chance of any rejection exceeds a threshold; the token that crosses it is still verified.

    The chance comes from a predictor that learns from the verdicts while decoding, one for temperature 0 and one above
    it.

    Args:
        stop_threshold: the paper's h, 0..1; 0 drafts the least, 1 the most that `bound` allows.
        bound: least and most tokens of a draft, both included.
        weight_mismatch: weight of a rejection in the predictor's loss, that of an acceptance being 1.
        num_speculative_tokens: most nodes of a step's tree, below `bound` too; None sets no further limit.
        disable_by_batch_size: no drafts at or above this number of sequences.
    Raises:
        ConfigError: a value outside its range.
    Source: SpecDec++ (arXiv:2405.19715).
    """

    name = "specdec_pp"

    def __init__(
        self,
        *,
        stop_threshold: float = 0.3,
        bound: Sequence[int] = (2, 20),
        weight_mismatch: float = 6.0,
        num_speculative_tokens: int | None = None,
        disable_by_batch_size: int | None = None,
    ) -> None:
        number("stop_threshold", stop_threshold, 0.0, 1.0, "be in 0..1")
        number("weight_mismatch", weight_mismatch, 0.0, 1e6, "be above 0", open_low=True)
        need(
            isinstance(bound, list | tuple) and len(bound) == 2,
            "bound",
            "be two integers, the least and the most",
            bound,
        )
        integer("bound[1]", bound[1], 1, MOST)
        integer("bound[0]", bound[0], 1, bound[1])
        super().__init__(num_speculative_tokens, disable_by_batch_size)
        self.stop_threshold, self.bound = stop_threshold, (bound[0], bound[1])
        self.heads = {greedy: AcceptHead(weight_mismatch) for greedy in (True, False)}

    def _remember(self, greedy: bool) -> _Recent:
        return _Recent(self.heads[greedy])

    def _length(self, memory: _Recent) -> int:
        return self.bound[1]

    def _follow(self, memory: _Recent, carried: float, token: Token) -> tuple[float, bool]:
        stands = carried * memory.head.chance(_features(memory, token))
        return stands, token.depth < self.bound[0] or 1.0 - stands <= self.stop_threshold

    def _learn(self, course: Course[_Recent], tree: TokenTree, verdict: Verdict) -> None:
        """Nodes below accepted ones are evidence; those below rejected ones say nothing."""
        memory, stands, chain = course.memory, set(verdict.path), tree.is_chain
        known: list[tuple[Features, bool]] = []
        rows = zip(tree.parents.tolist(), tree.kinds.tolist(), tokens_of(course, tree), strict=True)
        for node, (parent, kind, token) in enumerate(rows):
            if parent >= 0 and parent not in stands:
                if chain:
                    break
            elif not kind:
                known.append((_features(memory, token), node in stands))
        for features, accepted in known:
            memory.head.learn(features, accepted)
            memory.share += _RECENT * (accepted - memory.share)

    def _why(self, course: Course[_Recent]) -> str:
        least, most = (min(one, course.length) for one in self.bound)
        until = f"until the chance of a rejection exceeds {self.stop_threshold:g}"
        return (
            f"{least} to {count(most, 'level')}, {until}; it has learned from "
            f"{count(course.memory.head.seen, 'token')}."
        )

    def _policy(self) -> str:
        return (
            f"{self.bound[0]} to {self.bound[1]} levels, until the chance of a rejection exceeds "
            f"{self.stop_threshold:g}"
        )


def _features(memory: _Recent, token: Token) -> Features:
    return features_of(token.depth, token.confidence, token.reach, memory.share, token.features)
