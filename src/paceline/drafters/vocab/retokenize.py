"""One text in the tokens of two vocabularies: the target's tokens, as they come, in those of a draft model.

A text is cut into pieces at positions that depend on nothing but the text before them: before a single space that
follows SHORTEST_PIECE characters or more, or after LONGEST_PIECE. A piece that is closed is encoded once; the open one,
at most LONGEST_PIECE characters, is encoded again whenever it grows. So a prompt is encoded once, every step looks back
a bounded way, and what comes out does not depend on the steps in which the text came in. Bytes that do not end a
character yet wait. Special tokens become the draft's own of the same name, others are left out.

Where tokenizers begin every text with a space of their own, pieces are handed over without theirs; which do is found
out by trial.

A draft model with another tokenizer has a `TranslatedState`: the text in its own tokens, and a cache of it. The draft's
tokens of a text that grows are not those of the shorter text with some more behind: its last few may become others. The
cache keeps what stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from paceline.checkpoints import encoder_of, token_bytes, whole_characters
from paceline.drafters.common.draft_rows import uniform
from paceline.drafters.common.draft_state import DraftState, agreed

if TYPE_CHECKING:
    from paceline.checkpoints import Tokenizer
    from paceline.drafters.base import Context
    from paceline.models import Runner, SequenceCache

SHORTEST_PIECE: Final = 64
LONGEST_PIECE: Final = 256
"""Characters of a piece."""


def cut_of(text: str, start: int = 0) -> int | None:
    """Where the first piece of an open text ends, None where it does not yet; `start`: characters already looked at."""
    for at in range(max(start, SHORTEST_PIECE), min(len(text) - 1, LONGEST_PIECE)):
        if text[at] == " " and not text[at - 1].isspace() and not text[at + 1].isspace():
            return at
    return LONGEST_PIECE if len(text) > LONGEST_PIECE else None


class Retokenizer:
    """Translates tokens of one vocabulary into another's; serves many sequences.

    Args:
        specials: ids of special tokens -> ids of the other vocabulary.
    Attributes:
        prefix: the start token that the other tokenizer puts before a text, if any; the source's own takes its place.
    """

    def __init__(self, source: Tokenizer, other: Tokenizer, specials: Mapping[int, int]) -> None:
        self.written, self.specials = token_bytes(source), specials
        self.encode = encoder_of(other)
        start = other.encode("", add_special_tokens=True)
        self.prefix = start[:1] if start and start[0] == other.bos_id else []

    def open(self) -> TextReading:
        """A text of which nothing was read."""
        return TextReading(self)


class TextReading:
    """Reads one text, token by token, and writes it in the other vocabulary.

    Attributes:
        done: the other vocabulary's tokens of what is closed; they do not change.
        tail: text of the open piece. pending: bytes behind it that do not end a character.
        read: tokens of the source that were read.
    """

    __slots__ = ("_by", "_open", "done", "pending", "read", "tail")

    def __init__(self, by: Retokenizer) -> None:
        self._by = by
        self.done, self.tail, self.pending, self.read = list[int](), "", b"", 0
        self._open: list[int] | None = []

    def copy(self) -> TextReading:
        """The same text, to be read on another way."""
        other = TextReading(self._by)
        other.done, other.tail, other.pending, other.read = list(self.done), self.tail, self.pending, self.read
        other._open = None
        return other

    @property
    def open(self) -> list[int]:
        """The other vocabulary's tokens of the open piece."""
        if self._open is None:
            self._open = self._by.encode(self.tail) if self.tail else []
        return self._open

    def follow(self, tokens: Sequence[int]) -> None:
        """Read what `tokens`, the whole text, has beyond what was read."""
        written, specials, prefix = self._by.written, self._by.specials, self._by.prefix
        if not self.read and tokens and [specials.get(tokens[0])] != prefix:
            self.done = list(prefix)
        for token in tokens[self.read :]:
            data = written[token] if token < len(written) else None
            if data is not None:
                self.pending += data
                continue
            self._take(len(self.pending))
            self._close(len(self.tail))
            if token in specials:
                self.done.append(specials[token])
        self.read = len(tokens)
        self._take(whole_characters(self.pending))

    def _take(self, count: int) -> None:
        """Make text of the first bytes that wait."""
        if count:
            start = len(self.tail)
            self.tail, self.pending = self.tail + self.pending[:count].decode("utf-8", "replace"), self.pending[count:]
            self._open = None
            while (cut := cut_of(self.tail, start - 1)) is not None:
                self._close(cut)
                start = 0

    def _close(self, count: int) -> None:
        """Close the first characters of the open piece."""
        if count:
            self.done += self._by.encode(self.tail[:count])
            self.tail, self._open = self.tail[count:], None


_STEP = 1 << 40
"""Number of a draw that makes seeds; drafts have smaller ones."""


class TranslatedState:
    """Keeps one sequence in the target's tokens and in the draft's (see the module).

    Attributes:
        context: the sequence, in the target's tokens. inner: the same for the draft model, in its own.
        reading: how far the text was translated.
    """

    __slots__ = ("_closed", "context", "inner", "reading")

    def __init__(
        self, context: Context, reading: TextReading, cache: SequenceCache, inner: DraftState | None = None
    ) -> None:
        self.context, self.reading = context, reading
        tokens = [] if inner is None else list(inner.context.tokens)
        draft_context = replace(context, tokens=tokens, prompt_length=0, apply_rules=None, taps={}, prediction=())
        self.inner = DraftState(draft_context, cache, 0 if inner is None else inner.base)
        self._closed = 0

    @property
    def ready(self) -> bool:
        """Whether the draft model sees the whole text: no byte waits for the end of its character."""
        return bool(self.inner.context.tokens) and not self.reading.pending

    def follow(self, runner: Runner, number: Callable[[Sequence[int]], list[int]]) -> None:
        """Bring the draft's text up to the target's.

        The seed of a step is a function of the request's and of the target's position: draft texts of different steps
        may be equally long, and two steps must not share their noise.

        Args:
            number: the draft's tokens as `runner` knows them.
        """
        context, draft_context, reading = self.context, self.inner.context, self.reading
        draft_context.seed = int(uniform(context.seed, len(context.tokens), _STEP) * 2**53)
        if reading.read == len(context.tokens):
            return
        reading.follow(context.tokens)
        new = number([*reading.done[self._closed :], *reading.open])
        old = draft_context.tokens[self._closed :]
        same = agreed(old, new)
        draft_context.tokens[self._closed + same :] = new[same:]
        self.inner.forget(runner, self._closed + same)
        self._closed = len(reading.done)

    def fork(self, context: Context, runner: Runner) -> TranslatedState:
        """A state for a copy of the sequence."""
        if self.inner.context.tokens:
            self.inner.confirm(runner)
        if not runner.capabilities.fork:
            return TranslatedState(context, self.reading.copy(), runner.open())
        return TranslatedState(context, self.reading.copy(), runner.fork(self.inner.cache), self.inner)
