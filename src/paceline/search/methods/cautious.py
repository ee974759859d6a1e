"""Cautious next token prediction: where the model is unsure, several short trials, of which the likeliest is kept.

Source: Cautious Next Token Prediction (arXiv:2507.03038).
"""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING

import torch

from paceline.search.base import Search, Steps, continued, mean_logprob, need_draws
from paceline.search.branch import Branch, Found
from paceline.utils import integer, number

if TYPE_CHECKING:
    from paceline.config import SamplingParams

PUNCTUATION = frozenset(".\n?!:;)]}")


class CautiousPrediction(Search):
    """Samples trials where the entropy of the next token is high, more of them the higher it is.

    With H the entropy in nats of the distribution that is sampled from, floor(1 + (most_trials - 1) * clip((H -
    low_entropy) / (high_entropy - low_entropy), 0, 1)) trials go on to the next punctuation mark, and the one with the
    highest mean log-probability is kept whole. One trial is a plain step.

    Args:
        most_trials: at high entropy. low_entropy, high_entropy: nats, between which their number grows.
        trial_tokens: after so many tokens a trial ends without punctuation.
    Raises:
        ConfigError: a value outside its range.
    """

    name = "cautious"
    one_text = keeps_beginnings = True

    def __init__(
        self, most_trials: int = 10, low_entropy: float = 0.01, high_entropy: float = 1.5, trial_tokens: int = 64
    ) -> None:
        super().__init__()
        integer("most_trials", most_trials, 1, 256)
        number("low_entropy", low_entropy, 0.0, 1e3, "be 0 or more")
        number("high_entropy", high_entropy, low_entropy, 1e4, "be above low_entropy", open_low=True)
        integer("trial_tokens", trial_tokens, 1)
        self.most, self.low, self.high, self.longest = most_trials, low_entropy, high_entropy, trial_tokens
        self._ends: dict[int, bool] = {}
        self.branches = most_trials

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        need_draws(cls.name, params)

    def steps(self, root: Branch) -> Steps[None]:
        here = root
        while not here.ended:
            self.alive = [here]
            rows = yield [here]
            count = self.trials(rows.logprobs[0])
            trials = [here.child(*drawn(here, rows.logprobs[0], i)) for i in range(count)]
            if len(trials) == 1:
                here = trials[0]
                continue
            here = yield from self._best(trials, here)
        self.alive, self.found = [], [Found(here, mean_logprob(here))]

    def trials(self, logprobs: torch.Tensor) -> int:
        """Their number at log-probabilities (v,)."""
        share = (entropy(logprobs) - self.low) / (self.high - self.low)
        return floor(1 + (self.most - 1) * min(1.0, max(0.0, share)))

    def _best(self, trials: list[Branch], parent: Branch) -> Steps[Branch]:
        def over(trial: Branch) -> bool:
            return self._ends_here(trial.token) or trial.length - parent.length >= self.longest

        going = [i for i, trial in enumerate(trials) if not (trial.ended or over(trial))]
        grown = yield from continued([trials[i] for i in going], going, until=over)
        for i, trial in zip(going, grown, strict=True):
            trials[i] = trial
        return max(trials, key=lambda trial: (trial.logprob - parent.logprob) / (trial.length - parent.length))

    def _ends_here(self, token: int) -> bool:
        if token not in self._ends:
            text = self.tokenizer.decode([token], False).rstrip(" ")
            self._ends[token] = text[-1:] in PUNCTUATION if text else False
        return self._ends[token]


def drawn(branch: Branch, logprobs: torch.Tensor, index: int) -> tuple[int, float]:
    """A token, and its log-probability."""
    token = branch.draw(logprobs, index)
    return token, float(logprobs[token])


def entropy(logprobs: torch.Tensor) -> float:
    """In nats, of log-probabilities (v,)."""
    chances = logprobs.exp()
    return float(-(chances * logprobs.masked_fill(chances == 0, 0.0)).sum())
