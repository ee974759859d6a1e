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
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

import llguidance
import numpy as np
import numpy.typing as npt
import torch

from paceline.config import CONSTRAINTS, StructuredOutputsParams
from paceline.errors import ConfigError
from paceline.models.loading import Tokenizer, token_bytes
from paceline.sampling import LogitRule, Paths
from paceline.utils import shortened

LIKELY: Final = 0.9
"""Chance of a token that continues text which must come, where other tokens begin that text too."""

LONGEST: Final = 200
"""Characters of the library's explanation that a message keeps."""

MORE: Final = '; leave it out, or let "strict": False ignore it'

_vocabularies: WeakKeyDictionary[Tokenizer, dict[tuple[int, tuple[int, ...]], llguidance.LLTokenizer]] = (
    WeakKeyDictionary()
)


class _Spelling:
    """A tokenizer as llguidance wants it: bytes of each token, and what a text's tokens are.

    Args:
        ends: end tokens, the first of which is the one by name.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int]) -> None:
        self._tokenizer, self.eos_token_id = tokenizer, ends[0]
        names, found = tokenizer.tokens(), token_bytes(tokenizer)
        self.special_token_ids = [index for index, text in enumerate(found) if not text]
        self.tokens = [text or names.get(index, f"<{index}>").encode() for index, text in enumerate(found)]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False)


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> llguidance.LLTokenizer:
    """The library's view of a tokenizer, made once (about 0.2 s).

    Args:
        ends: end tokens; those outside the vocabulary do not count.
    Raises:
        ConfigError: there is no end token.
    """
    known = tuple(dict.fromkeys(end for end in ends if 0 <= end < vocab_size))
    if not known:
        raise ConfigError("structured_outputs needs a model with an end token, and this one declares none")
    made = _vocabularies.setdefault(tokenizer, {})
    if (vocab_size, known) not in made:
        spelling = llguidance.TokenizerWrapper(_Spelling(tokenizer, known))
        spelling.tokens = spelling.tokens[:vocab_size]
        spelling.special_token_ids = [token for token in spelling.special_token_ids if token < vocab_size]
        made[vocab_size, known] = llguidance.LLTokenizer(spelling, n_vocab=vocab_size, eos_token=list(known))
    return made[vocab_size, known]


def grammar_text(params: StructuredOutputsParams) -> str:
    """The library's own notation of a constraint.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return _text_of(params)
    except ValueError as error:
        raise _wrong(next(name for name in CONSTRAINTS if getattr(params, name) is not None), str(error)) from None


