"""Explore-then-exploit: write what the model is sure of, here and in later blocks; where that is too little, write what
it is not.

A slot the model is sure of carries almost no information, so a rule that writes only such slots needs many rounds for
the few informative ones. Writing one uncertain slot on purpose makes its neighbours certain, and the next round can
take them all.

In: scores and entropies of one round. Out: the slots to write. Not here: the view past the block (`ahead`), trying
several tokens at the explored slot (`explore_tokens`).
Source: From Bits to Rounds: Parallel Decoding with Exploration for Diffusion Language Models (arXiv:2511.21103). When
to explore, and where, is read from its abstract; the rule here is this library's.
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import NONE, Step
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints
from paceline.utils import need


class Explore:
    """The threshold rule; in a round that would write too little, one uncertain slot besides in each of the first
    blocks.

    The slot explored in a block is the one of largest entropy among its leftmost masked ones; its most probable token
    is written.

    Args:
        confidence_threshold: of the slots exploited.
        min_exploit: a round that exploits fewer slots explores.
        min_information: a round that exploits less, in nats, explores.
        explore_blocks: blocks explored at once, from the current one; 0 never explores.
        explore_window: leftmost masked slots of a block that are candidates.
    """

    stateless = True

    def __init__(
        self,
        setting: Setting,
        *,
        confidence_threshold: float = 0.9,
        min_exploit: int = 1,
        min_information: float = 0.0,
        explore_blocks: int = 1,
        explore_window: int = 4,
    ) -> None:
        assert setting.schedule is not None
        need(explore_blocks >= 0, "explore_blocks", "be at least 0", explore_blocks)
        need(explore_window >= 1, "explore_window", "be at least 1", explore_window)
        index = getattr(setting.schedule, "index", None)
        need(
            index is not None, "schedule", "be one of blocks for a rule that explores", type(setting.schedule).__name__
        )
        assert index is not None
        self.index, self.threshold = index, confidence_threshold
        self.slots, self.nats = min_exploit, min_information
        self.blocks, self.window = explore_blocks, explore_window

    def exploited(self, step: Step) -> Ints:
        """Slots the model is sure of."""
        return step.eligible[step.scores >= self.threshold]

    def explored(self, step: Step) -> Ints:
        """Slots written although the model is not sure, ascending; empty in most rounds."""
        sure = self.exploited(step)
        confidence = step.predictions.confidence[step.predictions.rows(sure)]
        nats = float(-np.log(np.maximum(confidence, 1e-300)).sum())
        if sure.size >= self.slots and nats >= self.nats:
            return NONE
        open_ = np.setdiff1d(step.eligible, sure, assume_unique=True)
        blocks = self.index(open_)
        return np.asarray(
            [self._one(step, open_[blocks == number]) for number in np.unique(blocks)[: self.blocks]], np.int64
        )

    def _one(self, step: Step, slots: Ints) -> int:
        candidates = slots[: self.window]
        entropy = step.predictions.entropy[step.predictions.rows(candidates)]
        return int(candidates[int(np.argmax(entropy))])

    def choose(self, step: Step) -> Ints:
        """See `base.Commit`."""
        return np.union1d(self.exploited(step), self.explored(step))
