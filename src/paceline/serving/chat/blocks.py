"""Calls that stand in a block, one behind the other, and those that are objects of JSON: what reads them, and their
grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from paceline.serving.chat.base import AllowedCalls, Opening
from paceline.serving.chat.grammar_rules import GrammarRules, literal
from paceline.serving.chat.growing_text import BLANKS, Brackets, EndedError, GrowingText, Steps
from paceline.serving.chat.message_parts import MessageParts

MOST_KEY: Final = 512
"""A parameter's name may have so many characters."""

BEFORE, BETWEEN = re.compile(r"[\s\[]*"), re.compile(r"[\s\],;]*")
"""What may stand before calls in JSON, and between and behind them."""

HEAD: Final = re.compile(
    r'\{\s{0,64}"name"\s{0,64}:\s{0,64}"([^"\\\x00-\x1f]{1,256})"\s{0,64},\s{0,64}"(?:arguments|parameters)"'
    r"\s{0,64}:\s{0,64}(?=\{)"
)
"""It matches a call in JSON up to its arguments, as most models write it."""

KEY: Final = re.compile(r'\{\s*"([^"\\]*)"\s*:')
KEYS: Final = frozenset(("name", "arguments", "parameters", "id", "type", "function"))
"""An object that is a call may begin with these keys."""

NAMED: Final = re.compile(r'[\s\[]*\{\s*"name"\s*:\s*"([^"\\]*)"')
"""It matches up to the name of a call that begins without a mark."""

ReadOne = Callable[[GrowingText, MessageParts], Steps[bool | None]]
"""Reads one call, behind the mark that begins it: whether it is one; None ends the block."""


def read_block(
    text: GrowingText,
    parts: MessageParts,
    mark: str,
    *,
    item: str,
    ends: tuple[str, ...],
    read_call: ReadOne,
    before: re.Pattern[str] = BLANKS,
    between: re.Pattern[str] = BLANKS,
) -> Steps[bool]:
    """Read calls up to the end of their block; returns whether the last thing in it was a call.

    Args:
        mark: that began the block; may be that of its first call.
        item: mark that begins each of them.
        ends: marks that end the block.
        read_call: reads one of them.
        before, between: what may stand before the first, and behind others.
    """
    called: bool | None = False
    begun = mark == item
    while called is not None:
        if not begun and not (yield from _next_item(text, before, item, ends, called=called)):
            return called
        begun, before = False, between
        called = yield from read_call(text, parts)
        if not called:
            parts.say(text.forget())
    return False


def _next_item(
    text: GrowingText, blanks: re.Pattern[str], item: str, ends: tuple[str, ...], *, called: bool
) -> Steps[bool]:
    """Read the mark of the next call; returns whether it comes, before the block or the text ends.

    Args:
        called: the last thing that was read is a call, behind which the text may end.
    Raises:
        EndedError: the text ends, and not behind a call.
    """
    yield from text.blanks(blanks)
    if called:
        text.forget()
    try:
        return (yield from text.literal(item, *ends)) == item
    except EndedError:
        if not called:
            raise
        text.to_end()
        return False


def read_arguments(text: GrowingText, parts: MessageParts, name: str, call_id: str = "", *ends: str) -> Steps[bool]:
    """Read the arguments, an object of JSON, of a call whose name is known; returns whether it is a call.

    Args:
        ends: marks that end them where no bracket does.
    """
    yield from text.blanks()
    if not parts.knows(name) or not (yield from text.literal("{")):
        return False
    text.at -= 1
    text.forget()
    parts.begin(name, call_id)
    if not (yield from text.json(parts.add, *ends)):
        parts.broken = True
        return True
    parts.end()
    return True


def read_ending(text: GrowingText, end: str, *before: str) -> Steps[None]:
    """Read what closes a call whose arguments are complete; it may be missing."""
    try:
        yield from text.blanks()
        if before and (yield from text.literal(*before)):
            yield from text.blanks()
        yield from text.literal(end)
    except EndedError:
        text.to_end()
    text.forget()


def add_call(text: GrowingText, parts: MessageParts, name: str, arguments: Any) -> bool:
    """Take a call that was read as a whole; returns whether it is of a function that is known."""
    if not parts.knows(name):
        return False
    try:
        parts.call(name, arguments)
    except (ValueError, RecursionError):
        return False
    text.forget()
    return True


