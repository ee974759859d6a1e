"""EAGLE: a decoder layer that goes on from the target's own states drafts, and is told the true ones after each round.

Source: EAGLE: speculative sampling requires rethinking feature uncertainty (arXiv:2401.15077); EAGLE-2: faster
inference of language models with dynamic draft trees (arXiv:2406.16858); EAGLE-3: scaling up inference acceleration of
large language models via training-time test (arXiv:2503.01840).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import torch

from paceline.drafters.base import Context, Drafter, DrafterArgs
from paceline.drafters.common.bases import SampleMethod, check_method, draws_for, limit_of
from paceline.drafters.common.draft_chain import ChainDraft
from paceline.drafters.common.draft_state import CHUNK
from paceline.drafters.growth.policies import PolicyName
from paceline.drafters.growth.policies import tree_policy as policy_of
from paceline.drafters.heads.feature_drafts import FeatureDrafts, FeatureState
from paceline.drafters.heads.tapped_states import TappedStates, of_pass, of_prompt
from paceline.errors import CapabilityError
from paceline.models import Runner
from paceline.models.heads import FeatureHead
from paceline.tree import EMPTY_TREE, Budget, Scores, TokenTree, Verdict
from paceline.utils import integer, need


class EagleDrafter(Drafter):
    """Drafts with a head of one decoder layer that was trained for the target.

    Args:
        model: folder or hub id of the head.
        num_speculative_tokens: most levels to draft; None leaves it to the budget.
        draft_sample_method: above temperature 0, "probabilistic" draws from the head's distribution, "greedy" takes its
            most likely tokens. By default it draws, but for requests with a seed of their own.
        tree_policy, tree_width, tree_threshold, speculative_token_tree: how trees grow, as for `draft_model`.
        draft_context: most tokens at the end of a prompt that the head sees, beside all that is generated; what lies
            before them is not computed again where it is cached. None is the whole prompt.
    Raises:
        ConfigError: a value outside its range, no head.
        CheckpointError: a head of another method or for another model.
        CapabilityError: a target that does not give what the head needs, or that scores no trees where some are grown.
    """

    name = "eagle"
    heads: ClassVar[tuple[str, ...]] = ("eagle",)
    usual_policy: ClassVar[PolicyName | None] = None

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
        draft_context: int | None = 1024,
    ) -> None:
        check_method(draft_sample_method)
        self.index, self.limit, self.method = args.index, limit_of(num_speculative_tokens), draft_sample_method
        if tree_policy is None and speculative_token_tree is None:
            tree_policy = self.usual_policy
        self.policy = policy_of(tree_policy, width=tree_width, threshold=tree_threshold, paths=speculative_token_tree)
        self.tree_policy, self._chains = self.policy.name, self.policy.name == "chain"
        clash = self.policy.points and draft_sample_method == "probabilistic"
        rule = f"be greedy or left out with tree_policy {self.policy.name!r}"
        need(not clash, "draft_sample_method", rule, draft_sample_method)
        integer("draft_context", 1 if draft_context is None else draft_context, 1)
        rule = f"be the folder or hub id of a head for method {self.name!r}"
        need(isinstance(model, str) and args.target is not None, "speculative_config model", rule, model)
        assert args.target is not None
        if not self._chains and not args.target.capabilities.trees:
            raise CapabilityError(
                f"tree_policy {self.policy.name!r} needs a model that scores trees, {args.target.info.name} cannot; "
                "leave it out"
            )
        self.head = FeatureHead.load(str(model), args.target, self.heads, tokenizer=args.fingerprint)
        self.taps, self.tap_window = self.head.taps, draft_context
        self._drafts = FeatureDrafts(self.head, args.vocab_size, args.index)
        info = args.target.info
        self._none = torch.empty(0, len(self.taps) * info.hidden_size, device=info.device, dtype=info.dtype)

    def begin(self, contexts: Sequence[Context]) -> list[FeatureState]:
        return [self._state(context) for context in contexts]

    def _state(self, context: Context) -> FeatureState:
        known = of_prompt(context, self.taps, self.tap_window, self._none)
        return FeatureState(context, self.head.open(), TappedStates(len(context.tokens) - 1 - len(known), known))

    def propose(
        self, states: Sequence[FeatureState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        trees = [EMPTY_TREE] * len(states)
        steps = [
            min(budget.nodes, budget.depth, self.limit) if state.knows_its_text else 0
            for state, budget in zip(states, budgets, strict=True)
        ]
        active = [i for i, count in enumerate(steps) if count > 0]
        if active:
            found = self._draft([states[i] for i in active], [budgets[i] for i in active], [steps[i] for i in active])
            for i, tree in zip(active, found, strict=True):
                trees[i] = tree
        return trees

    def _draft(
        self, states: Sequence[FeatureState], budgets: Sequence[Budget], steps: Sequence[int]
    ) -> list[TokenTree]:
        each = list(zip(states, budgets, steps, strict=True))
        if self._chains:
            chains = [
                ChainDraft(state.context, count, budget.go_on, self._drawn(state)) for state, budget, count in each
            ]
            return self._drafts.chains(states, chains)
        growing = [self.policy.start(state, budget, count, drawn=self._drawn(state)) for state, budget, count in each]
        return self._drafts.trees(growing)

    def observe(
        self,
        states: Sequence[FeatureState],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        scores: Scores | None,
    ) -> None:
        """Take the target's states of the committed tokens."""
        for i, (state, verdict) in enumerate(zip(states, verdicts, strict=True)):
            found = of_pass(scores, i, verdict, self.taps)
            known = self._none if found is None else found
            state.states.add(known)
            if not state.knows_its_text:
                self._begin_anew(state, known)
            if self.tap_window is not None and state.states.count > self.tap_window + CHUNK:
                self._begin_anew(state, state.states.all()[-self.tap_window :].clone())

    def _begin_anew(self, state: FeatureState, known: torch.Tensor) -> None:
        """See the text from where its last states are known on."""
        self.head.truncate(state.cache, 0)
        state.states = TappedStates(len(state.context.tokens) - 1 - len(known), known)
        state.kept = 0

    def fork(self, state: FeatureState, context: Context) -> FeatureState:
        self._drafts.confirm(state)
        return FeatureState(context, self.head.fork(state.cache), state.states.copy())

    def end(self, states: Sequence[FeatureState]) -> None:
        for state in states:
            self.head.release(state.cache)

    @property
    def draws_tokens(self) -> bool:
        return self.method != "greedy" and not self.policy.points

    def _drawn(self, state: FeatureState) -> bool:
        return not self.policy.points and draws_for(state.context, self.method)

    def runners(self) -> Sequence[Runner]:
        return (cast(Runner, self.head.runner),)

    def held_bytes(self, tokens: int) -> int:
        """Of states that were not used up: of the window and what may wait behind it, and of what is drafted."""
        most = tokens if self.tap_window is None else min(tokens, self.tap_window + CHUNK)
        return most * self._none.shape[1] * self._none.itemsize


class Eagle2Drafter(EagleDrafter):
    """The same head as `eagle`, with the trees of EAGLE-2 where no other policy is named.

    Args:
        model, num_speculative_tokens, draft_sample_method, tree_policy, tree_width, tree_threshold,
            speculative_token_tree, draft_context: as for `eagle`.
    Raises:
        ConfigError, CheckpointError, CapabilityError: as there.
    """

    name = "eagle2"
    usual_policy = "eagle2"


class Eagle3Drafter(EagleDrafter):
    """Drafts with a head that reads several of the target's layers and predicts tokens alone.

    Args:
        model, num_speculative_tokens, draft_sample_method, tree_policy, tree_width, tree_threshold,
            speculative_token_tree, draft_context: as for `eagle`; `tree_policy` "eagle2" makes the paper's trees.
    Raises:
        ConfigError, CheckpointError, CapabilityError: as there.
    """

    name = "eagle3"
    heads = ("eagle3",)
