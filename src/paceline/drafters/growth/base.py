"""Growing trees: the nodes under construction, the children of a node one after the other, and one forward pass a
round for the whole batch. Which nodes are wanted next is a policy's own (`levels`, `sampled`, `dyspec`); what scores
them is given: a draft model (`model_scores`), a trained head, or anything else that has a row for every node.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch

from paceline.drafters.common.draft_rows import best_tokens, chances_of, draw_for, fit_rows, weights
from paceline.drafters.common.draft_state import FEW, DraftState, catch_up
from paceline.tree import EMPTY_TREE, ROOT, GoOn, TokenTree, Trial, chain_columns, chain_sources, select_nodes

if TYPE_CHECKING:
    from paceline.drafters.base import Context
    from paceline.models import Runner

Found = tuple[int, float, Trial | None]


class HasContext(Protocol):
    """Says what policies need of a drafter's state."""

    @property
    def context(self) -> Context: ...


class FedState(HasContext, Protocol):
    """The state of a drafter that scores nodes by a model with a cache.

    Attributes:
        fed_tokens, fed_parents: inputs in the cache's scratch, with the positions of their parents.
        pending: what must be fed before the first node.
    """

    fed_tokens: list[int]
    fed_parents: list[int]

    @property
    def pending(self) -> list[int]: ...


class Siblings(Protocol):
    """Gives the children of one node, one after the other.

    Attributes:
        share: of the chance that the node is reached, what the next child may still win; it never grows.
    """

    share: float

    def take(self, node: int) -> Found | None:
        """The next child, to be node number `node`: token, its raw probability, its trial if drawn.

        None if none is left.
        """


class DrawnSiblings:
    """Draws without replacement; `share` is what the tokens drawn so far leave of the row.

    Source: DySpec (arXiv:2410.11744); recursive rejection without replacement (arXiv:2402.14160). How many tokens are
    drawn may depend on those drawn before, which token comes next on the draw alone.
    """

    __slots__ = ("_context", "_removed", "_row_v", "share")

    def __init__(self, context: Context, row_v: torch.Tensor) -> None:
        self._context, self._row_v, self.share = context, row_v, 1.0
        self._removed: tuple[int, ...] = ()

    def take(self, node: int) -> Found | None:
        """See `Siblings`. `node` is the number of the draw."""
        drawn = draw_for(self._context, self._row_v, self._removed, node)
        if drawn is None:
            self.share = 0.0
            return None
        token, chance = drawn
        trial = Trial(node, self._row_v, self._removed, order=node)
        self._removed = (*self._removed, token)
        self.share = max(self.share - chance, 0.0)
        return token, chance, trial


class RankedSiblings:
    """Takes tokens by probability; `share` is the probability of the next one, 0 where there is none."""

    __slots__ = ("_chances", "_taken", "_tokens", "share")

    def __init__(self, tokens: Sequence[int], chances: Sequence[float]) -> None:
        self._tokens, self._chances, self._taken = tokens, chances, 0
        self.share = chances[0] if chances else 0.0

    def take(self, node: int) -> Found | None:
        """See `Siblings`."""
        index = self._taken
        if not self.share > 0.0:
            return None
        self._taken += 1
        self.share = self._chances[index + 1] if index + 1 < len(self._chances) else 0.0
        return self._tokens[index], self._chances[index], None


def siblings_of(context: Context, weights_fv: torch.Tensor, *, drawn: bool, most: int) -> list[Siblings]:
    """One family per row of log-weights (f, v); a row that allows no token has one without children.

    Args:
        most: most children that any of them will need.
    Raises:
        DrafterError: NaN in a row.
    """
    if drawn:
        return [DrawnSiblings(context, row_v) for row_v in chances_of(weights_fv)]
    return [RankedSiblings(*row) for row in zip(*best_tokens(weights_fv, most), strict=True)]


