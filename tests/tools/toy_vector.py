"""The multi-draft toy vector: one p, one q, two drafts, and how every rule verifies them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tools.enumerate_draws import (
    Choices,
    EnumeratingDraws,
    distance,
    enumerate_distribution,
    output_distribution,
    rows_of,
    target_distribution,
)

from paceline.tree import ROOT, GroupTrial, TokenTree, Trial, Verdict

Weights = npt.NDArray[np.float64]
Propose = Callable[[Choices], TokenTree]
P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])


def drawn(q: Weights, drafts: int, *, replacement: bool, points: tuple[int, ...] = (), group: bool = False) -> Propose:
    """Draws from q below `points`; q is taken without the points, and without earlier draws unless there is
    replacement.
    """
    row = torch.from_numpy(q)

    def propose(choices: Choices) -> TokenTree:
        tokens: list[int] = list(points)
        trials = [Trial(i) for i in range(len(points))]
        for _ in range(drafts):
            removed = points if replacement else tuple(tokens)
            left = q.copy()
            left[list(removed)] = 0.0
            if not left.sum() > 0:
                break
            token = choices.choose(list(left / left.sum()))
            if token not in tokens:
                tokens.append(token)
            node = tokens.index(token)
            trials.append(GroupTrial(node, row, removed, group=drafts) if group else Trial(node, row, removed))
        return TokenTree.build(tokens, [ROOT] * len(tokens), trials={ROOT: trials})

    return propose


def acceptance_rate(verifier: Any, propose: Propose, p: Weights = P) -> float:
    """Chance that a child of the root stands."""

    def stands(choices: Choices) -> bool:
        tree = propose(choices)
        (verdict,) = verifier.verify([tree], [rows_of(tree, lambda path: p)], [EnumeratingDraws(choices)])
        assert isinstance(verdict, Verdict)
        return bool(verdict.path)

    return enumerate_distribution(stands).get(True, 0.0)


def flat_error(verifier: Any, propose: Propose, p: Weights = P) -> float:
    """Distance of the output distribution from p, over two tokens."""
    return distance(output_distribution(verifier, propose, lambda path: p, 2), target_distribution(lambda path: p, 2))
