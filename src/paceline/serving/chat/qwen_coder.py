"""Qwen3-Coder and Seed-OSS: `<function=NAME><parameter=KEY>VALUE</parameter></function>` between two marks, which the
models leave out at times. Qwen3-Coder has its values on lines of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from paceline.serving.chat.base import AllowedCalls, CallFormat, Calls, Opening
from paceline.serving.chat.blocks import read_block
from paceline.serving.chat.grammar_rules import NEWLINE, GrammarRules, one_of
from paceline.serving.chat.growing_text import GrowingText, Steps
from paceline.serving.chat.message_parts import MessageParts
from paceline.serving.chat.tagged import Elements, Tags, arguments_of

BEGIN, END = "<tool_call>", "</tool_call>"
SEED_BEGIN, SEED_END = "<seed:tool_call>", "</seed:tool_call>"
ELEMENTS: Final = Elements(
    call="<function=", call_end="</function>", parameter="<parameter=", parameter_end="</parameter>", close=">"
)

TAGS: Final = Tags(
    before=lambda _, name: rf'"{ELEMENTS.parameter}" {name} ">\n"',
    end=f"\n{ELEMENTS.parameter_end}",
    after=r'"\n"',
    words={"true": "True", "false": "False", "null": "None"},
    wrong=">\n",
)
SEED_TAGS: Final = replace(
    TAGS, before=lambda _, name: f'"{ELEMENTS.parameter}" {name} ">"', end=ELEMENTS.parameter_end
)


def _read(text: GrowingText, parts: MessageParts, mark: str, *, end: str) -> Steps[bool]:
    read_call = partial(ELEMENTS.read, end=end)
    return (yield from read_block(text, parts, mark, item=ELEMENTS.call, ends=(end,), read_call=read_call))


def _write(calls: Calls, *, begin: str, end: str, around: str) -> str:
    return "\n".join(f"{begin}\n{ELEMENTS.written(name, arguments, around)}\n{end}" for name, arguments in calls)


def _openings(rules: GrammarRules, calls: AllowedCalls, *, begin: str, end: str, tags: Tags) -> Iterator[Opening]:
    """Yield how calls begin: with the mark, or without it as the models write them at times."""
    again, over = rules.mark(begin), rules.mark(end)
    arguments = arguments_of(rules, calls, tags)
    texts = {name: rules.rule(rf'"\n" {text} "{ELEMENTS.call_end}"') for name, text in arguments.items()}
    each = one_of(f'"{ELEMENTS.call}{name}>" {text}' for name, text in texts.items())
    call = rules.rule(rf'"\n" {each} "\n" {over}')
    yield Opening(calls.repeated(call, f"{NEWLINE} {again}"), mark=begin)
    more = f"({NEWLINE} {again} {call})*" if calls.many else ""
    for name, text in texts.items():
        yield Opening(rf'{text} ("\n" {over})? {more}', mark=f"{ELEMENTS.call}{name}>", loose=True)


QWEN3_CODER: Final = CallFormat(
    signs=(BEGIN, ELEMENTS.call, ELEMENTS.parameter),
    begins=(BEGIN, ELEMENTS.call),
    marks=(END,),
    read=partial(_read, end=END),
    write=partial(_write, begin=BEGIN, end=END, around="\n"),
    openings=partial(_openings, begin=BEGIN, end=END, tags=TAGS),
)
SEED_OSS: Final = CallFormat(
    signs=(SEED_BEGIN, ELEMENTS.call),
    begins=(SEED_BEGIN,),
    marks=(SEED_END,),
    read=partial(_read, end=SEED_END),
    write=partial(_write, begin=SEED_BEGIN, end=SEED_END, around=""),
    openings=partial(_openings, begin=SEED_BEGIN, end=SEED_END, tags=SEED_TAGS),
)
