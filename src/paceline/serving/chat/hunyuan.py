"""Hunyuan, Jamba and others: a list of JSON objects between two marks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from paceline.serving.chat.base import AllowedCalls, CallFormat, Calls, Opening, as_json
from paceline.serving.chat.blocks import call_object, read_objects
from paceline.serving.chat.grammar_rules import GrammarRules

BEGIN, END = "<tool_calls>", "</tool_calls>"


def _write(calls: Calls) -> str:
    return f"{BEGIN}{as_json([{'name': name, 'arguments': arguments} for name, arguments in calls])}{END}"


def _openings(rules: GrammarRules, calls: AllowedCalls) -> Iterator[Opening]:
    listed = calls.repeated(call_object(rules, calls), 'BLANK? "," BLANK?')
    yield Opening(f'BLANK? "[" BLANK? {listed} BLANK? "]" BLANK? {rules.mark(END)}', mark=BEGIN)


HUNYUAN: Final = CallFormat(
    signs=(BEGIN,), begins=(BEGIN,), marks=(END,), read=partial(read_objects, end=END), write=_write, openings=_openings
)
