"""MiniMax-M2: `<invoke name="NAME">`, then `<parameter name="KEY">VALUE</parameter>` a line, for each call; two marks
stand around all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from paceline.serving.chat.base import AllowedCalls, CallFormat, Calls, Opening
from paceline.serving.chat.blocks import read_block
from paceline.serving.chat.grammar_rules import NEWLINE, GrammarRules, literal, one_of
from paceline.serving.chat.growing_text import GrowingText, Steps
from paceline.serving.chat.message_parts import MessageParts
from paceline.serving.chat.tagged import Elements, Tags, arguments_of

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
ELEMENTS: Final = Elements(
    call='<invoke name="', call_end="</invoke>", parameter='<parameter name="', parameter_end="</parameter>", close='">'
)
TAGS: Final = Tags(
    before=lambda _, name: f"{literal(ELEMENTS.parameter)} {name} {literal(ELEMENTS.close)}",
    end=ELEMENTS.parameter_end,
    after=NEWLINE,
    words={},
    wrong='">\n',
)


def _read(text: GrowingText, parts: MessageParts, mark: str) -> Steps[bool]:
    read_call = partial(ELEMENTS.read, end=END)
    return (yield from read_block(text, parts, mark, item=ELEMENTS.call, ends=(END,), read_call=read_call))


def _write(calls: Calls) -> str:
    return "\n".join((BEGIN, *(ELEMENTS.written(name, arguments) for name, arguments in calls), END))


def _openings(rules: GrammarRules, calls: AllowedCalls) -> Iterator[Opening]:
    each = (
        f"{literal(f'{ELEMENTS.call}{name}{ELEMENTS.close}')} {NEWLINE} {text} {literal(ELEMENTS.call_end)}"
        for name, text in arguments_of(rules, calls, TAGS).items()
    )
    call = rules.rule(one_of(each))
    yield Opening(f"{NEWLINE} {calls.repeated(call, NEWLINE)} {NEWLINE} {rules.mark(END)}", mark=BEGIN)


MINIMAX_M2: Final = CallFormat(
    signs=(BEGIN, ELEMENTS.call), begins=(BEGIN,), marks=(END,), read=_read, write=_write, openings=_openings
)
