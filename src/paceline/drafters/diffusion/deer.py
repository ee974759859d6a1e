"""DEER: a diffusion language model drafts many tokens at once, each drawn from its own slot's distribution.

The distributions of the slots do not depend on what was drawn at the others, so that a drafted token is no worse for a
mistake before it; the target's distributions do, and behind the first rejected token none can be accepted. Every token
is recorded with the very row that it was drawn from, the request's temperature, top-p and other rules applied: then
recursive rejection keeps the target's distribution whatever the denoiser says. Rules that look at earlier tokens see
those drafted before. The likeliest tokens of the slots, which are drafted at temperature 0, are points: recorded with a
row, as if drawn, they would break the distribution.

Nothing is drafted behind an end token.

Source: DEER: Draft with Diffusion, Verify with Autoregressive Models (arXiv:2512.15176).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import SampleMethod, check_method, draws_for
from paceline.drafters.common.draft_chain import ChainDraft, add_level
from paceline.drafters.diffusion.base import DenoisedState, DenoisingDrafter
from paceline.tree import TokenTree, always_go_on
from paceline.utils import integer

if TYPE_CHECKING:
    import torch


class DeerDrafter(DenoisingDrafter[DenoisedState]):
    """Drafts with one pass of a diffusion language model.

    Args:
        model: folder or hub id of a diffusion language model with the target's tokenizer.
        draft_max_length: most tokens of a draft.
        num_speculative_tokens: most tokens to draft, within `draft_max_length`; None leaves it to that.
        draft_sample_method: above temperature 0, "probabilistic" draws from the denoiser's distributions, "greedy"
            takes its most likely tokens, as it always does at temperature 0. By default it draws, but for requests with
            a seed of their own.
        separator_token_id: a token between the text and the masks, where the denoiser was trained with one.
        draft_masks: fewest masks behind the text, for a denoiser with full attention.
        draft_context: most tokens of the text that a pass sees; None is what the denoiser has room for.
        draft_device: where the denoiser runs: "cpu", "cuda" or "cuda:N"; None is the target's.
    Raises:
        ConfigError: a value outside its range, no denoiser.
        DrafterError: another tokenizer.
        UnsupportedModelError: a checkpoint of another kind.
    """

    name = "deer"

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        draft_max_length: int = 32,
        num_speculative_tokens: int | None = None,
        draft_sample_method: SampleMethod | None = None,
        separator_token_id: int | None = None,
        draft_masks: int = 32,
        draft_context: int | None = None,
        draft_device: str | None = None,
    ) -> None:
        check_method(draft_sample_method)
        if separator_token_id is not None:
            integer("separator_token_id", separator_token_id, 0, args.vocab_size - 1)
        super().__init__(
            args,
            model=model,
            num_speculative_tokens=num_speculative_tokens,
            draft_max_length=draft_max_length,
            draft_masks=draft_masks,
            draft_context=draft_context,
            draft_device=draft_device,
            between=() if separator_token_id is None else (separator_token_id,),
        )
        self.method = draft_sample_method

    def _state(self, context: Context) -> DenoisedState:
        return DenoisedState(context)

    @property
    def draws_tokens(self) -> bool:
        return self.method != "greedy"

    def _tree(self, state: DenoisedState, logits: torch.Tensor) -> TokenTree:
        chain = ChainDraft(state.context, len(logits), always_go_on, draws_for(state.context, self.method))
        for node, row in enumerate(logits.split(1)):
            add_level([chain], row)
            if len(chain.tokens) == node or chain.tokens[-1] in self.ends:  # the rules forbid all, or the text ends
                break
        return chain.tree(self.index)
