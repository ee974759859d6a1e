"""structured_outputs as a rule on logits: what the whole output must be, by llguidance's automata.

The mask at a node is that of the text along the node's own path, so the output has the distribution of the model under
the constraint, whatever is drafted. States of the library keep an error once they have one, so that a path that may be
wrong is only ever followed by a copy.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

import llguidance
import numpy as np
import torch

from paceline.checkpoints import Tokenizer, token_bytes
from paceline.config import CONSTRAINTS, StructuredOutputsParams
from paceline.errors import ConfigError, PacelineError
from paceline.grammar.follower import GrammarFollower, Outline, matcher_of
from paceline.grammar.lexemes import is_native, library_text, spelled
from paceline.grammar.library_schema import library_schema, with_references
from paceline.grammar.numbers import Mask, Numbers
from paceline.grammar.vocabulary import vocabulary_of
from paceline.sampling import LogitRule, Paths
from paceline.utils import shortened

LIKELY: Final = 0.9
"""Chance of a token that continues text which must come, where other tokens begin that text too."""

LONGEST: Final = 200
"""Characters of the library's explanation that a message keeps."""

MORE: Final = '; leave it out, or let "strict": False ignore it'

BLANKS: Final = r"(?:[ \t]|\r?\n(?: {0,32}|\t{0,8}))"
"""What may stand once between parts of JSON: a blank, or a line break and 8 levels of 4 blanks (16 of 2) or of tabs."""

_numbers: WeakKeyDictionary[Tokenizer, Numbers] = WeakKeyDictionary()


def grammar_text(params: StructuredOutputsParams) -> str:
    """The library's own notation of a constraint.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return _text_of(params)
    except ConfigError:
        raise
    except ValueError as error:
        raise _wrong(next(name for name in CONSTRAINTS if getattr(params, name) is not None), str(error)) from None


def _text_of(params: StructuredOutputsParams) -> str:
    """The library's own notation; ValueError is the library's own, too."""
    if params.regex is not None:
        return llguidance.LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return llguidance.LLMatcher.grammar_from_regex("|".join(map(spelled, params.choice)))
    if params.grammar is not None:
        return _grammar(params.grammar)
    if params.structural_tag is not None:
        return _tagged(params.structural_tag, params)
    schema = {"type": "object"} if params.json is None else {} if params.json is True else params.json
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(_bounded(schema, params)))


@lru_cache(maxsize=64)
def _grammar(text: str) -> str:
    try:
        return library_text(text)
    except PacelineError as error:
        raise ConfigError(f"structured_outputs grammar cannot be used: {error}") from None


def _bounded(schema: Any, params: StructuredOutputsParams) -> Any:
    pattern, compact = params.whitespace_pattern, params.disable_any_whitespace
    return bounded_json(schema, strict=params.strict, whitespace_pattern=pattern, compact=compact)


def bounded_json(schema: Any, *, strict: bool, whitespace_pattern: str | None = None, compact: bool = False) -> Any:
    """A schema with options for the library beside it: blanks end, and strings may hold JSON's escapes.

    Args:
        schema: what it says itself about white space, under `x-guidance`, holds where none of the others are given.
        strict: keywords that cannot be enforced are rejected; else they are ignored.
        whitespace_pattern: what may stand between parts; None is `BLANKS`.
        compact: one blank behind commas and colons and none elsewhere.
    """
    if not isinstance(schema, Mapping):
        return bounded_json({}, strict=strict) if schema is True else schema
    guidance = schema.get("x-guidance", {})
    if not isinstance(guidance, Mapping):
        return schema  # which the library rejects
    options = {"lenient": not strict, "coerce_one_of": not strict, "json_allow_general_unicode_escapes": True}
    if compact:
        blanks: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    elif whitespace_pattern is None and {"whitespace_pattern", "whitespace_flexible"} & guidance.keys():
        blanks = {}
    else:
        blanks = {"whitespace_pattern": whitespace_pattern or BLANKS}
    known = library_schema(with_references(schema, strict=strict))
    return {**known, "x-guidance": {**guidance, **options, **blanks}}


def _tagged(tag: Mapping[str, Any], params: StructuredOutputsParams) -> str:
    """Of vLLM's structural tag."""
    try:
        triggers = [str(trigger) for trigger in tag["triggers"]]
        tags = [
            llguidance.StructTag(
                trigger=next(trigger for trigger in triggers if part["begin"].startswith(trigger)),
                begin=part["begin"],
                grammar=_bounded(dict(part["schema"]), params),
                end=part["end"],
            )
            for part in tag["structures"]
        ]
        return llguidance.StructTag.to_grammar(tags, assume_special=False)
    except (KeyError, TypeError, StopIteration, AttributeError, AssertionError, ValueError):
        rule = (
            'be {"structures": [{"begin": text, "schema": dict, "end": text}, ...], "triggers": [text, ...]}, where '
            "each begin starts with one of the triggers"
        )
        raise ConfigError(f"structured_outputs structural_tag must {rule}, got {shortened(tag)}") from None


