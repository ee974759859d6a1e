"""SWIFT: the target drafts for itself without some of its attention and MLP sub-layers, chosen while it decodes.

In: contexts with their caches. Out: chains of the thinned target, or trees around them. Not here: which set is tried
next (`skip_search`), passes over past tokens (`skip_replay`), trees cut by confidence (controller "swift").

A set's *matchness* is the share of the last `context_window` generated tokens that the thinned target would have said,
in one pass over them. As long as the search goes on, one set is tried in every step, for one of a tenant's sequences.
What it found holds for all texts of the tenant; each text measures it once on tokens of its own, which may begin the
search again.

Side branches all hang off the main chain: trees for a drafter that looks at one token a level.

Source: SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration (arXiv:2410.06916).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.draft_options import SampleMethod
from paceline.drafters.common.draft_rows import best_tokens
from paceline.drafters.common.tables import MAX_TENANTS
from paceline.drafters.self.base import Asked, SelfDrafter, SelfState, Way
from paceline.drafters.self.skip_replay import has_room, replayed
from paceline.drafters.self.skip_search import SearchRules, SkipSearch
from paceline.drafters.self.skip_sets import SubLayers, choices, count_of, plan_of
from paceline.errors import CapabilityError, ConfigError
from paceline.models.decoder import MOST_PLANS, LayerPlan
from paceline.tree import Budget, TokenTree
from paceline.utils import integer, number


class SwiftState(SelfState):
    """One sequence.

    Attributes:
        search: of its tenant. replays: how often its tokens were replayed. seen: its length when they last were.
    """

    __slots__ = ("replays", "search", "seen")

    def __init__(self, context: Context, search: SkipSearch) -> None:
        super().__init__(context)
        self.search, self.replays, self.seen = search, 0, 0


class SwiftDrafter(SelfDrafter[SwiftState]):
    """Drafts with the target less a share of its sub-layers.

    Args:
        skip_ratio: share of the sub-layers between the first and the last layer that is left out.
        draft_stop_threshold: nothing is drafted behind a token that is less likely than this.
        draft_max_length: most tokens of a draft.
        context_window: generated tokens that a set is judged by; the search waits for them.
        stop_score: the search ends when a set has this matchness.
        max_search_steps: sets that are tried at most.
        search_patience: the search ends when so many sets in a row were no better.
        bayes_every: every so many steps the set comes from a Gaussian process; the others are random.
        search_seed: of the random sets.
        tree_width: candidates of a level, where tokens are not drawn: above 1, others are verified beside each of the
            chain's. The paper keeps 10 and lets the chain's confidence choose among them, as controller "swift" does.
        num_speculative_tokens: most tokens to draft, within `draft_max_length`; None leaves it to that.
        draft_sample_method: above temperature 0, "probabilistic" draws from the thinned target's distribution, "greedy"
        takes
            its most likely tokens. By default it draws, but for requests with a seed of their own.
    Raises:
        ConfigError: a value outside its range; a share that comes to no sub-layer.
        CapabilityError: a target whose layers cannot be run alone, or that has none between the first and the last.
    """

    name = "swift"
    shares_state = True

    def __init__(
        self,
        args: DrafterArgs,
        *,
        skip_ratio: float = 0.45,
        draft_stop_threshold: float = 0.8,
        draft_max_length: int = 25,
        context_window: int = 32,
        stop_score: float = 0.95,
        max_search_steps: int = 1000,
        search_patience: int = 300,
        bayes_every: int = 25,
        search_seed: int = 0,
        tree_width: int = 1,
        num_speculative_tokens: int | None = None,
        draft_sample_method: SampleMethod | None = None,
    ) -> None:
        super().__init__(args, num_speculative_tokens=num_speculative_tokens, draft_sample_method=draft_sample_method)
        number("skip_ratio", skip_ratio, 0.0, 1.0, "be above 0 and at most 1", open_low=True)
        number("draft_stop_threshold", draft_stop_threshold, 0.0, 1.0, "be in 0..1")
        number("stop_score", stop_score, 0.0, 1.0, "be in 0..1")
        for option, value, low in (
            ("draft_max_length", draft_max_length, 1),
            ("context_window", context_window, 1),
            ("max_search_steps", max_search_steps, 0),
            ("search_patience", search_patience, 1),
            ("bayes_every", bayes_every, 1),
            ("search_seed", search_seed, 0),
            ("tree_width", tree_width, 1),
        ):
            integer(option, value, low)
        self.layers, self.tree_width = self.target.info.num_layers, self._width(tree_width)
        self.count = self._count(skip_ratio)
        self.window, self.seed = context_window, search_seed
        self.rules = SearchRules(stop_score, max_search_steps, search_patience, bayes_every)
        self._steps_most, self._least = draft_max_length, draft_stop_threshold
        self._searches: OrderedDict[str, SkipSearch] = OrderedDict()
        self._plans: dict[SubLayers, LayerPlan] = {}

    def propose(
        self, states: Sequence[SwiftState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        """Try a set for each tenant that still searches, then draft."""
        ready: dict[int, SwiftState] = {}
        for state, budget in zip(states, budgets, strict=True):
            if budget.nodes > 0 and budget.depth > 0 and self._is_ready(state):
                other = ready.setdefault(id(state.search), state)
                if state.replays < other.replays:
                    ready[id(state.search)] = state
        for state in ready.values():
            self._try(state)
        return super().propose(states, budgets, so_far)

    def fork(self, state: SwiftState, context: Context) -> SwiftState:
        """The copy's text has been measured as far as the original's has."""
        copy = SwiftState(context, state.search)
        copy.replays, copy.seen = state.replays, state.seen
        return copy

    def search_of(self, tenant: str) -> SkipSearch:
        """The search that a tenant's texts share."""
        found = self._searches.get(tenant)
        if found is None:
            found = self._searches[tenant] = SkipSearch(self.layers, self.count, self.rules, self.seed)
            while len(self._searches) > MAX_TENANTS:
                self._searches.popitem(last=False)
        self._searches.move_to_end(tenant)
        return found

    def matchness(self, state: SwiftState, skipped: SubLayers) -> float:
        """Share of the last `context_window` tokens of the text that the target without these sub-layers would have
        said.
        """
        text = state.context.tokens
        start = len(text) - 1 - self.window
        states = replayed(self.target, self.drafts, state.cache, start, text[start:-1], plan=plan_of(skipped))
        said = self.drafts.best(states)
        return sum(mine == own for mine, own in zip(said, text[start + 1 :], strict=True)) / len(said)

    def _state(self, context: Context) -> SwiftState:
        return SwiftState(context, self.search_of(context.tenant))

    def _way(self, state: SwiftState) -> Way:
        """One plan object for each set that was ever the best: what is compiled for it is kept with it."""
        best_tokens = state.search.best
        plan = self._plans.get(best_tokens)
        if plan is None:
            plan = self._plans[best_tokens] = plan_of(best_tokens)
            if len(self._plans) > MOST_PLANS:
                del self._plans[next(iter(self._plans))]
        return Way(plan, self._steps_most, self._least)

    def _steps(self, context: Context, budget: Budget, way: Way) -> int:
        """Levels that leave room for the candidates beside the chain."""
        steps = super()._steps(context, budget, way)
        return min(steps, max(1, budget.nodes // self.tree_width)) if self._branches(context) else steps

    def _branches(self, context: Context) -> bool:
        """Whether other candidates are verified beside the chain's."""
        return self.tree_width > 1 and context.shape is None and not self.draws(context)

    def _add(self, asked: Sequence[Asked], logits: torch.Tensor) -> None:
        """The next token of every chain, and the candidates beside it."""
        for one, row in zip(asked, logits.split(1), strict=True) if self.tree_width > 1 else ():
            if self._branches(one.state.context):
                (tokens,), (chances,) = best_tokens(row, self.tree_width)
                one.levels.append((tokens, chances))
                one.chain.add(tokens[0], chances[0])
            else:
                super()._add([one], row)
        if self.tree_width == 1:
            super()._add(asked, logits)

    def _tree(self, asked: Asked) -> TokenTree:
        """A chain, or a tree around it."""
        return branched(asked.levels, asked.budget.nodes, self.index) if asked.levels else super()._tree(asked)

    def _is_ready(self, state: SwiftState) -> bool:
        """Whether a set is to be tried on this text: it has enough tokens of its own, and they were not all looked at
        before.
        """
        context, length = state.context, len(state.context.tokens)
        if self.rules.max_steps < 1 or (state.replays and state.search.done):
            return False
        return length - context.prompt_length >= self.window and length > state.seen and has_room(self.target, length)

    def _try(self, state: SwiftState) -> None:
        """The first replay of a text is the best set's, the others' are new ones'."""
        search, first = state.search, state.replays == 0
        skipped = search.best if first else search.next()
        score = self.matchness(state, skipped)
        state.replays, state.seen = state.replays + 1, len(state.context.tokens)
        if first:
            search.measured(score)
        else:
            search.tell(skipped, score)

    def _width(self, width: int) -> int:
        """Candidates of a level, where the runner scores trees."""
        info = self.target.info
        if width > 1 and not self.target.capabilities.trees:
            raise CapabilityError(
                f"tree_width must be 1, since the runner of {info.name} scores chains only, got {width}"
            )
        return width

    def _count(self, ratio: float) -> int:
        """Sub-layers to leave out."""
        if not choices(self.layers):
            raise CapabilityError(
                f"method 'swift' leaves out sub-layers between the first and the last layer, but "
                f"{self.target.info.name} has {self.layers} layers; use another method"
            )
        count = count_of(self.layers, ratio)
        if count < 1:
            raise ConfigError(
                f"skip_ratio must be at least {1 / len(choices(self.layers)):.3g}, one of {len(choices(self.layers))} "
                f"sub-layers, got {ratio:g}"
            )
        return count


def branched(levels: Sequence[tuple[Sequence[int], Sequence[float]]], nodes: int, source: int) -> TokenTree:
    """The chain of the best tokens, and of the others as many as there is room for, those with most chance of being
    reached first.

    Args:
        levels: per level tokens and their chances after the best tokens of the levels before. nodes: most nodes, at
            least as many as levels.
    """
    tokens = [own[0] for own, _ in levels]
    chances = [own[0] for _, own in levels]
    parents, reach = list(range(-1, len(levels) - 1)), 1.0
    beside: list[tuple[float, int, int, float]] = []
    for parent, (own, each) in enumerate(levels, -1):
        beside += [
            (reach * chance, parent, token, chance)
            for token, chance in zip(own[1:], each[1:], strict=True)
            if chance > 0.0
        ]
        reach *= each[0]
    beside.sort(key=lambda one: (-one[0], one[1], one[2]))
    for _, parent, token, chance in beside[: nodes - len(levels)]:
        tokens.append(token)
        parents.append(parent)
        chances.append(chance)
    return TokenTree.build(tokens, parents, confidence=chances, sources=source)
