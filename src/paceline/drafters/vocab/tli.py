"""A draft model with another tokenizer, exact under sampling: it draws from the tokens that both vocabularies have.

The text is handed to the draft model in its own tokens; what it drafts is in tokens of both, so that every drafted
token has an id and a probability of the target's, and the verifier's test is the usual one. A native draft model
computes the shared rows of its head alone. While a character lacks its last bytes, nothing is drafted.

Source: token-level intersection (TLI), Accelerating LLM inference with lossless speculative decoding algorithms for
heterogeneous vocabularies (arXiv:2502.05202); vLLM's `use_heterogeneous_vocab`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack, cast

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import model_of
from paceline.drafters.common.draft_state import DraftState
from paceline.drafters.draft_model.drafter import DraftModelDrafter
from paceline.drafters.growth.options import GrowthOptions, with_growth_options
from paceline.drafters.vocab.retokenize import Retokenizer, TranslatedState
from paceline.drafters.vocab.vocabularies import check_shared, open_shared, shared_tokens
from paceline.tree import EMPTY_TREE, NO_BUDGET, Budget, Scores, TokenTree, Verdict


@with_growth_options
class TliDrafter(DraftModelDrafter):
    """Drafts with a model of another tokenizer, in the tokens of both.

    Args:
        model: folder or hub id of the draft model.
        draft_device: as for `draft_model`.
    Raises:
        ConfigError: a value outside its range.
        DrafterError: tokenizers with nothing in common.
        CapabilityError: a tree from a draft model whose runner scores chains only.
    """

    name = "tli"
    learns = ""
    rewinds = False  # texts are followed forwards only
    takes_back = True  # a text may be read in other tokens once it goes on

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        draft_device: str | None = None,
        **growth: Unpack[GrowthOptions],
    ) -> None:
        self._configure(args, growth)
        model, models = model_of(args, self.name, model)
        target, draft = models.tokenizer, models.tokenizer_of(model)
        shared = shared_tokens(target, draft)
        check_shared(shared, model, target, draft)
        runner, self._numbering = open_shared(models, model, shared, args.vocab_size, draft_device)
        self._retokenizer = Retokenizer(target, draft, shared.specials)
        self._use(runner, repr(model))

    def begin(self, contexts: Sequence[Context]) -> list[Any]:
        return [TranslatedState(context, self._retokenizer.open(), self.runner.open()) for context in contexts]

    def catch_up(self, states: Sequence[Any]) -> None:
        for state in states:
            state.follow(self.runner, self._numbering.numbers)
        super().catch_up([state.inner for state in states if state.ready])

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        fitting = [self._fitting(state, budget) for state, budget in zip(states, budgets, strict=True)]
        return super().propose([state.inner for state in states], fitting, [EMPTY_TREE] * len(states))

    def observe(
        self, states: Sequence[Any], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores | None
    ) -> None:
        """Nothing to do: texts are followed when drafts are asked for."""

    def fork(self, state: Any, context: Context) -> Any:
        return cast(TranslatedState, state).fork(context, self.runner)

    def end(self, states: Sequence[Any]) -> None:
        super().end(cast(Sequence[DraftState], [state.inner for state in states]))

    def _fitting(self, state: TranslatedState, budget: Budget) -> Budget:
        """The budget, or none where there is nothing to draft from; the state follows its text."""
        if min(budget.nodes, budget.depth) <= 0:
            return NO_BUDGET
        state.follow(self.runner, self._numbering.numbers)
        state.inner.context.apply_rules = state.context.apply_rules
        return budget if state.ready else NO_BUDGET
