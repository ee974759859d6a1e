"""Exact verification of a token tree at any temperature: sample-and-match for points, recursive rejection for draws.

At a parent whose trials are all points the target's token z is drawn first and looked up among the children
(multi-draft verification of point masses is the same in distribution), with noise keyed by position: any tree of points
gives the very tokens of plain decoding. A parent with a drawn trial tries its children in order, each against what the
failures before it have left of p.

Notation follows Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318): p is the target, q
the drafter, r the residual. Several trials: SpecInfer (arXiv:2305.09781); without replacement: recursive speculative
decoding (arXiv:2402.14160).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from paceline.errors import NumericsError
from paceline.tree import ROOT, TokenTree, Trial, Verdict
from paceline.verifiers.base import Verifier, bad_row, before_bad_row, sample, verify_each

if TYPE_CHECKING:
    from paceline.verifiers.base import Draws, Rows


Decide = Callable[[Sequence[Trial], Sequence[int], torch.Tensor, "Draws", int], tuple[int | None, int]]
"""Trials at a parent, their tokens, the parent's row, draws, depth -> (the accepted child or None, the token)."""


class PlaceByPlace(Verifier):
    """Base of the rules that decide at one parent after the other."""

    row_by_row = True

    @staticmethod
    @abstractmethod
    def decide(
        trials: Sequence[Trial], tokens: Sequence[int], weights_v: torch.Tensor, draws: Draws, depth: int
    ) -> tuple[int | None, int]:
        """The rule at a parent with a drawn trial: (the accepted child or None, the token).

        Raises:
            NumericsError: the row holds NaN, +infinity or nothing but -inf.
        """

    def verify(
        self, trees: Sequence[TokenTree], rows: Sequence[Rows], draws: Sequence[Draws]
    ) -> list[Verdict | NumericsError]:
        """See `Verifier.verify`."""
        return verify_each(partial(walk, self.decide), trees, rows, draws)


def walk(decide: Decide, tree: TokenTree, rows_nv: Rows, draws: Draws) -> Verdict:
    """Descend from the root, deciding by `decide` at parents with a drawn trial and by `match` at all others.

    Raises:
        NumericsError: the root's row holds NaN, +infinity or nothing but -inf.
    """
    path: list[int] = []
    accepted: list[int] = []
    node: int | None = ROOT
    while node is not None:
        trials = tree.trials_of(node) if len(tree) else ()
        rule = decide if any(trial.drawn for trial in trials) else match
        try:
            node, token = rule(
                trials, [int(tree.tokens[trial.node]) for trial in trials], rows_nv[node + 1], draws, len(path)
            )
        except NumericsError:
            if path:
                return before_bad_row(path, accepted)
            raise
        if node is not None:
            path.append(node)
            accepted.append(token)
    return Verdict(tuple(path), tuple(accepted), token)


def match(
    trials: Sequence[Trial], tokens: Sequence[int], weights_v: torch.Tensor, draws: Draws, depth: int
) -> tuple[int | None, int]:
    """Sample-and-match over point trials: (the child that the target's token is or None, that token).

    Raises:
        NumericsError: the row holds NaN, +infinity or nothing but -inf.
    """
    token = sample(draws, depth, weights_v)
    return (trials[tokens.index(token)].node if token in tokens else None), token


def reject(
    trials: Sequence[Trial], tokens: Sequence[int], weights_v: torch.Tensor, draws: Draws, depth: int
) -> tuple[int | None, int]:
    """Recursive rejection over a list that may mix drawn and point trials: (the accepted child or None, the token).

    A trial x is accepted with probability min(1, r(x) / q(x)), q(x) = 1 for points. A drawn trial that its own q calls
    impossible (q(x) is 0 or NaN) breaks the drafter's contract and is passed over.

    Raises:
        NumericsError: the row holds NaN, +infinity or nothing but -inf.
    """
    r_v = probabilities_of(weights_v, depth)
    for number, (trial, token) in enumerate(zip(trials, tokens, strict=True)):
        q_v = proposal(trial, token, r_v)
        r_x, q_x = torch.stack((r_v[token], q_v[token])).tolist()
        if not q_x > 0.0:
            continue
        if draws.bernoulli(depth, number, acceptance(r_x, q_x)):
            return trial.node, token
        r_v = residual(r_v, q_v)
    return None, draws.categorical(depth, r_v)


