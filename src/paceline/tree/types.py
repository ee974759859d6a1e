"""Small types that the loop hands around besides the tree: budgets, verdicts, scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from paceline.tree.static_shapes import Shape
    from paceline.tree.token_tree import TokenTree


GoOn = Callable[[int, float, object], bool]
"""Asks a controller, with the level that comes next, the chance of the path so far as the drafter sees it, and what the
drafter passes beside it: a mapping of numbers, or None.
"""

ACCEPTANCE: Final = "acceptance"
"""Key of such a mapping: the chance, as a trained head foretells it, that the last drafted token whose state is known
is accepted; 1 where none is.
"""

Needed = Callable[["TokenTree"], bool]


def always_go_on(depth: int, confidence: float, features: object) -> bool:
    """The default stopper of a budget: never stop before it is used up."""
    return True


def always_needed(tree: TokenTree) -> bool:
    """The default of a budget: draft whatever is there already."""
    return True


@dataclass(frozen=True, slots=True)
class Budget:
    """How much one drafter may propose for one sequence in one step.

    Attributes:
        nodes: at most this many nodes; 0 means: propose the empty tree.
        depth: at most this many levels.
        go_on: called by sequential drafters before drafting level `depth` (from 2 on) with the confidence of the path
            so far; False stops drafting there.
        needed: called with the tree of the drafters before it, which may be empty; False leaves the drafter out.
        shape: that the controller has in mind, no larger than the budget; drafters of static trees follow it, others
            need not. None leaves it to them.
    """

    nodes: int
    depth: int
    go_on: GoOn = always_go_on
    needed: Needed = always_needed
    shape: Shape | None = None


NO_BUDGET = Budget(0, 0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was accepted of one sequence's tree.

    Attributes:
        path: accepted node indices, from the first level down.
        accepted: their tokens.
        next_token: the target's own token after the path, which every verifier gives; None only in place of a verdict,
            where a row held no distribution (`paceline.explain`).
        departures: rising places in `tokens` of what the exact rule with the same draws would not have taken there;
            empty under every exact rule.
    """

    path: tuple[int, ...]
    accepted: tuple[int, ...]
    next_token: int | None
    departures: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens this verdict commits: the accepted ones and the target's own."""
        return self.accepted if self.next_token is None else (*self.accepted, self.next_token)


@dataclass(frozen=True, slots=True)
class Scores:
    """What one forward pass of the target gave, for a batch of sequences with their trees.

    Attributes:
        logits: (r, v) raw logits in the model's dtype. Rows of sequence i are `rows[i] : rows[i + 1]`:
            first its root, then its nodes in order.
        rows: batch + 1 row offsets.
        taps: layer -> (r, hidden) hidden states, for the requested layers; layer k is the output of layer k counted
            from 0, -1 the embeddings, num_layers the output of the final norm.
        best: per row the lowest token id that holds the largest logit, or -1 where some logit is not finite; None where
            the runner did not look.
    """

    logits: torch.Tensor
    rows: tuple[int, ...]
    taps: Mapping[int, torch.Tensor] = field(default_factory=dict)
    best: Sequence[int] | None = None

    def of(self, index: int) -> torch.Tensor:
        """(1 + n, v): logits at the root and the nodes of sequence `index`; a view."""
        return self.logits[self.rows[index] : self.rows[index + 1]]

    def pick(self, indices: Sequence[int]) -> Scores:
        """The scores of some sequences of the batch, rows packed again (a copy)."""
        import torch

        spans = [slice(self.rows[i], self.rows[i + 1]) for i in indices]
        offsets = [0, *accumulate(span.stop - span.start for span in spans)]
        taps = {layer: torch.cat([tap[span] for span in spans]) for layer, tap in self.taps.items()}
        best = None if self.best is None else [token for span in spans for token in self.best[span]]
        return Scores(torch.cat([self.logits[span] for span in spans]), tuple(offsets), taps, best)
