"""When costs are measured again: only what real steps contradict, and only once measuring has taken a small share of their time.

In: seconds of steps and of measuring; whether steps contradicted what was measured. Out: whether to measure again. Not here: the
costs, clocks. The share is one of decoding, not of the time that passed: after an idle hour nothing has been earned.
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.005
"""Of the time that steps took, what measuring may take."""

IN_A_ROW: Final = 2
"""Contradictions that say something."""


class Doubts:
    """What there is to doubt, and the time to look again."""

    __slots__ = ("_in_a_row", "_owed")

    def __init__(self) -> None:
        self._owed, self._in_a_row = 0.0, 0

    def earn(self, seconds: float) -> None:
        """Steps took so long; nothing is saved up."""
        self._owed = max(self._owed - SHARE * seconds, 0.0)

    def spend(self, seconds: float) -> None:
        """Measuring took so long."""
        self._owed += seconds

    @property
    def affordable(self) -> bool:
        """Whether measuring has taken no more than its share since it was last begun."""
        return self._owed == 0.0

    def hear(self, *, contradicted: bool) -> bool:
        """What steps said of the costs; whether to measure again."""
        self._in_a_row = self._in_a_row + 1 if contradicted else 0
        if self._in_a_row < IN_A_ROW or not self.affordable:
            return False
        self._in_a_row = 0
        return True
