"""Ending at the end of the text: once a token that ends it is written, everything after it is dropped.

In: what is about to be written. Out: the new length. Not here: lengthening a text.
Source: end-of-text prediction (EoTP) of Learning to Parallel (arXiv:2509.25188).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.diffusion.base import Ending, Step
from paceline.diffusion.progress import end_tokens
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints


class EndOfText:
    """Cut right after the first end that is written; slots before it that are still masked are filled as usual.

    Args:
        end_token_ids: tokens that end the text; None takes the canvas', or the model's.
        eager_end: cut also where any masked slot predicts the end without being written yet, at the surest such slot:
            the second rule of the released code, which shortens texts on a guess.
    """

    stateless = True

    def __init__(
        self, setting: Setting, *, end_token_ids: Sequence[int] | None = None, eager_end: bool = False
    ) -> None:
        own = end_tokens(setting.canvas, setting)
        self.ends = np.asarray(own if end_token_ids is None else list(end_token_ids), np.int64)
        self.eager = eager_end

    def ending(self, step: Step, chosen: Ints) -> Ending | None:
        """See `base.Stop`."""
        found = self._ends(step, np.sort(chosen))
        if found.size:
            return Ending(length=int(found[0]) + 1)
        if not self.eager:
            return None
        masked = step.canvas.masked()
        guessed = self._ends(step, masked[step.predictions.known(masked)])
        if not guessed.size:
            return None
        confidence = step.predictions.confidence[step.predictions.rows(guessed)]
        return Ending(length=int(guessed[int(np.argmax(confidence))]) + 1)

    def _ends(self, step: Step, slots: Ints) -> Ints:
        return slots[np.isin(step.predictions.tokens[step.predictions.rows(slots)], self.ends)]
