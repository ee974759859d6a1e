"""What all drafters share that draft with some of the target's own layers, over the target's own cache.

A state holds nothing that must be given back: keys and values are the target's, drafted ones lie in scratch slots that
the next scoring pass takes. So nothing is caught up, forks cost nothing, and there is nothing to free.

Where the target's first layers draft, what they computed is what scoring would compute again: their keys and values are
in scratch already, and the states behind the exit are kept, so that scoring can go on from there (`resume`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar, cast

import torch

from paceline.drafters.base import Context, Drafter, DrafterArgs
from paceline.drafters.common.bases import SampleMethod, check_method, draws_for, limit_of
from paceline.drafters.common.draft_chain import ChainDraft, add_level
from paceline.drafters.common.draft_state import agreed
from paceline.errors import CapabilityError
from paceline.models import LayerPlan, PassResult, Runner, SequenceCache
from paceline.models.runners import LayerDrafts, layer_drafts_of, resuming_pays
from paceline.tree import EMPTY_TREE, Budget, Scores, TokenTree
from paceline.utils import need

MIN_RESUMED: Final = 3
"""Scored nodes from which going on behind the exit pays for a pass in two parts."""


class SelfState:
    """What a drafter of this family knows of one sequence.

    Attributes:
        kept: what the draft of this step computed that scoring can use.
    """

    __slots__ = ("context", "kept")

    def __init__(self, context: Context) -> None:
        self.context = context
        self.kept: Kept | None = None

    @property
    def cache(self) -> SequenceCache:
        """See `Context.target_cache`."""
        return self.context.target_cache()


@dataclass(frozen=True, slots=True)
class Kept:
    """The first inputs of a sequence behind the first layers.

    Attributes:
        inputs: the root and what was drafted behind it. states: (n, hidden) of the first n inputs. plan: the layers.
        cache, length: where their keys and values lie behind so many committed tokens.
    """

    inputs: Sequence[int]
    states: torch.Tensor
    plan: LayerPlan
    cache: SequenceCache
    length: int


S = TypeVar("S", bound=SelfState)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Says how one sequence drafts in one step.

    Attributes:
        plan: the layers that run. steps: most tokens. least: nothing is drafted behind a token that is less likely than
            this.
    """

    plan: LayerPlan
    steps: int
    least: float = 0.0


@dataclass(slots=True)
class ActiveDraft:
    """Collects what one sequence drafts in this step.

    Attributes:
        position: among those that were asked. hidden: what was kept of the states behind the layers, input by input.
        levels: tokens and chances of each level, where there are branches.
    """

    position: int
    state: SelfState
    budget: Budget
    draft_plan: DraftPlan
    chain: ChainDraft
    hidden: list[torch.Tensor] = field(default_factory=list)
    levels: list[tuple[Sequence[int], Sequence[float]]] = field(default_factory=list)

    @property
    def inputs(self) -> list[int]:
        """The root and what was drafted behind it."""
        return [self.state.context.tokens[-1], *self.chain.tokens]

    @property
    def wants_more(self) -> bool:
        """What was drawn is kept whatever its chance; only what comes behind it may depend on it."""
        return bool(self.chain.tokens) and self.chain.confidence[-1] >= self.draft_plan.least and self.chain.wants_more


