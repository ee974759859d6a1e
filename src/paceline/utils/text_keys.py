"""Keys of a text's beginnings, by which texts that begin alike are found without keeping them."""

from __future__ import annotations

import hashlib
from typing import Final

BEGINNINGS: Final = (128, 256, 512, 1024, 2048, 4096, 8192, 32768)
"""Their lengths in characters."""

KEY_BYTES: Final = 8
"""Of one key."""


def beginnings(text: str) -> list[bytes]:
    """A key for each length of `BEGINNINGS` up to the text's own; texts that begin alike have the same first keys."""
    keys = list[bytes]()
    for length in BEGINNINGS:
        keys.append(hashlib.blake2b(text[:length].encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest())
        if len(text) <= length:
            break
    return keys
