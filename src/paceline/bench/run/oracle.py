"""The acceptance dial: drafts of known worth, the true continuation with each token wrong by a chosen probability.

Trees of the dial are grown by a draft model's own tree policies over candidates whose worth is known, so that policies
can be compared without a draft model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt
import torch

from paceline.drafters import Context, DrafterArgs
from paceline.drafters.common import SingleDrafter, chain_tree
from paceline.drafters.growth import MAX_WIDTH, GrowthOptions, TreePolicy, growth_policy, with_tree_options
from paceline.errors import DrafterError
from paceline.tree import EMPTY_TREE, ROOT, Budget, TokenTree, always_go_on
from paceline.utils import need, number

if TYPE_CHECKING:
    from paceline.drafters import Context
    from paceline.drafters.growth import Growth

_MASK: Final = 2**64 - 1
_WEYL: Final = 0x9E3779B97F4A7C15
_CHANCE: Final = 0xD1342543DE82EF95
KEPT: Final = 256
"""Most grown trees that are kept."""
NEVER_ACCEPTED: Final = 2**31


class Known(NamedTuple):
    """A sequence with its record, of which `done` tokens are part of the text; `key` names its prompt in the noise."""

    context: Context
    record: Sequence[int]
    done: int
    key: int


class Place(NamedTuple):
    """Names a node whose children are guessed.

    Attributes:
        noise: 64 bits. position: of the children in the record; -1 off its path.
        chance: of the first candidate. right: rank of the true token, on the record's path.
    """

    noise: int
    position: int
    chance: float
    right: int


@dataclass(frozen=True, slots=True)
class Noise:
    """What is right and what is told, as a function of (key, path).

    Attributes:
        acceptance: mean chance of a node's first candidate. spread: how far chances differ from node to node, 0..1.
        confidence: what is told instead of the chance; None tells the truth.
    """

    acceptance: float
    spread: float
    confidence: float | None
    vocab_size: int

    @property
    def alike(self) -> bool:
        """Whether the same is told of all nodes."""
        return self.spread == 0.0 or self.confidence is not None

    def on(self, key: int, position: int) -> Place:
        """The node on the record's path whose true child is at `position`."""
        noise = mix(key ^ mix(position + _WEYL))
        chance, luck = self._chance(noise), _unit(noise)
        if luck < chance:
            return Place(noise, position, chance, 0)
        return Place(
            noise,
            position,
            chance,
            max(int(math.log1p(-luck) / math.log1p(-chance)), 1) if chance > 0.0 else NEVER_ACCEPTED,
        )

    def below(self, place: Place, rank: int, key: int) -> Place:
        """The node of the candidate of this rank."""
        if place.position >= 0 and rank == place.right:
            return self.on(key, place.position + 1)
        noise = mix(place.noise ^ mix(rank + _WEYL))
        return Place(noise, -1, self._chance(noise), NEVER_ACCEPTED)

    def told(self, place: Place) -> float:
        """Confidence given to a node's first candidate."""
        return place.chance if self.confidence is None else self.confidence

    def token(self, place: Place, rank: int, record: Sequence[int]) -> int:
        """The candidate of this rank: the true token, or one that differs from it and from the others, uniformly."""
        if place.position < 0:
            return (mix(place.noise) + rank) % self.vocab_size
        true = record[place.position]
        if rank == place.right or self.vocab_size < 2:
            return true
        return (true + 1 + (mix(place.noise) + rank) % (self.vocab_size - 1)) % self.vocab_size

    def chain(self, key: int, record: Sequence[int], done: int, steps: int) -> tuple[list[int], list[float]]:
        """The first candidates of the record's next `steps` places, and what is told of them."""
        if self.spread == 0.0:
            tokens = [self._first(key, done + i, true) for i, true in enumerate(record[done : done + steps])]
            return tokens, [self.acceptance if self.confidence is None else self.confidence] * steps
        places = [self.on(key, done + i) for i in range(steps)]
        return [self.token(place, 0, record) for place in places], [self.told(place) for place in places]

    def _first(self, key: int, position: int, true: int) -> int:
        """`token` of rank 0 where all places are alike, in half the time."""
        noise = mix(key ^ mix(position + _WEYL))
        if _unit(noise) < self.acceptance or self.vocab_size < 2:
            return true
        return (true + 1 + mix(noise) % (self.vocab_size - 1)) % self.vocab_size

    def _chance(self, noise: int) -> float:
        mean, spread = self.acceptance, self.spread
        return mean + spread * min(mean, 1.0 - mean) * (2.0 * _unit(mix(noise ^ _CHANCE)) - 1.0) if spread else mean


class _Grown(NamedTuple):
    """A tree of ranks, and the questions that it asked: (level, chance that it is reached)."""

    tree: TokenTree
    asked: tuple[tuple[int, float], ...]


