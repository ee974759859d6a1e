"""Predicted outputs: a draft that the caller gives along with the prompt.

The draft follows the prediction from its first token. Where the output differs, nothing is drafted until the output's
last tokens occur in the prediction again: the nearest position after the last sure one where two or more tokens match;
then the nearest before it; then, since a replaced word often ends soon, the nearest match of a single token, at most
NEAR tokens ahead. So replaced, inserted and deleted spans and blocks that moved are all found again. A position is sure
once SURE tokens in a row have matched. Python and Markdown files predicted by their previous versions (849,000 tokens,
16 tokens a step) give 6.6 to 8.1 tokens per step; the assumption that just the one token at the position of a
difference was replaced was right one time in fifty, so it is not tried.

OpenAI's counts are in a request's metrics: `accepted_prediction_tokens` is
`metrics.drafters["prediction"].num_accepted_tokens`, and `rejected_prediction_tokens` is its `num_draft_tokens` less
that. Tokens of the prediction that were never verified are in neither, and one that was verified and rejected twice
counts twice.

Source: "Predicted Outputs" of the OpenAI API. Copying the input and finding it again after a difference: aggressive
decoding (arXiv:2205.10350).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.drafters.base import Context
from paceline.drafters.common.bases import SingleDrafter
from paceline.drafters.common.chains import chain_tree
from paceline.tree import EMPTY_TREE, Budget, TokenTree

SURE: Final = 3
NEAR: Final = 32
LONGEST_MATCH: Final = 8
"""A search compares no more tokens than this."""

_RUN: Final = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32)
_RIGHT: Final = (0.9, 0.3, 0.55, 0.64, 0.75, 0.83, 0.86, 0.89, 0.92, 0.95, 0.97, 0.995)
PREDICTION_CONFIDENCE: Final[tuple[float, ...]] = tuple(
    float(c) for c in np.interp(np.arange(33), _RUN, _RIGHT).astype(np.float32)
)
"""By the number of tokens that matched in a row: how often the next one did, on those files. 0 is the start of the
output: there the files gave 0.98, but an answer may begin with words around what was predicted.
"""

LOST: Final = -1
UNKNOWN: Final = -1
"""In place of ids that the vocabulary does not have: never drafted, never matched."""


class PredictionState:
    """Keeps the position of one sequence in its prediction.

    Attributes:
        ids: the prediction; `ids_n` the same as (n,) int64.
        position: index in it of the token expected next, or LOST.
        run: tokens that matched in a row up to there.
        anchor: the last sure position.
        start, done: where the output begins, and how much of the text has been followed.
    """

    __slots__ = ("anchor", "context", "done", "ids", "ids_n", "position", "run", "start")

    def __init__(self, context: Context, ids: list[int]) -> None:
        self.context, self.ids, self.ids_n = context, ids, np.asarray(ids, np.int64)
        self.position = self.run = self.anchor = 0
        self.start = self.done = context.prompt_length

    def follow(self) -> None:
        """Take in the output's new tokens, one by one, so that the outcome does not depend on how they came."""
        text = self.context.tokens
        while self.done < len(text):
            token = text[self.done]
            self.done += 1
            if 0 <= self.position < len(self.ids) and self.ids[self.position] == token:
                self.position, self.run = self.position + 1, self.run + 1
            else:
                self.position, self.run = self.search(text)
            if self.run >= SURE:
                self.anchor = self.position

    def search(self, text: Sequence[int]) -> tuple[int, int]:
        """The position after the best match of the last tokens, and the match's length; LOST and 0 without one."""
        ends_m = np.flatnonzero(self.ids_n == text[self.done - 1])
        lengths_m = self._lengths(text, ends_m)
        pairs_m, singles_m = ends_m[lengths_m >= 2] + 1, ends_m + 1
        after = int(np.searchsorted(pairs_m, self.anchor, side="right"))
        if len(pairs_m):
            position = int(pairs_m[after if after < len(pairs_m) else -1])
        else:
            after = int(np.searchsorted(singles_m, self.anchor, side="right"))
            if after == len(singles_m) or singles_m[after] > self.anchor + NEAR:
                return LOST, 0
            position = int(singles_m[after])
        return position, int(lengths_m[np.searchsorted(ends_m, position - 1)])

    def _lengths(self, text: Sequence[int], ends_m: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """(m,) how many tokens up to and with each of these positions of the prediction equal the output's last
        ones.
        """
        lengths_m = np.ones(len(ends_m), np.intp)
        alive = np.arange(len(ends_m))
        for back in range(1, min(LONGEST_MATCH, self.done - self.start)):
            alive = alive[ends_m[alive] >= back]
            alive = alive[self.ids_n[ends_m[alive] - back] == text[self.done - 1 - back]]
            if not len(alive):
                break
            lengths_m[alive] += 1
        return lengths_m


class PredictionDrafter(SingleDrafter[PredictionState]):
    """Drafts along the output that the caller expects; drafts nothing for requests without a prediction.

    Args:
        num_speculative_tokens: most tokens to propose; None leaves it to the budget.
    Raises:
        ConfigError: a value outside its range.
    """

    name = "prediction"
    reads_prediction = True

    def _begin(self, context: Context) -> PredictionState | None:
        return PredictionState(context, self._known(context.prediction)) if len(context.prediction) else None

    def fork(self, state: PredictionState, context: Context) -> PredictionState:
        other = PredictionState(context, state.ids)
        other.position, other.run, other.anchor = state.position, state.run, state.anchor
        other.start, other.done = state.start, state.done
        return other

    def end(self, states: Sequence[PredictionState]) -> None:
        for state in states:
            state.ids, state.ids_n = [], np.empty(0, np.int64)

    def _propose(self, state: PredictionState, budget: Budget) -> TokenTree:
        state.follow()
        if state.position == LOST:
            return EMPTY_TREE
        tokens = state.ids[state.position : state.position + self._steps(budget)]
        if UNKNOWN in tokens:
            tokens = tokens[: tokens.index(UNKNOWN)]
        confidence = [
            PREDICTION_CONFIDENCE[min(state.run + i, len(PREDICTION_CONFIDENCE) - 1)] for i in range(len(tokens))
        ]
        return chain_tree(tokens, confidence, self.index)

    def _known(self, prediction: Sequence[int]) -> list[int]:
        """The prediction with UNKNOWN for what is no id of the vocabulary."""
        return [int(t) if isinstance(t, int | np.integer) and 0 <= t < self.vocab_size else UNKNOWN for t in prediction]
