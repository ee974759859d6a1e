"""Medusa: heads on the target's last state guess the tokens that follow the next one, each for itself.

The state is that of the token before the root: its own next token is the root, which is known, so that head 0 guesses
the first draft. All heads read the same state; a node of a tree has the chances of its depth, whatever its path.

Source: Medusa: simple LLM inference acceleration framework with multiple decoding heads (arXiv:2401.10774).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import SampleMethod
from paceline.drafters.common.draft_chain import ChainDraft, add_level
from paceline.drafters.common.draft_rows import fit_rows
from paceline.drafters.growth.base import Growth, grow
from paceline.drafters.growth.policies import PolicyName
from paceline.drafters.heads.head_drafter import HeadDrafter, fitted
from paceline.drafters.heads.tapped_states import of_pass, of_prompt
from paceline.models.heads import MedusaHead
from paceline.tree import Scores, TokenTree, Verdict


class MedusaState:
    """One sequence.

    Attributes:
        state: (0 or 1, hidden) of the target, of the token before the root. known: length of the text that it belongs
            to.
    """

    __slots__ = ("context", "known", "state")

    def __init__(self, context: Context, state: torch.Tensor) -> None:
        self.context, self.state, self.known = context, state, len(context.tokens)

    @property
    def knows_its_text(self) -> bool:
        return len(self.state) > 0 and self.known == len(self.context.tokens)


class MedusaDrafter(HeadDrafter[MedusaState]):
    """Drafts with Medusa's heads that were trained for the target.

    Args:
        model: folder or hub id of the heads.
        num_speculative_tokens: most levels to draft; None leaves it to the budget. There are no more than heads.
        draft_sample_method: above temperature 0, "probabilistic" draws from the heads' distributions, "greedy" takes
            their most likely tokens. By default it draws, but for requests with a seed of their own.
        tree_policy, tree_width, tree_threshold, speculative_token_tree: how trees grow, as of `draft_model`; "static"
            with the paper's sparse trees is `speculative_token_tree`, "ppd" the best shape for what was learned.
    Raises:
        ConfigError: a value outside its range, no heads.
        CheckpointError: heads of another method or for another model.
        CapabilityError: a target that does not give what the heads need, or that scores no trees where some are grown.
    """

    name = "medusa"

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        num_speculative_tokens: int | None = None,
        draft_sample_method: SampleMethod | None = None,
        tree_policy: PolicyName | None = None,
        tree_width: int | Sequence[int] | None = None,
        tree_threshold: float | None = None,
        speculative_token_tree: str | Sequence[Sequence[int]] | None = None,
    ) -> None:
        policy = tree_policy, tree_width, tree_threshold, speculative_token_tree
        name, target = self._configure(args, model, num_speculative_tokens, draft_sample_method, policy)
        self.head, self._vocab_size = MedusaHead(name, target, tokenizer=args.fingerprint), args.vocab_size
        self.limit = min(self.limit, self.head.depths)
        self._read(target, self.head.taps, 1)

    def begin(self, contexts: Sequence[Context]) -> list[MedusaState]:
        return [MedusaState(context, of_prompt(context, self.taps, 1, self.none)) for context in contexts]

    def observe(
        self,
        states: Sequence[MedusaState],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        scores: Scores | None,
    ) -> None:
        """Take the target's state of the last token before the new root."""
        for i, (state, verdict) in enumerate(zip(states, verdicts, strict=True)):
            found = of_pass(scores, i, verdict, self.taps)
            state.state = self.none if found is None else found[-1:]
            state.known = len(state.context.tokens)

    def fork(self, state: MedusaState, context: Context) -> MedusaState:
        return MedusaState(context, state.state)

    def held_bytes(self, tokens: int) -> int:
        return self.none.shape[1] * self.none.itemsize

    def _chains(self, states: Sequence[MedusaState], chains: Sequence[ChainDraft]) -> list[TokenTree]:
        active, depth = list(zip(states, chains, strict=True)), 0
        while active:
            rows = torch.cat([state.state for state, _ in active])
            add_level([chain for _, chain in active], self._logits(rows, depth))
            active, depth = [pair for pair in active if pair[1].wants_more], depth + 1
        return [chain.tree(self.index) for chain in chains]

    def _trees(self, growing: Sequence[Growth]) -> list[TokenTree]:
        known: dict[tuple[int, int], torch.Tensor] = {}

        def row(draft: Growth, depth: int) -> torch.Tensor:
            key = id(draft), depth
            if key not in known:
                state = draft.state
                assert isinstance(state, MedusaState)
                known[key] = self._logits(state.state, depth)
            return known[key]

        def score(active: Sequence[Growth]) -> list[torch.Tensor]:
            return [torch.cat([row(draft, len(draft.path_of(node))) for node in draft.front]) for draft in active]

        return grow(score, growing, self.index)

    def _logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """(b, v) of a head."""
        logits = self.head.logits(states, depth)
        tokens = self.head.tokens
        return fit_rows(logits, self._vocab_size) if tokens is None else fitted(logits, tokens, self._vocab_size)
