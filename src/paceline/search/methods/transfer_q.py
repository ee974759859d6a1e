"""Transfer Q*: every token is chosen by the model and by what a short continuation of it is worth under a reward.

The continuation comes from a model that is aligned already, whose values are taken over: where it was aligned with the
reward itself (direct transfer) the reward of the continuation is the value, where it was aligned with another one
(indirect transfer) the reward is weighed by how much likelier the aim makes it. Values are added to log-probabilities
of the likeliest tokens. Source: Transfer Q*: Principled Decoding for LLM Alignment (arXiv:2405.20495); continuations
are greedy and as short as in its authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, expm1, inf, log
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from paceline.search.base import Search, Steps
from paceline.search.branch import Branch, Found
from paceline.search.forest import raise_failure, shaped
from paceline.search.scoring import GivenScorer, NamedScorer, prompt_of
from paceline.search.second_model import CHUNK, fitted, open_second
from paceline.tree import EMPTY_TREE
from paceline.utils import integer, need, number

if TYPE_CHECKING:
    from paceline.models import Runner, SequenceCache

STEEPEST: Final = 700.0
"""Largest exponent of what a token falls short by: its chance is 0 then."""
LARGEST: Final = 1e300
"""Largest exponent of a weight."""

Value = tuple[int, float]
"""A sign, and the logarithm of the size; (0, -inf) is 0. Values may be larger than any float."""


class TransferQ(Search):
    """Decodes token by token, each by log-probability plus `weight` times its value (at a temperature, both divided by
    it); nothing else than the `top_k` likeliest is tried.

    The value of a token is the reward of the text with it and a greedy continuation, which keeps to the request's rules
    and ends where they allow no token. The text's score is its reward.

    Args:
        reward: as the `scorer` of `sample_and_rank`. baseline_reward: likewise, that with which the rollout model was
            aligned; None is the reward itself.
        weight: of values; 0 decodes plainly. top_k: tokens tried.
        rollout_tokens: most tokens of a continuation; 0 judges the text with the token alone.
        rollout_model: folder or hub id of a model with the same tokenizer; None continues with the model itself.
        beta: with `baseline_reward`, a reward r counts exp((r - baseline) / beta) * r.
    Raises:
        ConfigError: a value outside its range, no reward, a model with another tokenizer.
    """

    name = "transfer_q"
    needs_code = True
    one_text = keeps_beginnings = True

    def __init__(
        self,
        reward: GivenScorer | None = None,
        *,
        baseline_reward: GivenScorer | None = None,
        weight: float = 1.0,
        top_k: int = 10,
        rollout_tokens: int = 5,
        rollout_model: str | None = None,
        beta: float = 2.0,
    ) -> None:
        super().__init__()
        number("weight", weight, 0.0, 1e6, "be 0 or more")
        integer("top_k", top_k, 1, 256)
        integer("rollout_tokens", rollout_tokens, 0, 1024)
        number("beta", beta, 0.0, 1e6, "be above 0", open_low=True)
        need(
            rollout_model is None or isinstance(rollout_model, str),
            "rollout_model",
            "be a folder or hub id",
            rollout_model,
        )
        need(reward is not None, "reward", 'be a function, its name as "module:function", or {"model": FOLDER}', reward)
        assert reward is not None
        self.reward = NamedScorer("reward", reward)
        self.baseline = None if baseline_reward is None else NamedScorer("baseline_reward", baseline_reward)
        self.weight, self.top_k, self.rollout_tokens = weight, top_k, rollout_tokens
        self.rollout_model, self.beta, self.branches = rollout_model, beta, top_k
        self._other: SequenceCache | None = None  # of the rollout model

    def prepare(self) -> None:
        self.reward.open(self.models)
        if self.baseline is not None:
            self.baseline.open(self.models)
        self.roller: Runner = self.runner
        if self.rollout_model is not None:
            self.roller = open_second(self, "rollout_model", self.rollout_model)

    def steps(self, root: Branch) -> Steps[None]:
        here = root
        try:
            while not here.ended:
                self.alive = [here]
                rows = yield [here]
                logprobs = rows.logprobs[0]
                chosen = here.draw(self._weighed(here, logprobs) if self.weight else logprobs, 0)
                here = here.child(chosen, float(logprobs[chosen]))
        finally:
            if self._other is not None:
                self.roller.release(self._other)
        self.alive, self.found = [], [Found(here, self.score(here))]

    def score(self, branch: Branch) -> float:
        """Its reward."""
        return self.reward.scores(self.models, prompt_of(branch, self.tokenizer), [branch.written()])[0]

    def _weighed(self, here: Branch, logprobs: torch.Tensor) -> torch.Tensor:
        """(v,) log-probabilities of the next token."""
        tokens = logprobs.topk(min(self.top_k, int(logprobs.isfinite().sum()))).indices
        tried = [here.child(token, 0.0) for token in tokens.tolist()]
        texts = [text.written() for text in self._continued(here, tried)]
        params = here.request.params
        weight = log(self.weight) - (0.0 if params.greedy else log(params.temperature))
        short = [exp(min(weight + shortfall, STEEPEST)) for shortfall in shortfalls(self.values(here, texts))]
        shaped_v = torch.full_like(logprobs, -inf)
        shaped_v[tokens] = (logprobs[tokens].double() - torch.tensor(short, dtype=torch.float64)).float()
        return shaped_v.log_softmax(-1)

    def values(self, here: Branch, texts: Sequence[str]) -> list[Value]:
        """What texts are worth that continue the prompt of a branch."""
        prompt = prompt_of(here, self.tokenizer)
        rewards = self.reward.scores(self.models, prompt, texts)
        others = rewards if self.baseline is None else self.baseline.scores(self.models, prompt, texts)
        return [
            (1 if r > 0.0 else -1, log(abs(r)) + max(-LARGEST, min(LARGEST, (r - b) / self.beta))) if r else (0, -inf)
            for r, b in zip(rewards, others, strict=True)
        ]

    def _continued(self, here: Branch, tried: Sequence[Branch]) -> list[Branch]:
        """The texts tried, each with its greedy continuation."""
        texts, base, stuck = list(tried), self._base(here), set[int]()
        forks = [self.roller.fork(base) for _ in texts]
        try:
            for _ in range(self.rollout_tokens):
                going = [i for i, text in enumerate(texts) if not (text.ended or i in stuck)]
                if not going:
                    break
                caches, trees = [forks[i] for i in going], [EMPTY_TREE] * len(going)
                logits = self.roller.score(caches, [texts[i].token for i in going], trees).logits
                logprobs, errors = shaped([texts[i] for i in going], fitted(logits, self.runner.info.vocab_size))
                raise_failure(errors)
                stuck |= {i for i in going if texts[i] in errors}
                for i, token in zip(going, logprobs.argmax(-1).tolist(), strict=True):
                    texts[i] = texts[i] if i in stuck else texts[i].child(token, 0.0)
                self.roller.commit(caches, [()] * len(going))
                self.own_rows += len(going)
                self.own_passes += 1
        finally:
            for fork in forks:
                self.roller.release(fork)
        return texts

    def _base(self, here: Branch) -> SequenceCache:
        """A cache of the rollout model with the whole text."""
        if self.rollout_model is None:
            return here.cache  # it was just asked for
        if self._other is None:
            self._other = self.roller.open()
        text = here.text()
        for start in range(self._other.length, len(text), CHUNK):
            self.roller.extend([self._other], [text[start : start + CHUNK]])
        return self._other


def shortfalls(values: Sequence[Value]) -> list[float]:
    """Logarithms of what each value is less than the greatest of them; -inf of that itself."""
    top_sign, top = max(values, key=lambda value: (value[0], value[0] * value[1] if value[0] else 0.0))
    return [_difference(size, top) if sign == top_sign else float(np.logaddexp(size, top)) for sign, size in values]


def _difference(first: float, other: float) -> float:
    """log |exp(one) - exp(other)|."""
    low, high = sorted((first, other))
    return high + log(-expm1(low - high)) if low < high else -inf
