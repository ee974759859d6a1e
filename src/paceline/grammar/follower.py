r"""Follows an output with llguidance's automaton, and lets strings of JSON have `\/`, which the library does not know.

`\/` means `/`. So the library is given `/` where the output has `\/`: what a schema says of a string then holds of its
value, however that is written. This is done inside of strings of JSON alone, and only where the library does not take
`\/` as it stands (free text around a structural tag, where `<\/a` is not `</a`).

A backslash at the end of the output is held back until it is clear what it escapes. That a string of JSON is open is
read off the escapes that may come there. Where what may come is narrower than that (patterns, lists of values, names of
properties), the same is asked of an outline: the same grammar with any JSON in place of each schema's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Self

import llguidance
import numpy as np

from paceline.grammar.numbers import Mask
from paceline.grammar.vocabulary import Ids, TokenReading, TokenReadings, Vocabulary

STEP_ITEMS, STEP_FUEL, FUEL, MOST_FUEL = 1_000_000, 20_000, 200_000, 1_000_000
"""Bounds of the library's work: grammars of characters have more items than it expects; of its lexer's, about a
microsecond each, short texts that stand for much (a{1000} a thousand times) may not have as many as it allows.
"""

_SCHEMA: Final = re.compile(r"%json\s*")


def matcher_of(text: str, vocabulary: Vocabulary) -> llguidance.LLMatcher:
    """The library's automaton of a grammar, at the start of the output; in a state of error where it is none."""
    fuel = min(MOST_FUEL, FUEL + 10 * len(text))
    limits = llguidance.LLParserLimits(step_max_items=STEP_ITEMS, step_lexer_fuel=STEP_FUEL, initial_lexer_fuel=fuel)
    return llguidance.LLMatcher(vocabulary.library, text, log_level=0, limits=limits)


def outline_text(text: str) -> str:
    """A grammar in the library's notation with any JSON in place of that of each schema."""
    if text.startswith("{"):
        grammars = json.loads(text)["grammars"]
        return json.dumps({"grammars": [{"json_schema": _any(grammar["json_schema"])} for grammar in grammars]})
    parts, at = list[str](), 0
    for match in _SCHEMA.finditer(text):
        if match.start() < at:
            continue  # a text within a schema
        try:
            schema, end = json.JSONDecoder().raw_decode(text, match.end())
        except ValueError:
            continue  # no schema: a comment, or a text that is quoted
        parts += [text[at : match.end()], json.dumps(_any(schema))]
        at = end
    return "".join([*parts, text[at:]])


def _any(schema: Any) -> Any:
    return {"x-guidance": schema["x-guidance"]} if isinstance(schema, Mapping) and "x-guidance" in schema else {}


class Outline:
    """What a grammar is without its schemas, made where it is asked for.

    Args:
        text: of the grammar, in the library's notation.
    """

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self._text, self._vocabulary = text, vocabulary

    @cached_property
    def start(self) -> llguidance.LLMatcher:
        """Its automaton, at the start of the output."""
        return matcher_of(outline_text(self._text), self._vocabulary)


