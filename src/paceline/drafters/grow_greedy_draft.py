"""Greedy draft sampling: all children of a node but one are its likeliest tokens, and one is drawn from the others.

In: rows of a draft model. Out: trees with points and one draw at a place. Not here: verifying (`acceptance_method`
"greedy_draft_sampling"), trees of points, which this policy grows as `draft_tree` does.

Source: Towards optimal multi-draft speculative decoding (arXiv:2502.18779).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.drafters import draft_rows
from paceline.drafters.draft_tree import TreeDraft
from paceline.tree.token_tree import Trial


@dataclass(slots=True)
class GreedyDraft(TreeDraft):
    """Level by level, `width` children of each of the `width` likeliest nodes."""

    def _draw(self, q_fv: torch.Tensor) -> None:
        for parent, row_v in zip(self.front, q_fv, strict=True):
            room = min(self.width, self.nodes - len(self.tokens))
            if room < 1:
                return
            top = row_v.topk(min(room, len(row_v)))
            pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            points = [(token, chance) for token, chance in pairs[: room - 1] if chance > 0.0]
            taken = tuple(token for token, _ in points)
            trials = [Trial(self.add(parent, token, min(chance, 1.0))) for token, chance in points]
            context, node = self.state.context, len(self.tokens)
            found = draft_rows.draw(row_v, taken, draft_rows.uniform(context.seed, len(context.tokens), node))
            if found is not None:
                trials.append(Trial(self.add(parent, *found), row_v, taken))
                self.trials[parent] = trials
