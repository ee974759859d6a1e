"""How many retrievals to speculate before the index is asked: the stride that brings the most per second.

With a the seconds of a speculated step (retrieval from the local cache and the tokens up to the next one), b those of
a verification, and g the chance that a speculated retrieval is right, a round of stride s brings (1 - g^s) / (1 - g)
steps on average and takes s a + b seconds; where a further step is speculated while the index is asked,

    g^s ((s - 1) a + max(a, b)) + (1 - g^s) (s a + b).

The stride is the s with the most steps per second. g is the most likely value under the last w verifications: steps
that were right, over these and the first wrong ones, and at most a given number, so that strides do not run away after
a few lucky rounds. Source: optimal speculation stride scheduler (OS3) of RaLMSpec (arXiv:2401.14021), with w = 5 and
g <= 0.6. a and b are means of the last w here; b of a longer stride is taken to be as that of the last ones.
"""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW: Final = 5
MOST_CHANCE: Final = 0.6
LONGEST: Final = 16
"""Largest stride that is considered."""


class StrideScheduler:
    """Chooses the stride of each round from those before.

    Args:
        asynchronous: a further step is speculated while the index is asked.
        window: verifications that count. most_chance: of a right step. longest: most steps of a round.
    """

    def __init__(
        self, *, asynchronous: bool, window: int = WINDOW, most_chance: float = MOST_CHANCE, longest: int = LONGEST
    ) -> None:
        self.asynchronous, self.most_chance, self.longest = asynchronous, most_chance, longest
        self._rounds = deque[tuple[int, int]](maxlen=window)
        self._steps = deque[float](maxlen=window)
        self._verifications = deque[float](maxlen=window)

    def observe(self, right: int, steps: int, verification: float) -> None:
        """Note a round.

        Args:
            right: steps before the first wrong one. steps: that were speculated. verification: seconds.
        """
        self._rounds.append((right, steps))
        self._verifications.append(verification)

    def observe_step(self, seconds: float) -> None:
        """Note what a speculated step took."""
        self._steps.append(seconds)

    @property
    def chance(self) -> float:
        """That a speculated retrieval is right, as far as is known; 0 before the first verification."""
        right = sum(one for one, _ in self._rounds)
        wrong = sum(one < steps for one, steps in self._rounds)
        return min(self.most_chance, right / (right + wrong)) if right else 0.0

    def stride(self) -> int:
        """Of the next round; 1 before anything is known."""
        if not self._rounds or not self._steps:
            return 1
        step = sum(self._steps) / len(self._steps)
        verification = sum(self._verifications) / len(self._verifications)
        return best_stride(step, verification, self.chance, asynchronous=self.asynchronous, longest=self.longest)


def steps_per_second(stride: int, step: float, verification: float, chance: float, *, asynchronous: bool) -> float:
    """What a round of a stride brings.

    Args:
        step, verification: seconds. chance: in 0..1 without 1.
    """
    gained = (1.0 - chance**stride) / (1.0 - chance)
    whole = stride * step + verification
    if not asynchronous:
        return gained / whole
    all_right = chance**stride
    return gained / (all_right * ((stride - 1) * step + max(step, verification)) + (1.0 - all_right) * whole)


def best_stride(step: float, verification: float, chance: float, *, asynchronous: bool, longest: int = LONGEST) -> int:
    """The stride that brings the most steps per second, the shortest of equal ones."""
    rates = {
        stride: steps_per_second(stride, step, verification, chance, asynchronous=asynchronous)
        for stride in range(1, longest + 1)
    }
    return max(rates, key=lambda stride: (rates[stride], -stride))
