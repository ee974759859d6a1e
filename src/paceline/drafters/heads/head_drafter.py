"""What drafters with a trained head share: their options, and who drafts how much."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final, Generic, Protocol, TypeVar

import torch

from paceline.drafters.base import Context, Drafter, DrafterArgs
from paceline.drafters.common.bases import check_method, draft_where, draws_for, limit_of
from paceline.drafters.common.draft_chain import ChainDraft, add_level, plain
from paceline.drafters.common.draft_rows import best_tokens, fit_rows
from paceline.drafters.growth.base import Growth
from paceline.drafters.growth.options import GrowthOptions, growth_policy
from paceline.drafters.growth.policies import PolicyName
from paceline.drafters.growth.policies import tree_policy as policy_of
from paceline.errors import CapabilityError
from paceline.models import Runner
from paceline.tree import Budget, TokenTree
from paceline.utils import need

STATIC: Final = policy_of("ppd", width=None, threshold=None, paths=None)
"""Trees of the shape that comes with the budget."""

REREAD: Final = 64
"""Tokens at the end of a prompt that are read again for their states where the prefix cache holds them. A head sees
less of the prompt then, which costs a few of its drafts, where more would cost the time of reading most prompts twice.
"""

TREES: Final = ("tree_policy", "tree_width", "tree_threshold", "speculative_token_tree")
"""Options that say how trees grow."""


class HeadState(Protocol):
    """Keeps one sequence, and whether the head's states cover its text."""

    context: Context

    @property
    def knows_its_text(self) -> bool:
        """Whether the target's states are known that a draft begins with."""


S = TypeVar("S", bound=HeadState)


class HeadDrafter(Drafter, Generic[S]):
    """Base of these drafters, which check their options (`_configure`), load the head and say what it reads (`_read`).

    Args: as of `EagleDrafter`.
    Attributes:
        target: the runner. none: (0, width) of the states that are read.
    """

    usual_policy: ClassVar[PolicyName | None] = None
    follows_shapes: ClassVar[bool] = False
    """Whether the shape of a static tree that a controller has chosen is drafted where the user named no policy."""
    none: torch.Tensor

    def _configure(self, args: DrafterArgs, model: str | None, growth: GrowthOptions) -> tuple[str, Runner]:
        """Check and keep the options; the head's name and the target."""
        method = growth.get("draft_sample_method")
        check_method(method)
        self.index, self.limit, self.method = args.index, limit_of(growth.get("num_speculative_tokens")), method
        self.policy = growth_policy(growth, self.usual_policy)
        self.tree_policy, self._in_chains = self.policy.name, self.policy.name == "chain"
        free = all(growth.get(name) is None for name in TREES) and method != "probabilistic"
        rule = f"be the folder or hub id of a head for method {self.name!r}"
        need(isinstance(model, str) and args.target is not None, "speculative_config model", rule, model)
        assert args.target is not None
        if not self._in_chains and not args.target.capabilities.trees:
            raise CapabilityError(
                f"tree_policy {self.policy.name!r} needs a model that scores trees, {args.target.info.name} cannot; "
                "leave it out"
            )
        self._follows = self.follows_shapes and free and args.branches
        return str(model), args.target

    def _read(self, target: Runner, taps: Sequence[int], window: int | None) -> None:
        """Ask for these states, of so many of the prompt's last tokens."""
        info = target.info
        self.taps, self.tap_window = taps, window
        self.tap_reread = None if window is None else min(window, REREAD)
        self.none = torch.empty(0, len(taps) * info.hidden_size, device=info.device, dtype=info.dtype)

    def propose(self, states: Sequence[S], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        steps = [
            min(budget.nodes, budget.depth, self.limit) if state.knows_its_text else 0
            for state, budget in zip(states, budgets, strict=True)
        ]
        return draft_where(steps, self._draft, states, budgets, steps)

    def _draft(self, states: Sequence[S], budgets: Sequence[Budget], steps: Sequence[int]) -> list[TokenTree]:
        each = list(zip(states, budgets, steps, strict=True))
        if self._follows and any(budget.shape is not None for budget in budgets):
            return self._trees([STATIC.start(state, budget, count, drawn=False) for state, budget, count in each])
        if self._in_chains:
            return self._chains(
                states,
                [ChainDraft(state.context, count, budget.go_on, self._drawn(state)) for state, budget, count in each],
            )
        return self._trees(
            [self.policy.start(state, budget, count, drawn=self._drawn(state)) for state, budget, count in each]
        )

    @abstractmethod
    def _chains(self, states: Sequence[S], chains: Sequence[ChainDraft]) -> list[TokenTree]:
        """Draft chains, at least one token each."""

    @abstractmethod
    def _trees(self, growing: Sequence[Growth]) -> list[TokenTree]:
        """Draft trees; their states are those of `begin`."""

    @property
    def draws_tokens(self) -> bool:
        return self.method != "greedy" and not self.policy.points

    def _drawn(self, state: S) -> bool:
        return not self.policy.points and draws_for(state.context, self.method)


class DraftVocabulary:
    """The tokens that a head can draft, among those of the target.

    Args:
        tokens: (n,) int64 the target's token of each column of the head's logits; None where that is the column itself.
        vocab_size: of the target.
    """

    def __init__(self, tokens: torch.Tensor | None, vocab_size: int) -> None:
        self._tokens, self._vocab_size = tokens, vocab_size
        self._ids = None if tokens is None else tokens.tolist()

    def add_level(self, drafts: Sequence[ChainDraft], logits: torch.Tensor) -> None:
        """The next token of every chain, from logits (r, n) of the head."""
        if self._ids is None or not all(plain(draft) for draft in drafts):
            add_level(drafts, self.fitted(logits))
            return
        for draft, columns, chances in zip(drafts, *best_tokens(logits, 1), strict=True):
            draft.add_best([self._ids[column] for column in columns], chances)

    def fitted(self, logits: torch.Tensor) -> torch.Tensor:
        """(r, v) logits over the target's tokens; those that the head does not have cannot be drawn."""
        if self._tokens is None:
            return fit_rows(logits, self._vocab_size)
        whole = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        return whole.index_copy_(1, self._tokens, logits)