class SelfDrafter(Drafter, Generic[S]):
    """Base of the drafters that run layers of the target.

    Args:
        num_speculative_tokens: most tokens to draft; None leaves it to the budget.
        draft_sample_method: above temperature 0, "probabilistic" draws from the distribution of the layers that ran,
            "greedy" takes their most likely tokens, as is always done at temperature 0. By default it draws, but for
            requests with a seed of their own, which then get the tokens of that seed whatever is drafted.
        resume_verification: let scoring go on behind the layers that drafted; None where that is measured to be faster.
    Raises:
        ConfigError: a value outside its range.
        CapabilityError: a target whose layers cannot be run alone.
    """

    catches_up = True
    runs_target = True

    def __init__(
        self,
        args: DrafterArgs,
        *,
        num_speculative_tokens: int | None = None,
        draft_sample_method: SampleMethod | None = None,
        resume_verification: bool | None = False,
    ) -> None:
        resume = resume_verification
        need(resume is None or isinstance(resume, bool), "resume_verification", "be True or False", resume)
        check_method(draft_sample_method)
        if args.target is None:
            raise CapabilityError(f"method {self.name!r} runs the target's own layers, but no target was given")
        self.target: Runner = args.target
        self.drafts: LayerDrafts = layer_drafts_of(args.target, self.name)
        self.index, self.limit, self.method = args.index, limit_of(num_speculative_tokens), draft_sample_method
        self._resumes = resume_verification

    @property
    def resumes(self) -> bool:
        """Whether scoring goes on behind the layers that drafted; measured when first needed, unless it was given."""
        if self._resumes is None:
            plan = self._usual()
            self._resumes = plan is not None and resuming_pays(self.target, self.drafts, plan)
        return self._resumes

    def _usual(self) -> LayerPlan | None:
        """First layers that often draft, for that measurement."""
        return None

    @abstractmethod
    def _state(self, context: Context) -> S:
        """A new sequence's state."""

    @abstractmethod
    def draft_plan(self, state: S) -> DraftPlan:
        """Which layers draft for this sequence now, and how far at most."""

    def begin(self, contexts: Sequence[Context]) -> list[S]:
        return [self._state(context) for context in contexts]

    def propose(self, states: Sequence[S], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        trees = [EMPTY_TREE] * len(states)
        groups: dict[int, list[ActiveDraft]] = {}
        for position, (state, budget) in enumerate(zip(states, budgets, strict=True)):
            state.kept = None
            if budget.nodes < 1 or budget.depth < 1:
                continue
            draft_plan = self.draft_plan(state)
            steps = self._steps(state.context, budget, draft_plan)
            if steps > 0:
                chain = ChainDraft(state.context, steps, budget.go_on, self.draws(state.context))
                groups.setdefault(id(draft_plan.plan), []).append(
                    ActiveDraft(position, state, budget, draft_plan, chain)
                )
        for group in groups.values():
            for drafted, tree in zip(group, self._draft(group), strict=True):
                trees[drafted.position] = tree
        return trees

    def fork(self, state: S, context: Context) -> S:
        return self._state(context)

    @property
    def draws_tokens(self) -> bool:
        return self.method != "greedy"

    def draws(self, context: Context) -> bool:
        """Whether tokens are drawn for this sequence rather than the most likely ones taken."""
        return draws_for(context, self.method)

    def _steps(self, context: Context, budget: Budget, draft_plan: DraftPlan) -> int:
        """Tokens to draft: within the budget, the options and the target's context."""
        return min(
            budget.nodes, budget.depth, draft_plan.steps, self.limit, self.target.info.max_context - len(context.tokens)
        )

    def resume(
        self, states: Sequence[S], caches: Sequence[SequenceCache], roots: Sequence[int], trees: Sequence[TokenTree]
    ) -> Scores | None:
        """The scores of these trees, computed from what the drafts of this step left.

        None where that saves nothing, or where something else than one chain behind each root is to be scored.
        """
        if not self.resumes:
            return None
        kept = [None if state is None else state.kept for state in states]
        plans = {id(passed.plan): passed.plan for passed in kept if passed is not None}
        if len(plans) != 1 or not all(tree.is_chain or not len(tree) for tree in trees):
            return None
        known = [_known(*each) for each in zip(kept, caches, roots, trees, strict=True)]
        none = next(passed.states[:0] for passed in kept if passed is not None)
        if sum(map(len, trees)) < MIN_RESUMED or not any(resumed is not None for resumed in known):
            return None
        (plan,) = plans.values()
        return self.drafts.score(
            caches, roots, trees, [none if resumed is None else resumed for resumed in known], plan
        )

    def _level(
        self, states: Sequence[S], caches: Sequence[SequenceCache], inputs: Sequence[Sequence[int]], plan: LayerPlan
    ) -> PassResult:
        """Logits (r, v) after each sequence's last input, and states (r, hidden) if they are to be kept; see
        `LayerDrafts.step`.
        """
        return self.drafts.step(caches, inputs, plan, states=self.resumes)

    def _draft(self, drafts: Sequence[ActiveDraft]) -> list[TokenTree]:
        """Chains by the same layers: a pass a level for the whole group."""
        caches, active, plan = (
            {draft.position: draft.state.cache for draft in drafts},
            list(drafts),
            drafts[0].draft_plan.plan,
        )
        while active:
            states, inputs = [cast(S, draft.state) for draft in active], [draft.inputs for draft in active]
            result = self._level(states, [caches[draft.position] for draft in active], inputs, plan)
            for draft, row in zip(active, result.states.split(1), strict=False):
                draft.hidden.append(row)
            self._add(active, result.logits)
            active = [draft for draft in active if draft.wants_more]
        for draft in drafts if self.resumes else ():
            cache = caches[draft.position]
            draft.state.kept = Kept(draft.inputs, torch.cat(draft.hidden), plan, cache, cache.length)
        return [self._tree(draft) for draft in drafts]

    def _add(self, drafts: Sequence[ActiveDraft], logits: torch.Tensor) -> None:
        """The next token of every chain, from (r, v) logits."""
        add_level([draft.chain for draft in drafts], logits)

    def _tree(self, draft: ActiveDraft) -> TokenTree:
        """What was drafted."""
        return draft.chain.tree(self.index)


def _known(kept: Kept | None, cache: SequenceCache, root: int, tree: TokenTree) -> torch.Tensor | None:
    """(n, hidden) the states of a scored chain's first inputs, as far as they were drafted."""
    if kept is None or kept.cache is not cache or kept.length != cache.length or kept.inputs[0] != root:
        return None
    return kept.states[: 1 + agreed(tree.tokens.tolist(), kept.inputs[1:])]
