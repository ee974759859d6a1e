"""Block verification: the drafted tokens of a chain are verified together, not one by one. Exact, and never worse.

A *run* is a chain of drawn tokens x_1..x_m below a node. With p_0 = 1 and p_i = min(1, p_{i-1} p(x_i) / q(x_i)), the
run is accepted up to its last token i that passes a coin of chance h_i: p_m at the end, and before it R / (R + 1 -
p_i), where R is the mass of max(p_i p - q, 0) over the next token. A run that ends before its last token goes on with a
draw from that rest. The chance to accept at least i tokens is then p_i, which no exact rule exceeds; one by one it
would be the product of the single chances.

The coins of a run look at positions that may be drafted and verified again in the next step, so all of them are keyed
by the run's first position, whose token this step decides.

Source: Block verification accelerates speculative decoding (arXiv:2403.10444), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch

from paceline.errors import CapabilityError, NumericsError
from paceline.tree import ROOT, TokenTree, Trial, Verdict
from paceline.verifiers.base import Verifier, before_bad_row, verify_each
from paceline.verifiers.recursive_rejection import match, probabilities_of, proposal

if TYPE_CHECKING:
    from paceline.verifiers.base import Draws, Rows


Position = tuple[torch.Tensor, torch.Tensor]
"""(v,) p at a position of a run, and its rest."""


class BlockVerification(Verifier):
    """Exact verification of drawn chains as wholes; points are verified as by `rejection_sampler`.

    Raises:
        CapabilityError: on a tree in which a position has a drawn proposal and another one.
    """

    name = "block_verification"
    row_by_row = True

    def verify(
        self, trees: Sequence[TokenTree], rows: Sequence[Rows], draws: Sequence[Draws]
    ) -> list[Verdict | NumericsError]:
        """See `Verifier.verify`."""
        for tree in trees:
            reject_branches(tree)
        return verify_each(_verdict, trees, rows, draws)


def reject_branches(tree: TokenTree) -> None:
    """Reject what is no chain of drawn proposals.

    Raises:
        CapabilityError: some position has a drawn proposal and another one.
    """
    for parent, trials in tree.trials.items():
        if len(trials) > 1 and any(trial.drawn for trial in trials):
            raise CapabilityError(
                f"block_verification verifies chains of drawn drafts, got a tree with {len(trials)} proposals below "
                f"{'its root' if parent == ROOT else f'node {parent}'}; draft chains (tree_width 1, one method), or "
                f"take "
                "acceptance_method 'rejection_sampler'"
            )


def _verdict(tree: TokenTree, rows_nv: Rows, draws: Draws) -> Verdict:
    """Descend run by run; a run that is accepted whole is followed by what lies below its last token."""
    path: list[int] = []
    tokens: list[int] = []
    node: int | None = ROOT
    row_of = cache(lambda node: rows_nv[node + 1])
    while node is not None:
        trials = tree.trials_of(node) if len(tree) else ()
        try:
            if any(trial.drawn for trial in trials):
                nodes, token = verify_run(tree, node, row_of, draws, len(path))
                node = nodes[-1] if token is None else None
            else:
                found = [int(tree.tokens[trial.node]) for trial in trials]
                node, token = match(trials, found, row_of(node), draws, len(path))
                nodes = [] if node is None else [node]
        except NumericsError:
            if path:
                return before_bad_row(path, tokens)
            raise
        path += nodes
        tokens += [int(tree.tokens[one]) for one in nodes]
    return Verdict(tuple(path), tuple(tokens), token)


def verify_run(
    tree: TokenTree, parent: int, row_of: Callable[[int], torch.Tensor], draws: Draws, depth: int
) -> tuple[list[int], int | None]:
    """The accepted nodes of the run below `parent`, and the token after them; None where the whole run is accepted.

    A run ends before a row that holds no distribution: which one that is depends on the tokens before it alone.

    Args:
        row_of: (v,) log-weights at a node.
        depth: of the run's first token.
    Raises:
        NumericsError: the row of `parent` holds NaN, +infinity or nothing but -inf.
    """
    nodes: list[int] = []
    reached = [1.0]
    positions: list[Position] = []
    trial = _drawn_child(tree, parent)
    while trial is not None:
        try:
            p_v = probabilities_of(row_of(nodes[-1] if nodes else parent), depth + len(nodes))
        except NumericsError:
            if nodes:
                break
            raise
        token = int(tree.tokens[trial.node])
        q_v = proposal(trial, token, p_v)
        p_x, q_x = torch.stack((p_v[token], q_v[token])).tolist()
        if not q_x > 0.0:  # the drafter broke its contract: the target goes on alone
            positions.append((p_v, p_v))
            break
        positions.append((p_v, rest_of(p_v, q_v, reached[-1])))
        reached.append(reach(reached[-1], p_x, q_x))
        nodes.append(trial.node)
        trial = _drawn_child(tree, trial.node)
    return _accepted_run(nodes, reached, positions, draws, depth)


def _accepted_run(
    nodes: list[int], reached: list[float], positions: list[Position], draws: Draws, depth: int
) -> tuple[list[int], int | None]:
    """Flip the coins from the last token back to the first, and draw from the rest where a run ends early.

    Args:
        nodes: (m). reached: p_0..p_m. positions: of tokens 1..m; with one more, that is what follows the whole run.
    """
    stop = len(nodes)
    while stop and not draws.bernoulli(depth, stop, _chance(stop, nodes, reached, positions)):
        stop -= 1
    if stop == len(positions):
        return nodes, None
    p_v, rest_v = positions[stop]
    mass = float(rest_v.sum())  # none where p and q are equal up to rounding
    return nodes[:stop], draws.categorical(depth + stop, rest_v / mass if mass > 0.0 else p_v)


def _chance(stop: int, nodes: list[int], reached: list[float], positions: list[Position]) -> float:
    return reached[stop] if stop == len(nodes) else stop_chance(float(positions[stop][1].sum()), reached[stop])


def _drawn_child(tree: TokenTree, parent: int) -> Trial | None:
    trials = tree.trials.get(parent, ())
    return trials[0] if trials and trials[0].drawn else None


def reach(before: float, p_x: float, q_x: float) -> float:
    """p_i: the chance that the run is accepted at least up to a token, given the run."""
    return min(1.0, before * p_x / q_x)


def rest_of(p_v: torch.Tensor, q_v: torch.Tensor, reached: float) -> torch.Tensor:
    """(v,) max(p_i p - q, 0), not normalised.

    What the target has at the next position beyond what longer acceptance gives it.
    """
    return (reached * p_v - q_v).clamp_(min=0.0)


def stop_chance(rest: float, reached: float) -> float:
    """h_i: the chance to stop at a token, given that no later one passed; `rest` is the mass of `rest_of`."""
    below = rest + (1.0 - reached)
    return rest / below if below > 0.0 else 1.0
