"""GLM-4.5: `<tool_call>NAME`, then pairs of `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from paceline.serving.chat.base import AllowedCalls, CallFormat, Calls, Opening
from paceline.serving.chat.blocks import MOST_KEY
from paceline.serving.chat.grammar_rules import NEWLINE, GrammarRules, one_of
from paceline.serving.chat.growing_text import GrowingText, Steps
from paceline.serving.chat.message_parts import NAME, MessageParts
from paceline.serving.chat.tagged import TaggedCall, Tags, arguments_of, read_value, value_text

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def _before_value(rules: GrammarRules, name: str) -> str:
    key, key_end, value = map(rules.mark, (KEY, KEY_END, VALUE))
    return rf'{key} {name} {key_end} "\n"? {value}'


TAGS: Final = Tags(before=_before_value, end=VALUE_END, after=NEWLINE, words={}, wrong="<\n")


def _read(text: GrowingText, parts: MessageParts, _: str) -> Steps[bool]:
    """Read one call behind its mark; returns whether it is one."""
    yield from text.blanks()
    name = yield from text.run(NAME)
    yield from text.blanks()
    tag = yield from text.literal(KEY, END)
    if not tag or not parts.knows(name):
        return False
    call = TaggedCall(text, parts, name)
    while tag == KEY:
        key, mark = yield from text.until(KEY_END, most=MOST_KEY)
        yield from text.blanks()
        if not mark or not (yield from text.literal(VALUE)):
            return call.over(whole=False)
        call.add(key.strip(), (yield from read_value(text, VALUE_END, (KEY, END))))
        yield from text.blanks()
        tag = yield from text.literal(KEY, END)
    return call.over(whole=tag != "")


def _write(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        pairs = (f"{KEY}{key}{KEY_END}\n{VALUE}{value_text(value)}{VALUE_END}\n" for key, value in arguments.items())
        written.append(f"{BEGIN}{name}\n{''.join(pairs)}{END}")
    return "\n".join(written)


def _openings(rules: GrammarRules, calls: AllowedCalls) -> Iterator[Opening]:
    each = (f'"{name}" {NEWLINE} {text}' for name, text in arguments_of(rules, calls, TAGS).items())
    call = rules.rule(f"{one_of(each)} {rules.mark(END)}")
    yield Opening(calls.repeated(call, f"{NEWLINE} {rules.mark(BEGIN)}"), mark=BEGIN)


GLM45: Final = CallFormat(
    signs=(BEGIN, KEY),
    begins=(BEGIN,),
    marks=(END, KEY, KEY_END, VALUE, VALUE_END),
    read=_read,
    write=_write,
    openings=_openings,
)