def _wrong(name: str, why: str) -> ConfigError:
    """What the library says, in a line that names the parameter."""
    said = " ".join(why.split())
    unknown = re.match(r"Unimplemented keys: (\[.*\])$", said)
    if unknown is not None:
        return ConfigError(f"structured_outputs {name} uses keywords that cannot be enforced: {unknown[1]}{MORE}")
    if said.startswith("oneOf constraints"):
        return ConfigError(
            f"structured_outputs {name} uses oneOf with alternatives that are not disjoint, which cannot be enforced; "
            'use anyOf, or let "strict": False take it for anyOf'
        )
    more = MORE if said.startswith("Unknown format") else ""
    return ConfigError(f"structured_outputs {name} cannot be used: {shortened(said, LONGEST)}{more}")


def constraint(
    params: StructuredOutputsParams, tokenizer: Tokenizer | None, vocab_size: int, ends: Sequence[int]
) -> Constraint:
    """Make the sampling rule that holds a request to its structured output.

    Args:
        ends: end tokens of the model.
    Raises:
        ConfigError: no tokenizer, no end token, or a schema, expression or grammar that cannot be read or enforced.
    """
    if tokenizer is None:
        raise ConfigError("structured_outputs needs a tokenizer, and this model has none; use allowed_token_ids")
    vocabulary = vocabulary_of(tokenizer, vocab_size, ends)
    name = next(key for key in CONSTRAINTS if getattr(params, key) is not None)
    text = grammar_text(params)
    matcher = matcher_of(text, vocabulary)
    if matcher.is_error():
        raise _wrong(name, matcher.get_error())
    if not _of_json(params):
        return Constraint(GrammarFollower(matcher, vocabulary), ends)
    return Constraint(GrammarFollower(matcher, vocabulary, Outline(text, vocabulary)), ends, numbers_of(tokenizer))


def _of_json(params: StructuredOutputsParams) -> bool:
    """Whether there is JSON in the output."""
    if params.grammar is not None:
        return is_native(params.grammar) and "%json" in params.grammar
    return params.regex is None and params.choice is None


def numbers_of(tokenizer: Tokenizer) -> Numbers:
    """What a tokenizer's tokens do to numbers, made once."""
    if tokenizer not in _numbers:
        _numbers[tokenizer] = Numbers(token_bytes(tokenizer))
    return _numbers[tokenizer]


