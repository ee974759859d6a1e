"""Random targets and random drafters over tiny vocabularies, for exact enumeration and bit tests.

The trees of a drafter mix everything that a token tree may hold: point and drawn trials, with and without replacement,
equal draws, probes, chains and branches. All that it decides besides its own draws is a
function of what came before.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from tools.enumerate_draws import Choices, Target, Tokens

from paceline.tree import CANDIDATE, PROBE, ROOT, TokenTree, Trial

Weights = npt.NDArray[np.float64]


def random_distribution(rng: np.random.Generator, vocabulary: int, zeros: float = 0.2) -> Weights:
    """Probabilities of which some are exactly 0 and some are close to 1."""
    weights = rng.gamma(rng.choice([0.3, 1.0, 5.0]), size=vocabulary) + 1e-6
    weights[rng.random(vocabulary) < zeros] = 0.0
    if not weights.any():
        weights[rng.integers(vocabulary)] = 1.0
    return np.asarray(weights / weights.sum())


def random_target(seed: int, vocabulary: int, zeros: float = 0.2) -> Target:
    """A target that depends on all tokens after the root."""

    @cache
    def target(path: Tokens) -> Weights:
        return random_distribution(np.random.default_rng([seed, 1, *path]), vocabulary, zeros)

    return target


class RandomDrafter:
    """Proposes one tree per run; calling it makes its draws through `Choices`.

    Args:
        seed: fixes all but the draws.
        vocabulary: number of tokens.
        depth: most levels.
        draws: most drawn trials of a tree, which keeps the enumeration small.
    """

    def __init__(self, seed: int, vocabulary: int, *, depth: int = 3, draws: int = 4, nodes: int = 9) -> None:
        self.seed, self.vocabulary, self.depth, self.draws, self.nodes = seed, vocabulary, depth, draws, nodes
        self._plans: dict[Tokens, tuple[list[tuple[bool, Weights, bool, int]], bool]] = {}

    def __call__(self, choices: Choices) -> TokenTree:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._kinds: list[int] = []
        self._left = self.draws
        trials: dict[int, list[Trial]] = {}
        queue: list[tuple[int, Tokens]] = [(ROOT, ())]
        while queue:
            parent, path = queue.pop(0)
            made = self._grow(parent, path, choices)
            if any(trial.drawn for trial in made):
                trials[parent] = made
            if len(path) + 1 < self.depth:
                queue += [(node, (*path, self._tokens[node])) for node in dict.fromkeys(trial.node for trial in made)]
        return TokenTree.build(self._tokens, self._parents, kinds=self._kinds, trials=trials)

    def _grow(self, parent: int, path: Tokens, choices: Choices) -> list[Trial]:
        """The trials at one parent: how many, of which kind and from which row is fixed by the path to it."""
        planned, probes = self._planned(path)
        trials: list[Trial] = []
        for point, distribution, remove, token in planned:
            if len(self._tokens) >= self.nodes:
                break
            if point:
                trials.append(Trial(self._node(parent, token)))
            elif self._left > 0:
                tried = {self._tokens[trial.node] for trial in trials} if remove else set()
                removed = tuple(sorted(tried))
                q = distribution.copy()
                q[list(removed)] = 0.0
                if q.sum() > 0:
                    self._left -= 1
                    drawn = self._node(parent, choices.choose(list(q / q.sum())))
                    trials.append(Trial(drawn, torch.from_numpy(distribution), removed))
        if probes:
            self._add_probe(parent, trials)
        return (
            trials
            if any(trial.drawn for trial in trials)
            else [Trial(n) for n in dict.fromkeys(t.node for t in trials)]
        )

    def _planned(self, path: Tokens) -> tuple[list[tuple[bool, Weights, bool, int]], bool]:
        """Of each trial: a point or not, its row, without those before or not, its token; and whether a probe comes."""
        if path not in self._plans:
            rng = np.random.default_rng([self.seed, 2, *path])
            rows = [random_distribution(rng, self.vocabulary) for _ in range(2)]
            trials = [
                (rng.random() < 0.4, rows[rng.integers(2)], rng.random() < 0.5, int(rng.integers(self.vocabulary)))
                for _ in range(int(rng.choice([0, 1, 2, 3], p=[0.1, 0.35, 0.35, 0.2])))
            ]
            self._plans[path] = trials, rng.random() < 0.3
        return self._plans[path]

    def _node(self, parent: int, token: int, kind: int = CANDIDATE) -> int:
        for node, known in enumerate(zip(self._parents, self._tokens, strict=True)):
            if known == (parent, token):
                return node
        self._tokens.append(token)
        self._parents.append(parent)
        self._kinds.append(kind)
        return len(self._tokens) - 1

    def _add_probe(self, parent: int, trials: list[Trial]) -> None:
        free = sorted(set(range(self.vocabulary)) - {self._tokens[trial.node] for trial in trials})
        if free:
            self._node(self._node(parent, free[0], PROBE), free[0], PROBE)