@dataclass(slots=True)
class Growth(ABC):
    """Grows one tree, front by front.

    Attributes:
        nodes, depth: limits. go_on: called before each level but the first. drawn: sample from q instead of choosing by
            rank.
        tokens, parents, confidence: of the nodes so far, parents first; reach: product of the confidences along a
            node's path; paths: tokens after the root up to and with the node.
        trials: parent -> drawn trials. fed: node -> its place among the inputs that were fed.
        front: nodes whose rows are wanted next; none when the tree is done.
        level: levels that have children or were asked for.
        ended: nodes that get no children, whatever their rows say.
    """

    state: HasContext
    nodes: int
    depth: int
    go_on: GoOn
    drawn: bool = False
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    reach: list[float] = field(default_factory=list)
    paths: list[tuple[int, ...]] = field(default_factory=list)
    trials: dict[int, list[Trial]] = field(default_factory=dict)
    fed: dict[int, int] = field(default_factory=dict)
    front: list[int] = field(default_factory=lambda: [ROOT])
    level: int = 0
    ended: set[int] = field(default_factory=set)

    @abstractmethod
    def expand(self, weights_fv: torch.Tensor) -> None:
        """Use the front's rows, log-weights (front, v) whose softmax is q, and choose the next front."""

    def rows(self, logits: torch.Tensor) -> torch.Tensor:
        """(front, v) log-weights under the request's rules; -inf alone behind nodes that have ended."""
        rows = weights(self.state.context, logits, [self.path_of(node) for node in self.front])
        ended = [i for i, node in enumerate(self.front) if node in self.ended]
        return rows.index_fill(0, torch.tensor(ended, device=rows.device), -torch.inf) if ended else rows

    def path_of(self, node: int) -> tuple[int, ...]:
        """Tokens after the root up to and with the node; none for ROOT."""
        return () if node == ROOT else self.paths[node]

    def reach_of(self, node: int) -> float:
        """Chance that the node is reached, by the draft's own probabilities."""
        return 1.0 if node == ROOT else self.reach[node]

    def add(self, parent: int, token: int, chance: float) -> int:
        """A new node, where its token has any chance; its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.confidence.append(chance)
        self.reach.append(self.reach_of(parent) * chance)
        self.paths.append((*self.path_of(parent), token))
        return len(self.tokens) - 1

    def take(self, parent: int, family: Siblings) -> int | None:
        """A new node for the next child of a family; its number, None if no child is left."""
        child = family.take(len(self.tokens))
        if child is None:
            return None
        token, chance, trial = child
        if trial is not None:
            self.trials.setdefault(parent, []).append(trial)
        return self.add(parent, token, chance)

    def last_level(self, first: int, least: float = 0.0) -> list[int]:
        """The nodes from `first` on, the last level, that are reached at all and with a chance of `least` or more.

        None where no further level is to come.
        """
        new = [node for node in range(first, len(self.tokens)) if self.reach[node] >= least and self.reach[node] > 0.0]
        if not new or self.level >= self.depth or len(self.tokens) >= self.nodes:
            return []
        return new if self.go_on(self.level + 1, max(self.reach[node] for node in new), None) else []

    def tree(self, source: int) -> TokenTree:
        """What was grown; of points, the nodes most likely reached."""
        if not self.tokens:
            return EMPTY_TREE
        trials = {parent: tuple(drawn_trials) for parent, drawn_trials in self.trials.items()}
        tree = TokenTree.build(self.tokens, self.parents, confidence=self.confidence, sources=source, trials=trials)
        return tree if self.drawn else select_nodes(tree, self.nodes)


@dataclass(slots=True)
class Ranked(Growth):
    """A tree of points that may grow beyond its limit, of which the nodes most likely reached stay in the end.

    Attributes:
        bar: nodes that are no more likely reached than this are not entered; 0 while there are fewer than the limit.
        largest: chances of the nodes that would stay, as a heap.
    """

    bar: float = 0.0
    largest: list[float] = field(default_factory=list)

    def enter(self, weights_fv: torch.Tensor, width: int) -> range:
        """Give the front those of their `width` likeliest children that may stay; the new nodes."""
        first = len(self.tokens)
        for parent, tokens, chances in zip(self.front, *best_tokens(weights_fv, width), strict=True):
            for token, chance in zip(tokens, chances, strict=True):
                if not self.reach_of(parent) * chance > self.bar:
                    break
                reach = self.reach[self.add(parent, token, chance)]
                if len(self.largest) < self.nodes:
                    heapq.heappush(self.largest, reach)
                else:
                    heapq.heapreplace(self.largest, reach)
                if len(self.largest) == self.nodes:
                    self.bar = self.largest[0]
        return range(first, len(self.tokens))


ScoreFronts = Callable[[Sequence[Growth]], Sequence[torch.Tensor]]
"""The rows (front, v) of each draft's front, logits over the target's tokens. Fronts are the root at first, and then
nodes whose parents were in an earlier one.
"""


def grow(score: ScoreFronts, drafts: Sequence[Growth], source: int) -> list[TokenTree]:
    """One tree per draft, a call of `score` a round."""
    active = [draft for draft in drafts if draft.front]
    while active:
        for draft, logits in zip(active, score(active), strict=True):
            draft.expand(draft.rows(logits))
        active = [draft for draft in active if draft.front]
    return [draft.tree(source) for draft in drafts]


def model_scores(runner: Runner, drafts: Sequence[Growth], vocab_size: int) -> ScoreFronts:
    """Scores by a draft model, whose caches first get what they lack of the texts.

    What was fed stays in the caches' scratch slots until the states are confirmed.

    Args:
        drafts: all that will be scored; their states are `DraftState`s. vocab_size: of the target.
    """
    catch_up(runner, [cast(DraftState, draft.state) for draft in drafts], FEW)
    return lambda active: [fit_rows(logits, vocab_size) for logits in _feed(runner, active)]


def _feed(runner: Runner, drafts: Sequence[Growth]) -> list[torch.Tensor]:
    """Score the fronts; (front, v) logits each."""
    states = [cast(DraftState, draft.state) for draft in drafts]
    inputs = [inputs_of(draft, state) for draft, state in zip(drafts, states, strict=True)]
    computed = [len(state.fed_tokens) for state in states]
    for state in states:
        state.fed_tokens, state.fed_parents = [], []
    trees = [as_tree(tokens[1:], [p - 1 for p in parents[1:]]) for tokens, parents in inputs]
    roots = [tokens[0] for tokens, _ in inputs]
    scores = runner.score([state.cache for state in states], roots, trees, computed=computed)
    logits = []
    for i, (draft, state, (tokens, parents)) in enumerate(zip(drafts, states, inputs, strict=True)):
        state.fed_tokens, state.fed_parents = tokens, parents
        logits.append(scores.of(i)[-len(draft.front) :])
    return logits


def inputs_of(draft: Growth, state: FedState) -> tuple[list[int], list[int]]:
    """All inputs with their parents' positions: those fed before and the front, or at first what is pending."""
    if draft.front == [ROOT]:
        tokens = state.pending
        draft.fed[ROOT] = len(tokens) - 1
        return tokens, list(range(-1, len(tokens) - 1))
    tokens, parents = list(state.fed_tokens), list(state.fed_parents)
    for node in draft.front:
        draft.fed[node] = len(tokens)
        tokens.append(draft.tokens[node])
        parents.append(draft.fed[draft.parents[node]])
    return tokens, parents


def as_tree(tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
    """Inputs below the first as a tree for the runner.

    What `TokenTree.build` makes, without its checks, which take a tenth of a level's time.
    """
    n, depths = len(tokens), np.empty(len(tokens), np.int32)
    for i, parent in enumerate(parents):
        depths[i] = 1 if parent < 0 else depths[parent] + 1
    kinds = chain_columns(n).kinds
    confidence = np.full(n, 0.5, np.float32)
    return TokenTree(
        np.array(tokens, np.int32), np.array(parents, np.int32), depths, chain_sources(n, 0), confidence, kinds
    )
