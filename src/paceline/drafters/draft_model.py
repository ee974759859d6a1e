"""A smaller model with the same tokenizer drafts what the target will say.

In: contexts, a draft model. Out: chains or trees, point or drawn, whose q follows the request's sampling rules.
Not here: loading models, accepting tokens, how much to draft (controllers).

The draft's cache keeps what the text confirms of its own drafts; whatever else was committed (the target's own tokens, other
drafters' ones, steps without drafts) is fed together with the next first level, a long gap in chunks.

Source: Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318); trees as in `draft_tree`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paceline.checking import need
from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.draft_chain import ChainDraft, draft_chains
from paceline.drafters.draft_quick import ChainRunner, quick_chains
from paceline.drafters.draft_state import DraftState
from paceline.drafters.draft_tree import TreeDraft, draft_trees
from paceline.errors import CapabilityError, ConfigError
from paceline.tree.token_tree import EMPTY_TREE, TokenTree
from paceline.tree.types import Budget, Scores, Verdict

MAX_WIDTH = 64


class DraftModelDrafter:
    """Drafts with a smaller model.

    Args:
        model: folder or hub id of the draft model.
        num_speculative_tokens: most levels to draft; None leaves it to the budget.
        draft_sample_method: above temperature 0, "probabilistic" draws from the draft's law, "greedy" takes its most likely
            tokens, as it always does at temperature 0. By default it draws, but for requests with a seed of their own, which then
            get the tokens of that seed whatever is drafted.
        tree_width: children of a node, and nodes that are expanded on a level; 1 drafts chains.
    Raises:
        ConfigError: a value outside its range. CapabilityError: a tree from a draft model whose runner scores chains only.
    """

    name = "draft_model"
    catches_up = True
    taps: Sequence[int] = ()

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        num_speculative_tokens: int | None = None,
        draft_sample_method: Literal["probabilistic", "greedy"] | None = None,
        tree_width: int = 1,
    ) -> None:
        methods = ("probabilistic", "greedy")
        need(draft_sample_method in (None, *methods), "draft_sample_method", f"be one of {', '.join(methods)}", draft_sample_method)
        whole = isinstance(tree_width, int) and not isinstance(tree_width, bool)
        need(whole and 1 <= tree_width <= MAX_WIDTH, "tree_width", f"be an integer in 1..{MAX_WIDTH}", tree_width)
        limit = num_speculative_tokens
        need(limit is None or (isinstance(limit, int) and limit >= 0), "num_speculative_tokens", "be 0 or more", limit)
        if not isinstance(model, str) or args.load_runner is None:
            raise ConfigError(f"speculative_config model must be a folder or hub id for method 'draft_model', got {model!r}")
        self.runner = args.load_runner(model)
        if tree_width > 1 and not self.runner.capabilities.trees:
            raise CapabilityError(
                f"tree_width={tree_width} needs a draft model that scores trees, {model!r} cannot; use tree_width=1"
            )
        self.index, self.vocab_size, self.limit, self.width = args.index, args.vocab_size, limit, tree_width
        self.method = draft_sample_method
        same = self.runner.info.vocab_size == args.vocab_size
        self._quick = tree_width == 1 and same and isinstance(self.runner, ChainRunner)

    def begin(self, contexts: Sequence[Context]) -> list[DraftState]:
        return [DraftState(context, self.runner.open()) for context in contexts]

    def propose(self, states: Sequence[DraftState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        trees = [EMPTY_TREE] * len(states)
        quick: list[tuple[int, DraftState, Budget, int]] = []
        slow: list[tuple[int, DraftState, Budget, int]] = []
        for i, (state, budget) in enumerate(zip(states, budgets, strict=True)):
            if (count := self._steps(state, budget)) > 0:
                state.settle(self.runner)
                short = self._quick and state.context.shape is None and not self._drawn(state)
                (quick if short else slow).append((i, state, budget, count))
        for asked, draft in ((quick, self._draft_quick), (slow, self._draft)):
            if asked:
                places, *parts = zip(*asked, strict=True)
                for i, tree in zip(places, draft(*parts), strict=True):
                    trees[i] = tree
        return trees

    def observe(
        self, states: Sequence[DraftState], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores | None
    ) -> None:
        for state in states:
            state.settle(self.runner)

    def fork(self, state: DraftState, context: Context) -> DraftState:
        state.settle(self.runner)
        if not self.runner.capabilities.fork:
            return DraftState(context, self.runner.open())
        return DraftState(context, self.runner.fork(state.cache), state.base)

    def end(self, states: Sequence[DraftState]) -> None:
        for state in states:
            self.runner.release(state.cache)

    def _steps(self, state: DraftState, budget: Budget) -> int:
        """Levels to draft: within the budget, the option and the draft model's context."""
        room = self.runner.info.max_context - len(state.context.tokens) + 1
        steps = min(budget.nodes, budget.depth, room)
        return steps if self.limit is None else min(steps, self.limit)

    def _drawn(self, state: DraftState) -> bool:
        draws = self.method == "probabilistic" or (self.method is None and not state.context.seeded)
        return draws and state.context.temperature > 0

    def _draft_quick(self, states: Sequence[DraftState], budgets: Sequence[Budget], steps: Sequence[int]) -> list[TokenTree]:
        return quick_chains(self.runner, states, budgets, steps, self.index)

    def _draft(self, states: Sequence[DraftState], budgets: Sequence[Budget], steps: Sequence[int]) -> list[TokenTree]:
        each = list(zip(states, budgets, steps, strict=True))
        if self.width == 1:
            chains = [ChainDraft(state, count, budget.go_on, self._drawn(state)) for state, budget, count in each]
            return draft_chains(self.runner, chains, self.vocab_size, self.index)
        grown = [TreeDraft(s, budget.nodes, count, self.width, budget.go_on, self._drawn(s)) for s, budget, count in each]
        return draft_trees(self.runner, grown, self.vocab_size, self.index)
