"""Exact enumeration: run a random program once per branch of its decisions and add up the probabilities.

The program makes its decisions through `Choices` (a drafter's draws) and `EnumeratingDraws` (a verifier's); the
distribution of its result has no sampling noise. Meant for vocabularies of 3 to 6 tokens, in float64.

    distribution = enumerate_distribution(lambda choices: coin + choices.choose([0.5, 0.5]))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import product
from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from paceline.tree import PROBE, TokenTree, Verdict
from paceline.verifiers import Verifier

T = TypeVar("T", bound=Hashable)
Tokens = tuple[int, ...]
Target = Callable[[Tokens], npt.NDArray[np.float64]]
"""The tokens after the root -> (v,) probabilities of the next one."""
Distribution = dict[Tokens, float]


class Choices:
    """The decisions of one run: follows a script of outcomes, then takes the first possible outcome of every new
    decision.
    """

    def __init__(self, script: Sequence[int]) -> None:
        self._script = list(script)
        self.made: list[tuple[int, list[float]]] = []

    def choose(self, probabilities: Sequence[float]) -> int:
        """An outcome of a decision with these probabilities; impossible outcomes are not explored."""
        distribution = [float(p) for p in probabilities]
        position = len(self.made)
        taken = (
            self._script[position]
            if position < len(self._script)
            else next((i for i, p in enumerate(distribution) if p > 0), 0)
        )
        self.made.append((taken, distribution))
        return taken

    @property
    def probability(self) -> float:
        """Of the run so far."""
        return prod(distribution[taken] for taken, distribution in self.made)

    def next_script(self) -> list[int] | None:
        """The script of the next run in depth-first order, None after the last."""
        for position in range(len(self.made) - 1, -1, -1):
            taken, distribution = self.made[position]
            for other in range(taken + 1, len(distribution)):
                if distribution[other] > 0:
                    return [*(t for t, _ in self.made[:position]), other]
        return None


def enumerate_distribution(program: Callable[[Choices], T]) -> dict[T, float]:
    """The exact distribution of a program's result. The program must depend on nothing but its choices."""
    distribution: defaultdict[T, float] = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        choices = Choices(script)
        result = program(choices)
        distribution[result] += choices.probability
        script = choices.next_script()
    return dict(distribution)


class EnumeratingDraws:
    """`Draws` for one sequence in one step, whose decisions are enumerated.

    Gumbel noise belongs to a depth: the same row at the same depth gives the same token again. A rule that would reuse
    the noise of one decision for another one (two rows at a depth) is not enumerable and fails an assertion. A coin
    belongs to a trial at a depth: asked with another probability it is the same number in 0..1, held against that.
    """

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._known: dict[tuple[object, ...], tuple[list[float], int]] = {}
        self._coins: dict[tuple[int, int], tuple[float, float]] = {}  # between which numbers the coin is known to lie

    def gumbel(self, depth: int, weights_v: torch.Tensor) -> int:
        return self._decide(("gumbel", depth), torch.softmax(weights_v.double(), 0).tolist())

    def bernoulli(self, depth: int, trial: int, probability: float) -> bool:
        assert 0.0 <= probability <= 1.0, f"a coin with probability {probability}"
        low, high = self._coins.get((depth, trial), (0.0, 1.0))
        if not low < probability < high:
            return probability >= high
        below = (probability - low) / (high - low)
        heads = self._choices.choose([below, 1.0 - below]) == 0
        self._coins[depth, trial] = (low, probability) if heads else (probability, high)
        return heads

    def categorical(self, depth: int, probabilities_v: torch.Tensor) -> int:
        return self._decide(("categorical", depth), probabilities_v.tolist())

    def _decide(self, key: tuple[object, ...], distribution: list[float]) -> int:
        if key in self._known:
            before, taken = self._known[key]
            assert before == distribution, f"the noise of {key} was used for another decision before"
            return taken
        taken = self._choices.choose(distribution)
        self._known[key] = (distribution, taken)
        return taken


def paths_of(tree: TokenTree) -> list[Tokens]:
    """The tokens after the root that lead to the root and to each node, node included."""
    return [(), *(tuple(int(tree.tokens[i]) for i in tree.path(node)) for node in range(len(tree)))]


def rows_of(tree: TokenTree, target: Target) -> torch.Tensor:
    """(1 + n, v) float64 log-weights of the target at the root and the nodes; rows of probes are NaN: nobody may read
    them.
    """
    with np.errstate(divide="ignore"):
        rows = np.stack([np.log(target(path)) for path in paths_of(tree)])
    rows[1:][tree.kinds == PROBE] = np.nan
    return torch.from_numpy(rows)


def output_distribution(
    verifier: Verifier, propose: Callable[[Choices], TokenTree], target: Target, length: int
) -> Distribution:
    """Distribution of the first `length` tokens written by one verified tree, completed by the target's own draws."""

    def step(choices: Choices) -> Tokens:
        tree = propose(choices)
        (verdict,) = verifier.verify([tree], [rows_of(tree, target)], [EnumeratingDraws(choices)])
        assert isinstance(verdict, Verdict), verdict
        return verdict.tokens

    distribution: defaultdict[Tokens, float] = defaultdict(float)
    for tokens, probability in enumerate_distribution(step).items():
        for text, share in target_distribution(target, length, tokens[:length]).items():
            distribution[text] += probability * share
    return dict(distribution)


def target_distribution(target: Target, length: int, start: Tokens = ()) -> Distribution:
    """Distribution of `length` tokens by plain decoding, given that they begin with `start`."""
    distribution: Distribution = {}
    vocabulary = range(len(target(())))
    for rest in product(vocabulary, repeat=length - len(start)):
        text, probability = start + rest, 1.0
        for position in range(len(start), length):
            probability *= float(target(text[:position])[text[position]])
        distribution[text] = probability
    return distribution


def distance(distribution: Distribution, other: Distribution) -> float:
    """Largest difference of the two probabilities of any text."""
    return max(abs(distribution.get(text, 0.0) - other.get(text, 0.0)) for text in distribution.keys() | other.keys())
