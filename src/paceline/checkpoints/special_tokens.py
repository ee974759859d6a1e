"""Which special tokens of a conversation are its chat template's own.

A text is encoded as always, and its special tokens are compared with those that the template wrote. Where there are
others, texts of the messages spell them: it is then encoded again by a tokenizer to which special tokens are text, with
the template's own put in. Special are the tokens that the tokenizer says are, and those that look it (`<|...|>`),
which many checkpoints forget to declare; other added tokens (`<think>`, `<tool_call>`) are what assistants' messages
hold, and stay tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence, Sized
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from paceline.errors import PromptError

if TYPE_CHECKING:
    from paceline.checkpoints.chat_template import Rendered

LOOKS_SPECIAL: Final = re.compile(r"<[|\uff5c][^<>]*[|\uff5c]>")
STRANGE: Final = "\u16a0 \u1b05 \ua66e \U00012000 \U0010fffd"
"""Characters of which hardly a vocabulary has all."""

LONG: Final = 20_000
"""Characters of a text that takes milliseconds to encode."""

Tokens = TypeVar("Tokens", bound=Sized)


def bounded(tokens: Tokens, most: int | None) -> Tokens:
    """The same tokens.

    Raises:
        PromptError: more than `most`.
    """
    if most is not None and len(tokens) > most:
        raise PromptError(f"the text has {len(tokens)} tokens; at most {most} are read of one, so shorten it")
    return tokens


def ids_of(encoder: Any, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
    """Token ids of a text by a `tokenizers.Tokenizer`.

    Args:
        most: tokens; of a text with more, no list is made, which would keep other threads waiting.
    Raises:
        PromptError: it has more.
    """
    if len(text) < LONG:
        encoding = encoder.encode(text, add_special_tokens=add_special_tokens)
    else:  # other threads go on meanwhile
        encoding = encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    ids: list[int] = bounded(encoding, most).ids
    return ids


class Added(NamedTuple):
    """An added token of a tokenizer, and how it is found in texts."""

    id: int
    text: str
    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool

    @classmethod
    def of(cls, index: int, token: Any) -> Added:
        special = bool(token.special) or LOOKS_SPECIAL.fullmatch(token.content) is not None
        return cls(index, token.content, special, token.lstrip, token.rstrip, token.single_word)

    @property
    def pattern(self) -> str:
        form = re.escape(self.text)
        return rf"(?<!\w){form}(?!\w)" if self.single_word else form


CUT: Final = -1
"""In the place of an id: no token spans this place."""


class Span(NamedTuple):
    """Where a special token is in a text, or (CUT) where two tokens must meet."""

    start: int
    end: int
    id: int


class SpecialTokenEncoder(Protocol):
    """What `SpecialTokens` needs of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def added(self) -> list[Added]: ...

    def encode_apart(self, text: str, spans: Sequence[Span], most: int | None = None) -> list[int]: ...


class SpecialTokens:
    """Of one tokenizer."""

    def __init__(self, encoder: SpecialTokenEncoder) -> None:
        added = [token for token in encoder.added() if token.text]
        longest_first = sorted(added, key=lambda token: -len(token.text))
        unknown = frozenset(encoder.encode(STRANGE, False))  # is in ids without being in the text
        self._encoder, self._known = encoder, {token.text: token for token in added}
        self._pattern = re.compile("|".join(token.pattern for token in longest_first) or "(?!)")
        self._special = frozenset(token.id for token in added if token.special) - unknown
        self._unknown = [token.text for token in added if token.special and token.id in unknown]

    def apart(self, ids: list[int], rendered: Rendered, most: int | None = None) -> list[int]:
        """The ids of a conversation without special tokens that the template did not write.

        Args:
            ids: of its text.
            most: tokens that there may be.
        Raises:
            PromptError: there are such, and the template's own cannot be told from them; or too many tokens.
        """
        spans_known = self._found(rendered.written)
        wanted = [span.id for span in spans_known if span.id in self._special]
        same = self._in(ids) == wanted
        if same and all(rendered.text.count(text) == rendered.written.count(text) for text in self._unknown):
            return ids
        if not rendered.exact:
            raise PromptError(
                "messages hold special tokens, and the chat template treats texts in a way that these cannot be told "
                "from its own; leave them out, or allow them with allow_special_tokens (--allow-special-tokens)"
            )
        text = rendered.text
        spans = [self._stretched(text, span) for span in spans_known]
        encoded = self._encoder.encode_apart(text, spans, most)
        if self._in(encoded) != wanted:  # a model that makes such tokens of text, as Unigram does
            encoded = self._encoder.encode_apart(text, sorted([*spans, *self._cuts(text, spans_known)]), most)
        if self._in(encoded) != wanted:
            raise PromptError("messages hold special tokens, which this tokenizer cannot read as text; leave them out")
        return encoded

    def _in(self, ids: Iterable[int]) -> list[int]:
        return [index for index in ids if index in self._special]

    def _found(self, printed: str) -> list[Span]:
        """The special tokens in what a template wrote."""
        matches = ((match, self._known[match[0]]) for match in self._pattern.finditer(printed))
        return [Span(match.start(), match.end(), token.id) for match, token in matches if token.special]

    def _cuts(self, text: str, known: Sequence[Span]) -> list[Span]:
        """Within every special token of a text that the template did not write."""
        starts = {span.start for span in known}
        places = [span.start + 1 for span in self._found(text) if span.start not in starts]
        return [Span(place, place, CUT) for place in places]

    def _stretched(self, text: str, span: Span) -> Span:
        """With the white space that belongs to the token."""
        token, (start, end, index) = self._known[text[span.start : span.end]], span
        if token.lstrip:
            start = len(text[:start].rstrip())
        if token.rstrip:
            end = len(text) - len(text[end:].lstrip())
        return Span(start, end, index)


class LiteralTwin:
    """A `tokenizers.Tokenizer` with the same model as another one, to which special tokens are text."""

    def __init__(self, inner: Any) -> None:
        from tokenizers import AddedToken, Tokenizer

        self._twin = Tokenizer(inner.model)
        for name in ("normalizer", "pre_tokenizer"):
            if (part := getattr(inner, name)) is not None:
                setattr(self._twin, name, part)
        self._twin.encode_special_tokens = True
        known = inner.get_added_tokens_decoder()
        for index, token in sorted(known.items()):
            special = Added.of(index, token).special
            flags = {key: getattr(token, key) for key in ("single_word", "lstrip", "rstrip", "normalized")}
            self._twin.add_tokens([AddedToken(token.content, special=special, **flags)])
        self._mark = f"\ufdd0{secrets.token_hex(8)}\ufdd1"  # that nobody can write
        self._twin.add_tokens([AddedToken(self._mark, special=False, normalized=False)])
        self._mark_id = self._twin.token_to_id(self._mark)
        texts = {token.content: index for index, token in known.items()}
        self._own = {self._twin.token_to_id(text): index for text, index in texts.items()}

    def encode(self, text: str, spans: Sequence[Span], most: int | None = None) -> list[int]:
        """Token ids of a text in which the spans are special tokens, and nothing else is one."""
        starts = [0, *(span.end for span in spans)]
        ends = [*(span.start for span in spans), len(text)]
        parts = [text[start:end] for start, end in zip(starts, ends, strict=True)]
        ids = ids_of(self._twin, self._mark.join(parts), False, most)
        marks = iter([span.id for span in spans])
        named = [next(marks) if index == self._mark_id else self._own.get(index, index) for index in ids]
        return [index for index in named if index != CUT]
