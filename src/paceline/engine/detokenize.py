"""Text of a growing output, piece by piece.

A tokenizer's decode of a token depends on its neighbours (leading spaces, characters spread over several tokens), so
each push decodes a short window of the last tokens and takes what is new. The window starts where a piece of text
started and all before it was complete, which makes its decode agree with that of the whole output, and it is bounded,
so that a push costs the same at any length. What could still be the beginning of a character (it decodes to U+FFFD) is
held back until it completes, or until it is clear that it never will.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from paceline.checkpoints import Tokenizer

WINDOW: Final = 12
"""Tokens in the window before it is cut back to its last piece."""

PATIENCE: Final = 4
"""A character has at most four bytes: after so many tokens without a whole character the bytes are broken, not
incomplete.
"""

BROKEN: Final = "\ufffd"


class IncrementalDetokenizer:
    """Decodes one output as it grows.

    The text is the continuation of the prompt's text: pushed tokens give decode(prompt + output) without
    decode(prompt), so that a leading space of a metaspace tokenizer is kept. With an empty prompt that is
    decode(output).

    Args:
        prompt_ids: of which only a short tail is read.
        skip_special_tokens: leave special tokens out of the text, or those that are given.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool | Collection[int]
    ) -> None:
        self.text = ""
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window, shown = self._tail(prompt_ids)
        self._shown = len(shown)  # characters of the window's decode that are out already
        self._piece = 0  # where in the window the piece of text starts that is not complete yet
        self._waiting = 0  # tokens in a row that ended in a broken character and completed none

    def fork(self) -> IncrementalDetokenizer:
        """Another one at the same point."""
        twin = copy(self)
        twin._window = list(self._window)
        return twin

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens; returns the text they complete, possibly ""."""
        delta = "".join([self._push(token) for token in token_ids])
        self.text += delta
        return delta

    def finish(self) -> str:
        """No more tokens will come: returns what was held back, broken characters as U+FFFD."""
        delta = self._decode(self._window)[self._shown :]
        self._shown += len(delta)
        self.text += delta
        return delta

    def rest(self, token_ids: Sequence[int]) -> str:
        """Append the output's last tokens and end it: the text that `push` and `finish` would give, decoded in one go.

        Where broken characters come up, what is shown of them depends on how long they are waited for; then it is done
        by `push`.
        """
        wanted = [token for token in token_ids if self._tokenizer.has_text(token, self._skip)]
        text = self._decode([*self._window, *wanted])
        if BROKEN in text:
            return self.push(token_ids) + self.finish()
        delta = text[self._shown :]
        self._window, self._shown = self._window + wanted, len(text)
        self.text += delta
        return delta

    def _push(self, token: int) -> str:
        if not self._tokenizer.has_text(token, self._skip):
            return ""
        self._window.append(token)
        text = stable = self._decode(self._window)
        if text.endswith(BROKEN):
            stable = text.rstrip(BROKEN) if self._waiting + 1 < PATIENCE else text[:-1]
        delta = stable[self._shown :]
        if delta:
            self._shown = len(stable)
        if len(stable) < len(text):
            self._waiting = 1 if delta else self._waiting + 1
            if delta and len(self._window) >= 2 * WINDOW:
                self._cut(len(self._window) - PATIENCE, held=len(text) - len(stable))
        elif delta:
            self._waiting = 0
            if len(self._window) >= WINDOW:
                self._cut(self._piece, held=0)
            self._piece = len(self._window)
        return delta

    def _cut(self, start: int, held: int) -> None:
        """Drop the window's tokens before `start`; `held` characters at its end are not out yet."""
        del self._window[:start]
        self._piece = max(0, self._piece - start)
        self._shown = max(0, len(self._decode(self._window)) - held)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)

    def _tail(self, prompt_ids: Sequence[int]) -> tuple[list[int], str]:
        """The shortest tail of the prompt, in powers of two, that has text of its own, and that text."""
        length = 4
        while True:
            tail = list(prompt_ids[-length:])
            text = self._decode(tail) if tail else ""
            if text or length >= len(prompt_ids):
                return tail, text
            length *= 2
