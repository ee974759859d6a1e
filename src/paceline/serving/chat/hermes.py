"""Hermes, Qwen 2.5, Qwen 3 and many others: each call is a JSON object between two marks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from paceline.serving.chat.base import AllowedCalls, CallFormat, Calls, Opening, as_json
from paceline.serving.chat.blocks import call_object, read_objects
from paceline.serving.chat.grammar_rules import GrammarRules

BEGIN, END = "<tool_call>", "</tool_call>"


def _write(calls: Calls) -> str:
    return "\n".join(f"{BEGIN}\n{as_json({'name': name, 'arguments': arguments})}\n{END}" for name, arguments in calls)


def _openings(rules: GrammarRules, calls: AllowedCalls) -> Iterator[Opening]:
    call = f"BLANK? {call_object(rules, calls)} BLANK? {rules.mark(END)}"
    yield Opening(calls.repeated(call, f"BLANK? {rules.mark(BEGIN)}"), mark=BEGIN)


HERMES: Final = CallFormat(
    signs=(BEGIN,), begins=(BEGIN,), marks=(END,), read=partial(read_objects, end=END), write=_write, openings=_openings
)
