"""SWIFT: the target drafts for itself without some of its attention and MLP sub-layers, chosen while it decodes.

A set's *matchness* is the share of the last `context_window` generated tokens that the thinned target predicts, in one
pass over them. As long as the search goes on, one set is tried in every step, for one of a tenant's sequences. What it
found holds for all texts of the tenant; each text measures it once on tokens of its own, which may begin the search
again.

The search tries random sets, and every so often the one that a Gaussian process expects most of. It holds for many
texts: each measures the best set anew when it has a context of its own, and where that scores far less than before, the
texts are of another kind, and the search begins again from the set that it has.

Side branches all hang off the main chain: trees for a drafter that looks at one token a level.

Source: SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration (arXiv:2410.06916): process noise
0.01, upper bounds of 2.5 standard deviations, every 25th step. The kernel is Matern's of 5/2, as in the library that
its code uses.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import SampleMethod
from paceline.drafters.common.draft_rows import best_tokens, weights
from paceline.drafters.common.tables import MAX_TENANTS
from paceline.drafters.self.base import ActiveDraft, DraftPlan, SelfDrafter, SelfState
from paceline.drafters.self.skip_replay import has_room, replayed
from paceline.drafters.self.skip_sets import SubLayers, choices, count_of, first_set, plan_of, random_set
from paceline.errors import CapabilityError, ConfigError
from paceline.models import LayerPlan
from paceline.models.runners import MAX_PLANS
from paceline.tree import Budget, TokenTree
from paceline.utils import integer, number

Array = npt.NDArray[np.float64]
NOISE = 1e-2
KAPPA = 2.5
LENGTHS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Length scales that the process chooses from by likelihood; sets that differ by one exchange are sqrt(2) apart."""
KNOWN = 128
"""Latest scores that the process looks at, which bounds its cost."""
POOL = 256
"""Sets that it chooses from, half of them one exchange away from the best."""
TRIES = 16
"""Draws to find a set that was not tried yet."""
SHIFT = 0.2
"""A fall of the best set's score by more than this, on another text, begins the search again."""


@dataclass(frozen=True, slots=True)
class SearchRules:
    """Says how long a search goes on, and how.

    Attributes:
        stop_score: it ends when the best set scores this. max_steps: sets that it tries at most.
        patience: it ends when so many sets in a row were no better. bayes_every: steps from one set of the process to
            the next.
    """

    stop_score: float = 0.95
    max_steps: int = 1000
    patience: int = 300
    bayes_every: int = 25


