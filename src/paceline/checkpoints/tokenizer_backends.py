"""The libraries that tokenizers are built on, made alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Protocol

from paceline.checkpoints.byte_level import read_literally
from paceline.checkpoints.special_tokens import CUT, LONG, Added, LiteralTwin, Span, bounded, ids_of

CLEAN_UP = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)


class TokenizerBackend(Protocol):
    """What a Tokenizer needs of the library behind it."""

    def encode(self, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...

    def vocabulary(self) -> dict[str, int]: ...

    def size(self) -> int: ...

    def index(self, token: str) -> int | None: ...

    def token(self, index: int) -> str | None: ...

    def special_ids(self) -> Iterable[int]: ...

    def added_ids(self) -> Iterable[int]: ...

    def literal_ids(self) -> Iterable[int]: ...

    def added(self) -> list[Added]: ...

    def finds_special(self) -> bool: ...

    def encode_apart(self, text: str, spans: Sequence[Span], most: int | None = None) -> list[int]: ...


class FastBackend:
    """A `tokenizers.Tokenizer`."""

    def __init__(self, inner: Any, *, clean_up: bool = False) -> None:
        inner.no_truncation()
        inner.no_padding()
        self.inner = inner
        # The clean-up joins punctuation to words for WordPiece-like models; on BPE it would eat spaces of the text.
        self.clean_up = clean_up and type(inner.model).__name__ != "BPE"
        self._special, self._literal = frozenset(self.special_ids()), read_literally(inner)
        self._twin: LiteralTwin | None = None

    def encode(self, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
        return ids_of(self.inner, text, add_special_tokens, most)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        text: str
        if self._literal.keys().isdisjoint(ids):
            if len(ids) < LONG:
                text = self.inner.decode(ids, skip_special_tokens=skip_special_tokens)
            else:  # other threads go on meanwhile
                text = self.inner.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        else:
            parts = groupby(ids, self._literal.get)
            text = "".join(self._part(literal, list(run), skip_special_tokens) for literal, run in parts)
        return _clean_up(text) if self.clean_up else text

    def _part(self, literal: str | None, ids: list[int], skip_special_tokens: bool) -> str:
        """The text of ids that are all the same added token, or all others."""
        if literal is None:
            return str(self.inner.decode(ids, skip_special_tokens=skip_special_tokens))
        return "" if skip_special_tokens and ids[0] in self._special else literal * len(ids)

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

    def added_ids(self) -> Iterable[int]:
        return list(self.inner.get_added_tokens_decoder())

    def literal_ids(self) -> Iterable[int]:
        return self._literal

    def added(self) -> list[Added]:
        """All added tokens."""
        return [Added.of(index, token) for index, token in self.inner.get_added_tokens_decoder().items()]

    def finds_special(self) -> bool:
        """Whether special tokens are found in texts at all."""
        return not self.inner.encode_special_tokens

    def encode_apart(self, text: str, spans: Sequence[Span], most: int | None = None) -> list[int]:
        """Token ids of a text in which the spans are special tokens, and nothing else is one."""
        if self._twin is None:
            self._twin = LiteralTwin(self.inner)
        return self._twin.encode(text, spans, most)


class SlowBackend:
    """A tokenizer of transformers that is not built on `tokenizers`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def encode(self, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
        return bounded(list(self.inner.encode(text, add_special_tokens=add_special_tokens)), most)

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

    def added_ids(self) -> Iterable[int]:
        return list(self.inner.added_tokens_decoder)

    def literal_ids(self) -> Iterable[int]:
        return self.added_ids()

    def added(self) -> list[Added]:
        return [Added.of(index, token) for index, token in self.inner.added_tokens_decoder.items()]

    def finds_special(self) -> bool:
        return not getattr(self.inner, "split_special_tokens", False)

    def encode_apart(self, text: str, spans: Sequence[Span], most: int | None = None) -> list[int]:
        ids, start = list[int](), 0
        for span in (*spans, None):
            part = text[start : span.start if span else None]
            ids += self.inner.encode(part, add_special_tokens=False, split_special_tokens=True) if part else []
            if span:
                ids.append(span.id)
                start = span.end
        return [index for index in bounded(ids, most) if index != CUT]


def _clean_up(text: str) -> str:
    for spaced, joined in CLEAN_UP:
        text = text.replace(spaced, joined)
    return text
