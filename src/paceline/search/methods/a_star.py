"""A*-decoding: the text that a reward of partial answers finds most promising is gone on with, step by step.

A step is what is sampled up to a delimiter. Steps that were left behind stay in the queue, and the search may come back
to them. The paper leaves open what a path costs and how far from its goal it is; both forms that fit its words are
here. Source: A*-Decoding: Token-Efficient Inference Scaling (arXiv:2505.13672).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import log
from typing import TYPE_CHECKING, Final

from paceline.search.base import Search, Steps, continued, need_draws
from paceline.search.branch import Branch, Found
from paceline.search.named import Scorer, named, rewards
from paceline.utils import choice, integer, need, number

if TYPE_CHECKING:
    from paceline.config import SamplingParams
    from paceline.engine import Request

TEXTS: Final = 4
"""Of `max_tokens`, for which there are rows where no budget is given."""
DIGITS: Final = 9
"""Of totals, so that rounding makes no difference between equal ones."""
LEAST: Final = 1e-6
"""A reward below counts as this where its logarithm is taken."""


@dataclass(slots=True)
class _QueuedAnswer:
    """A partial answer in the queue.

    Attributes:
        cost: sum over its steps so far. steps: their number. ahead: estimate of what is left. stream: whose randomness
            its first child goes on with.
    """

    branch: Branch
    cost: float
    steps: int
    ahead: float
    stream: int


class AStar(Search):
    """Best-first search over steps.

    A text's total is `path_weight` times the cost of its path plus an estimate of what is left; of texts with the same
    total the longest is gone on with. A path costs the mean of its steps: a sum grows with every step, however good,
    so that the search would turn back to short texts over and over.

    Without `budget_tokens`, a search computes at most as many rows as four texts of `max_tokens` need, or as many as
    are wanted, with all that is sampled beside them.

    Args:
        reward: of texts so far (behind the prompt), numbers in 0..1, one each: a callable that takes a list, or
            "module:function". It is asked once for every step sampled.
        branching: steps sampled from a text; equal ones count once.
        delimiter: where a step ends. step_tokens: after so many tokens it ends without one.
        heuristic: what is left, "shortfall" (1 - reward) or "log" (-log reward).
        cost: of a step, "shortfall" or "surprisal", the mean negative log-probability of its tokens.
        path: "mean" of the costs of its steps, or their "sum", as in A* for graphs.
        path_weight: of the cost of the path; 0 is greedy best-first search.
        finished: end once so many ended texts were taken from the queue, and no fewer than `n`.
    Raises:
        ConfigError: a value outside its range, no reward.
    """

    name = "a_star"
    needs_code = True

    def __init__(
        self,
        reward: Scorer | str | None = None,
        *,
        branching: int = 4,
        delimiter: str = "\n",
        step_tokens: int = 64,
        heuristic: str = "shortfall",
        cost: str = "shortfall",
        path: str = "mean",
        path_weight: float = 1.0,
        finished: int = 1,
    ) -> None:
        super().__init__()
        integer("branching", branching, 1, 256)
        integer("step_tokens", step_tokens, 1)
        integer("finished", finished, 1)
        choice("heuristic", heuristic, ("shortfall", "log"))
        choice("cost", cost, ("shortfall", "surprisal"))
        choice("path", path, ("mean", "sum"))
        need(
            isinstance(delimiter, str) and delimiter != "", "delimiter", "be a string of a character or more", delimiter
        )
        number("path_weight", path_weight, 0.0, 1e6, "be 0 or more")
        self.reward, self.branching, self.delimiter = named("reward", reward), branching, delimiter
        self.longest, self.heuristic, self.cost = step_tokens, heuristic, cost
        self.weight, self.wanted, self.mean = path_weight, finished, path == "mean"
        self.branches = branching
        self._queue: list[tuple[float, int, int, _QueuedAnswer]] = []
        self._totals: dict[Branch, float] = {}
        self._order, self._streams = count(), count(1)

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        need_draws(cls.name, params)

    def most_rows(self, request: Request) -> int:
        return max(TEXTS, self.wanted, request.params.n) * self.branching * request.max_tokens

    def steps(self, root: Branch) -> Steps[None]:
        self._push([_QueuedAnswer(root, 0.0, 0, 0.0, 0)])
        wanted, said = max(self.wanted, root.request.params.n), set[str | tuple[int, ...]]()
        while self._queue:
            self.alive = self._best_so_far()
            total, _, _, node = heappop(self._queue)
            if node.branch.ended:
                self.found.append(Found(node.branch, -total))
                said.add(node.branch.said())
                if len(said) >= wanted:
                    break
                continue
            streams = [node.stream, *(next(self._streams) for _ in range(self.branching - 1))]
            texts = yield from self._sampled(node.branch, streams)
            self._push(self._judged(node, texts))
        self.alive = self.kept = []

    def score(self, branch: Branch) -> float:
        """Minus its total in the queue; within the first step, of which nothing is judged yet, as elsewhere."""
        return -self._totals[branch] if branch in self._totals else super().score(branch)

    def _best_so_far(self) -> list[Branch]:
        """Where the budget ends now: the texts in the queue that have ended, or the deepest of the others."""
        texts = [node.branch for *_, node in self._queue]
        deepest = max(text.length for text in texts)
        return [text for text in texts if text.ended] or [text for text in texts if text.length == deepest]

    def _push(self, nodes: Iterable[_QueuedAnswer]) -> None:
        for node in nodes:
            path = node.cost / max(1, node.steps) if self.mean else node.cost
            total = round(self.weight * path + node.ahead, DIGITS)
            self._totals[node.branch] = total
            heappush(self._queue, (total, -node.steps, next(self._order), node))
        self.kept = [node.branch for *_, node in self._queue if not node.branch.ended]

    def _sampled(self, branch: Branch, streams: Sequence[int]) -> Steps[dict[tuple[int, ...], tuple[Branch, int]]]:
        """Different continuations by one step, each with its stream."""
        begin = branch.length

        def over(text: Branch) -> bool:
            step = self.tokenizer.decode(text.tokens()[begin:], False)
            return text.length - begin >= self.longest or self.delimiter in step.lstrip()

        def note(texts: list[Branch]) -> None:
            if not begin:  # where the budget ends before a whole step is there, a part of it is better than nothing
                self.alive = texts

        texts = yield from continued([branch] * len(streams), streams, until=over, alive=note)
        by_tokens: dict[tuple[int, ...], tuple[Branch, int]] = {}
        for text, stream in zip(texts, streams, strict=True):
            by_tokens.setdefault(tuple(text.tokens()[begin:]), (text, stream))
        return by_tokens

    def _judged(self, node: _QueuedAnswer, texts: dict[tuple[int, ...], tuple[Branch, int]]) -> list[_QueuedAnswer]:
        judged = rewards(self.reward, [branch.written() for branch, _ in texts.values()])
        nodes = []
        for (branch, stream), reward in zip(texts.values(), judged, strict=True):
            ahead = 1 - reward if self.heuristic == "shortfall" else -log(max(reward, LEAST))
            surprisal = (node.branch.logprob - branch.logprob) / max(1, branch.length - node.branch.length)
            step = 1 - reward if self.cost == "shortfall" else surprisal
            nodes.append(_QueuedAnswer(branch, node.cost + step, node.steps + 1, ahead, stream))
        return nodes
