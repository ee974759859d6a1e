"""One round of the plain method: from a canvas and the model's word on it to the next canvas.

In: the parts of a method. Out: `Transition`, canvas -> canvas. Not here: passes of the model (`diffusion.loop`), any
single rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.diffusion.base import (
    NONE,
    Changes,
    Check,
    Commit,
    Correction,
    Edit,
    Ending,
    Modifier,
    Schedule,
    Score,
    Step,
    Stop,
)
from paceline.diffusion.canvas import Canvas
from paceline.diffusion.predictions import Predictions
from paceline.models.denoiser import Ints


@dataclass(slots=True)
class Transition:
    """The rules of a method, for one canvas.

    Attributes:
        ended: a stop rule has spoken; the canvas it left is the last.
    """

    schedule: Schedule
    score: Score
    modifiers: Sequence[Modifier]
    commit: Commit
    edit: Edit | None = None
    check: Check | None = None
    stop: Stop | None = None
    correction: Correction | None = None
    ended: bool = False

    @property
    def stateless(self) -> bool:
        """Whether every rule decides by the canvas and the predictions alone."""
        parts = (
            self.schedule,
            self.score,
            *self.modifiers,
            self.commit,
            self.edit,
            self.check,
            self.stop,
            self.correction,
        )
        return all(part is None or part.stateless for part in parts)

    @property
    def reads_written(self) -> bool:
        """Whether predictions of slots that are not masked are looked at: by a rule that says so, or since edits may
        open them.
        """
        parts = (self.schedule, self.score, *self.modifiers, self.commit, self.check, self.stop, self.correction)
        return self.edit is not None or any(getattr(part, "reads_written", False) for part in parts)

    def finished(self, canvas: Canvas) -> bool:
        """Whether nothing is left to do."""
        return self.ended or (not canvas.masked().size and (self.edit is None or not self.edit.pending(canvas)))

    def step(self, canvas: Canvas, predictions: Predictions) -> Step:
        """What the rules see: eligible slots with their scores."""
        if self.correction:
            predictions = self.correction.correct(predictions, canvas)
        eligible = self.schedule.eligible(canvas)
        eligible = eligible[predictions.known(eligible)]
        scores = self.score.score(predictions.at(eligible), canvas)
        step = Step(canvas, predictions, eligible, scores, self.schedule.block(canvas))
        for modifier in self.modifiers:
            changed = modifier.modify(step)
            open_ = ~np.isneginf(changed)
            if open_.any():
                step = Step(canvas, predictions, step.eligible[open_], changed[open_], step.block)
        return step

    def __call__(self, canvas: Canvas, predictions: Predictions) -> Canvas:
        """The canvas after one round; the one given stays as it is."""
        step = self.step(canvas, predictions)
        chosen = self.commit.choose(step) if step.eligible.size else NONE
        if not chosen.size and step.eligible.size and not getattr(self.commit, "waits", False):
            chosen = step.ranked[:1]
        ending = self.stop.ending(step, chosen) if self.stop else None
        if ending and ending.fill:
            chosen = canvas.masked()
            chosen = chosen[predictions.known(chosen)]
        changes = self.edit.changes(step, chosen) if self.edit else Changes()
        slots, tokens = self._settled(step, np.sort(chosen))
        after = canvas.copy()
        _apply(after, step.predictions, slots, tokens, changes)
        self._end(after, ending)
        return after

    def _settled(self, step: Step, chosen: Ints) -> tuple[Ints, Ints]:
        if self.check and chosen.size:
            return self.check.settle(step, chosen)
        return chosen, step.predictions.tokens[step.predictions.rows(chosen)]

    def _end(self, canvas: Canvas, ending: Ending | None) -> None:
        if ending is None:
            return
        if ending.length is not None and (self.check is None or self.check.cuts(canvas, ending.length)):
            canvas.truncate(ending.length)
        self.ended = ending.fill and not canvas.masked().size


def _apply(canvas: Canvas, predictions: Predictions, slots: Ints, tokens: Ints, changes: Changes) -> None:
    """Write, edit, mask again, and count the round."""
    canvas.write(slots, tokens, _probability(predictions, slots, tokens))
    canvas.edit(changes.slots, changes.tokens, _probability(predictions, changes.slots, changes.tokens))
    canvas.remask(changes.remask)
    canvas.round += 1


def _probability(predictions: Predictions, slots: Ints, tokens: Ints) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Of tokens at computed slots, under the clean distribution; where it is the prediction, as noted there."""
    rows = predictions.rows(slots)
    values = predictions.confidence[rows].copy()
    for i in np.flatnonzero(predictions.tokens[rows] != tokens):
        values[i] = float(predictions.logits[int(rows[i])].double().softmax(-1)[int(tokens[i])])
    return values
