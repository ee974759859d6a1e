"""Phi-4-mini: a list of JSON objects behind a word, as the prompts of its makers ask for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from paceline.serving.chat.base import AllowedCalls, CallFormat, Calls, Opening, as_json
from paceline.serving.chat.blocks import call_object, read_objects
from paceline.serving.chat.grammar_rules import GrammarRules

BEGIN: Final = "functools["


def _write(calls: Calls) -> str:
    return f"functools{as_json([{'name': name, 'arguments': arguments} for name, arguments in calls])}"


def _openings(rules: GrammarRules, calls: AllowedCalls) -> Iterator[Opening]:
    listed = calls.repeated(call_object(rules, calls), 'BLANK? "," BLANK?')
    yield Opening(f'BLANK? {listed} BLANK? "]"', mark=BEGIN)


PHI4_MINI: Final = CallFormat(
    signs=(r"functools\[",), begins=(BEGIN,), read=partial(read_objects, end=""), write=_write, openings=_openings
)
