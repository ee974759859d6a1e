"""Token editing: a written token is replaced as soon as the model, seeing the rest, is sure of another one.

A block is decoded by thresholds and edited in the same rounds. Once it is full it gets further rounds, until nothing
changes in one of them or their number is spent; then the next block begins. The speedy mode writes early and edits on
every change of mind, the quality mode asks for more before it does either.

In: predictions at written slots. Out: their new tokens. Not here: which masked slots are written (any commit rule),
penalties on repeated tokens (`repetition_guard`).
Source: LLaDA2.1: Speeding Up Text Diffusion via Token Editing (arXiv:2602.08676); rounds are counted as in SGLang's
joint threshold. Masked slots are written from the threshold on, as everywhere here; theirs exceed it.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from paceline.diffusion.base import Changes, Step
from paceline.diffusion.canvas import Canvas, Status
from paceline.diffusion.schedule.held_blocks import HeldBlocks
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints
from paceline.utils import need


class TokenEditing:
    """Written slots take the model's first token where that is another one with a probability above `edit_threshold`.

    It is for models trained to correct tokens; others are corrupted by it. Prompt and prior slots are never edited.
    Edits follow the most probable token at any temperature.

    Args:
        edit_threshold: 1 edits nothing, and costs no further round.
        max_post_edit_steps: most rounds that edit a full block.
        edit_scope: "block" edits the current block; "text" every slot with a prediction, so earlier blocks too where
            the cache policy computes them (multi-block editing).
    Raises:
        ConfigError: a schedule that does not hold blocks.
    """

    stateless = False

    def __init__(
        self,
        setting: Setting,
        *,
        edit_threshold: float = 0.5,
        max_post_edit_steps: int = 16,
        edit_scope: Literal["block", "text"] = "block",
    ) -> None:
        need(max_post_edit_steps >= 0, "max_post_edit_steps", "be at least 0", max_post_edit_steps)
        need(edit_scope in ("block", "text"), "edit_scope", "be 'block' or 'text'", edit_scope)
        rule = "be 'held_blocks' for token editing"
        need(isinstance(setting.schedule, HeldBlocks), "schedule", rule, type(setting.schedule).__name__)
        assert isinstance(setting.schedule, HeldBlocks)
        self.schedule, self.threshold, self.scope = setting.schedule, edit_threshold, edit_scope
        self.most = max_post_edit_steps if edit_threshold < 1 else 0
        self.post = 0

    def changes(self, step: Step, chosen: Ints) -> Changes:
        """See `base.Edit`."""
        slots, tokens = self._edits(step)
        full = not np.setdiff1d(step.canvas.masked(step.block.start, step.block.stop), chosen).size
        if self.schedule.held is not None:
            self.post += 1
            if not slots.size or self.post >= self.most:
                self.schedule.held, self.post = None, 0
        elif full and self.most:
            self.schedule.held = step.block
        return Changes(slots, tokens)

    def pending(self, canvas: Canvas) -> bool:
        """See `base.Edit`."""
        return self.schedule.held is not None

    def _edits(self, step: Step) -> tuple[Ints, Ints]:
        status = step.canvas.status
        slots = np.flatnonzero(status == Status.COMMITTED)
        if self.scope == "block":
            slots = slots[(slots >= step.block.start) & (slots < step.block.stop)]
        slots = slots[step.predictions.known(slots)]
        best = step.predictions.at(slots).logits.double().softmax(-1).max(-1)
        tokens, sure = best.indices.cpu().numpy(), best.values.cpu().numpy()
        edited = (tokens != step.canvas.tokens[slots]) & (sure > self.threshold)
        return slots[edited], tokens[edited]
