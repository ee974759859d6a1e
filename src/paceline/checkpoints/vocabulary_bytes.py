"""What each token of a vocabulary writes into a text, as bytes, whatever the tokenizer's kind.

A leading space is included; special tokens and unused ids have no bytes.

Byte-level vocabularies (GPT-2's) spell every byte as one character, except in tokens that were added to them;
sentencepiece's write a space as U+2581 and lonely bytes as <0x00> .. <0xFF>; WordPiece marks what continues a word with
"##". Other vocabularies are taken as they read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Final

from paceline.checkpoints.byte_level import BYTE_OF
from paceline.checkpoints.tokenizer import Tokenizer

SPACE: Final = "\u2581"
BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
CONTINUES: Final = "##"
INCOMPLETE: Final = 3
"""Most bytes of a character that lacks its end."""


def token_bytes(tokenizer: Tokenizer) -> list[bytes | None]:
    """Bytes of each id, up to the largest."""
    spelled = tokenizer.tokens()
    read = reader_of(tokenizer)
    letters = tokenizer.literal_ids if read is byte_level else frozenset[int]()
    spelling: list[bytes | None] = [None] * (max(spelled, default=-1) + 1)
    for index, text in spelled.items():
        if index not in tokenizer.special_ids:
            spelling[index] = text.encode("utf-8", "replace") if index in letters else read(text)
    return spelling


class TokenBytes:
    """The bytes that each token stands for, looked up one by one; those of special tokens are their names.

    Attributes:
        special_ids: of the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.special_ids, self._tokenizer = tokenizer.special_ids, tokenizer

    @cached_property
    def _reader(self) -> tuple[Callable[[str], bytes], Collection[int]]:
        """How the vocabulary spells, which takes a look at all of it, and the tokens that it spells otherwise."""
        read = reader_of(self._tokenizer)
        return read, self.special_ids | (self._tokenizer.literal_ids if read is byte_level else set())

    def __getitem__(self, index: int) -> bytes:
        """Empty for an id beyond the vocabulary."""
        text, (read, literal) = self._tokenizer.tokens().get(index, ""), self._reader
        return text.encode("utf-8", "replace") if index in literal else read(text)


def reader_of(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """How the vocabulary spells: from a token as it is written there to its bytes."""
    spelled = tokenizer.tokens()
    signs = "".join(chr(256 + i) for i in range(68))
    for index, text in spelled.items():
        if (
            any(sign in text for sign in signs)
            and all(sign in BYTE_OF for sign in text)
            and index not in tokenizer.special_ids
        ):
            plain = bytes(BYTE_OF[sign] for sign in text).decode("utf-8", "replace")
            if tokenizer.decode([index], False) == plain != text:
                return byte_level
    if any(SPACE in text or BYTE.fullmatch(text) for text in spelled.values()):
        return sentencepiece
    if any(text.startswith(CONTINUES) and len(text) > len(CONTINUES) for text in spelled.values()):
        return wordpiece
    return str.encode


def byte_level(text: str) -> bytes:
    """GPT-2's spelling; a token with other signs than that knows is an added one, and keeps its own bytes."""
    if all(sign in BYTE_OF for sign in text):
        return bytes(BYTE_OF[sign] for sign in text)
    return text.encode("utf-8", "replace")


def sentencepiece(text: str) -> bytes:
    """Sentencepiece's spelling."""
    if (byte := BYTE.fullmatch(text)) is not None:
        return bytes([int(byte[1], 16)])
    return text.replace(SPACE, " ").encode("utf-8", "replace")


def wordpiece(text: str) -> bytes:
    """WordPiece's spelling: what does not continue a word begins with a space."""
    if text.startswith(CONTINUES) and len(text) > len(CONTINUES):
        return text[len(CONTINUES) :].encode("utf-8", "replace")
    return f" {text}".encode("utf-8", "replace")


def encoder_of(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Encodes a text that continues another one, without special tokens."""

    def plain(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def spaceless(text: str) -> list[int]:
        return plain(text[1:] if text[:1] == " " and text[1:2] not in ("", " ") else text)

    whole, first = plain("one two"), plain("one")
    if whole != first + plain(" two") and whole == first + plain("two"):
        return spaceless
    return plain


def whole_characters(data: bytes) -> int:
    """How many bytes from the start hold no character that lacks its end."""
    for back in range(1, min(INCOMPLETE, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:  # begins a character of 2 to 4 bytes
            wanted = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if wanted > back else len(data)
        if byte < 0x80:
            break
    return len(data)
