"""Several tokens at the explored slot: each is tried on a canvas of its own, and the one after which most can be
exploited stays.

In: the plain next canvas of a rule that explores. Out: copies of it with other tokens at the first explored slot. Not
here: when a slot is explored (`explore`).
Source: From Bits to Rounds (arXiv:2511.21103); the choice by the number of slots that pass the threshold is this
library's reading.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.diffusion.canvas import Canvas
from paceline.diffusion.commit.explore import Explore
from paceline.diffusion.predictions import Predictions
from paceline.diffusion.setting import Setting
from paceline.utils import need


class ExploreTokens:
    """The `explore_tokens` most probable tokens of the first explored slot, computed in one pass; drafts cost slots,
    not calls.

    Raises:
        ConfigError: a commit rule that does not explore, or rules with a memory.
    """

    def __init__(self, setting: Setting, *, explore_tokens: int = 2) -> None:
        assert setting.transition is not None
        need(explore_tokens >= 1, "explore_tokens", "be at least 1", explore_tokens)
        rule = setting.transition.commit
        need(isinstance(rule, Explore), "commit", "be 'explore' for verification 'explore_tokens'", type(rule).__name__)
        need(
            setting.transition.stateless,
            "verification 'explore_tokens'",
            "go with rules without a memory",
            "one with a memory",
        )
        assert isinstance(rule, Explore)
        unchecked = "be left out where a constraint is checked (the tokens it tries are not)"
        need(setting.transition.check is None, "verification 'explore_tokens'", unchecked, "a constraint")
        self.rule, self.transition, self.number = rule, setting.transition, explore_tokens

    def drafts(self, canvas: Canvas, predictions: Predictions) -> list[Canvas]:
        """See `base.Verification`."""
        first = self.transition(canvas, predictions)
        step = self.transition.step(canvas, predictions)
        explored = self.rule.explored(step) if step.eligible.size else step.eligible
        if not explored.size or explored[0] >= first.length:
            return [first]
        slot = int(explored[0])
        row = predictions.logits[int(predictions.rows(explored[:1])[0])].double().softmax(-1)
        values, tokens = row.topk(min(self.number, row.numel() - 1))
        others = [
            (int(t), float(p)) for t, p in zip(tokens, values, strict=True) if int(t) != first.tokens[slot] and p > 0
        ]
        return [first, *(_with(first, slot, token, p) for token, p in others[: self.number - 1])]

    def choose(self, drafts: Sequence[Canvas], predictions: Sequence[Predictions]) -> int:
        """See `base.Verification`: the first of those after which most slots pass."""
        return int(np.argmax([self._exploited(d, p) for d, p in zip(drafts, predictions, strict=False)]))

    def _exploited(self, canvas: Canvas, predictions: Predictions) -> int:
        return int(self.rule.exploited(self.transition.step(canvas, predictions)).size)


def _with(canvas: Canvas, slot: int, token: int, probability: float) -> Canvas:
    """A copy with another token at a slot that was just written."""
    copy = canvas.copy()
    copy.tokens[slot], copy.confidence[slot] = token, probability
    return copy
