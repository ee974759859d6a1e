"""Walks a chain by the exact rule, and past drafts that it rejects where a relaxed rule keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from paceline.errors import NumericsError
from paceline.tree import TokenTree, Trial, Verdict
from paceline.verifiers.base import before_bad_row, chain_of, sample
from paceline.verifiers.recursive_rejection import match, probabilities_of, proposal, reject

if TYPE_CHECKING:
    import torch

    from paceline.verifiers.base import Draws, Rows


@dataclass(slots=True)
class JudgedChain:
    """A chain of drafts with the rows behind them.

    Attributes:
        trials: from the root down. tokens: theirs.
        rows_nv: log-weights, the root's first. draws: of the exact rule.
    """

    trials: Sequence[Trial]
    tokens: Sequence[int]
    rows_nv: Rows
    draws: Draws
    _rows: dict[int, torch.Tensor] = field(default_factory=dict)
    _exact: dict[int, tuple[int | None, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.trials)

    def row(self, place: int) -> torch.Tensor:
        """(v,) log-weights of the token at a place, looked up once."""
        if place not in self._rows:
            self._rows[place] = self.rows_nv[self.trials[place - 1].node + 1 if place else 0]
        return self._rows[place]

    def exact(self, place: int) -> tuple[int | None, int]:
        """What the exact rule says at a place: the accepted node or None, the token.

        Raises:
            NumericsError: its row holds no distribution.
        """
        if place not in self._exact:
            rule = reject if self.trials[place].drawn else match
            one = slice(place, place + 1)
            self._exact[place] = rule(self.trials[one], self.tokens[one], self.row(place), self.draws, place)
        return self._exact[place]

    def possible(self, place: int) -> torch.Tensor | None:
        """(v,) the target's probabilities, where it gives the draft at a place a chance, and so does the row that the
        draft comes from; else None.
        """
        p_v, token = probabilities_of(self.row(place), place), self.tokens[place]
        likely = float(proposal(self.trials[place], token, p_v)[token]) > 0.0 and float(p_v[token]) > 0.0
        return p_v if likely else None


def walk_past(
    rule: str, tree: TokenTree, rows_nv: Rows, draws: Draws, keeps: Callable[[JudgedChain, int], bool]
) -> Verdict:
    """The verdict on a chain whose rejected drafts stand where `keeps` says so of a place.

    Args:
        rule: `acceptance_method`, for errors.
    Raises:
        CapabilityError: a position has several proposals.
        NumericsError: the root's row holds no distribution.
    """
    trials = chain_of(tree, rule)
    nodes = [trial.node for trial in trials]
    tokens = [int(tree.tokens[node]) for node in nodes]
    chain, kept, departures = JudgedChain(trials, tokens, rows_nv, draws), 0, list[int]()
    try:
        while kept < len(chain):
            node, token = chain.exact(kept)
            if node is None:
                if not keeps(chain, kept):
                    break
                departures.append(kept)
            kept += 1
        else:
            token = sample(draws, kept, chain.row(kept))
    except NumericsError:
        if kept:
            return replace(before_bad_row(nodes[:kept], tokens[:kept]), departures=tuple(departures))
        raise
    return Verdict(tuple(nodes[:kept]), tuple(tokens[:kept]), token, tuple(departures))
