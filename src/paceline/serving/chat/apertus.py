"""Apertus: a list between two marks, of objects whose one key is the name of a function, with its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Final

from paceline.serving.chat.base import AllowedCalls, CallFormat, Calls, Opening, as_json
from paceline.serving.chat.blocks import BEFORE, BETWEEN, MOST_KEY, json_parts, read_arguments, read_block
from paceline.serving.chat.grammar_rules import GrammarRules
from paceline.serving.chat.growing_text import EndedError, GrowingText, Steps
from paceline.serving.chat.message_parts import MessageParts

BEGIN, END = "<|tools_prefix|>", "<|tools_suffix|>"


def _read_call(text: GrowingText, parts: MessageParts) -> Steps[bool]:
    """Read a call behind its brace."""
    yield from text.blanks()
    if not (yield from text.literal('"')):
        return False
    name, mark = yield from text.until('"', most=MOST_KEY)
    yield from text.blanks()
    if not mark or not (yield from text.literal(":")):
        return False
    if not (yield from read_arguments(text, parts, name, "", END)):
        return False
    with suppress(EndedError):  # nothing that belongs to the call is missing
        yield from text.json(lambda _: None, END, depth=1)
    text.forget()
    return True


def _write(calls: Calls) -> str:
    return f"{BEGIN}{as_json([{name: arguments} for name, arguments in calls])}{END}"


def _openings(rules: GrammarRules, calls: AllowedCalls) -> Iterator[Opening]:
    each = calls.each(rules, lambda name: json_parts("{", f'"{name}"', ":", ""))
    listed = calls.repeated(rules.rule(f'{each} BLANK? "}}"'), 'BLANK? "," BLANK?')
    yield Opening(f'BLANK? "[" BLANK? {listed} BLANK? "]" BLANK? {rules.mark(END)}', mark=BEGIN)


APERTUS: Final = CallFormat(
    signs=(r"<\|tools_prefix\|>",),
    begins=(BEGIN,),
    marks=(END,),
    read=partial(read_block, item="{", ends=(END,), read_call=_read_call, before=BEFORE, between=BETWEEN),
    write=_write,
    openings=_openings,
)
