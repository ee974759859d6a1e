"""Kimi K2: calls whose ids are `functions.NAME:NUMBER`, which are all that tells the name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Final

from paceline.serving.chat.base import AllowedCalls, CallFormat, Calls, Opening, as_json
from paceline.serving.chat.blocks import MOST_KEY, CallBlock, read_arguments, read_ending
from paceline.serving.chat.grammar_rules import GrammarRules
from paceline.serving.chat.growing_text import GrowingText, Steps
from paceline.serving.chat.message_parts import MessageParts

BLOCK: Final = CallBlock(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"
)
ARGUMENTS: Final = "<|tool_call_argument_begin|>"


def _read_call(text: GrowingText, parts: MessageParts) -> Steps[bool]:
    named, mark = yield from text.until(ARGUMENTS, most=MOST_KEY)
    call_id = named.strip()
    name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id.removeprefix("functions.")
    if not mark or not (yield from read_arguments(text, parts, name, call_id, BLOCK.call_end)):
        return False
    yield from read_ending(text, BLOCK.call_end)
    return True


def _write(calls: Calls) -> str:
    return BLOCK.written(
        f"functions.{name}:{number}{ARGUMENTS}{as_json(arguments)}" for number, (name, arguments) in enumerate(calls)
    )


def _openings(rules: GrammarRules, calls: AllowedCalls) -> Iterator[Opening]:
    arguments = rules.mark(ARGUMENTS)
    return BLOCK.openings(
        rules, calls, calls.each(rules, lambda name: f'"functions.{name}:" /[0-9]{{1,3}}/ {arguments}')
    )


KIMI_K2: Final = CallFormat(
    signs=(rf"{re.escape(BLOCK.call)}|<\|im_system\|>tool_declare",),
    begins=(BLOCK.begin, BLOCK.call),
    marks=(BLOCK.end, BLOCK.call_end, ARGUMENTS),
    read=partial(BLOCK.read, read_call=_read_call),
    write=_write,
    openings=_openings,
)
