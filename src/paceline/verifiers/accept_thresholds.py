"""Acceptance by thresholds on the target's probability alone, SGLang's rule: exact at thresholds of 1, approximate by
design below.

At a node with row p a coin u in 0..1 is drawn, and its children are looked at in their order, with P the sum of p over
them so far: a child is accepted if u <= P / acc, or if its own p >= single; the path goes on there with a new coin.
Where no child is accepted, the token is drawn from p without all of the children, by noise apart from the coin. Drafts
are judged by their tokens, equal ones once; from which distribution they were drawn does not count.

With both thresholds at 1 that draws a token from p and looks it up among the children. acc < 1 gives child i the chance
min(1, P_i / acc) - min(1, P_{i-1} / acc), up to 1 / acc times as much; single < 1 accepts every child that is likely
enough, wherever the coin fell. A departure is a child that the same coin would not have accepted at thresholds of 1.

Source: `--speculative-accept-threshold-single` and `--speculative-accept-threshold-acc` of SGLang (tree verification by
target probabilities alone).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from paceline.errors import NumericsError
from paceline.tree import ROOT, TokenTree, Verdict
from paceline.verifiers.base import Verifier, before_bad_row, sample, verify_each
from paceline.verifiers.recursive_rejection import probabilities_of

if TYPE_CHECKING:
    import torch

    from paceline.verifiers.base import Draws, Rows

LEAST: Final = 1e-9
"""The threshold on the sum is taken to be at least this."""

COIN: Final = 0
"""Number of the one coin of a node: equal numbers at one depth mean the same coin (`Draws.bernoulli`)."""


class AcceptThresholds(Verifier):
    """Accepts children by the target's probability alone, on trees too; at temperature 0 equal or reject decides.

    Args:
        speculative_accept_threshold_single: accepts every child of at least this probability.
        speculative_accept_threshold_acc: what the sum of the probabilities is divided by.
    """

    name = "accept_thresholds"
    row_by_row = True

    def __init__(
        self, speculative_accept_threshold_single: float = 1.0, speculative_accept_threshold_acc: float = 1.0
    ) -> None:
        self.single, self.acc = speculative_accept_threshold_single, max(speculative_accept_threshold_acc, LEAST)

    def verify(
        self, trees: Sequence[TokenTree], rows: Sequence[Rows], draws: Sequence[Draws]
    ) -> list[Verdict | NumericsError]:
        """See `Verifier.verify`."""
        return verify_each(self._verdict, trees, rows, draws)

    def _verdict(self, tree: TokenTree, rows_nv: Rows, draws: Draws) -> Verdict:
        path, accepted, departures = list[int](), list[int](), list[int]()
        node: int | None = ROOT
        while node is not None:
            children = list(dict.fromkeys(trial.node for trial in tree.trials_of(node))) if len(tree) else []
            tokens, weights_v, place = [int(tree.tokens[child]) for child in children], rows_nv[node + 1], len(path)
            try:
                taken, token, exact = self._decide(tokens, weights_v, draws, place)
            except NumericsError:
                if path:
                    return replace(before_bad_row(path, accepted), departures=tuple(departures))
                raise
            node = None if taken is None else children[taken]
            if node is not None:
                path.append(node)
                accepted.append(token)
                departures += [] if exact else [place]
        return Verdict(tuple(path), tuple(accepted), token, tuple(departures))

    def _decide(
        self, tokens: Sequence[int], weights_v: torch.Tensor, draws: Draws, depth: int
    ) -> tuple[int | None, int, bool]:
        """The number of the accepted child or None, the token, and whether thresholds of 1 would have it so.

        Raises:
            NumericsError: the row holds NaN, +infinity or nothing but -inf.
        """
        if not tokens:
            return None, sample(draws, depth, weights_v), True
        p_v, before = probabilities_of(weights_v, depth), 0.0
        for number, (token, p) in enumerate(zip(tokens, p_v[list(tokens)].tolist(), strict=True)):
            total = before + p
            if p > 0.0 and (p >= self.single or draws.bernoulli(depth, COIN, min(1.0, total / self.acc))):
                return number, token, self._is_exact(before, total, draws, depth)
            before = total
        p_v[list(tokens)] = 0.0
        return None, draws.categorical(depth, rest_of(p_v, weights_v, depth)), True

    def _is_exact(self, before: float, total: float, draws: Draws, depth: int) -> bool:
        """Whether the coin lies between the sums before and with a child."""
        if self.single >= 1.0 and self.acc >= 1.0:
            return True
        passes = draws.bernoulli(depth, COIN, min(1.0, total))
        return passes and not draws.bernoulli(depth, COIN, min(1.0, before))


def rest_of(left_v: torch.Tensor, weights_v: torch.Tensor, depth: int) -> torch.Tensor:
    """(v,) what is left of p without the children, normalised; p itself where rounding alone left no child accepted."""
    mass = float(left_v.sum())
    return left_v / mass if mass > 0.0 else probabilities_of(weights_v, depth)
