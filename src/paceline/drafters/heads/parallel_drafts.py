"""Drafting with a head that predicts all tokens of a draft in one pass, by masks behind the text.

    inputs of a text: those that the cache lacks, of which the last one is of the text's last token, then k - 1 masks
    rows of the last k inputs: logits of the next k tokens, (k, n); row i is that of every node of depth i
    inputs of the text stay in the cache once the text has gone on; masks never do

Row i depends on the text alone, not on the i - 1 tokens before, but for the request's rules, which see the drafted
path. Drawn tokens carry the row that they were drawn from, so that verification is exact.

Source: P-EAGLE: parallel-drafting EAGLE with scalable training (arXiv:2602.01469).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch

from paceline.drafters.common.draft_chain import ChainDraft, chains_of_rows
from paceline.drafters.growth.base import Growth, grow
from paceline.drafters.heads.feature_drafts import FeatureDrafts, FeatureState, chain
from paceline.tree import TokenTree


class ParallelDrafts(FeatureDrafts):
    """Drafts for many sequences, each in one pass of a head that has a mask (`FeatureHead.mask`)."""

    def chains(self, states: Sequence[FeatureState], drafts: Sequence[ChainDraft]) -> list[TokenTree]:
        rows = self.predicted(states, [draft.steps for draft in drafts])
        return chains_of_rows(drafts, rows, self._source, self._vocabulary.add_level)

    def trees(self, drafts: Sequence[Growth]) -> list[TokenTree]:
        growing = [draft for draft in drafts if draft.front]
        states = [cast(FeatureState, draft.state) for draft in growing]
        found = self.predicted(states, [draft.depth for draft in growing]) if growing else []
        rows = {id(draft): self._vocabulary.fitted(logits) for draft, logits in zip(growing, found, strict=True)}

        def of_fronts(active: Sequence[Growth]) -> list[torch.Tensor]:
            return [rows[id(draft)][[len(draft.path_of(node)) for node in draft.front]] for draft in active]

        return grow(of_fronts, drafts, self._source)

    def predicted(self, states: Sequence[FeatureState], steps: Sequence[int]) -> list[torch.Tensor]:
        """(k, n) logits of the next k tokens of each text, from one pass.

        Args:
            steps: k of each, 1 or more.
        """
        self.catch_up(states)
        mask, counts = self.head.mask, [state.states.count for state in states]
        assert mask is not None, "a head without a mask"
        joined = self.head.joined(torch.cat([state.states.all() for state in states])).split(counts)
        lengths = [count + step - 1 for count, step in zip(counts, steps, strict=True)]
        ends = list(accumulate(lengths))
        tokens, rows, picked = list[int](), list[torch.Tensor](), list[int]()
        for state, step, known, end in zip(states, steps, joined, ends, strict=True):
            tokens += [*state.pending, *[mask.token] * (step - 1)]
            rows += [known, mask.state.expand(step - 1, -1)]
            picked += range(end - step, end)
        result = self.head.step(
            [state.cache for state in states], [chain(length) for length in lengths], [0] * len(states),
            tokens=tokens, states=torch.cat(rows), picked=picked,
        )  # fmt: skip
        for state, count in zip(states, counts, strict=True):
            state.kept = count
        return list(result.logits.split(list(steps)))
