"""What of an output is final while its canvas still fills.

In: the tokens before the first masked slot, as they grow. Out: the text and tokens that are new and will stand. Not
here: which tokens those are, methods that change written slots (`diffusion.engine`).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine import StopChecker


class Settled:
    """One output of a stream.

    Args:
        checker: of the output, which has seen nothing yet; text that may begin a stop string is held back.
    """

    __slots__ = ("_chars", "_checker", "_tokens")

    def __init__(self, checker: StopChecker) -> None:
        self._checker, self._chars, self._tokens = checker, 0, 0

    def grow(self, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """What is new among tokens that stand, the ones of earlier calls included."""
        new = tuple(tokens[self._tokens :])
        if new:
            self._checker.push(new)
        self._tokens += len(new)
        before, self._chars = self._chars, max(self._chars, self._checker.safe_text_length)
        return self._checker.text[before : self._chars], new

    def rest(self, text: str, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """What is left of the whole output."""
        return text[self._chars :], tuple(tokens[self._tokens :])
