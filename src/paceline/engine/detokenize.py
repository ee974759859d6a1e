"""Text of a growing output, piece by piece.

In:  token ids in order. Out: the text each push adds, in whole characters.
Not here: stop strings (`engine.stops`), the vocabulary (`models.tokenizer`).

A tokenizer's decode of a token depends on its neighbours (leading spaces, characters spread over several tokens), so each push
decodes a short window of the last tokens and takes what is new. The window starts where a piece of text started and all before it
was complete, which makes its decode agree with that of the whole output, and it is bounded, so that a push costs the same at any
length. What could still be the beginning of a character (it decodes to U+FFFD) is held back until it completes, or until it is
clear that it never will.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer

WINDOW: Final = 12
"""Tokens in the window before it is cut back to its last piece."""

PATIENCE: Final = 4
"""A character has at most four bytes: after so many tokens without a whole character the bytes are broken, not incomplete."""

BROKEN: Final = "\ufffd"


class IncrementalDetokenizer:
    """Decodes one output as it grows.

    The text is the continuation of the prompt's text: pushed tokens give decode(prompt + output) without decode(prompt), so that a
    leading space of a metaspace tokenizer is kept. With an empty prompt that is decode(output).

    Args:
        prompt_ids: of which only a short tail is read.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self.text = ""
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window, shown = self._tail(prompt_ids)
        self._shown = len(shown)  # characters of the window's decode that are out already
        self._held = 0  # tokens at the end of the window since the text was last complete

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens; returns the text they complete, possibly ""."""
        delta = "".join([self._push(token) for token in token_ids])
        self.text += delta
        return delta

    def finish(self) -> str:
        """No more tokens will come: returns what was held back, broken characters as U+FFFD."""
        delta = self._decode(self._window)[self._shown :]
        self._shown += len(delta)
        self._held = 0
        self.text += delta
        return delta

    def _push(self, token: int) -> str:
        if not self._tokenizer.has_text(token, self._skip):
            return ""
        start = len(self._window) - self._held
        self._window.append(token)
        self._held += 1
        text = self._decode(self._window)
        stable = text.rstrip(BROKEN) if text.endswith(BROKEN) and self._held < PATIENCE else text
        delta = stable[self._shown :]
        if delta:
            self._shown = len(stable)
        if delta and len(stable) == len(text):
            self._complete(start)
        return delta

    def _complete(self, start: int) -> None:
        """All of the window is out; its last piece began at token `start`. Cut the window there if it has grown long."""
        self._held = 0
        if len(self._window) >= WINDOW:
            del self._window[:start]
            self._shown = len(self._decode(self._window))

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
