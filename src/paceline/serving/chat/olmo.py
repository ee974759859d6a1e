"""OLMo 3: calls as Python writes them (`pythonic`), a line each, between two marks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from paceline.serving.chat.base import AllowedCalls, CallFormat, Calls, Opening
from paceline.serving.chat.grammar_rules import NEWLINE, GrammarRules, one_of
from paceline.serving.chat.growing_text import EndedError, GrowingText, Steps
from paceline.serving.chat.message_parts import MessageParts
from paceline.serving.chat.pythonic import call_grammars, call_text, read_call

BEGIN, END = "<function_calls>", "</function_calls>"


def _read(text: GrowingText, parts: MessageParts, _: str) -> Steps[bool]:
    """Read calls behind the mark, each whole."""
    yield from text.blanks()
    while (yield from read_call(text, parts)):
        try:
            yield from text.blanks()
            if (yield from text.literal(END)):
                text.forget()
                return True
        except EndedError:
            text.to_end()
            return True
    return False


def _write(calls: Calls) -> str:
    lines = "\n".join(call_text(*call) for call in calls)
    return f"{BEGIN}{lines}{END}"


def _openings(rules: GrammarRules, calls: AllowedCalls) -> Iterator[Opening]:
    each = (f'"{name}(" {text} ")"' for name, text in call_grammars(rules, calls).items())
    lines = calls.repeated(rules.rule(one_of(each)), r'"\n"')
    yield Opening(f"{NEWLINE} {lines} {NEWLINE} {rules.mark(END)}", mark=BEGIN)


OLMO3: Final = CallFormat(signs=(BEGIN,), begins=(BEGIN,), marks=(END,), read=_read, write=_write, openings=_openings)
