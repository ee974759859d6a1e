"""The libraries behind a Tokenizer, made alike.

In:  a `tokenizers.Tokenizer`, or a tokenizer of transformers that is not built on one. Out: the few calls that
`models.loading.tokenizer` makes. Not here: reading a checkpoint's files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

CLEAN_UP = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)


class Backend(Protocol):
    """What a Tokenizer needs of the library behind it."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...

    def vocabulary(self) -> dict[str, int]: ...

    def size(self) -> int: ...

    def index(self, token: str) -> int | None: ...

    def token(self, index: int) -> str | None: ...

    def special_ids(self) -> Iterable[int]: ...


class Fast:
    """A `tokenizers.Tokenizer`."""

    def __init__(self, inner: Any, *, clean_up: bool = False) -> None:
        inner.no_truncation()
        inner.no_padding()
        self.inner = inner
        # The clean-up joins punctuation to words for WordPiece-like models; on BPE it would eat spaces of the text.
        self.clean_up = clean_up and type(inner.model).__name__ != "BPE"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self.inner.decode(ids, skip_special_tokens=skip_special_tokens)
        return _clean_up(text) if self.clean_up else text

    def vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.inner.get_vocab(with_added_tokens=True)
        return vocabulary

    def size(self) -> int:
        return int(self.inner.get_vocab_size(with_added_tokens=True))

    def index(self, token: str) -> int | None:
        index: int | None = self.inner.token_to_id(token)
        return index

    def token(self, index: int) -> str | None:
        token: str | None = self.inner.id_to_token(index)
        return token

    def special_ids(self) -> Iterable[int]:
        return [index for index, token in self.inner.get_added_tokens_decoder().items() if token.special]


class Slow:
    """A tokenizer of transformers that is not built on `tokenizers`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return str(self.inner.decode([i for i in ids if i < len(self.inner)], skip_special_tokens=skip_special_tokens))

    def vocabulary(self) -> dict[str, int]:
        return dict(self.inner.get_vocab())

    def size(self) -> int:
        return len(self.inner)

    def index(self, token: str) -> int | None:
        return self.vocabulary().get(token)

    def token(self, index: int) -> str | None:
        return str(self.inner.convert_ids_to_tokens(index)) if index < len(self.inner) else None

    def special_ids(self) -> Iterable[int]:
        return list(self.inner.all_special_ids)


def _clean_up(text: str) -> str:
    for spaced, joined in CLEAN_UP:
        text = text.replace(spaced, joined)
    return text
