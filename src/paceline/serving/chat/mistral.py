"""Mistral's two ways behind `[TOOL_CALLS]`: a list of JSON objects, and, in newer models, a name, perhaps `[CALL_ID]`
and an id, `[ARGS]`, and the object of its arguments. Both are read wherever one of them is.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from paceline.serving.chat.base import AllowedCalls, CallFormat, Calls, Opening, as_json
from paceline.serving.chat.blocks import call_object, read_arguments, read_objects
from paceline.serving.chat.grammar_rules import GrammarRules
from paceline.serving.chat.growing_text import GrowingText, Steps
from paceline.serving.chat.message_parts import NAME, MessageParts

BEGIN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID: Final = re.compile(r"[A-Za-z0-9]{1,64}")


def nine_signs() -> str:
    """Return a new id of a call, as Mistral's chat templates want it."""
    return secrets.token_hex(5)[:9]


def _read(text: GrowingText, parts: MessageParts, _: str) -> Steps[bool]:
    """Read calls behind a mark, written in either way; returns whether they are some."""
    yield from text.blanks()
    if text.text.startswith(("{", "["), text.at):
        return (yield from read_objects(text, parts, "", end=""))
    name = yield from text.run(NAME)
    mark = yield from text.literal(CALL_ID, ARGUMENTS, "{")
    call_id = ""
    if mark == CALL_ID:
        call_id = yield from text.run(ID)
        mark = yield from text.literal(ARGUMENTS)
    text.at -= mark == "{"
    return mark != "" and (yield from read_arguments(text, parts, name, call_id))


def _write_list(calls: Calls) -> str:
    return f"{BEGIN}{as_json([{'name': name, 'arguments': arguments} for name, arguments in calls])}"


def _write_names(calls: Calls) -> str:
    return "".join(f"{BEGIN}{name}{ARGUMENTS}{as_json(arguments)}" for name, arguments in calls)


def _list_openings(rules: GrammarRules, calls: AllowedCalls) -> Iterator[Opening]:
    call_id = r'(BLANK? "," BLANK? "\"id\"" BLANK? ":" BLANK? /"[A-Za-z0-9]{9}"/)?'
    listed = calls.repeated(call_object(rules, calls, call_id), 'BLANK? "," BLANK?')
    yield Opening(f'BLANK? "[" BLANK? {listed} BLANK? "]"', mark=BEGIN)


def _name_openings(rules: GrammarRules, calls: AllowedCalls) -> Iterator[Opening]:
    arguments = rules.mark(ARGUMENTS)
    call_id = f"({rules.mark(CALL_ID)} /[A-Za-z0-9]{{9}}/)?" if rules.silent(CALL_ID) else ""
    call = rules.rule(calls.each(rules, lambda name: f'"{name}" {call_id} {arguments}'))
    yield Opening(calls.repeated(call, rules.mark(BEGIN)), mark=BEGIN)


MISTRAL: Final = CallFormat(
    signs=(r"\[TOOL_CALLS\]",),
    begins=(BEGIN,),
    read=_read,
    write=_write_list,
    openings=_list_openings,
    make_id=nine_signs,
)
MISTRAL_ARGS: Final = replace(
    MISTRAL,
    signs=(*MISTRAL.signs, r"\[ARGS\]"),
    marks=(ARGUMENTS, CALL_ID),
    write=_write_names,
    openings=_name_openings,
)