class OracleTrees:
    """Grows the trees of one policy.

    Args:
        source: index of the drafter.
    """

    def __init__(self, policy: TreePolicy, noise: Noise, source: int) -> None:
        self.policy, self.noise, self.source = policy, noise, source
        self._ranks_k = torch.arange(min(MAX_WIDTH, max(noise.vocab_size - 1, 1)), dtype=torch.float32)
        self._kept: dict[tuple[Any, ...], _Grown] = {}

    def tree(self, known: Known, budget: Budget, depth: int) -> TokenTree:
        """A tree within a budget of at least one node, of at most `depth` levels, no deeper than the record goes."""
        root = self.noise.on(known.key, known.done)
        if self.noise.alike:
            ranks = self._alike(known, budget, depth, self.noise.told(root))
        else:
            ranks = self._differing(known, budget, depth, root)
        return self._named(ranks, root, known) if len(ranks) else EMPTY_TREE

    def _alike(self, known: Known, budget: Budget, depth: int, told: float) -> TokenTree:
        """The kept tree for these limits, stopped at the level that the controller denies."""
        grown = self._kept_tree(known, budget, depth, NEVER_ACCEPTED, told)
        if budget.go_on is not always_go_on:
            for level, reach in grown.asked:
                if not budget.go_on(level, reach, None):
                    return self._kept_tree(known, budget, depth, level, told).tree
        return grown.tree

    def _kept_tree(self, known: Known, budget: Budget, depth: int, stop: int, told: float) -> _Grown:
        key = budget.nodes, depth, stop, None if budget.shape is None else budget.shape.columns().tobytes()
        grown = self._kept.get(key)
        if grown is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            grown = self._kept[key] = self._grown_once(known, budget, depth, stop, told)
        return grown

    def _grown_once(self, known: Known, budget: Budget, depth: int, stop: int, told: float) -> _Grown:
        asked: list[tuple[int, float]] = []

        def go_on(level: int, reach: float, features: object) -> bool:
            asked.append((level, reach))
            return level < stop

        growth = self._start(known, budget, depth)
        growth.go_on = go_on
        row_k = self._row([told])
        _grow(growth, lambda front: row_k.expand(len(front), -1))
        tree = growth.tree(self.source)
        return _Grown(tree.replace(confidence=_chances(tree, [told] * len(tree))), tuple(asked))

    def _differing(self, known: Known, budget: Budget, depth: int, root: Place) -> TokenTree:
        """A tree over the chances of each node's own."""
        growth, places, noise = self._start(known, budget, depth), {ROOT: root}, self.noise

        def rows(front: Sequence[int]) -> torch.Tensor:
            for node in front:
                if node not in places:
                    places[node] = noise.below(places[growth.parents[node]], growth.tokens[node], known.key)
            return self._row([noise.told(places[node]) for node in front])

        _grow(growth, rows)
        return growth.tree(self.source)

    def _start(self, known: Known, budget: Budget, depth: int) -> Growth:
        """An empty tree."""
        return self.policy.start(known, budget, depth, drawn=False)

    def _row(self, told: Sequence[float]) -> torch.Tensor:
        """(front, k) log-weights of the ranks."""
        steps = [max(math.log1p(-chance), -1e4) if chance < 1.0 else -1e4 for chance in told]
        return torch.tensor(steps).unsqueeze(1) * self._ranks_k

    def _named(self, ranks: TokenTree, root: Place, known: Known) -> TokenTree:
        """The tree with tokens in place of ranks, and the truth about nodes that differ."""
        noise, parents, numbers = self.noise, ranks.parents.tolist(), ranks.tokens.tolist()
        places, tokens, told = {ROOT: root}, [], []
        for parent, rank in zip(parents, numbers, strict=True):
            place = places.get(parent)
            if place is None:
                place = places[parent] = noise.below(places[parents[parent]], numbers[parent], known.key)
            tokens.append(noise.token(place, rank, known.record))
            told.append(place.chance)
        chances = ranks.confidence if noise.alike else _chances(ranks, told)
        if ranks.is_chain:
            return chain_tree(tokens, chances.tolist(), self.source)
        return ranks.replace(tokens=np.array(tokens, np.int32), confidence=chances)


def _grow(growth: Growth, rows: Callable[[Sequence[int]], torch.Tensor]) -> None:
    while growth.front:
        growth.expand(rows(growth.front))


def _chances(ranks: TokenTree, told: Sequence[float]) -> npt.NDArray[np.float32]:
    """(n,) what is told of each node, by that of its parent's first candidate: a row of finitely many ranks sums to
    less than 1.
    """
    told_n = np.array(told, np.float64)
    chances_n: npt.NDArray[np.float32] = (told_n * (1.0 - told_n) ** ranks.tokens).astype(np.float32)
    return chances_n


