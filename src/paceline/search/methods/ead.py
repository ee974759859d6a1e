"""Entropy adaptive decoding: a small model writes where it is sure of the next token, the large one elsewhere.

One of two models with one tokenizer is active. At every token
1. the active one, which has read the whole text, gives logits, from which the token is drawn as the request asks;
2. their entropy H = -sum p log2 p, of the raw logits (before temperature and rules), joins a window of w tokens;
3. if the mean of the window is tau or more, the large model is to write on, else the small one; they change places only
   where the active one has written `min_dwell` tokens.
A model that becomes active reads what it missed in one pass: both caches are kept, and each token is read once by each.
Nothing is verified: all that the small model writes stands.

At tau = 0 the large model writes all, above log2 of the vocabulary's size the small one. Source: Entropy Adaptive
Decoding: Dynamic Model Switching for Efficient Inference (arXiv:2502.06833), with w = 5; its thresholds and dwell are
not known here.
"""

from __future__ import annotations

from collections import deque
from math import log

import torch

from paceline.search.base import Search, Steps, mean_logprob
from paceline.search.branch import Branch, Found
from paceline.search.methods.cautious import entropy
from paceline.search.second_model import SecondModel, open_second
from paceline.utils import integer, need, number


class EntropyAdaptive(Search):
    """Switches between the model and a small one by the entropy of what comes next. Approximate by design: the share of
    the text that the small model wrote bounds how far it departs from the model's own.

    Args:
        model: folder or hub id of the small model, whose tokenizer is the model's.
        entropy_threshold: tau, bits; from which mean entropy on the large model writes.
        entropy_window: w, tokens.
        min_dwell: tokens that a model writes before the other one may.
    Raises:
        ConfigError: a value outside its range, no model or one with another tokenizer.
    """

    name = "ead"
    needs_code = True
    one_text = keeps_beginnings = True

    def __init__(
        self,
        model: str | None = None,
        *,
        entropy_threshold: float = 1.0,
        entropy_window: int = 5,
        min_dwell: int = 8,
    ) -> None:
        super().__init__()
        need(isinstance(model, str) and model != "", "model", "be a folder or hub id", model)
        number("entropy_threshold", entropy_threshold, 0.0, 1e9, "be 0 or more")
        integer("entropy_window", entropy_window, 1, 1024)
        integer("min_dwell", min_dwell, 1, 65536)
        self.model, self.threshold, self.dwell = model, entropy_threshold, min_dwell
        self._window: deque[float] = deque(maxlen=entropy_window)

    def prepare(self) -> None:
        self.small = open_second(self, "model", self.model)

    def steps(self, root: Branch) -> Steps[None]:
        small = SecondModel(self, self.small)
        try:
            yield from self._written(root, small)
        finally:
            small.release()

    def _written(self, root: Branch, small: SecondModel) -> Steps[None]:
        here, large, dwelt = root, self._unsure(), 0
        self.kept = [root]
        while not here.ended:
            self.alive = [here]
            if large:
                self.kept = [here]
                rows = yield [here]
                logits_v, logprobs_v = rows.logits[0], rows.logprobs[0]
            else:
                yield []  # others' turn
                logits_v, logprobs_v = small.rows(here)
                self.second_tokens += 1
            self._window.append(entropy_of(logits_v))
            token = here.draw(logprobs_v, 0)
            here, dwelt = here.child(token, float(logprobs_v[token])), dwelt + 1
            if dwelt >= self.dwell and self._unsure() != large:
                large, dwelt = not large, 0
        self.alive, self.kept, self.found = [], [], [Found(here, mean_logprob(here))]

    def _unsure(self) -> bool:
        """Whether the large model is to write; of no tokens the mean is 0."""
        return sum(self._window) / max(1, len(self._window)) >= self.threshold


def entropy_of(logits_v: torch.Tensor) -> float:
    """Bits, of the softmax of (v,) logits."""
    return entropy(logits_v.log_softmax(-1)) / log(2)
