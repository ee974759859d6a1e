"""Slots the model is sure of are written: by one threshold or several, or by a bound on the joint distribution."""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import NONE, Commit, Setting, Step
from paceline.diffusion.canvas import Status
from paceline.diffusion.schedule import BlockSchedule
from paceline.models import Ints
from paceline.utils import need


class ThresholdCommit(Commit):
    """All eligible slots with a score of at least `confidence_threshold`; the loop writes the best where none has.

    Args:
        confidence_threshold: above 1 it is the static baseline, one slot a round.
    Source: Fast-dLLM (arXiv:2505.22618).
    """

    def __init__(self, setting: Setting, *, confidence_threshold: float = 0.9) -> None:
        self.threshold = confidence_threshold

    def choose(self, step: Step) -> Ints:
        return step.eligible[step.scores >= self.threshold]


class FactorCommit(Commit):
    """The largest n with (n + 1) (1 - c_n) < factor, where c_n is the n-th highest confidence; one at least.

    While all n marginals exceed 1 - e and (n + 1) e <= 1, the joint's most probable tokens are those of the marginals.

    Args:
        factor: 1 is the bound itself; larger commits more.
    Source: Fast-dLLM (arXiv:2505.22618).
    """

    def __init__(self, setting: Setting, *, factor: float = 1.0) -> None:
        self.factor = factor

    def choose(self, step: Step) -> Ints:
        ranked = step.ranked
        sure = step.predictions.confidence_at(np.sort(ranked))
        sure = -np.sort(-sure)
        fine = (np.arange(1, sure.size + 1) + 1) * (1 - sure) < self.factor
        return ranked[: max(1, int(np.flatnonzero(fine).max(initial=-1)) + 1)]


class EntropyCommit(Commit):
    """All eligible slots with an entropy of at most `entropy_threshold`; the loop writes the best where none has.

    Args:
        entropy_threshold: nats, of the clean distribution; 0.5, and 0.45 to 0.5 for Dream in the paper. Below 0 it
            writes a slot a round.
    Source: dParallel: Learnable Parallel Decoding for dLLMs (arXiv:2509.26488).
    """

    def __init__(self, setting: Setting, *, entropy_threshold: float = 0.5) -> None:
        self.threshold = entropy_threshold

    def choose(self, step: Step) -> Ints:
        entropy = step.predictions.entropy_at(step.eligible)
        return step.eligible[entropy <= self.threshold]


class CappedCommit(Commit):
    """The best k slots, k = the number of scores at or above the threshold, within 1..`max_tokens_per_round`.

    Since every round writes a slot, a block takes as many rounds as it has slots at most; no round forces the rest.

    Args:
        confidence_threshold: above 1 it is the static baseline.
        max_tokens_per_round: 1 is the static baseline too.
    Source: CAD of CD4LM, https://github.com/yihao-liang/CDLM.
    """

    def __init__(self, setting: Setting, *, confidence_threshold: float = 0.95, max_tokens_per_round: int = 32) -> None:
        need(max_tokens_per_round >= 1, "max_tokens_per_round", "be at least 1", max_tokens_per_round)
        self.threshold, self.most = confidence_threshold, max_tokens_per_round

    def choose(self, step: Step) -> Ints:
        sure = int((step.scores >= self.threshold).sum())
        return step.ranked[: int(np.clip(sure, 1, self.most))]


class BoundedCommit(Commit):
    """Threshold = mean confidence of the slots written in the current block, or the best confidence where there is none
    yet, kept within two bounds.

    What was written, and how sure, is read off the canvas: the history is that of one block of one text by
    construction.

    Args:
        confidence_low: lower bound.
        confidence_high: upper bound; equal bounds are the threshold rule.
    Raises:
        ConfigError: bounds out of order.
    Source: BACD of TDAR (arXiv:2602.09555).
    """

    def __init__(self, setting: Setting, *, confidence_low: float = 0.6, confidence_high: float = 0.9) -> None:
        rule = f"be at most confidence_high ({confidence_high})"
        need(confidence_low <= confidence_high, "confidence_low", rule, confidence_low)
        self.low, self.high = confidence_low, confidence_high

    def threshold(self, step: Step) -> float:
        """Of this round."""
        part = slice(step.block.start, step.block.stop)
        written = step.canvas.status[part] == Status.COMMITTED
        history = step.canvas.confidence[part][written]
        middle = float(history.mean()) if history.size else float(step.scores.max())
        return float(np.clip(middle, self.low, self.high))

    def choose(self, step: Step) -> Ints:
        return step.eligible[step.scores >= self.threshold(step)]


