"""What a verifier is: decides which drafted tokens are accepted, and draws the target's own next token.

Notation follows Leviathan et al. 2023 (arXiv:2211.17192): p is the target, q the drafter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from paceline.errors import CapabilityError, NumericsError

if TYPE_CHECKING:
    import torch

    from paceline.checkpoints import Tokenizer
    from paceline.models import Runner
    from paceline.tree import Scores, TokenTree, Trial, Verdict
    from paceline.verifiers.reflection import Reflection

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
        """True with the given probability: one number in 0..1 for each depth and trial is below it."""

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
        reads_text: what it accepts depends on the text before the tree, which `after` tells it.
        chains_only: it judges chains alone; methods and settings that draft trees are rejected beside it.
        taps: the layer of the target whose states it wants, as `Scores.taps` counts them, which `seeing` tells it; none
            or one, once it is prepared.
        reflection: drafts are shown to the target twice in a pass, and the rule gets the logits mixed; None is once.
    """

    name: str
    row_by_row: bool = False
    chains_only: bool = False
    reads_text: bool = False
    reflection: Reflection | None = None
    taps: Sequence[int] = ()

    def prepare(self, runner: Runner, tokenizer: Tokenizer | None) -> None:  # noqa: B027  # most need nothing
        """Fit the rule to the model whose rows it will judge, before the first step.

        Raises:
            PacelineError: a model that it cannot judge with.
        """

    def after(self, texts: Sequence[Sequence[int]]) -> Verifier:
        """The rule in one step of sequences with these committed texts, prompts and roots included.

        It is asked for in every step, of rules that read the text.
        """
        return self

    def seeing(self, states: Sequence[torch.Tensor]) -> Verifier:
        """The rule in one step of sequences whose roots and nodes have these (1 + n, hidden) states.

        It is asked for in every step, of rules with `taps`.
        """
        return self

    def at_zero(self) -> ArgmaxVerifier | None:
        """What decides at temperature 0 where this rule is chosen; None is `GreedyVerifier`, equal or reject."""
        return None

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
    """A rule for temperature 0: it draws nothing, so that it can judge all rows of a pass at once."""

    def after(self, texts: Sequence[Sequence[int]]) -> ArgmaxVerifier:
        """See `Verifier.after`."""
        return self

    def seeing(self, states: Sequence[torch.Tensor]) -> ArgmaxVerifier:
        """See `Verifier.seeing`."""
        return self

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


class Likeliest:
    """`Draws` at temperature 0: the target's token is the likeliest, the first of equals; there are no coins."""

    def gumbel(self, depth: int, weights_v: torch.Tensor) -> int:
        """The index of the largest entry."""
        return int(weights_v.argmax())

    def bernoulli(self, depth: int, trial: int, probability: float) -> bool:
        """True where that is at all likely."""
        return probability > 0.0

    def categorical(self, depth: int, probabilities_v: torch.Tensor) -> int:
        """The index of the largest entry."""
        return int(probabilities_v.argmax())


class AtZero(ArgmaxVerifier):
    """A rule at temperature 0: drafts are points, and the target's own token is its likeliest.

    Args:
        rule: it gets the rows of temperature 0, which are logits after all sampling rules.
    """

    def __init__(self, rule: Verifier) -> None:
        self.rule, self.name = rule, rule.name
        self.row_by_row, self.chains_only, self.reads_text = rule.row_by_row, rule.chains_only, rule.reads_text

    @property
    def taps(self) -> Sequence[int]:  # type: ignore[override]
        """Of the rule."""
        return self.rule.taps

    def seeing(self, states: Sequence[torch.Tensor]) -> AtZero:
        """See `Verifier.seeing`."""
        return AtZero(self.rule.seeing(states))

    def after(self, texts: Sequence[Sequence[int]]) -> AtZero:
        """See `Verifier.after`."""
        return AtZero(self.rule.after(texts))

    def verify(
        self, trees: Sequence[TokenTree], rows: Sequence[torch.Tensor], draws: Sequence[Draws] = ()
    ) -> list[Verdict | NumericsError]:
        """See `Verifier.verify`; `draws` are not used."""
        points = [tree.replace(trials={}) if tree.trials else tree for tree in trees]
        return self.rule.verify(points, rows, [Likeliest()] * len(trees))

    def verify_scores(self, trees: Sequence[TokenTree], scores: Scores) -> list[Verdict | NumericsError]:
        """See `ArgmaxVerifier.verify_scores`."""
        return self.verify(trees, [scores.of(i) for i in range(len(trees))])


def chain_of(tree: TokenTree, rule: str) -> list[Trial]:
    """The trials of a chain, from the root down.

    Args:
        rule: `acceptance_method`, for the error.
    Raises:
        CapabilityError: a position has several proposals.
    """
    from paceline.tree import ROOT

    chain: list[Trial] = []
    while len(tree) and (trials := tree.trials_of(chain[-1].node if chain else ROOT)):
        if len(trials) > 1:
            raise CapabilityError(
                f"acceptance_method {rule!r} judges chains, got a tree with {len(trials)} proposals behind "
                f"{len(chain)} tokens; draft chains, or use acceptance_method 'rejection_sampler'"
            )
        chain.append(trials[0])
    return chain


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
