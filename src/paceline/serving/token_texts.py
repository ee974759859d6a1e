"""Tokens of log probabilities are written as OpenAI does it.

A token may be part of a character. Chats give its bytes beside it, and write what is no text as `\\xe2\\x98`;
completions have no bytes, and write `bytes:\\xe2\\x98`. Offsets count every character of the text once: that of a token
is how many characters are complete before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Final
from weakref import WeakKeyDictionary

from paceline.checkpoints import TokenBytes, Tokenizer

_BYTES: Final = WeakKeyDictionary[Tokenizer, TokenBytes]()

PREFIX: Final = "bytes:"
"""It stands before a token of completions that is no text."""


def token_bytes_of(tokenizer: Tokenizer) -> TokenBytes:
    """Return bytes by token id, made once for a tokenizer."""
    if tokenizer not in _BYTES:
        _BYTES[tokenizer] = TokenBytes(tokenizer)
    return _BYTES[tokenizer]


def written(data: bytes, prefix: str = "") -> str:
    """Return a token as a text: what it says, or its bytes with `prefix` before them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in data)


class Offsets:
    """Counts the characters of an output as its tokens come.

    Args:
        skip_special_tokens: they are not in the text, or those that are given.
    """

    def __init__(self, token_bytes: TokenBytes, *, skip_special_tokens: bool | Collection[int], start: int = 0) -> None:
        self._bytes, self._count = token_bytes, start
        skipped = skip_special_tokens
        self._skipped = skipped if not isinstance(skipped, bool) else token_bytes.special_ids if skipped else ()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Return how many characters are before each of the next tokens."""
        offsets = list[int]()
        for token in tokens:
            offsets.append(self._count)
            if token not in self._skipped:
                self._count += len(self._decoder.decode(self._bytes[token]))
        return offsets


def offsets_in(text: str, tokens: Sequence[int], token_bytes: TokenBytes) -> list[int]:
    """Return how many characters of a text are before each of its tokens.

    Special tokens that were added to it, and a space that a tokenizer put before it, have none.
    """
    data, place, count, offsets = text.encode("utf-8", "replace"), 0, 0, list[int]()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        offsets.append(count)
        piece = token_bytes[token]
        piece = piece if data.startswith(piece, place) else piece.removeprefix(b" ")
        if data.startswith(piece, place) or token not in token_bytes.special_ids:
            count += len(decoder.decode(data[place : place + len(piece)]))
            place += len(piece)
    return offsets
