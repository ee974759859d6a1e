"""Prophet: once the model is sure of the answer, everything that is still masked is written at once.

After each pass the logit gap between the first and the second token is averaged over the slots that hold the answer.
The bar for it falls as decoding proceeds, since an early exit must be surer than a late one.

In: logits of the monitored slots. Out: the decision to write all. Not here: the rule until then.
Source: Diffusion Language Models Know the Answer Before Decoding (arXiv:2508.19982).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from paceline.diffusion.base import Ending, Step
from paceline.diffusion.canvas import Canvas, Status
from paceline.diffusion.progress import total_rounds
from paceline.diffusion.setting import Setting
from paceline.errors import ConfigError
from paceline.models.denoiser import Ints
from paceline.utils import need


class Prophet:
    """Exit when the mean gap of the monitored slots reaches the bar of the current third of decoding.

    Where a cache policy computes the current block only, an exit fills that block, and the next whole pass fills the
    rest.

    Args:
        gap_thresholds: bars in logit units, one more than `gap_progress`; infinite bars are the method without Prophet.
        gap_progress: shares of the rounds at which the next bar holds.
        monitor: "masked", all masked slots; "last", the last `answer_length` slots of the text; "span", `answer_length`
            slots from `answer_start`; "template", `answer_length` slots after `answer_template`, which stands in the
            text as a prior.
        answer_length: slots of the answer, where not all masked slots are monitored.
        answer_start: its first slot, counted from the end of the prompt, for "span".
        answer_template: tokens before the answer, for "template".
        denoising_steps: rounds for a block, from which the number of rounds follows; None is a round for each slot.
    Raises:
        ConfigError: bars that do not go with shares, a span outside the text, a template that is not in it.
    """

    stateless = True

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
        self.rounds = total_rounds(setting, denoising_steps)
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
        """Options without effect beside others -> what to do about them."""
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
        """See `base.Stop`."""
        return Ending(fill=True) if self.gap(step) >= self.bar(step.canvas.round) else None


def _after(canvas: Canvas, template: Sequence[int]) -> int:
    """First slot after the last place where the template stands as a prior."""
    tokens = np.asarray(template, np.int64)
    need(tokens.size > 0, "answer_template", "hold the tokens before the answer", list(template))
    for start in range(canvas.length - tokens.size, canvas.start - 1, -1):
        part = slice(start, start + tokens.size)
        if (canvas.status[part] == Status.PRIOR).all() and (canvas.tokens[part] == tokens).all():
            return start + int(tokens.size)
    raise ConfigError(
        f"answer_template must stand in the text as a prior (Canvas.of(priors=...)), got {list(template)}"
    )
