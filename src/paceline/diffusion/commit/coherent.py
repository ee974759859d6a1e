"""Coherent contextual decoding: trust a slot whose prediction stays put while its context changes.

The predictions a slot got under the last contexts are averaged, and slots are ranked by the entropy of the average. It
is the mean entropy plus the Jensen-Shannon divergence of the predictions, which estimates how much the token still
depends on the context.

In: predictions, round after round. Out: the slots to write. Not here: the agreement of arguments of the maximum
(`agreement`).
Source: Beyond Confidence: Adaptive and Coherent Decoding for Diffusion Language Models (arXiv:2512.02044).
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from paceline.diffusion.base import NONE, Step
from paceline.diffusion.canvas import Floats
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints
from paceline.utils import need


def entropy(p: torch.Tensor) -> torch.Tensor:
    """(k,) nats of (k, v) distributions."""
    return -torch.xlogy(p, p).sum(-1)


class Coherent:
    """A fixed number of slots a round, by the entropy of the averaged prediction.

    In every round the `history_slots` best slots of the current ranking are remembered. Slots remembered in each of the
    last `history_length` rounds come first, by averaged entropy; where there are too few of them, the current ranking
    decides.

    Args:
        history_length: contexts averaged (2 or 3 in the paper); 1 is the plain ranking.
        history_slots: slots remembered a round.
        commit_slots: slots written a round.
    Raises:
        ConfigError: a count below 1, fewer slots remembered than written.
    """

    stateless = False

    def __init__(
        self, setting: Setting, *, history_length: int = 2, history_slots: int = 4, commit_slots: int = 1
    ) -> None:
        del setting
        need(history_length >= 1, "history_length", "be at least 1", history_length)
        need(commit_slots >= 1, "commit_slots", "be at least 1", commit_slots)
        need(
            history_slots >= commit_slots, "history_slots", f"be at least commit_slots ({commit_slots})", history_slots
        )
        self.slots, self.number = history_slots, commit_slots
        self.history: deque[dict[int, torch.Tensor]] = deque(maxlen=history_length)
        self.length = -1

    def remember(self, step: Step) -> tuple[Ints, Floats]:
        """Note this round; the slots seen in all remembered rounds, surest first, and their averaged entropies."""
        if step.canvas.length != self.length:
            self.history.clear()
            self.length = step.canvas.length
        top = step.ranked[: self.slots]
        p = step.predictions.logits[torch.from_numpy(step.predictions.rows(top))].double().softmax(-1)
        self.history.append({int(slot): row for slot, row in zip(top, p, strict=True)})
        if len(self.history) < (self.history.maxlen or 1):
            return NONE, np.empty(0)
        shared = [int(slot) for slot in top if all(int(slot) in seen for seen in self.history)]
        if not shared:
            return NONE, np.empty(0)
        averaged = torch.stack([torch.stack([seen[slot] for seen in self.history]).mean(0) for slot in shared])
        values = entropy(averaged).cpu().numpy()
        order = np.argsort(values.round(12), kind="stable")  # equal but for rounding: as ranked now
        return np.asarray(shared, np.int64)[order], values[order]

    def choose(self, step: Step) -> Ints:
        """See `base.Commit`."""
        coherent, _ = self.remember(step)
        chosen = coherent[: self.number]
        rest = step.ranked[~np.isin(step.ranked, chosen)]
        return np.concatenate([chosen, rest[: self.number - chosen.size]])


class CoherentAdaptive(Coherent):
    """As many slots as are coherent (CCD-DS): those whose averaged entropy is at most the largest entropy among the
    best slots.

    The bar is the entropy of the last of the `history_slots` best slots of the current ranking: a prediction that does
    not move with the context passes it, one that does has a divergence on top of its entropy. At least `commit_slots`
    are written. Where the bar lies exactly is not stated in what the authors published; this one is set from the
    ranking, as they say theirs is.
    """

    def choose(self, step: Step) -> Ints:
        """See `base.Commit`."""
        coherent, values = self.remember(step)
        top = step.ranked[: self.slots]
        bar = step.predictions.entropy[step.predictions.rows(top)].max()
        chosen: Ints = coherent[values <= bar + 1e-12]
        if chosen.size >= self.number:
            return chosen
        rest = step.ranked[~np.isin(step.ranked, chosen)]
        return np.concatenate([chosen, rest[: self.number - chosen.size]])
