"""Tokens that one vocabulary drafted, in those of another.

In: the text so far in the target's tokens, drafted tokens of another vocabulary with their chances. Out: the target's
tokens of
what was drafted, with theirs. Not here: drafting (`slem`), the way back (`retokenize`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from paceline.drafters.vocab.retokenize import encoder_of, whole_characters
from paceline.models.loading import token_bytes

if TYPE_CHECKING:
    from paceline.models.loading import Tokenizer

LOOK_BACK: Final = 8
"""Tokens of the target that are encoded again with what was drafted."""


class Writer:
    """Writes drafted tokens in the target's.

    Args:
        vocab_size: of the target; ids lie below it.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer, vocab_size: int) -> None:
        self._mine, self._theirs = token_bytes(target)[:vocab_size], token_bytes(draft)
        self._encode, self._end, self._their_end = encoder_of(target), target.eos_id, draft.eos_id

    def rewrite(
        self, text: Sequence[int], drafted: Sequence[int], chances: Sequence[float]
    ) -> tuple[list[int], list[float]]:
        """The target's tokens of what was drafted after `text`, and the chance of each at its place as the draft sees
        it: that of the drafted tokens which it ends or touches first.
        """
        data, reach, end = self._read(drafted, chances)
        size = whole_characters(data)
        tokens = self._tokens(text, data[:size]) if size else []
        found, before, at = list[float](), 1.0, 0
        for token in tokens:
            at += len(self._mine[token] or b"")
            now = reach[at - 1]
            found.append(min(now / before, 1.0) if before > 0.0 else 0.0)
            before = now
        if end is not None and self._end is not None and at == len(data):
            return [*tokens, self._end], [*found, end]
        return tokens, found

    def _read(self, drafted: Sequence[int], chances: Sequence[float]) -> tuple[bytes, list[float], float | None]:
        """Bytes up to the first special token, the chance that the draft gets to the token of each, and that of an end
        there.
        """
        data, reach, now = b"", list[float](), 1.0
        for token, chance in zip(drafted, chances, strict=True):
            written = self._theirs[token] if token < len(self._theirs) else None
            if written is None:
                return data, reach, chance if token == self._their_end else None
            now *= chance
            data += written
            reach += [now] * len(written)
        return data, reach, None

    def _tokens(self, text: Sequence[int], data: bytes) -> list[int]:
        """The target's tokens of `data` behind a text, none where they cannot be told from those of the text."""
        behind = self._behind(text)
        together = self._encode((behind + data).decode("utf-8", "replace"))
        left, first = len(data), len(together)
        while left > 0 and first > 0:
            first -= 1
            left -= self._size(together[first])
        if left == 0:
            return together[first:]
        alone = self._encode(data.decode("utf-8", "replace"))
        return alone if b"".join(self._bytes(token) for token in alone) == data else []

    def _behind(self, text: Sequence[int]) -> bytes:
        """What the last few tokens wrote, from the first whole character and the last special token on."""
        found = b""
        for token in reversed(text[-LOOK_BACK:]):
            if not (written := self._bytes(token)):
                break
            found = written + found
        start = next((i for i, byte in enumerate(found) if not 0x80 <= byte < 0xC0), len(found))
        return found[start:]

    def _bytes(self, token: int) -> bytes:
        """What a token of the target writes; nothing for special and unknown ones."""
        return (self._mine[token] or b"") if token < len(self._mine) else b""

    def _size(self, token: int) -> int:
        """Bytes of a token of the target; more than any text for one that writes none, which ends the search."""
        return len(self._bytes(token)) or 1 << 60
