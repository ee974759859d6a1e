"""What each token of a tokenizer writes, for constraints on the text.

In: a `Tokenizer`. Out: a `TokenText`. Not here: decoding of texts (`models.loading.tokenizer`).
"""

from __future__ import annotations

from paceline.models.loading import Tokenizer, token_bytes


class TokenTexts:
    """The text of each token as it reads inside a text, a leading space included.

    None for special tokens, for ids beyond the vocabulary, and for tokens that hold a part of a character only: a
    constrained text does without them. A tokenizer that drops a space at the start of a text shows a text that starts
    with one without it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.texts = [_read(found) for found in token_bytes(tokenizer)]

    def __call__(self, token: int) -> str | None:
        """See `setting.TokenText`."""
        return self.texts[token] if token < len(self.texts) else None


def _read(found: bytes | None) -> str | None:
    if not found:
        return None
    try:
        return found.decode("utf-8")
    except UnicodeDecodeError:
        return None