@dataclass(frozen=True, slots=True)
class CallBlock:
    """Describes a block between marks, which holds calls between marks of their own.

    Attributes:
        begin, end: around the block.
        call, call_end: around a call.
    """

    begin: str
    end: str
    call: str
    call_end: str

    def read(self, text: GrowingText, parts: MessageParts, mark: str, *, read_call: ReadOne) -> Steps[bool]:
        """Read what is behind the mark of the block, or of a call without one."""
        return (yield from read_block(text, parts, mark, item=self.call, ends=(self.end,), read_call=read_call))

    def written(self, calls: Iterable[str], between: str = "") -> str:
        """Return the text of a block."""
        return self.begin + between.join(f"{self.call}{call}{self.call_end}" for call in calls) + self.end

    def openings(self, rules: GrammarRules, calls: AllowedCalls, body: str, between: str = "") -> Iterator[Opening]:
        """Yield the grammar of a block, and of calls without the marks around it.

        Args:
            body: what is between the marks of a call.
        """
        begin, end = rules.mark(self.call), rules.mark(self.end)
        call = rules.rule(f"{body} {rules.mark(self.call_end)}")
        yield Opening(f"{calls.repeated(f'{begin} {call}', between)} {end}", mark=self.begin)
        again = f"({between} {begin} {call})*" if calls.many else ""
        yield Opening(f"{call} {again} {end}?", mark=self.call, loose=True)


def read_objects(text: GrowingText, parts: MessageParts, mark: str, *, end: str) -> Steps[bool]:
    """Read calls that are JSON objects, one or a list of them."""
    ends = (end,) if end else ()
    read_call = partial(_read_object, ends=ends)
    return (
        yield from read_block(
            text, parts, mark, item="{", ends=ends, read_call=read_call, before=BEFORE, between=BETWEEN
        )
    )


def _read_object(text: GrowingText, parts: MessageParts, *, ends: tuple[str, ...]) -> Steps[bool | None]:
    """Read a call that is a JSON object, behind its brace; None where the object is something else."""
    text.at -= 1
    brackets, reached = Brackets(*ends), 0
    while (head := HEAD.match(text.text, text.at)) is None:
        key, named = KEY.match(text.text, text.at), NAMED.match(text.text, text.at)
        if key is not None and key[1] not in KEYS:
            return None
        if named is not None and not parts.knows(named[1]):
            return (yield from _other_object(text, parts, ends))
        reached = brackets.reach(text.text, text.at + reached, last=text.last) - text.at
        if brackets.closed or brackets.marked:
            return _whole_object(text, parts, reached)
        yield from text.more()
    if not parts.knows(head[1]):
        return (yield from _other_object(text, parts, ends))
    text.at = head.end()
    text.forget()
    parts.begin(head[1])
    if not (yield from text.json(parts.add, *ends)):
        parts.broken = True
        return True
    parts.end()
    try:
        yield from text.json(lambda _: None, *ends, depth=1)
    except EndedError:  # nothing that belongs to the call is missing
        text.forget()
    return True


def _other_object(text: GrowingText, parts: MessageParts, ends: tuple[str, ...]) -> Steps[bool]:
    """Read an object that calls what is no function, as content."""
    parts.say(text.forget())
    yield from text.json(parts.say, *ends)
    return False


def _whole_object(text: GrowingText, parts: MessageParts, length: int) -> bool:
    """Read a call that is clear at its end only; returns whether it is one."""
    written = text.text[text.at : text.at + length]
    text.at += length
    try:
        name, arguments = _of_json(written)
    except (ValueError, RecursionError):
        return False
    return add_call(text, parts, name, arguments)


def _of_json(written: str) -> tuple[str, Any]:
    """Return the name and the arguments of the call that an object is.

    Raises:
        ValueError: it is none.
    """
    call = json.loads(written)
    if isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call.get("name"), str) or not (
        call.keys() & {"arguments", "parameters"} or call.keys() <= {"name", "id", "type"}
    ):
        raise ValueError("no call")
    arguments: Any = next((call[key] for key in ("arguments", "parameters") if call.get(key) is not None), {})
    return call["name"], json.loads(arguments or "{}") if isinstance(arguments, str) else arguments


def json_parts(*parts: str) -> str:
    """Return the grammar of parts of JSON with white space between them; "" is a place where some may stand."""
    return " BLANK? ".join(literal(part) if part else "" for part in parts)


def call_object(rules: GrammarRules, calls: AllowedCalls, more: str = "") -> str:
    """Return the rule for a call that is an object.

    Args:
        more: what may stand behind its arguments.
    """
    start = json_parts("{", '"name"', ":")
    each = calls.each(rules, lambda name: json_parts(f'"{name}"', ",", '"arguments"', ":", ""))
    return rules.rule(f'{start} BLANK? {each} {more} BLANK? "}}"')
