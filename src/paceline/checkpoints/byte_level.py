"""How byte-level vocabularies (GPT-2's) spell bytes, and the added tokens that look as if they were spelled so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final


def _byte_of() -> dict[str, int]:
    """GPT-2's spelling: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF: Final[Mapping[str, int]] = _byte_of()


NEVER: Final = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
"""Bytes that no text has."""


def read_literally(inner: Any) -> dict[int, str]:
    """Added tokens, by id, whose signs are letters, but which the decoder of a `tokenizers.Tokenizer` takes for bytes.

    Such a token is found in a text as it reads ("für", "đem"), so this is also what it writes. One that the model makes
    of other text too ("\u010a" of a line break) stands for bytes.
    """
    return {
        index: token.content
        for index, token in inner.get_added_tokens_decoder().items()
        if not token.content.isascii()
        and all(sign in BYTE_OF for sign in token.content)
        and inner.decode([index], skip_special_tokens=False) == _spelled(token.content).decode("utf-8", "replace")
        and not _made_of_text(inner, token.content, index)
    }


def _spelled(content: str) -> bytes:
    return bytes(BYTE_OF[sign] for sign in content)


def _made_of_text(inner: Any, content: str, index: int) -> bool:
    """Whether the merges lead to a token."""
    ids = [token.id for token in inner.model.tokenize(content)]
    return ids == [index] and NEVER.isdisjoint(_spelled(content))
