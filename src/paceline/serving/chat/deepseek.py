"""DeepSeek's marks with wide bars and low blocks. V3 writes `function`, a separator, the name and a block of JSON, V3.1
the name, the separator and JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from paceline.serving.chat.base import AllowedCalls, CallFormat, Calls, Opening, as_json
from paceline.serving.chat.blocks import MOST_KEY, CallBlock, read_arguments, read_ending
from paceline.serving.chat.grammar_rules import NEWLINE, GrammarRules
from paceline.serving.chat.growing_text import GrowingText, Steps
from paceline.serving.chat.message_parts import NAME, MessageParts


def _mark(words: str) -> str:
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


SEPARATOR: Final = _mark("tool sep")
BLOCK: Final = CallBlock(*map(_mark, ("tool calls begin", "tool calls end", "tool call begin", "tool call end")))


def _read_call(text: GrowingText, parts: MessageParts) -> Steps[bool]:
    """Read one call of either version, behind its mark; returns whether it is one."""
    yield from text.blanks()
    name, mark = yield from text.until(SEPARATOR, most=MOST_KEY)
    if not mark:
        return False
    yield from text.blanks()
    begun = yield from text.literal("{", "```json")
    if not begun:
        name = yield from text.run(NAME)
        yield from text.blanks()
        yield from text.literal("```json")
    text.at -= begun == "{"
    if not (yield from read_arguments(text, parts, name.strip(), "", BLOCK.call_end)):
        return False
    yield from read_ending(text, BLOCK.call_end, "```")
    return True


def _write_v3(calls: Calls) -> str:
    written = (f"function{SEPARATOR}{name}\n```json\n{as_json(arguments)}\n```" for name, arguments in calls)
    return BLOCK.written(written, "\n")


def _write_v31(calls: Calls) -> str:
    return BLOCK.written(f"{name}{SEPARATOR}{as_json(arguments)}" for name, arguments in calls)


def _openings_v3(rules: GrammarRules, calls: AllowedCalls) -> Iterator[Opening]:
    each = calls.each(rules, lambda name: rf'"{name}\n```json\n"')
    return BLOCK.openings(rules, calls, rf'"function" {rules.mark(SEPARATOR)} {each} "\n```"', NEWLINE)


def _openings_v31(rules: GrammarRules, calls: AllowedCalls) -> Iterator[Opening]:
    return BLOCK.openings(rules, calls, calls.each(rules, lambda name: f'"{name}" {rules.mark(SEPARATOR)}'))


DEEPSEEK_V3: Final = CallFormat(
    signs=(SEPARATOR, "```json"),
    begins=(BLOCK.begin, BLOCK.call),
    marks=(BLOCK.end, BLOCK.call_end, SEPARATOR),
    read=partial(BLOCK.read, read_call=_read_call),
    write=_write_v3,
    openings=_openings_v3,
)
DEEPSEEK_V31: Final = replace(DEEPSEEK_V3, signs=(SEPARATOR,), write=_write_v31, openings=_openings_v31)
