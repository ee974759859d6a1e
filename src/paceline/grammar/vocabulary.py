r"""A tokenizer as llguidance wants it, and what its tokens read where `\/` is a slash.

The library knows all escapes of JSON's strings but that one, so it is given `/` where the output has `\/` (see
`grammar.follower`). Behind the ids of the vocabulary come some that no model writes, for bytes that are no token but
that one with a backslash is read as. The library's masks cover them, too, and so say at once which tokens may come if
their `\/` are slashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import llguidance
import numpy as np
import numpy.typing as npt

from paceline.checkpoints import Tokenizer, token_bytes
from paceline.errors import ConfigError

BACKSLASH: Final = b"\\"
SLASH: Final = b"/"
ESCAPES: Final = b'"\\bfnrtu'
"""What the library takes behind a backslash in a string of JSON."""

NO_ESCAPES: Final = b"/'0ax\n"
"""Some of what it does not take there, but in strings of other languages or in free text."""

_PARTS: Final = re.compile(rb"((?:[^\\]|\\.)*)(\\?)", re.DOTALL)
_ESCAPE: Final = re.compile(rb"\\(.)", re.DOTALL)

_vocabularies: WeakKeyDictionary[Tokenizer, dict[tuple[int, tuple[int, ...]], Vocabulary]] = WeakKeyDictionary()

Ids = tuple[int, ...]


class TokenReading(NamedTuple):
    r"""Says what a token is to the library.

    Attributes:
        plain: its bytes as they are, but for a backslash at the end that escapes nothing yet.
        opens: there is such a backslash.
        slashed: the same with `/` for each `\/`; None where it has none.
        twin: all that with `/` for the backslash at the end, too; None where it has neither.
        places: what stands before those slashes, where a string of JSON must be open: nothing where the token closes
            and opens none before.
    """

    plain: Ids
    opens: bool = False
    slashed: Ids | None = None
    twin: int | None = None
    places: tuple[Ids, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenReadings:
    """Those of the tokens that are not simply themselves.

    Attributes:
        of: by token.
        tokens_t, twins_t: (t,) tokens that have a twin, and that.
        inside_t: (t,) whether the token has no other place than its start.
    """

    of: Mapping[int, TokenReading]
    tokens_t: npt.NDArray[np.int64]
    twins_t: npt.NDArray[np.int64]
    inside_t: npt.NDArray[np.bool_]

    @classmethod
    def with_arrays(cls, of: Mapping[int, TokenReading]) -> TokenReadings:
        """Make the arrays that masks are loosened with."""
        pairs = [
            (token, reading.twin, reading.places == ((),)) for token, reading in of.items() if reading.twin is not None
        ]
        tokens, twins, inside = zip(*pairs, strict=True) if pairs else ((), (), ())
        return cls(of, np.asarray(tokens, np.int64), np.asarray(twins, np.int64), np.asarray(inside, np.bool_))


class Cut(NamedTuple):
    r"""Where a slash in a token could be `\/`.

    Attributes:
        place: what stands before it in the token; nothing where that closes and opens no string.
        tokens: that lead there, or begin with the token's text, its slash written so.
    """

    place: Ids
    tokens: list[int]


class _LibraryTokenizer:
    """What llguidance asks of a tokenizer: bytes of each token, and what a text's tokens are.

    Args:
        written: bytes of each id; none for those that are no text.
        ends: end tokens, the first of which is the one by name.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, written: Sequence[bytes], ends: Sequence[int]) -> None:
        self._tokenizer, self.eos_token_id = tokenizer, ends[0]
        names = tokenizer.tokens()
        self.special_token_ids = [index for index, text in enumerate(written) if not text]
        self.tokens = [text or names.get(index, f"<{index}>").encode() for index, text in enumerate(written)]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False)


