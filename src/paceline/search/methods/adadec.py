"""AdaDec: greedy decoding that looks ahead where the model is unsure.

Source: Towards Better Code Generation: Adaptive Decoding with Uncertainty Guidance (arXiv:2506.08980).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch

from paceline.search.base import Search, Steps, mean_logprob
from paceline.search.branch import Branch, Found
from paceline.search.methods.cautious import entropy
from paceline.search.named import named
from paceline.utils import integer, number


class AdaDec(Search):
    """Takes the likeliest token, but where the entropy of the next token is `threshold` or more, tries the likeliest
    `candidates`, each continued greedily, and takes the one whose continuation has the highest mean log-probability.

    Args:
        threshold: nats, of the model's own distribution; `paceline tune --search adadec` finds it for a model.
        candidates: tokens tried. lookahead: most tokens that each is continued by.
        stop_lookahead: of the text behind the prompt, whether a continuation ends here (outside of a function's body,
            say): a callable or "module:function"; by default only the text's own end counts.
    Raises:
        ConfigError: a value outside its range.
    """

    name = "adadec"
    one_text = drops_dead_ends = keeps_beginnings = True

    def __init__(
        self,
        threshold: float = 1.0,
        candidates: int = 3,
        lookahead: int = 5,
        stop_lookahead: Callable[[str], Any] | str | None = None,
    ) -> None:
        super().__init__()
        number("threshold", threshold, 0.0, float("inf"), "be 0 or more")
        integer("candidates", candidates, 1, 64)
        integer("lookahead", lookahead, 0, 1024)
        self.threshold, self.candidates, self.lookahead = threshold, candidates, lookahead
        self.branches = candidates
        self.stop = None if stop_lookahead is None else named("stop_lookahead", stop_lookahead)

    def steps(self, root: Branch) -> Steps[None]:
        here = root
        logits, logprobs = yield from self._rows(here)
        while True:
            self.alive, self.kept = [here], []
            if not (allowed := int(logprobs.isfinite().sum())):
                return
            if self.candidates == 1 or self.lookahead == 0 or entropy(logits.log_softmax(-1)) < self.threshold:
                here = here.child(*best(logprobs))
                if here.ended:
                    break
                logits, logprobs = yield from self._rows(here)
                continue
            top = logprobs.topk(min(self.candidates, allowed))
            tried = [here.child(int(token), float(value)) for value, token in zip(*top, strict=True)]
            here, following = yield from self._ahead(tried)
            if following is None:
                break
            logits, logprobs = following
        self.alive, self.found = [], [Found(here, mean_logprob(here))]

    def _rows(self, branch: Branch) -> Steps[tuple[torch.Tensor, torch.Tensor]]:
        rows = yield [branch]
        return rows.logits[0], rows.logprobs[0]

    def _ahead(self, tried: Sequence[Branch]) -> Steps[tuple[Branch, tuple[torch.Tensor, torch.Tensor] | None]]:
        """The token tried that goes on best, and what may follow it; None where it ends the text."""
        first = tried[0].parent
        assert first is not None
        self.kept = list(tried)
        ends, rows_of, stuck = list(tried), {}, set[int]()
        for depth in range(self.lookahead):
            going = [i for i, end in enumerate(ends) if i not in stuck and not self._over(end, depth)]
            if not going:
                break
            rows = yield [ends[i] for i in going]
            for row, i in enumerate(going):
                if not depth:
                    rows_of[i] = rows.logits[row], rows.logprobs[row]
                token, logprob = best(rows.logprobs[row])
                if logprob > -inf:
                    ends[i] = ends[i].child(token, logprob)
                else:
                    stuck.add(i)
        means = [(end.logprob - first.logprob) / (end.length - first.length) for end in ends]
        taken = max(range(len(tried)), key=lambda i: (i not in stuck, means[i]))
        return tried[taken], rows_of.get(taken)

    def _over(self, branch: Branch, depth: int) -> bool:
        """Whether a continuation by so many tokens ends here."""
        stops = depth > 0 and self.stop is not None and bool(self.stop(branch.written()))
        return branch.ended or stops


def best(logprobs: torch.Tensor) -> tuple[int, float]:
    """The likeliest token, and its log-probability."""
    token = int(logprobs.argmax())
    return token, float(logprobs[token])
