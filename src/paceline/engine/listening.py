"""Guesses that nobody scores: what a drafter says while the controller drafts nothing, held against the text as it comes.

In: a sequence that decodes plainly. Out: to the controller, how many tokens of an earlier guess came true. Not here: what follows
from that (`controllers.ear`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.controllers.ear import TOKENS
from paceline.tree.types import Budget

if TYPE_CHECKING:
    from paceline.controllers.base import Controller
    from paceline.engine.sequence import Sequence as Decoding
    from paceline.tree.token_tree import TokenTree

Ask = Callable[[int], "TokenTree"]


class Listening:
    """Remembers one guess at a time."""

    def __init__(self) -> None:
        self._key, self._drafter, self._at = -1, 0, 0
        self._guess: list[int] = []

    def step(self, sequence: Decoding, controller: Controller, ask: Ask) -> None:
        """Report on the guess made last, if it is of this sequence, and make the next; of those whom the controller listens to, the
        first that says something counts.

        Args:
            ask: makes a drafter propose for this sequence.
        """
        tokens = sequence.context.tokens
        if self._guess and self._key == sequence.key:
            came = tokens[self._at : self._at + len(self._guess)]
            matched = next((i for i, (a, b) in enumerate(zip(self._guess, came, strict=False)) if a != b), len(came))
            controller.hear(self._drafter, matched)
        self._guess = []
        for drafter in controller.listens:
            tree = ask(drafter)
            if len(tree) and tree.is_chain:
                self._key, self._drafter, self._at, self._guess = sequence.key, drafter, len(tokens), tree.tokens.tolist()
                return


BUDGET = Budget(TOKENS, TOKENS)