class Constraint(LogitRule):
    """Forbids every token that leads out of what the output must be; end tokens are allowed where it is complete.

    Rows may be wider than the vocabulary: padded ids are forbidden.

    Args:
        state: at the start of the output.
        ends: end tokens.
        numbers: cuts numbers off; None lets them be as long as the grammar does.
    """

    name = "structured_outputs"
    needs_paths = True

    def __init__(self, state: GrammarFollower, ends: Sequence[int], numbers: Numbers | None = None) -> None:
        self._state, self._ends, self._numbers = state, frozenset(ends), numbers
        self._beyond = 0  # committed tokens that the state did not take: end tokens behind a complete output
        self._sizes = [0]  # characters of the number at the end, at the start and behind each committed token

    def apply(self, rows_rv: torch.Tensor, paths: Paths, generated: Sequence[int]) -> None:
        for row, path in enumerate(paths):
            state = self._along(path) if path else self._state
            if state is None:
                continue  # a path that the verifier never accepts
            allowed = self._mask(state, self._size(path), rows_rv.shape[1])
            if state.error:
                raise RuntimeError(shortened(state.error.split("\n<state>")[0], LONGEST))
            _forbid(rows_rv[row], ~allowed)

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._sizes.append(self._after(self._sizes[-1], token))
        if self._beyond or self._state.ended:
            self._beyond += len(tokens)
            return
        self._beyond = len(tokens) - self._state.take(tokens)

    def rewind(self, tokens: Sequence[int]) -> None:
        del self._sizes[len(self._sizes) - len(tokens) :]
        left = max(0, self._beyond - len(tokens))
        back = len(tokens) - (self._beyond - left)
        self._beyond = left
        if back:
            self._state.rollback(back)

    def fork(self) -> Self:
        twin = type(self)(self._state.copy(), tuple(self._ends), self._numbers)
        twin._beyond, twin._sizes = self._beyond, list(self._sizes)
        return twin

    def allowed(self, path: Sequence[int]) -> int:
        taken = self._take(self._state.copy(), path)
        return taken + 1 if taken < len(path) and path[taken] in self._ends and self._complete(path[:taken]) else taken

    def forced(self, most: int) -> list[tuple[int, float]]:
        tokens, state, size = list[tuple[int, float]](), self._state.copy(), self._sizes[-1]
        while len(tokens) < most:
            mask = self._mask(state, size)
            certain = np.count_nonzero(mask) == 1
            likely = [] if certain else state.likely()
            if state.error or not (certain or likely):
                break
            token, chance = (int(mask.argmax()), 1.0) if certain else (likely[0], LIKELY)
            tokens.append((token, chance))
            size = self._after(size, token)
            if not state.take([token]):
                break  # the end
        return tokens

    def _after(self, size: int, token: int) -> int:
        return 0 if self._numbers is None else self._numbers.after(size, token)

    def _size(self, path: Sequence[int]) -> int:
        """Characters of the number at the end of a path."""
        size = self._sizes[-1]
        for token in path if self._numbers is not None else ():
            size = self._after(size, token)
        return size

    def _mask(self, state: GrammarFollower, size: int, width: int | None = None) -> Mask:
        """(width or as many as the vocabulary has,) what may come next; nothing after an error."""
        mask = state.mask()
        if width is not None:
            mask = mask[:width] if len(mask) >= width else np.pad(mask, (0, width - len(mask)))
        return mask if self._numbers is None else self._numbers.cut(mask, size)

    def _take(self, state: GrammarFollower, path: Sequence[int]) -> int:
        """Let a state take what is allowed of a path: how many tokens that is."""
        size, begin = self._sizes[-1], 0
        for at, token in enumerate(path if self._numbers is not None else ()):
            if self._numbers is not None and self._numbers.too_long(size, token):
                taken = state.take(path[begin:at])
                if taken < at - begin or not self._mask(state, size)[token]:
                    return begin + taken
                begin = at
            size = self._after(size, token)
        return begin + state.take(path[begin:])

    def _along(self, path: Sequence[int]) -> GrammarFollower | None:
        """The state behind a path; None where the constraint forbids it."""
        state = self._state.copy()
        return state if self._take(state, path) == len(path) else None

    def _complete(self, path: Sequence[int]) -> bool:
        state = self._along(path)
        return state is not None and state.complete


def _forbid(row_v: torch.Tensor, forbidden_v: Mask) -> None:
    """Tokens to -inf; in free text those are few."""
    if 2 * np.count_nonzero(forbidden_v) > forbidden_v.size:
        row_v.masked_fill_(torch.from_numpy(forbidden_v).to(row_v.device), -math.inf)
    else:
        row_v.index_fill_(0, torch.from_numpy(np.flatnonzero(forbidden_v)).to(row_v.device), -math.inf)
