"""Arbitrage: a small model writes the steps of an answer, and the large one those that it would write better.

A step is what is written up to a delimiter, a blank line by default. Until the text ends:
1. the small model writes a step;
2. a router reads prompt, text and step, and says how likely the large model is to write a better one, y in 0..1;
3. if y <= threshold the step stands, else the large model writes it anew from the same text.
No token is verified. Both caches are kept: the large model reads steps that stand in one pass when it is its turn, the
small one forgets its own step where that did not stand.

At threshold 1 the small model writes all, at 0 the large one. The router is a linear head on the small model's state
behind the step, trained on steps that are marked by an advantage (`training.judge`), where the authors fine-tune a
process reward model of its own; or a function. With `reward` in its place both models write every step, and the large
one's stands where its reward is higher by more than the threshold: the oracle, which bounds what a router can bring.

Source: Arbitrage: Efficient Reasoning via Advantage-Aware Speculation (arXiv:2512.05033).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from paceline.models.heads import StateJudge
from paceline.search.base import Search, Steps, continued, mean_logprob
from paceline.search.branch import Branch, Found
from paceline.search.named import Scorer, named, numbers, rewards
from paceline.search.second_model import SecondModel, open_second
from paceline.utils import integer, need, number


class Arbitrage(Search):
    """Lets a small model write steps, and the model those at which a router expects it to do better. Approximate by
    design: the share of the text that the small model wrote bounds how far it departs from the model's own.

    Args:
        model: folder or hub id of the small model, whose tokenizer is the model's.
        router: folder of a head that `paceline train judge` has trained for the small model, or a function (itself, or
            "module:function") of texts so far, the step included: numbers in 0..1, how likely the model is to write a
            better step.
        reward: in its place, of texts so far, numbers in 0..1, the higher the better.
        threshold: of what the router says, or of the difference of rewards, above which the model writes the step.
        delimiter: where a step ends. step_tokens: after so many tokens it ends without one.
    Raises:
        ConfigError: a value outside its range, neither or both of `router` and `reward`, another tokenizer.
        CheckpointError: a head of another model.
    """

    name = "arbitrage"
    needs_code = True
    one_text = keeps_beginnings = True

    def __init__(
        self,
        model: str | None = None,
        router: Scorer | str | None = None,
        reward: Scorer | str | None = None,
        *,
        threshold: float = 0.5,
        delimiter: str = "\n\n",
        step_tokens: int = 128,
    ) -> None:
        super().__init__()
        need(isinstance(model, str) and model != "", "model", "be a folder or hub id", model)
        need(router is not None or reward is not None, "router", "be given, or else reward", router)
        need(router is None or reward is None, "router", "be left out beside reward", router)
        number("threshold", threshold, 0.0, 1.0, "be in 0..1")
        need(isinstance(delimiter, str) and delimiter != "", "delimiter", "be a string that is not empty", delimiter)
        integer("step_tokens", step_tokens, 1)
        self.model, self.threshold, self.delimiter, self.longest = model, threshold, delimiter, step_tokens
        self._reward = None if reward is None else named("reward", reward)
        self._head: str | None = None
        self._function: Scorer | None = None
        if isinstance(router, str) and (":" not in router or Path(router).is_dir()):
            self._head = router
        elif router is not None:
            self._function = named("router", router)

    def prepare(self) -> None:
        self.small = open_second(self, "model", self.model)
        if self._head is not None:
            fingerprint = self.models.tokenizer_of(str(self.model)).fingerprint
            self.judge = StateJudge.read(self._head, self.small, tokenizer=fingerprint)

    def steps(self, root: Branch) -> Steps[None]:
        small = SecondModel(self, self.small)
        try:
            yield from self._written(root, small)
        finally:
            small.release()

    def _written(self, root: Branch, small: SecondModel) -> Steps[None]:
        here = root
        self.kept = [root]
        while not here.ended:
            self.alive = [here]
            step = here
            if self.threshold > 0.0 or self._reward is not None:
                step = yield from self._by_small(here, small)
            if step is not here and self._reward is None and self._stands(step, small):
                self.second_tokens += step.length - here.length
                here = step
                continue
            other = yield from self._by_large(here)
            if self._reward is not None and not self._better(other, step):
                self.second_tokens += step.length - here.length
                other = step
            here = other
        self.alive, self.kept, self.found = [], [], [Found(here, mean_logprob(here))]

    def _by_small(self, here: Branch, small: SecondModel) -> Steps[Branch]:
        """The text with a step of the small model's."""
        over, text = self._over(here), here
        while not text.ended and not (text is not here and over(text)):
            yield []  # others' turn
            _, logprobs_v = small.rows(text)
            token = text.draw(logprobs_v, 0)
            text = text.child(token, float(logprobs_v[token]))
        return text

    def _by_large(self, here: Branch) -> Steps[Branch]:
        """The text with a step of the model's; its cache is kept as far as it was read."""
        anchor = self.kept
        (text,) = yield from continued([here], [0], until=self._over(here))
        read = text.parent
        self.kept = [read] if read is not None and read.has_cache else anchor
        return text

    def _over(self, here: Branch) -> Callable[[Branch], bool]:
        """Whether a text that goes on from a branch has come to the end of its step."""
        begin = here.length

        def over(text: Branch) -> bool:
            step = self.tokenizer.decode(text.tokens()[begin:], False)
            return text.length - begin >= self.longest or self.delimiter in step.lstrip()

        return over

    def _stands(self, step: Branch, small: SecondModel) -> bool:
        """Whether the router lets a step of the small model's stand."""
        if self.threshold >= 1.0:
            return True
        if self._function is not None:
            (better,) = numbers("router", self._function([step.written()]), 1, high=1.0)
        else:
            (states,) = small.read(step, (self.small.info.num_layers - 1,)).values()
            better = float(torch.sigmoid(-self.judge.logits(states)))
        return better <= self.threshold

    def _better(self, other: Branch, step: Branch) -> bool:
        """Whether the model's step is better than the small one's by more than the threshold."""
        assert self._reward is not None
        large, little = rewards(self._reward, [other.written(), step.written()])
        return large - little > self.threshold
