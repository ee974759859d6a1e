"""Slots whose prediction stays put while its context changes are trusted: rules that remember earlier rounds."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from paceline.diffusion.base import NONE, Commit, Setting, Step
from paceline.diffusion.canvas import Floats
from paceline.models import Ints
from paceline.utils import need


def entropy(p: torch.Tensor) -> torch.Tensor:
    """(k,) nats of (k, v) distributions."""
    return -torch.xlogy(p, p).sum(-1)


class CoherentCommit(Commit):
    """A fixed number of slots a round, by the entropy of the averaged prediction.

    The predictions a slot got under the last contexts are averaged. The entropy of the average is the mean entropy plus
    the Jensen-Shannon divergence of the predictions, which estimates how much the token still depends on the context.

    In every round the `history_slots` best slots of the current ranking are remembered. Slots remembered in each of the
    last `history_length` rounds come first, by averaged entropy; where there are too few of them, the current ranking
    decides.

    Args:
        history_length: contexts averaged (2 or 3 in the paper); 1 is the plain ranking.
        history_slots: slots remembered a round.
        commit_slots: slots written a round.
    Raises:
        ConfigError: a count below 1, fewer slots remembered than written.
    Source: Beyond Confidence: Adaptive and Coherent Decoding for Diffusion Language Models (arXiv:2512.02044).
    """

    stateless = False

    def __init__(
        self, setting: Setting, *, history_length: int = 2, history_slots: int = 4, commit_slots: int = 1
    ) -> None:
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
        coherent, _ = self.remember(step)
        chosen = coherent[: self.number]
        rest = step.ranked[~np.isin(step.ranked, chosen)]
        return np.concatenate([chosen, rest[: self.number - chosen.size]])


class AdaptiveCoherentCommit(CoherentCommit):
    """As many slots as are coherent (CCD-DS): those whose averaged entropy is at most the largest entropy among the
    best slots.

    The bar is the entropy of the last of the `history_slots` best slots of the current ranking: a prediction that does
    not move with the context passes it, one that does has a divergence on top of its entropy. At least `commit_slots`
    are written. Where the bar lies exactly is not stated in what the authors published; this one is set from the
    ranking, as they say theirs is.
    """

    def choose(self, step: Step) -> Ints:
        coherent, values = self.remember(step)
        top = step.ranked[: self.slots]
        bar = step.predictions.entropy_at(top).max()
        chosen: Ints = coherent[values <= bar + 1e-12]
        if chosen.size >= self.number:
            return chosen
        rest = step.ranked[~np.isin(step.ranked, chosen)]
        return np.concatenate([chosen, rest[: self.number - chosen.size]])


class AgreementCommit(Commit):
    """After `warmup_rounds` of the plain ranking.

    If the best slots were next in line in the round before, all slots of the current list that were so too, with the
    same token, are written; the best slots otherwise.

    Args:
        commit_slots: slots of a plain round.
        warmup_rounds: plain rounds at the start.
        list_growth: the list grows by a slot a round, from one, up to commit_slots + int(list_growth * commit_slots).
        adaptive: write all that agree; False writes `commit_slots` of them.
    Source: the rule of the code released with Beyond Confidence (arXiv:2512.02044), without its reset late in decoding.
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
        need(commit_slots >= 1, "commit_slots", "be at least 1", commit_slots)
        need(warmup_rounds >= 0, "warmup_rounds", "be at least 0", warmup_rounds)
        need(list_growth >= 0, "list_growth", "be at least 0", list_growth)
        self.number, self.warmup, self.adaptive = commit_slots, warmup_rounds, adaptive
        self.most = commit_slots + int(list_growth * commit_slots)
        self.list_length, self.rounds = 1, 0
        self.listed: dict[int, int] = {}
        self.length = -1

    def choose(self, step: Step) -> Ints:
        if step.canvas.length != self.length:
            self.listed, self.length = {}, step.canvas.length
        ranked = step.ranked
        predicted = step.predictions.tokens_at(ranked)
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