class SkipSearch:
    """Searches over sets of `count` sub-layers.

    Args:
        seed: of its random sets.

    Attributes:
        best: the best set so far, at first every second layer. score: its score, below 0 before it was measured.
        steps: sets tried since the search began. idle: of these, those in a row that were no better. searches: times it
            began.
    """

    def __init__(self, layers: int, count: int, rules: SearchRules, seed: int = 0) -> None:
        self.layers, self.count, self.rules = layers, count, rules
        self.best, self.score = first_set(layers, count), -1.0
        self.steps, self.idle, self.searches = 0, 0, 1
        self._rng = np.random.default_rng((seed, layers, count))
        self._scores: dict[SubLayers, float] = {}
        self._all = math.comb(len(choices(layers)), count)

    @property
    def done(self) -> bool:
        """Whether to try no more sets on the texts at hand."""
        rules = self.rules
        spent = self.steps >= rules.max_steps or self.idle >= rules.patience or len(self._scores) >= self._all
        return spent or self.score >= rules.stop_score

    def next(self) -> SubLayers:
        """The set to try now, not tried yet if one is found."""
        due = self.steps > 0 and self.steps % self.rules.bayes_every == 0 and len(self._scores) > 1
        return self._promising() if due else self._new()

    def tell(self, skipped: SubLayers, score: float) -> None:
        """What a set that `next` gave scored, 0..1; kept if better."""
        self.steps += 1
        self.idle += 1
        self._note(skipped, score)
        if score > self.score:
            self.best, self.score, self.idle = skipped, score, 0

    def measured(self, score: float) -> None:
        """What the best set scores on another text."""
        if score < self.score - SHIFT:
            self.steps, self.idle, self.searches = 0, 0, self.searches + 1
            self._scores.clear()
        self.score = score
        self._note(self.best, score)

    def _note(self, skipped: SubLayers, score: float) -> None:
        self._scores.pop(skipped, None)
        self._scores[skipped] = score

    def _new(self) -> SubLayers:
        for _ in range(TRIES):
            skipped = random_set(self.layers, self.count, self._rng)
            if skipped not in self._scores:
                break
        return skipped

    def _promising(self) -> SubLayers:
        """The untried set with the highest upper bound."""
        near = [self._exchanged() for _ in range(POOL // 2)]
        far = [random_set(self.layers, self.count, self._rng) for _ in range(POOL // 2)]
        pool = [skipped for skipped in dict.fromkeys(near + far) if skipped not in self._scores]
        if not pool:
            return self._new()
        known = list(self._scores)[-KNOWN:]
        scores = np.array([self._scores[skipped] for skipped in known])
        bounds = upper_bounds(self._rows(known), scores, self._rows(pool))
        return pool[int(bounds.argmax())]

    def _exchanged(self) -> SubLayers:
        """The best set with one sub-layer exchanged for another."""
        inside = sorted(self.best)
        outside = sorted(set(choices(self.layers)) - self.best)
        if not outside:
            return self.best
        leaves, comes = inside[int(self._rng.integers(len(inside)))], outside[int(self._rng.integers(len(outside)))]
        return self.best - {leaves} | {comes}

    def _rows(self, sets: list[SubLayers]) -> Array:
        rows = np.zeros((len(sets), 2 * self.layers))
        for row, skipped in zip(rows, sets, strict=True):
            row[sorted(skipped)] = 1.0
        return rows


def upper_bounds(
    known: Array, scores: Array, candidates: Array, *, noise: float = NOISE, kappa: float = KAPPA
) -> Array:
    """Mean plus `kappa` standard deviations of a Gaussian process given scores.

    Args:
        known: (n, d) points. scores: (n,) there, n of 1 or more. candidates: (m, d) points. noise: variance of a score,
            as a share of the scores' variance.
    Returns:
        (m,) bounds, in units of the scores.
    """
    mean, scale = float(scores.mean()), float(scores.std()) or 1.0
    y = (scores - mean) / scale
    between, across = _distances(known, known), _distances(candidates, known)
    fits = [_fit(_matern(between / length) + noise * np.eye(len(y)), y) for length in LENGTHS]
    chosen = max(range(len(fits)), key=lambda i: fits[i][0])
    (_, root, half), length = fits[chosen], LENGTHS[chosen]
    weights = np.linalg.solve(root, _matern(across / length).T)
    spread = np.sqrt(np.maximum(1.0 - (weights**2).sum(0), 0.0))
    bounds: Array = mean + scale * (weights.T @ half + kappa * spread)
    return bounds


def _fit(covariance: Array, y: Array) -> tuple[float, Array, Array]:
    """Log likelihood of y up to a constant, the covariance's Cholesky factor, and y in its terms."""
    root = np.asarray(np.linalg.cholesky(covariance), np.float64)
    half = np.asarray(np.linalg.solve(root, y), np.float64)
    return -0.5 * float(half @ half) - float(np.log(np.diag(root)).sum()), root, half


def _distances(a: Array, b: Array) -> Array:
    """(n, m) Euclidean distances of rows of zeros and ones: roots of the numbers of positions that differ."""
    differing = a.sum(1)[:, None] + b.sum(1) - 2.0 * a @ b.T
    distances: Array = np.sqrt(np.maximum(differing, 0.0))
    return distances


def _matern(distance: Array) -> Array:
    """Matern's kernel of 5/2 at distances in units of its length."""
    x = math.sqrt(5.0) * distance
    likeness: Array = (1.0 + x + x * x / 3.0) * np.exp(-x)
    return likeness


class SwiftState(SelfState):
    """Keeps one sequence, with the search of its tenant.

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
        context_window: generated tokens that a set is measured on; the search waits for them.
        stop_score: the search ends when a set has this matchness.
        max_search_steps: sets that are tried at most.
        search_patience: the search ends when so many sets in a row were no better.
        bayes_every: every so many steps the set comes from a Gaussian process; the others are random.
        search_seed: of the random sets.
        tree_width: candidates of a level, where tokens are not drawn: above 1, others are verified beside each of the
            chain's. The paper keeps 10 and lets the chain's confidence choose among them, as controller "swift" does.
            Drawn drafts are chains, where the paper's reference keeps candidates too.
        num_speculative_tokens: most tokens to draft, within `draft_max_length`; None leaves it to that.
        draft_sample_method: above temperature 0, "probabilistic" draws from the thinned target's distribution, "greedy"
            takes its most likely tokens. By default it draws, but for requests with a seed of their own.
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
            self.try_next(state)
        return super().propose(states, budgets, so_far)

    def fork(self, state: SwiftState, context: Context) -> SwiftState:
        """The copy's text has been measured as far as the original's has."""
        copy = SwiftState(context, state.search)
        copy.replays, copy.seen = state.replays, state.seen
        return copy

    def search_of(self, tenant: str) -> SkipSearch:
        """The search that a tenant's texts share."""
        search = self._searches.get(tenant)
        if search is None:
            search = self._searches[tenant] = SkipSearch(self.layers, self.count, self.rules, self.seed)
            while len(self._searches) > MAX_TENANTS:
                self._searches.popitem(last=False)
        self._searches.move_to_end(tenant)
        return search

    def matchness(self, state: SwiftState, skipped: SubLayers) -> float:
        """Share of the last `context_window` tokens of the text that the target without these sub-layers predicts."""
        text = state.context.tokens
        start = len(text) - 1 - self.window
        states = replayed(self.drafts.runner, state.cache, start, text[start:-1], plan=plan_of(skipped))
        drafted = self.drafts.best(states)
        return sum(mine == token for mine, token in zip(drafted, text[start + 1 :], strict=True)) / len(drafted)

    def _state(self, context: Context) -> SwiftState:
        return SwiftState(context, self.search_of(context.tenant))

    def draft_plan(self, state: SwiftState) -> DraftPlan:
        """One plan object for each set that was ever the best: what is compiled for it is kept with it."""
        best_tokens = state.search.best
        plan = self._plans.get(best_tokens)
        if plan is None:
            plan = self._plans[best_tokens] = plan_of(best_tokens)
            if len(self._plans) > MAX_PLANS:
                del self._plans[next(iter(self._plans))]
        return DraftPlan(plan, self._steps_most, self._least)

    def _steps(self, context: Context, budget: Budget, draft_plan: DraftPlan) -> int:
        """Levels that leave room for the candidates beside the chain."""
        steps = super()._steps(context, budget, draft_plan)
        return min(steps, max(1, budget.nodes // self.tree_width)) if self._branches(context) else steps

    def _branches(self, context: Context) -> bool:
        """Whether other candidates are verified beside the chain's."""
        return self.tree_width > 1 and not self.draws(context)

    def _add(self, drafts: Sequence[ActiveDraft], logits: torch.Tensor) -> None:
        """The next token of every chain, and the candidates beside it."""
        for draft, row in zip(drafts, logits.split(1), strict=True) if self.tree_width > 1 else ():
            if self._branches(draft.state.context):
                rows = weights(draft.state.context, row, [draft.chain.tokens])
                (tokens,), (chances,) = best_tokens(rows, self.tree_width)
                draft.chain.add_best(tokens, chances)
                if tokens:
                    draft.levels.append((tokens, chances))
            else:
                super()._add([draft], row)
        if self.tree_width == 1:
            super()._add(drafts, logits)

    def _tree(self, draft: ActiveDraft) -> TokenTree:
        """A chain, or a tree around it."""
        return branched(draft.levels, draft.budget.nodes, self.index) if draft.levels else super()._tree(draft)

    def _is_ready(self, state: SwiftState) -> bool:
        """Whether a set is to be tried on this text: it has enough tokens of its own, and they were not all looked at
        before.
        """
        context, length = state.context, len(state.context.tokens)
        if self.rules.max_steps < 1 or (state.replays and state.search.done):
            return False
        return length - context.prompt_length >= self.window and length > state.seen and has_room(self.target, length)

    def try_next(self, state: SwiftState) -> None:
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
    tokens = [level[0] for level, _ in levels]
    chances = [level[0] for _, level in levels]
    parents, reach = list(range(-1, len(levels) - 1)), 1.0
    beside: list[tuple[float, int, int, float]] = []
    for parent, (level_tokens, level_chances) in enumerate(levels, -1):
        beside += [
            (reach * chance, parent, token, chance)
            for token, chance in zip(level_tokens[1:], level_chances[1:], strict=True)
            if chance > 0.0
        ]
        reach *= level_chances[0]
    beside.sort(key=lambda candidate: (-candidate[0], candidate[1], candidate[2]))
    for _, parent, token, chance in beside[: nodes - len(levels)]:
        tokens.append(token)
        parents.append(parent)
        chances.append(chance)
    return TokenTree.build(tokens, parents, confidence=chances, sources=source)
