"""When a canvas is done before every slot was decided singly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from paceline.diffusion.base import Ending, Setting, Step, Stop
from paceline.diffusion.canvas import Canvas, Status
from paceline.errors import ConfigError
from paceline.models import Ints
from paceline.utils import need, shortened


class EndOfTextStop(Stop):
    """Cut right after the first end that is written; slots before it that are still masked are filled as usual.

    Args:
        end_token_ids: tokens that end the text; None takes the canvas', or the model's.
        eager_end: cut also where any masked slot predicts the end without being written yet, at the surest such slot:
            the second rule of the released code, which shortens texts on a prediction alone.
    Source: end-of-text prediction (EoTP) of Learning to Parallel (arXiv:2509.25188).
    """

    def __init__(
        self, setting: Setting, *, end_token_ids: Sequence[int] | None = None, eager_end: bool = False
    ) -> None:
        self.ends = np.asarray(setting.end_tokens if end_token_ids is None else list(end_token_ids), np.int64)
        self.eager = eager_end

    def ending(self, step: Step, chosen: Ints) -> Ending | None:
        ends = _predicting(self.ends, step, np.sort(chosen))
        if ends.size:
            return Ending(length=int(ends[0]) + 1)
        if not self.eager:
            return None
        masked = step.canvas.masked()
        guessed = _predicting(self.ends, step, masked[step.predictions.known(masked)])
        if not guessed.size:
            return None
        return Ending(length=int(guessed[int(np.argmax(step.predictions.confidence_at(guessed)))]) + 1)


class AdaptiveLengthStop(Stop):
    """The text is cut after the first end-of-text token that is written; masked slots before it are still filled.

    Source: Window-Diffusion (arXiv:2601.20332).
    """

    def __init__(self, setting: Setting) -> None:
        self.ends = np.asarray(setting.end_tokens, np.int64)

    def ending(self, step: Step, chosen: Ints) -> Ending | None:
        canvas = step.canvas
        old = np.flatnonzero((canvas.status == Status.COMMITTED) & np.isin(canvas.tokens, self.ends))
        ends = np.concatenate([_predicting(self.ends, step, np.sort(chosen)), old])
        if not ends.size or ends.min() + 1 >= canvas.length:
            return None
        return Ending(length=int(ends.min()) + 1)


class ProphetStop(Stop):
    """Once the model is sure of the answer, everything that is still masked is written at once.

    Exit when the mean gap between the first and the second logit of the monitored slots reaches the bar of the current
    third of decoding.

    The bar falls as decoding proceeds, since an early exit must be surer than a late one. Where a cache policy computes
    the current block only, an exit fills that block, and the next whole pass fills the rest.

    Args:
        gap_thresholds: bars in logit units, one more than `gap_progress`; infinite bars are the method without Prophet.
        gap_progress: shares of the rounds at which the next bar holds.
        monitor: "masked", all masked slots; "last", the last `answer_length` slots of the text; "span", `answer_length`
            slots from `answer_start`; "template", `answer_length` slots after a text that is given in the canvas.
        answer_length: slots of the answer, where not all masked slots are monitored.
        answer_start: its first slot, counted from the end of the prompt, for "span".
        answer_template: tokens of that text, for "template"; empty is whatever the last slot to fill is given after.
        denoising_steps: rounds for a block, from which the number of rounds follows; None is a round for each slot.
    Raises:
        ConfigError: bars that do not go with shares, a span outside the text, a template that is not in it.
    Source: Diffusion Language Models Know the Answer Before Decoding (arXiv:2508.19982).
    """

    def __init__(
        self,
        setting: Setting,
        *,
        gap_thresholds: Sequence[float] = (7.5, 5.0, 2.5),
        gap_progress: Sequence[float] = (0.33, 0.67),
        monitor: Literal["masked", "last", "span", "template"] = "masked",
        answer_length: int = 5,
        answer_start: int = 0,
        answer_template: Sequence[int] = (),
        denoising_steps: int | None = None,
    ) -> None:
        rule = f"be one more than gap_progress has ({len(gap_progress)})"
        need(len(gap_thresholds) == len(gap_progress) + 1, "gap_thresholds", rule, list(gap_thresholds))
        need(answer_length >= 1, "answer_length", "be at least 1", answer_length)
        self.bars, self.shares = np.asarray(gap_thresholds, float), np.asarray(gap_progress, float)
        self.rounds = setting.rounds_of_blocks(denoising_steps)
        start = {"last": setting.canvas.length - answer_length, "span": setting.canvas.start + answer_start}
        if monitor == "template":
            start["template"] = _after(setting.canvas, answer_template)
        need(monitor == "masked" or monitor in start, "monitor", "be 'masked', 'last', 'span' or 'template'", monitor)
        self.span = None if monitor == "masked" else range(start[monitor], start[monitor] + answer_length)
        self.reads_written = self.span is not None
        if self.span is not None:
            rule = (
                f"lie in the {setting.canvas.length - setting.canvas.start} slots of the text, answer_length included"
            )
            inside = setting.canvas.start <= self.span.start and self.span.stop <= setting.canvas.length
            need(inside, "answer_start", rule, self.span.start - setting.canvas.start)

    @staticmethod
    def unread(options: Mapping[str, Any]) -> dict[str, str]:
        monitor = options.get("monitor", "masked")
        readers = {
            "answer_start": ("span",),
            "answer_template": ("template",),
            "answer_length": ("last", "span", "template"),
        }
        rule = f"be left out with monitor {monitor!r}; it is read with"
        return {name: f"{rule} {' or '.join(map(repr, by))}" for name, by in readers.items() if monitor not in by}

    def bar(self, round_: int) -> float:
        """Of a round, counted from 0."""
        return float(self.bars[int((self.shares <= round_ / self.rounds).sum())])

    def gap(self, step: Step) -> float:
        """Mean over the monitored slots; -inf where none has a prediction."""
        slots = (
            step.canvas.masked()
            if self.span is None
            else np.arange(self.span.start, min(self.span.stop, step.canvas.length))
        )
        slots = slots[step.predictions.known(slots)]
        return float(step.predictions.gap[step.predictions.rows(slots)].mean()) if slots.size else -np.inf

    def ending(self, step: Step, chosen: Ints) -> Ending | None:
        return Ending(fill=True) if self.gap(step) >= self.bar(step.canvas.round) else None


def _predicting(ends: Ints, step: Step, slots: Ints) -> Ints:
    """Of `slots`, those whose prediction ends the text."""
    return slots[np.isin(step.predictions.tokens_at(slots), ends)]


def _after(canvas: Canvas, template: Sequence[int]) -> int:
    """First slot after the last occurrence of the template as a prior; without one, after the last text given."""
    if not len(template):
        gaps = canvas.masked(1)
        begun = gaps[canvas.status[gaps - 1] == Status.PRIOR]
        need(begun.size > 0, "canvas", "give the text before the answer, which this model's method monitors", None)
        return int(begun[-1])
    tokens = np.asarray(template, np.int64)
    for start in range(canvas.length - tokens.size, canvas.start - 1, -1):
        part = slice(start, start + tokens.size)
        if (canvas.status[part] == Status.PRIOR).all() and (canvas.tokens[part] == tokens).all():
            return start + int(tokens.size)
    raise ConfigError(f"canvas must hold answer_template, got a text without the tokens {shortened(list(template))}")
