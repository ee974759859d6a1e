"""Qwen3-Coder and Seed-OSS: `<function=NAME><parameter=KEY>VALUE</parameter></function>` between two marks, which the
models leave out at times. Qwen3-Coder has its values on lines of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from paceline.serving.chat.base import AllowedCalls, CallFormat, Calls, Opening
from paceline.serving.chat.blocks import MOST_KEY, read_block
from paceline.serving.chat.grammar_rules import NEWLINE, GrammarRules, one_of
from paceline.serving.chat.growing_text import GrowingText, Steps
from paceline.serving.chat.message_parts import NAME, MessageParts
from paceline.serving.chat.tagged import TaggedCall, Tags, arguments_of, read_value, value_text

BEGIN, END = "<tool_call>", "</tool_call>"
SEED_BEGIN, SEED_END = "<seed:tool_call>", "</seed:tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

TAGS: Final = Tags(
    before=lambda _, name: rf'"{PARAMETER}" {name} ">\n"',
    end=f"\n{PARAMETER_END}",
    after=r'"\n"',
    words={"true": "True", "false": "False", "null": "None"},
    wrong=">\n",
)
SEED_TAGS: Final = replace(TAGS, before=lambda _, name: f'"{PARAMETER}" {name} ">"', end=PARAMETER_END)


def _read(text: GrowingText, parts: MessageParts, mark: str, *, end: str) -> Steps[bool]:
    read_call = partial(_read_call, end=end)
    return (yield from read_block(text, parts, mark, item=FUNCTION, ends=(end,), read_call=read_call))


def _read_call(text: GrowingText, parts: MessageParts, *, end: str) -> Steps[bool]:
    """Read one call behind `<function=`; returns whether it is one."""
    name = yield from text.run(NAME)
    if not (yield from text.literal(">")) or not parts.knows(name):
        return False
    call = TaggedCall(text, parts, name)
    while True:
        yield from text.blanks()
        tag = yield from text.literal(PARAMETER, FUNCTION_END, end)
        if tag != PARAMETER:
            text.at -= len(tag) if tag == end else 0
            return call.over(whole=tag != "")
        key, mark = yield from text.until(">", most=MOST_KEY)
        if not mark:
            return call.over(whole=False)
        value = yield from read_value(text, PARAMETER_END, (PARAMETER, FUNCTION_END, end))
        call.add(key.strip(), value.removeprefix("\n").removesuffix("\n"))


def _write(calls: Calls, *, begin: str, end: str, around: str) -> str:
    return "\n".join(f"{begin}\n{_element(name, arguments, around)}\n{end}" for name, arguments in calls)


def _element(name: str, arguments: Mapping[str, Any], around: str) -> str:
    values = "".join(
        f"{PARAMETER}{key}>{around}{value_text(value)}{around}{PARAMETER_END}\n" for key, value in arguments.items()
    )
    return f"{FUNCTION}{name}>\n{values}{FUNCTION_END}"


def _openings(rules: GrammarRules, calls: AllowedCalls, *, begin: str, end: str, tags: Tags) -> Iterator[Opening]:
    """Yield how calls begin: with the mark, or without it as the models write them at times."""
    again, over = rules.mark(begin), rules.mark(end)
    arguments = arguments_of(rules, calls, tags)
    texts = {name: rules.rule(rf'"\n" {text} "{FUNCTION_END}"') for name, text in arguments.items()}
    each = one_of(f'"{FUNCTION}{name}>" {text}' for name, text in texts.items())
    call = rules.rule(rf'"\n" {each} "\n" {over}')
    yield Opening(calls.repeated(call, f"{NEWLINE} {again}"), mark=begin)
    more = f"({NEWLINE} {again} {call})*" if calls.many else ""
    for name, text in texts.items():
        yield Opening(rf'{text} ("\n" {over})? {more}', mark=f"{FUNCTION}{name}>", loose=True)


QWEN3_CODER: Final = CallFormat(
    signs=(BEGIN, FUNCTION, PARAMETER),
    begins=(BEGIN, FUNCTION),
    marks=(END,),
    read=partial(_read, end=END),
    write=partial(_write, begin=BEGIN, end=END, around="\n"),
    openings=partial(_openings, begin=BEGIN, end=END, tags=TAGS),
)
SEED_OSS: Final = CallFormat(
    signs=(SEED_BEGIN, FUNCTION),
    begins=(SEED_BEGIN,),
    marks=(SEED_END,),
    read=partial(_read, end=SEED_END),
    write=partial(_write, begin=SEED_BEGIN, end=SEED_END, around=""),
    openings=partial(_openings, begin=SEED_BEGIN, end=SEED_END, tags=SEED_TAGS),
)
