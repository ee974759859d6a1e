"""Trees for the acceptance dial: a draft model's tree policies, grown over candidates whose worth is known, and its
noise.

In: a policy, limits, a record of what the target says. Out: trees of points. Not here: finding the record
(`corrupted_oracle`), how trees grow (`tree_policies`).

Trees grow over ranks: a row holds the chance that the true token is the candidate of rank 0, 1, ..., which is all that
a policy looks at. With chance a at a node, rank 0 has a, rank 1 has a of the rest, and so on, so that rank r has a (1 -
a)^r. Then the ranks become tokens. On the record's path the rank of the true token is drawn from these very chances,
once for all, by (seed, prompt, position); everything else is noise by (seed, prompt, path). Where all nodes have the
same chances, limits alone decide what grows, so it is grown once and kept, with the questions that it asks on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from paceline.drafters.common import chain_tree
from paceline.drafters.growth import MAX_WIDTH, TreePolicy
from paceline.tree import EMPTY_TREE, ROOT, Budget, TokenTree, always_go_on

if TYPE_CHECKING:
    from paceline.drafters import Context
    from paceline.drafters.common import DraftState
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
    """A node whose children are guessed.

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
        """What is said of a node's first candidate."""
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
        """The kept tree for these limits, stopped at the level that the controller refuses."""
        grown = self._kept_tree(known, budget, depth, NEVER_ACCEPTED, told)
        if budget.go_on is not always_go_on:
            for level, reach in grown.asked:
                if not budget.go_on(level, reach, None):
                    return self._kept_tree(known, budget, depth, level, told).tree
        return grown.tree

    def _kept_tree(self, known: Known, budget: Budget, depth: int, stop: int, told: float) -> _Grown:
        key = budget.nodes, depth, stop, None if budget.shape is None else budget.shape.columns().tobytes()
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            found = self._kept[key] = self._grown_once(known, budget, depth, stop, told)
        return found

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
        """An empty tree; of a draft's state, trees of points read the context alone."""
        return self.policy.start(cast("DraftState", known), budget, depth, drawn=False)

    def _row(self, told: Sequence[float]) -> torch.Tensor:
        """(front, k) log-weights of the ranks."""
        steps = [max(math.log1p(-one), -1e4) if one < 1.0 else -1e4 for one in told]
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