def mix(value: int) -> int:
    """SplitMix64's finaliser (Steele et al., 2014)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key_of(seed: int, tokens: Sequence[int]) -> int:
    """64 bits that name a prompt under a seed."""
    state = mix(seed + _WEYL)
    for token in tokens:
        state = mix((state ^ token) + _WEYL)
    return state


def _unit(noise: int) -> float:
    """A number in [0, 1)."""
    return (noise >> 11) * 2.0**-53


Continuations = Mapping[tuple[int, ...], Sequence[int]]


class RecordedState:
    """A sequence with its record, which begins at token `start` of the text; `key` names its prompt in the noise;
    `followed` tokens of the record are known to be accepted.
    """

    __slots__ = ("context", "followed", "key", "record", "start")

    def __init__(self, context: Context, record: Sequence[int], start: int, key: int, followed: int = 0) -> None:
        self.context, self.record, self.start, self.key, self.followed = context, record, start, key, followed


@with_tree_options
class CorruptedOracleDrafter(SingleDrafter[RecordedState]):
    """Drafts the recorded continuation with mistakes.

    Args:
        continuations: what plain decoding generated: {prompt token ids as a tuple: continuation}. Prompts without a
            record get no drafts.
        acceptance: chance that a drafted token is the recorded one, 0..1.
        confidence: what it says of every first candidate, 0..1; None tells the truth (`acceptance`, if `spread` is 0).
        spread: how far chances differ from place to place, evenly around `acceptance`: 1 reaches 0 or 1, whichever is
            nearer.
        seed: of the mistakes.
        num_speculative_tokens: most tokens to propose; None leaves it to the budget.
        tree_policy, tree_width, tree_threshold, speculative_token_tree: how trees grow, as for `draft_model`; chains
            without them. The second candidate is right with `acceptance` of what the first leaves, and so on.
    Raises:
        DrafterError: no continuations.
        ConfigError: a value outside its range, an option that the policy does not have.
    """

    name = "corrupted_oracle"

    def __init__(
        self,
        args: DrafterArgs,
        *,
        continuations: Any = None,
        acceptance: float = 0.8,
        confidence: float | None = None,
        spread: float = 0.0,
        seed: int = 0,
        **growth: Unpack[GrowthOptions],
    ) -> None:
        if continuations is None:
            raise DrafterError(
                "corrupted_oracle needs 'continuations', a record of plain decoding; `paceline bench` makes one"
            )
        known = isinstance(continuations, Mapping) and all(isinstance(prompt, tuple) for prompt in continuations)
        need(known, "continuations", "be a mapping from tuples of token ids to token ids", continuations)
        number("acceptance", acceptance, 0.0, 1.0, "be in 0..1")
        if confidence is not None:
            number("confidence", confidence, 0.0, 1.0, "be in 0..1")
        number("spread", spread, 0.0, 1.0, "be in 0..1")
        need(isinstance(seed, int) and not isinstance(seed, bool), "seed", "be an integer", seed)
        super().__init__(args, growth.get("num_speculative_tokens"))
        self.records: Continuations = continuations
        self._lengths = sorted({len(prompt) for prompt in self.records}, reverse=True)
        self.seed = seed
        self.noise = Noise(
            float(acceptance), float(spread), None if confidence is None else float(confidence), self.vocab_size
        )
        policy = growth_policy(growth)
        self._trees = None if policy.name == "chain" else OracleTrees(policy, self.noise, self.index)

    def _begin(self, context: Context) -> RecordedState:
        """The record with the longest prompt that the text begins with; the noise is keyed by that prompt."""
        for length in self._lengths:
            prompt = tuple(context.tokens[:length])
            if len(prompt) == length and prompt in self.records:
                return RecordedState(context, self.records[prompt], length, key_of(self.seed, prompt))
        return RecordedState(context, (), len(context.tokens), 0)

    def fork(self, state: RecordedState, context: Context) -> RecordedState:
        return RecordedState(context, state.record, state.start, state.key, state.followed)

    def end(self, states: Sequence[RecordedState]) -> None:
        for state in states:
            state.record = ()

    def _propose(self, state: RecordedState, budget: Budget) -> TokenTree:
        steps, done = self._steps(budget), len(state.context.tokens) - state.start
        steps = min(steps, len(state.record) - done)
        if steps <= 0 or not _follows(state, done):
            return EMPTY_TREE
        if self._trees is not None:
            budget = budget if budget.nodes <= self.limit else replace(budget, nodes=self.limit)
            return self._trees.tree(Known(state.context, state.record, done, state.key), budget, steps)
        tokens, told = self.noise.chain(state.key, state.record, done, steps)
        return TokenTree.chain(tokens, confidence=told, source=self.index)


def _follows(state: RecordedState, done: int) -> bool:
    """Whether the output so far is the record's; what was compared once is not compared again."""
    start = state.start
    if list(state.record[state.followed : done]) != state.context.tokens[start + state.followed : start + done]:
        state.record = ()
        return False
    state.followed = done
    return True