class LocalLeapCommit(Commit):
    """Two thresholds, the lower one within `anchor_radius` slots of an anchor of the same round.

    Near a slot the model is sure of, a lower bar is enough. Without an anchor only the best slot is written.

    Args:
        confidence_threshold: of an anchor; above 1 it is the static baseline.
        relaxed_threshold: near an anchor; equal to the other, it is the threshold rule.
        anchor_radius: slots to either side.
    Raises:
        ConfigError: a negative radius, a relaxed threshold above that of anchors.
    Source: Accelerating Diffusion LLM Inference via Local Determinism Propagation (arXiv:2510.07081), with a flat
        radius.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        confidence_threshold: float = 0.9,
        relaxed_threshold: float = 0.75,
        anchor_radius: int = 4,
    ) -> None:
        need(anchor_radius >= 0, "anchor_radius", "be at least 0", anchor_radius)
        rule = f"be at most confidence_threshold ({confidence_threshold})"
        need(relaxed_threshold <= confidence_threshold, "relaxed_threshold", rule, relaxed_threshold)
        self.sure, self.relaxed, self.radius = confidence_threshold, relaxed_threshold, anchor_radius

    def choose(self, step: Step) -> Ints:
        anchors = step.eligible[step.scores >= self.sure]
        if not anchors.size:
            return NONE
        after = np.searchsorted(anchors, step.eligible)
        left = step.eligible - anchors[np.maximum(after - 1, 0)]
        right = anchors[np.minimum(after, anchors.size - 1)] - step.eligible
        near = np.minimum(np.abs(left), np.abs(right)) <= self.radius
        return step.eligible[step.scores >= np.where(near, self.relaxed, self.sure)]


class ExploreCommit(Commit):
    """The threshold rule, plus one uncertain slot in each of the first blocks in rounds that would write too little.

    A slot the model is sure of carries almost no information, so a rule that writes only such slots needs many rounds
    for the few informative ones. Writing one uncertain slot on purpose makes its neighbours certain, and the next round
    can take them all. The slot explored in a block is the one of largest entropy among its leftmost masked ones; its
    most probable token is written.

    Args:
        confidence_threshold: of the slots exploited.
        min_exploit: a round that exploits fewer slots explores.
        min_information: a round that exploits less, in nats, explores.
        explore_blocks: blocks explored at once, from the current one; 0 never explores.
        explore_window: leftmost masked slots of a block that are candidates.
    Source: From Bits to Rounds: Parallel Decoding with Exploration for Diffusion Language Models
        (arXiv:2511.21103). When to explore, and where, is read from its abstract; the rule here is this library's.
    """

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
        schedule = setting.schedule
        need(explore_blocks >= 0, "explore_blocks", "be at least 0", explore_blocks)
        need(explore_window >= 1, "explore_window", "be at least 1", explore_window)
        rule = "be one of blocks for a rule that explores"
        need(isinstance(schedule, BlockSchedule), "schedule", rule, type(schedule).__name__)
        assert isinstance(schedule, BlockSchedule)
        self.index, self.threshold = schedule.index, confidence_threshold
        self.slots, self.nats = min_exploit, min_information
        self.blocks, self.window = explore_blocks, explore_window

    def exploited(self, step: Step) -> Ints:
        """Slots the model is sure of."""
        return step.eligible[step.scores >= self.threshold]

    def explored(self, step: Step) -> Ints:
        """Slots written although the model is not sure, ascending; empty in most rounds."""
        sure = self.exploited(step)
        confidence = step.predictions.confidence_at(sure)
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
        entropy = step.predictions.entropy_at(candidates)
        return int(candidates[int(np.argmax(entropy))])

    def choose(self, step: Step) -> Ints:
        return np.union1d(self.exploited(step), self.explored(step))