class Vocabulary:
    r"""A tokenizer for the library, made once (about 0.2 s).

    Args:
        size: of the model's vocabulary.
        ends: end tokens.
    Attributes:
        library: its view, which has more ids.
        size: of the model's vocabulary.
        fresh, opened: readings where no backslash is open before the token, and where one is.
        slashes_v: (size,) tokens that begin with a slash.
        cuts: by token with a slash.
        backslash, slash: ids.
        escapes, others: a backslash and one of `ESCAPES`, or of `NO_ESCAPES`.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> None:
        written = [text or b"" for text in token_bytes(tokenizer)[:size]]
        written += [b""] * (size - len(written))
        self.size, self._more = size, list[bytes]()
        self._ids = {text: index for index, text in reversed(list(enumerate(written))) if text}
        self.backslash, self.slash = self._id(BACKSLASH), self._id(SLASH)
        self.escapes = [[self.backslash, self._id(bytes([sign]))] for sign in ESCAPES]
        self.others = [[self.backslash, self._id(bytes([sign]))] for sign in NO_ESCAPES]
        texts = {token: text for token, text in enumerate(written) if BACKSLASH in text}
        behind = {token: text for token, text in texts.items() if text.startswith(BACKSLASH)}
        fresh = {token: self._reading(text) for token, text in texts.items()}
        opened = fresh | {token: self._reading(text, opened=True) for token, text in behind.items()}
        self.fresh, self.opened = TokenReadings.with_arrays(fresh), TokenReadings.with_arrays(opened)
        self.slashes_v = np.asarray([text.startswith(SLASH) for text in written], np.bool_)
        self.cuts = self._cuts(written)
        spelling = llguidance.TokenizerWrapper(_LibraryTokenizer(tokenizer, [*written, *self._more], ends))
        self.library = llguidance.LLTokenizer(spelling, n_vocab=size + len(self._more), eos_token=list(ends))
        self._ids = {}

    def _id(self, text: bytes) -> int:
        """Of a token with these bytes."""
        if text not in self._ids:
            self._ids[text] = self.size + len(self._more)
            self._more.append(text)
        return self._ids[text]

    def _spelled(self, text: bytes) -> Ids:
        return (self._id(text),) if text else ()

    def _reading(self, text: bytes, *, opened: bool = False) -> TokenReading:
        """Of a token.

        Args:
            opened: its first sign is what an open backslash escapes.
        """
        first, rest = text[:opened], text[opened:]
        match = _PARTS.fullmatch(rest)
        assert match is not None  # which matches every text
        body, tail = first + match[1], match[2]
        slashed = first + _slashed(match[1])
        places = list(_places(first, match[1], opens=tail != b""))
        return TokenReading(
            plain=self._spelled(body),
            opens=tail != b"",
            slashed=None if slashed == body else self._spelled(slashed),
            twin=self._id(slashed + (SLASH if tail else b"")) if places else None,
            places=tuple(map(self._spelled, places)),
        )

    def _cuts(self, written: Sequence[bytes]) -> Mapping[int, Sequence[Cut]]:
        leading: dict[int, list[int]] = {}
        for token, twin in zip(self.fresh.tokens_t.tolist(), self.fresh.twins_t.tolist(), strict=True):
            leading.setdefault(twin, []).append(token)
        texts = ((token, text) for token, text in enumerate(written) if SLASH in text and BACKSLASH not in text)
        return {token: list(self._cuts_of(text, leading)) for token, text in texts}

    def _cuts_of(self, text: bytes, leading: Mapping[int, list[int]]) -> Iterator[Cut]:
        for at in (match.start() for match in re.finditer(SLASH, text)):
            known = [self._ids.get(text[:size], self.size) for size in range(at, 0, -1)]
            before = next((token for token in known if token < self.size), None)
            twins = [self._ids.get(text[:size]) for size in range(at + 1, len(text) + 1)]
            tokens = [token for twin in twins if twin is not None for token in leading.get(twin, ())]
            place = text[:at] if b'"' in text[:at] else b""
            yield Cut(self._spelled(place), tokens if before is None else [before, *tokens])


def _slashed(text: bytes) -> bytes:
    return _ESCAPE.sub(lambda match: SLASH if match[1] == SLASH else match[0], text)


def _places(first: bytes, body: bytes, *, opens: bool) -> Iterator[bytes]:
    """What stands before the slashes; one place for those between which no string begins or ends."""
    ends = [match.start() for match in _ESCAPE.finditer(body) if match[1] == SLASH]
    since: bytes | None = None
    for end in [*ends, *([len(body)] if opens else [])]:
        before = first + _slashed(body[:end])
        if since is None:
            since = before if b'"' in before else b""
            yield since
        elif b'"' in before[len(since) :]:
            since = before
            yield since


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> Vocabulary:
    """The library's view of a tokenizer, made once.

    Args:
        ends: end tokens; those outside the vocabulary do not count.
    Raises:
        ConfigError: there is no end token.
    """
    known = tuple(dict.fromkeys(end for end in ends if 0 <= end < vocab_size))
    if not known:
        raise ConfigError("structured_outputs needs a model with an end token, and this one declares none")
    vocabularies = _vocabularies.setdefault(tokenizer, {})
    if (vocab_size, known) not in vocabularies:
        vocabularies[vocab_size, known] = Vocabulary(tokenizer, vocab_size, known)
    return vocabularies[vocab_size, known]