def _text_of(params: StructuredOutputsParams) -> str:
    """The library's own notation; ValueError is the library's own, too."""
    if params.regex is not None:
        return llguidance.LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return llguidance.grammar_from("choice", json.dumps(list(params.choice)))
    if params.grammar is not None:
        return llguidance.grammar_from("grammar", params.grammar)
    if params.structural_tag is not None:
        return _tagged(params.structural_tag)
    schema = {"type": "object"} if params.json is None else {} if params.json is True else params.json
    options: Any = {"lenient": not params.strict, "coerce_one_of": not params.strict}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    if params.disable_any_whitespace:
        options |= {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def _tagged(given: Mapping[str, Any]) -> str:
    """Of vLLM's structural tag."""
    try:
        triggers = [str(trigger) for trigger in given["triggers"]]
        tags = [
            llguidance.StructTag(
                trigger=next(one for one in triggers if part["begin"].startswith(one)),
                begin=part["begin"],
                grammar=dict(part["schema"]),
                end=part["end"],
            )
            for part in given["structures"]
        ]
        return llguidance.StructTag.to_grammar(tags, assume_special=False)
    except (KeyError, TypeError, StopIteration, AttributeError, AssertionError, ValueError):
        rule = (
            'be {"structures": [{"begin": text, "schema": dict, "end": text}, ...], "triggers": [text, ...]}, where '
            "each begin starts with one of the triggers"
        )
        raise ConfigError(f"structured_outputs structural_tag must {rule}, got {shortened(given)}") from None


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
    """The rule of a request.

    Args:
        ends: end tokens of the model.
    Raises:
        ConfigError: no tokenizer, no end token, or a schema, expression or grammar that cannot be read or enforced.
    """
    if tokenizer is None:
        raise ConfigError("structured_outputs needs a tokenizer, and this model has none; use allowed_token_ids")
    vocabulary = vocabulary_of(tokenizer, vocab_size, ends)
    name = next(key for key in CONSTRAINTS if getattr(params, key) is not None)
    matcher = llguidance.LLMatcher(vocabulary, grammar_text(params), log_level=0)
    if matcher.is_error():
        raise _wrong(name, matcher.get_error())
    return Constraint(matcher, ends)


class Constraint(LogitRule):
    """Forbids every token that leads out of what the output must be; end tokens are allowed where it is complete.

    Args:
        matcher: llguidance's, at the start of the output.
        ends: end tokens.
    """

    name = "structured_outputs"
    needs_paths = True

    def __init__(self, matcher: llguidance.LLMatcher, ends: Sequence[int]) -> None:
        self._matcher, self._ends = matcher, frozenset(ends)
        self._beyond = 0  # committed tokens that the matcher did not take: end tokens behind a complete output

    def apply(self, rows_rv: torch.Tensor, paths: Paths, generated: Sequence[int]) -> None:
        for row, path in enumerate(paths):
            matcher = self._along(path) if path else self._matcher
            if matcher is None:
                continue  # a path that the verifier never accepts
            allowed = _mask(matcher)[: rows_rv.shape[1]]
            if matcher.is_error():
                raise RuntimeError(shortened(matcher.get_error().split("\n<state>")[0], LONGEST))
            rows_rv[row].masked_fill_(torch.from_numpy(allowed == 0).to(rows_rv.device), -math.inf)

    def advance(self, tokens: Sequence[int]) -> None:
        if self._beyond or (self._matcher.is_stopped() and not self._matcher.is_error()):
            self._beyond += len(tokens)
            return
        self._beyond = len(tokens) - self._matcher.try_consume_tokens(list(tokens))

    def rewind(self, tokens: Sequence[int]) -> None:
        left = max(0, self._beyond - len(tokens))
        back = len(tokens) - (self._beyond - left)
        self._beyond = left
        if back:
            self._matcher.rollback(back)

    def fork(self) -> Self:
        twin = type(self)(self._matcher.deep_copy(), tuple(self._ends))
        twin._beyond = self._beyond
        return twin

    def allowed(self, path: Sequence[int]) -> int:
        taken = self._matcher.deep_copy().try_consume_tokens(list(path))
        return taken + 1 if taken < len(path) and path[taken] in self._ends and self._complete(path[:taken]) else taken

    def forced(self, most: int) -> list[tuple[int, float]]:
        found, matcher = list[tuple[int, float]](), self._matcher.deep_copy()
        while len(found) < most:
            only = np.flatnonzero(_mask(matcher))[:2]
            likely = [] if len(only) == 1 else matcher.compute_ff_tokens()
            if matcher.is_error() or not (len(only) == 1 or likely):
                break
            token, chance = (int(only[0]), 1.0) if len(only) == 1 else (likely[0], LIKELY)
            found.append((token, chance))
            if not matcher.try_consume_tokens([token]):
                break  # the end
        return found

    def _along(self, path: Sequence[int]) -> llguidance.LLMatcher | None:
        """The state behind a path; None where the constraint forbids it."""
        matcher = self._matcher.deep_copy()
        return matcher if matcher.try_consume_tokens(list(path)) == len(path) else None

    def _complete(self, path: Sequence[int]) -> bool:
        matcher = self._along(path)
        return matcher is not None and matcher.is_accepting()


def _mask(matcher: llguidance.LLMatcher) -> npt.NDArray[np.uint8]:
    """(v or more,) 1 for each token that may come next; all 0 after an error."""
    if matcher.is_error():
        return np.zeros(0, np.uint8)
    return np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
