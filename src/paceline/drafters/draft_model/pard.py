"""PARD: a draft model that predicts all tokens of a draft in one pass, by mask tokens behind the text.

The model is an ordinary one of the target's tokenizer that was trained further (training.pard): a mask token behind the
text predicts one token further than the token before it, so that a pass over the text's new tokens and k - 1 masks has
k rows of logits that are drafts.

    s = the text's tokens that the cache lacks, at least the last one
    x = s, then k - 1 mask tokens, at consecutive positions under the causal mask     (|s| + k - 1,)
    rows of x's last k inputs: the last token of s says y_1, mask i says y_(i+1)      (k, v)
    y_1 .. y_k, one behind the other, are a chain
    keys and values of s stay, once the text goes on behind them; those of masks never do

Accepted drafts are fed in the next pass, since the model has read masks in their places. Row i depends on the text
alone, not on y_1 .. y_(i-1), but for the request's rules, which see the drafted path; drawn tokens carry the row that
they were drawn from, so that verification is exact.

Source: PARD: accelerating LLM inference with low-cost parallel draft model adaptation (arXiv:2504.18583); vLLM's
`parallel_drafting`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from paceline.drafters.base import DrafterArgs
from paceline.drafters.common.bases import FollowingDrafter, SampleMethod, draws_for, model_of
from paceline.drafters.common.draft_chain import ChainDraft, chains_of_rows
from paceline.drafters.common.draft_rows import fit_rows
from paceline.drafters.common.draft_state import DraftState
from paceline.errors import DrafterError
from paceline.tree import Budget, TokenTree

if TYPE_CHECKING:
    from paceline.models import Runner


class PardDrafter(FollowingDrafter):
    """Drafts chains with a parallel draft model, in one pass of it.

    Args:
        model: folder or hub id of the draft model, whose config.json names its mask token (`pard_token`).
        num_speculative_tokens: most tokens to draft; None leaves it to the budget. More than the model was trained for
            may be drafted, and are right less often.
        draft_sample_method: above temperature 0, "probabilistic" draws from the draft's distributions, "greedy" takes
            the likeliest tokens. By default it draws, but for requests with a seed of their own.
        draft_device: as for `draft_model`.
    Raises:
        ConfigError: a value outside its range, no model.
        DrafterError: another tokenizer, a model that has no mask token.
    """

    name = "pard"

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        num_speculative_tokens: int | None = None,
        draft_sample_method: SampleMethod | None = None,
        draft_device: str | None = None,
    ) -> None:
        self._keep(args, num_speculative_tokens, draft_sample_method)
        model, models = model_of(args, self.name, model)
        mask = models.mask_token_of(model)
        if mask is None:
            raise DrafterError(
                f"draft model {model!r} is no parallel one: its config.json names no mask token (pard_token); use "
                "method 'draft_model', or train it with `paceline train pard`"
            )
        self.runner = models.open(model, device=draft_device)
        if mask >= self.runner.info.vocab_size:
            raise DrafterError(
                f"draft model {model!r} has {self.runner.info.vocab_size} embeddings, and its mask token is {mask}; "
                "repair its config.json"
            )
        self.mask = mask

    @property
    def row_bytes(self) -> int:
        """All logits come from one pass."""
        return 4 * self.runner.info.vocab_size

    def fitted(self, rows_kv: torch.Tensor) -> torch.Tensor:
        """Logits over the target's tokens, of which the mask is none."""
        fitted = fit_rows(rows_kv, self.vocab_size)
        if self.mask >= self.vocab_size:
            return fitted
        return fitted.index_fill(-1, torch.tensor([self.mask], device=fitted.device), float("-inf"))

    def _draft(self, states: Sequence[DraftState], budgets: Sequence[Budget], steps: Sequence[int]) -> list[TokenTree]:
        """A chain of at most `steps` tokens each, from one pass."""
        self.catch_up(states)
        rows = predicted(self.runner, states, steps, self.mask)
        drafts = [
            ChainDraft(state.context, count, budget.go_on, draws_for(state.context, self.method))
            for state, budget, count in zip(states, budgets, steps, strict=True)
        ]
        return chains_of_rows(drafts, [self.fitted(rows_kv) for rows_kv in rows], self.index)


def predicted(runner: Runner, states: Sequence[DraftState], steps: Sequence[int], mask: int) -> list[torch.Tensor]:
    """(k, v) logits of the next k tokens of each text, from one pass. What of the text was fed is kept as soon as the
    text has gone on behind it; masks are not noted, so that nothing can keep them.

    Args:
        steps: k of each, 1 or more. mask: the mask token.
    """
    fed = [state.pending for state in states]
    trees = [TokenTree.chain([*text[1:], *[mask] * (count - 1)]) for text, count in zip(fed, steps, strict=True)]
    scores = runner.score([state.cache for state in states], [text[0] for text in fed], trees)
    for state, text in zip(states, fed, strict=True):
        state.fed_tokens, state.fed_parents = text, list(range(-1, len(text) - 1))
    return [scores.of(i)[-count:] for i, count in enumerate(steps)]