class GrammarFollower:
    r"""Follows an output through a grammar, and says which tokens may come next.

    Args:
        matcher: llguidance's, at the start of the output.
        outline: of a grammar with strings of JSON; None lets none have `\/`.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary, outline: Outline | None = None) -> None:
        self._matcher, self._vocabulary, self._outline = matcher, vocabulary, outline
        self._given = list[int]()  # what the matcher has taken
        self._steps = list[tuple[int, bool]]()  # by token: how much of that, and whether a backslash was open before
        self._held = False  # a backslash is open at the end, and the matcher has not taken it
        self._outlined: llguidance.LLMatcher | None = None  # the outline, behind the first `_seen` of `_given`
        self._seen, self._shared = 0, False  # by copies, so that it may not be changed

    def copy(self) -> Self:
        """An independent state at the same point."""
        twin = type(self)(self._matcher.deep_copy(), self._vocabulary, self._outline)
        twin._given, twin._steps, twin._held = list(self._given), list(self._steps), self._held
        twin._outlined, twin._seen = self._outlined, self._seen
        self._shared = twin._shared = True
        return twin

    @property
    def error(self) -> str:
        """Why it cannot go on; empty where it can."""
        return self._matcher.get_error() if self._matcher.is_error() else ""

    @property
    def ended(self) -> bool:
        """Whether nothing can follow but the end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def complete(self) -> bool:
        """Whether the output may end here."""
        if not self._held:
            return self._matcher.is_accepting()
        behind = self._matcher.deep_copy()
        return behind.try_consume_tokens([self._vocabulary.backslash]) == 1 and behind.is_accepting()

    def likely(self) -> list[int]:
        """Tokens in which what must come is usually written."""
        tokens = [] if self._held else self._matcher.compute_ff_tokens()
        strange = (at for at, token in enumerate(tokens) if token >= self._vocabulary.size)
        return tokens[: next(strange, len(tokens))]

    def take(self, tokens: Sequence[int]) -> int:
        """Take tokens as long as they may follow: how many that is."""
        return next((at for at, token in enumerate(tokens) if not self._take(token)), len(tokens))

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""
        taken_back = 0
        for size, held in reversed(self._steps[len(self._steps) - count :]):
            taken_back, self._held = taken_back + size, held
        del self._steps[len(self._steps) - count :], self._given[len(self._given) - taken_back :]
        self._matcher.rollback(taken_back)
        if self._outlined is not None and (ahead := self._seen - len(self._given)) > 0:
            self._own_outline().rollback(ahead)
            self._seen -= ahead

    def mask(self) -> Mask:
        """(size of the vocabulary,) what may come next; nothing after an error."""
        if self._held:
            return self._mask_behind_backslash()
        return self._loosened(self._bits())[: self._vocabulary.size]

    # ---------------------------------------------------------------------------------------------- tokens

    def _take(self, token: int) -> bool:
        if token >= self._vocabulary.size:
            return False
        opens = False
        if self._outline is None or not (self._held or token in self._vocabulary.fresh.of):
            library_ids: Sequence[int] = (token,)
        elif (read := self._read(token)) is not None:
            library_ids, opens = read
        else:
            return False
        if self._matcher.try_consume_tokens(list(library_ids)) < len(library_ids):
            return False
        self._steps.append((len(library_ids), self._held))
        self._given += library_ids
        self._held = opens
        return True

    def _read(self, token: int) -> tuple[Ids, bool] | None:
        """What the matcher is to take for a token, and whether a backslash is open then; None where it may not come."""
        words = self._vocabulary
        itself = TokenReading(plain=(token,))
        if not self._held:
            return self._fitting(words.fresh.of.get(token, itself), ())
        fitting = self._fitting(words.opened.of.get(token, itself), (words.backslash,))
        if fitting is None and words.slashes_v[token] and self._quoted():
            return self._fitting(words.fresh.of.get(token, itself), ())
        return fitting

    def _fitting(self, reading: TokenReading, before: Ids) -> tuple[Ids, bool] | None:
        for body, places in ((reading.plain, ()), (reading.slashed, reading.places)):
            if body is None or not all(self._open_at(before, place) for place in places):
                continue
            library_ids = (*before, *body)
            if self._fits(library_ids) if not reading.opens else self._may_escape(library_ids):
                return library_ids, reading.opens
        return None

    def _may_escape(self, library_ids: Ids) -> bool:
        """Whether a backslash may follow."""
        words = self._vocabulary
        return self._fits((*library_ids, words.backslash)) or (
            self._fits((*library_ids, words.slash)) and self._quoted(library_ids)
        )

    def _fits(self, library_ids: Ids) -> bool:
        return self._matcher.validate_tokens(list(library_ids)) == len(library_ids)

    # ---------------------------------------------------------------------------------------------- masks

    def _bits(self) -> Mask:
        """(ids of the library,) its own mask; nothing after an error."""
        if self._matcher.is_error():
            return np.zeros(self._vocabulary.library.vocab_size, np.bool_)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self._vocabulary.library.vocab_size, bitorder="little").view(np.bool_)

    def _loosened(self, mask_t: Mask) -> Mask:
        r"""A mask of the library's with the tokens that may come if their `\/` are slashes."""
        if self._outline is None:
            return mask_t
        certain = int(mask_t.argmax()) if np.count_nonzero(mask_t) == 1 else -1
        self._add_twins(mask_t, self._vocabulary.fresh, ())
        for cut in self._vocabulary.cuts.get(certain, ()):  # else written in its usual token alone
            if cut.tokens and self._open_at((), cut.place):
                mask_t[cut.tokens] = True
        return mask_t

    def _add_twins(self, mask_t: Mask, readings: TokenReadings, before: Ids) -> None:
        more_t = mask_t[readings.twins_t] & ~mask_t[readings.tokens_t]
        if not more_t.any():
            return
        inside_t = more_t & readings.inside_t
        if inside_t.any() and self._quoted():
            mask_t[readings.tokens_t[inside_t]] = True
        for token in readings.tokens_t[more_t & ~readings.inside_t].tolist():
            mask_t[token] = all(self._open_at(before, place) for place in readings.of[token].places)

    def _mask_behind_backslash(self) -> Mask:
        words = self._vocabulary
        mask_t = np.zeros(words.library.vocab_size, np.bool_)
        if self._matcher.try_consume_tokens([words.backslash]) == 1:
            mask_t = self._bits()
            self._matcher.rollback(1)
            self._add_twins(mask_t, words.opened, (words.backslash,))
        if self._quoted():
            mask_t[: words.size] |= self._loosened(self._bits())[: words.size] & words.slashes_v
        return mask_t[: words.size]

    # ---------------------------------------------------------------------------------------------- strings

    def _open_at(self, before: Ids, place: Ids) -> bool:
        """Whether a string is open at a place of a token; none is opened or closed before an empty one."""
        return self._quoted((*before, *place) if place else ())

    def _quoted(self, library_ids: Ids = ()) -> bool:
        """Whether a string of JSON is open, where an escape may begin, behind what the matcher might take."""
        if self._has_escapes(self._matcher, library_ids):
            return True
        outlined = self._own_outline()
        self._seen += outlined.try_consume_tokens(self._given[self._seen :])
        return self._seen == len(self._given) and self._has_escapes(outlined, library_ids)

    def _has_escapes(self, matcher: llguidance.LLMatcher, library_ids: Ids) -> bool:
        words, size = self._vocabulary, len(library_ids) + 2
        return all(matcher.validate_tokens([*library_ids, *escape]) == size for escape in words.escapes) and not any(
            matcher.validate_tokens([*library_ids, *other]) == size for other in words.others
        )

    def _own_outline(self) -> llguidance.LLMatcher:
        """The outline, to be changed."""
        if self._outlined is None or self._shared:
            assert self._outline is not None
            self._outlined = (self._outline.start if self._outlined is None else self._outlined).deep_copy()
            self._shared = False
        return self._outlined
