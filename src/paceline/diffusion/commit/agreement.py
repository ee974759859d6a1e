"""Agreement with the round before: slots that were next in line and still predict the same token are written together.

In: a ranking, round after round. Out: the slots to write. Not here: averaged predictions (`coherent`), which this
stands in for.
Source: the rule of the code released with Beyond Confidence: Adaptive and Coherent Decoding for Diffusion Language
Models (arXiv:2512.02044), without its reset late in decoding.
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import Step
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints
from paceline.utils import need


class Agreement:
    """After `warmup_rounds` of the plain ranking: if the best slots stood next in line in the round before, all slots
    of the current list that stood there too, with the same token, are written; the best slots otherwise.

    Args:
        commit_slots: slots of a plain round.
        warmup_rounds: plain rounds at the start.
        list_growth: the list grows by a slot a round, from one, up to commit_slots + int(list_growth * commit_slots).
        adaptive: write all that agree; False writes `commit_slots` of them.
    """

    stateless = False

    def __init__(
        self,
        setting: Setting,
        *,
        commit_slots: int = 1,
        warmup_rounds: int = 5,
        list_growth: float = 4.0,
        adaptive: bool = True,
    ) -> None:
        del setting
        need(commit_slots >= 1, "commit_slots", "be at least 1", commit_slots)
        need(warmup_rounds >= 0, "warmup_rounds", "be at least 0", warmup_rounds)
        need(list_growth >= 0, "list_growth", "be at least 0", list_growth)
        self.number, self.warmup, self.adaptive = commit_slots, warmup_rounds, adaptive
        self.most = commit_slots + int(list_growth * commit_slots)
        self.list_length, self.rounds = 1, 0
        self.listed: dict[int, int] = {}
        self.length = -1

    def choose(self, step: Step) -> Ints:
        """See `base.Commit`."""
        if step.canvas.length != self.length:
            self.listed, self.length = {}, step.canvas.length
        ranked = step.ranked
        predicted = step.predictions.tokens[step.predictions.rows(ranked)]
        tokens = {int(slot): int(token) for slot, token in zip(ranked, predicted, strict=True)}
        chosen = ranked[: self.number]
        if self.rounds >= self.warmup:
            chosen = self._agreed(ranked, tokens)
            self.list_length = min(self.list_length + 1, self.most)
        left = ranked[~np.isin(ranked, chosen)]
        self.listed = {int(slot): tokens[int(slot)] for slot in left[: self.list_length]}
        self.rounds += 1
        return chosen

    def _agreed(self, ranked: Ints, tokens: dict[int, int]) -> Ints:
        best = ranked[: self.number]
        if not all(int(slot) in self.listed for slot in best):
            return best
        same = [
            int(slot)
            for slot in ranked[: max(self.list_length, self.number)]
            if self.listed.get(int(slot)) == tokens[int(slot)]
        ]
        if len(same) < self.number:
            return best
        return np.asarray(same if self.adaptive else same[: self.number], np.int64)
