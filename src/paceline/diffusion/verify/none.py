"""No verification: one canvas at a time.

In: a transition. Out: its next canvas. Not here: drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.diffusion.canvas import Canvas
from paceline.diffusion.predictions import Predictions
from paceline.diffusion.setting import Setting


class Plain:
    """The plain method's next canvas, and no other."""

    def __init__(self, setting: Setting) -> None:
        assert setting.transition is not None
        self.transition = setting.transition

    def drafts(self, canvas: Canvas, predictions: Predictions) -> list[Canvas]:
        """See `base.Verification`."""
        return [self.transition(canvas, predictions)]

    def choose(self, drafts: Sequence[Canvas], predictions: Sequence[Predictions]) -> int:
        """See `base.Verification`."""
        return 0