def departures_at(tree: TokenTree, verdict: Verdict, rows_nv: Rows, draws: Draws) -> tuple[int, ...]:
    """Places in the tokens of a verdict, its last one included, where exact verification with the same draws, by rows
    of the target's own, would have given another token behind the tokens before it.

    Args:
        rows_nv: not those that the verdict was made of.
    """
    found: list[int] = []
    for place, (parent, token) in enumerate(zip((ROOT, *verdict.path), verdict.tokens, strict=True)):
        trials = tree.trials_of(parent) if len(tree) else ()
        rule = reject if any(trial.drawn for trial in trials) else match
        tokens = [int(tree.tokens[trial.node]) for trial in trials]
        if rule(trials, tokens, rows_nv[parent + 1], draws, place)[1] != token:
            found.append(place)
    return tuple(found)


def departures_of(tree: TokenTree, path: Sequence[int], rows_nv: Rows, draws: Draws) -> tuple[int, ...]:
    """Places of an accepted path at which exact verification with the same draws would not have gone that way.

    Args:
        path: of nodes whose parents' rows hold distributions.
    """
    found: list[int] = []
    for place, (parent, node) in enumerate(zip((ROOT, *path), path, strict=False)):
        trials = tree.trials_of(parent)
        rule = reject if any(trial.drawn for trial in trials) else match
        tokens = [int(tree.tokens[trial.node]) for trial in trials]
        if rule(trials, tokens, rows_nv[parent + 1], draws, place)[0] != node:
            found.append(place)
    return tuple(found)


def probabilities_of(weights_v: torch.Tensor, depth: int) -> torch.Tensor:
    """(v,) p, the softmax of a row of log-weights, in float64 where the row is float64, else in float32.

    Raises:
        NumericsError: the row holds NaN, +infinity or nothing but -inf.
    """
    p_v = torch.softmax(weights_v, 0, dtype=torch.float64 if weights_v.dtype == torch.float64 else torch.float32)
    if math.isnan(float(p_v[0])):  # softmax spreads one bad entry over its row
        raise bad_row(float(weights_v.max()), depth)
    return p_v


def proposal(trial: Trial, token: int, like_v: torch.Tensor) -> torch.Tensor:
    """(v,) q of a trial in the dtype and on the device of `like_v`.

    All mass on `token` for a point, else its row without what was removed before the draw, normalised.
    """
    if trial.row is None:
        q_v = torch.zeros_like(like_v)
        q_v[token] = 1.0
        return q_v
    q_v = trial.row.to(like_v)
    if trial.removed:
        q_v = q_v.index_fill(0, torch.tensor(trial.removed, device=q_v.device), 0.0)
    return q_v / q_v.sum()


def acceptance(r_x: float, q_x: float) -> float:
    """Chance that a trial is accepted."""
    return min(1.0, r_x / q_x)


def residual(r_v: torch.Tensor, q_v: torch.Tensor) -> torch.Tensor:
    """norm(max(r - q, 0)): what is left of r after a trial from q has failed.

    Where nothing is left, r and q are equal up to rounding and the trial failed by rounding alone; r is then returned
    as it is. Either way no token gets mass that has none in r, and so none that p forbids.
    """
    rest_v = (r_v - q_v).clamp_(min=0.0)
    mass = float(rest_v.sum())
    return rest_v.div_(mass) if mass > 0.0 else r_v


class RecursiveRejection(PlaceByPlace):
    """The exact verifier above temperature 0."""

    name = "rejection_sampler"
    decide = staticmethod(reject)
