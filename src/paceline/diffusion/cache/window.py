"""Window-Diffusion: only the first masked slots are computed, the next ones are read, the far ones do not exist.

In: a canvas. Out: which slots may be written (`Sliding`), plans of passes (`Window`), where the text ends
(`AdaptiveLength`).
Not here: which of the open slots are written.
Source: Window-Diffusion: Accelerating Diffusion Language Model Inference with Windowed Token Pruning and Caching
(arXiv:2601.20332) and its authors' code. Where that code differs between models we take one way: the window is counted
before the refresh's own commits (Dream's), and a refresh commits among the active slots like every other pass (LLaDA's
may commit anywhere).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from paceline.diffusion.base import Ending, Plan, Step
from paceline.diffusion.cache.refreshed import Refreshed
from paceline.diffusion.canvas import Canvas, Status
from paceline.diffusion.progress import end_tokens
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints
from paceline.utils import need


class Sliding:
    """The first masked slots are open; they slide to the right as slots are written. The text is one block.

    Args:
        active_slots: how many are open; None is all of them.
    """

    stateless = True

    def __init__(self, setting: Setting, *, active_slots: int | None = 16) -> None:
        del setting
        need(active_slots is None or active_slots >= 1, "active_slots", "be at least 1, or None for all", active_slots)
        self.active = active_slots

    def block(self, canvas: Canvas) -> range:
        """See `base.Schedule`."""
        return range(canvas.start, canvas.length)

    def eligible(self, canvas: Canvas) -> Ints:
        """See `base.Schedule`."""
        return canvas.masked()[: self.active]


class Window(Refreshed):
    """A refresh stores what is written and the first masked slots; the passes between compute the active ones of these.

    With them they compute the slots written since the refresh, whose states still settle, and they read the rest of the
    window. Positions are those of the canvas, whatever is left out. An active slot beyond the window, where many slots
    are written between two refreshes, is computed all the same.

    The defaults are the authors' for LLaDA; for Dream they take window_slots 128 and score entropy.

    Args:
        active_slots: computed in every pass; None is all. The schedule takes the same.
        window_slots: masked slots that exist for the model, the active ones included; None is all.
        refresh_period: rounds from one refresh to the next; None refreshes at the start only.
        refresh: what a refresh computes: the "window" and what is written, or the whole "canvas", of which the window
        is read.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        active_slots: int | None = 16,
        window_slots: int | None = 64,
        refresh_period: int | None = 32,
        refresh: Literal["window", "canvas"] = "window",
    ) -> None:
        super().__init__(setting, refresh_period)
        active = setting.canvas.length if active_slots is None else active_slots
        rule = f"be at least active_slots ({active_slots}), or None for all"
        need(window_slots is None or window_slots >= active, "window_slots", rule, window_slots)
        need(refresh in ("window", "canvas"), "refresh", "be window or canvas", refresh)
        self.active, self.window, self.whole = active_slots, window_slots, refresh == "canvas"
        self.kept = np.empty(0, np.int64)

    def refresh(self, canvas: Canvas) -> Plan:
        """See `Refreshed`."""
        dropped = canvas.masked()[self.window :] if self.window is not None else np.empty(0, np.int64)
        every = np.arange(canvas.length)
        self.kept = np.setdiff1d(every, dropped, assume_unique=True)
        return Plan(every if self.whole else self.kept, write=True)

    def between(self, canvas: Canvas, block: range) -> Plan:
        """See `Refreshed`."""
        settling = np.flatnonzero((canvas.status == Status.COMMITTED) & (canvas.born >= self.since))
        slots = np.union1d(self.with_left(canvas.masked()[: self.active]), settling)
        return Plan(slots, np.setdiff1d(self.kept, slots, assume_unique=True))


class AdaptiveLength:
    """The text is cut after the first end-of-text token that is written; masked slots before it are still filled."""

    stateless = True

    def __init__(self, setting: Setting) -> None:
        self.ends = np.asarray(end_tokens(setting.canvas, setting), np.int64)

    def ending(self, step: Step, chosen: Ints) -> Ending | None:
        """See `base.Stop`."""
        canvas = step.canvas
        chosen = np.sort(chosen)
        new = chosen[np.isin(step.predictions.tokens[step.predictions.rows(chosen)], self.ends)]
        old = np.flatnonzero((canvas.status == Status.COMMITTED) & np.isin(canvas.tokens, self.ends))
        ends = np.concatenate([new, old])
        if not ends.size or ends.min() + 1 >= canvas.length:
            return None
        return Ending(length=int(ends.min()) + 1)
