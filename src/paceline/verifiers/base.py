"""What a verifier is: decides which drafted tokens are accepted, and draws the target's own next token.

Notation follows Leviathan et al. 2023 (arXiv:2211.17192): p is the target, q the drafter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from paceline.errors import NumericsError

if TYPE_CHECKING:
    import torch

    from paceline.tree import Scores, TokenTree, Verdict

R = TypeVar("R")


class Draws(Protocol):
    """The only source of randomness of a verifier, for one sequence in one step; tests replace it by enumeration.

    `depth` counts from 0 (the token after the root); implementations key their noise by (request seed, position of that
    token), so equal positions get equal noise whatever the tree. `trial` keeps several decisions at one position apart.
    """

    def gumbel(self, depth: int, weights_v: torch.Tensor) -> int:
        """argmax(log p + Gumbel noise) of float32 log-weights (v,).

        A draw from softmax(weights_v), the same for all trees.
        """

    def bernoulli(self, depth: int, trial: int, probability: float) -> bool:
        """True with the given probability."""

    def categorical(self, depth: int, probabilities_v: torch.Tensor) -> int:
        """An index drawn from float32 probabilities (v,) that sum to 1."""


class Rows(Protocol):
    """Log-weights of a tree by row, the root's first.

    A tensor (1 + n, v), or something that makes a row when it is looked at.
    """

    def __getitem__(self, row: int, /) -> torch.Tensor:
        """(v,) of one row."""


class Verifier(ABC):
    """A rule for a batch of sequences, each with its own tree; every verifier derives from it.

    Attributes:
        name: what logs call it.
        row_by_row: it asks its `rows` for single rows alone (`Rows`), once each: rules are then applied to rows that it
            reaches and not to the others.
    """

    name: str
    row_by_row: bool = False

    @abstractmethod
    def verify(
        self, trees: Sequence[TokenTree], rows: Sequence[torch.Tensor], draws: Sequence[Draws]
    ) -> list[Verdict | NumericsError]:
        """One entry per sequence: its verdict, or the error that ends it (and only it).

        The entry is a NumericsError where the root's row holds NaN, +infinity or nothing but -inf. Such a row further
        down the accepted path ends the path before it (`before_bad_row`); rows off that path and rows of probes may
        hold anything.

        Args:
            trees: one per sequence, EMPTY_TREE for plain decoding.
            rows: per sequence (1 + n, v) log-weights after all rules, the root first (softmax gives p; -inf is
                forbidden). For the greedy verifier they are logits of any floating dtype of which only the argmax
                counts; the others compute in float32, or in float64 where the rows are float64.
            draws: one source per sequence.
        """


class ArgmaxVerifier(Verifier):
    """A rule that looks at the best token of each row alone, so that it can judge all rows of a pass at once."""

    @abstractmethod
    def verify_scores(self, trees: Sequence[TokenTree], scores: Scores) -> list[Verdict | NumericsError]:
        """`verify` of all rows of a pass, to which no rules are to be applied."""


def verify_each(
    rule: Callable[[TokenTree, R, Draws], Verdict],
    trees: Sequence[TokenTree],
    rows: Sequence[R],
    draws: Sequence[Draws],
) -> list[Verdict | NumericsError]:
    """Apply a rule to every sequence of a batch; a NumericsError that it raises becomes that sequence's entry."""
    verdicts: list[Verdict | NumericsError] = []
    for tree, rows_nv, source in zip(trees, rows, draws, strict=True):
        try:
            verdicts.append(rule(tree, rows_nv, source))
        except NumericsError as error:
            verdicts.append(error)
    return verdicts


def before_bad_row(path: Sequence[int], accepted: Sequence[int]) -> Verdict:
    """The verdict on an accepted path whose last node has a row that holds no distribution.

    All accepted tokens stay, the last one as the target's own, which it is: it becomes the root, and the next step,
    like plain decoding, meets the bad row there.
    """
    from paceline.tree import Verdict

    return Verdict(tuple(path[:-1]), tuple(accepted[:-1]), accepted[-1])


def sample(draws: Draws, depth: int, weights_v: torch.Tensor) -> int:
    """The target's own token at `depth`: what plain decoding with the same keys gives.

    Raises:
        NumericsError: the row holds NaN, +infinity or nothing but -inf.
    """
    token = draws.gumbel(depth, weights_v)
    if not math.isfinite(value := float(weights_v[token])):
        raise bad_row(value, depth)
    return token


def bad_row(largest: float, depth: int) -> NumericsError:
    """The error for a row whose largest entry is not finite."""
    where = f" at depth {depth} of a draft" if depth else ""
    if largest == -math.inf:
        return NumericsError(
            f"no token is allowed{where}: every logit is -inf; loosen the sampling rules, or check the checkpoint"
        )
    kind = "NaN" if math.isnan(largest) else "infinity"
    return NumericsError(
        f"the model returned {kind} among its logits{where}; check the checkpoint, or try dtype='float32'"
    )
