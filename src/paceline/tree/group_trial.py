"""A drawn trial that says how many independent draws from its row were planned at its place, for rules that need the
number.

In: nothing. Out: GroupTrial. Not here: the rules (`verifiers.k_seq`), other trials (`token_tree`).

A cut leaves fewer draws than planned, and how many may depend on the tokens that came up. A rule that reads the number
of draws off a tree would let the chance of the first draw depend on its own token, which breaks the output
distribution; the planned number does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.tree.token_tree import Trial


@dataclass(frozen=True, slots=True)
class GroupTrial(Trial):
    """One of several draws with replacement from one row at one place; they share the row object.

    Attributes:
        group: planned number of these draws, settled before the first.
    """

    group: int = 1
