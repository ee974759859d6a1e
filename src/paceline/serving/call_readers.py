"""Function calls in the texts of models, read while they are written: one generator for each way of writing them.

Each reads what follows a mark, or a whole block of calls, and returns whether the last thing it read is a call. What
began like a call and is none goes on as content, to the letter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from paceline.serving.growing_text import BLANKS, Brackets, EndedError, GrowingText, Steps
from paceline.serving.message_parts import NAME, Parts, say_taken
from paceline.serving.python_literals import CALL_HEAD, call_end, keywords
from paceline.serving.typed_values import typed_value

BEFORE, BETWEEN = re.compile(r"[\s\[]*"), re.compile(r"[\s\],;]*")
"""What may stand before calls in JSON, and between and behind them."""

HEAD: Final = re.compile(
    r'\{\s{0,64}"name"\s{0,64}:\s{0,64}"([^"\\\x00-\x1f]{1,256})"\s{0,64},\s{0,64}"(?:arguments|parameters)"'
    r"\s{0,64}:\s{0,64}(?=\{)"
)
"""A call in JSON up to its arguments, as most models write it."""

KEY: Final = re.compile(r'\{\s*"([^"\\]*)"\s*:')
KEYS: Final = frozenset(("name", "arguments", "parameters", "id", "type", "function"))
"""Those that an object may begin with that is a call."""

NAMED: Final = re.compile(r'[\s\[]*\{\s*"name"\s*:\s*"([^"\\]*)"')
CALLED: Final = re.compile(r"\s*\[\s*([A-Za-z_][A-Za-z0-9_.-]*)\(")
"""The name of a call that begins without a mark."""

SHORT: Final = re.compile(r"[A-Za-z0-9]{1,64}")
MOST_KEY: Final = 512
"""Characters of a parameter's name."""

Item = Callable[[GrowingText, Parts], Steps[bool | None]]
"""Reads one call: whether it is one; None ends the block."""


def read_block(
    text: GrowingText,
    parts: Parts,
    mark: str,
    *,
    item: str,
    ends: tuple[str, ...],
    one: Item,
    before: re.Pattern[str] = BLANKS,
    between: re.Pattern[str] = BLANKS,
) -> Steps[bool]:
    """Calls up to the end of their block.

    Args:
        mark: that began the block; may be that of its first call.
        item: mark that begins each of them.
        ends: marks that end the block.
        one: reads one of them behind its mark.
        before, between: what may stand before the first, and behind others.
    """
    called: bool | None = False
    begun = mark == item
    while called is not None:
        if not begun:
            yield from text.blanks(before)
            if called:
                text.forget()
            try:
                found = yield from text.literal(item, *ends)
            except EndedError:
                if not called:
                    raise
                text.to_end()
                return True
            if found != item:
                return called
        begun, before = False, between
        called = yield from one(text, parts)
        if not called:
            say_taken(text, parts)
    return False


def read_object(text: GrowingText, parts: Parts, *, ends: tuple[str, ...]) -> Steps[bool | None]:
    """A call as a JSON object, behind its brace."""
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


def _other_object(text: GrowingText, parts: Parts, ends: tuple[str, ...]) -> Steps[bool]:
    """An object that calls what is no function."""
    say_taken(text, parts)
    yield from text.json(parts.say, *ends)
    return False


def _whole_object(text: GrowingText, parts: Parts, length: int) -> bool:
    """A call that is clear at its end only."""
    written = text.text[text.at : text.at + length]
    text.at += length
    try:
        name, arguments = _of_json(written)
    except (ValueError, RecursionError):
        return False
    return _called(text, parts, name, arguments)


def _called(text: GrowingText, parts: Parts, name: str, arguments: Any) -> bool:
    """A call that was read as a whole, if it is of a function that is known."""
    if not parts.knows(name):
        return False
    try:
        parts.call(name, arguments)
    except (ValueError, RecursionError):
        return False
    text.forget()
    return True


def _of_json(written: str) -> tuple[str, Any]:
    """The call that an object is.

    Raises:
        ValueError: it is none.
    """
    one = json.loads(written)
    if isinstance(one.get("function"), dict):
        one = one["function"]
    if not isinstance(one.get("name"), str) or not (
        one.keys() & {"arguments", "parameters"} or one.keys() <= {"name", "id", "type"}
    ):
        raise ValueError("no call")
    arguments: Any = next((one[key] for key in ("arguments", "parameters") if one.get(key) is not None), {})
    return one["name"], json.loads(arguments or "{}") if isinstance(arguments, str) else arguments


def read_objects(text: GrowingText, parts: Parts, mark: str, *, end: str) -> Steps[bool]:
    """Calls as JSON objects, one or a list of them."""
    ends = (end,) if end else ()
    one = partial(read_object, ends=ends)
    return (yield from read_block(text, parts, mark, item="{", ends=ends, one=one, before=BEFORE, between=BETWEEN))


def read_mistral(text: GrowingText, parts: Parts, _: str) -> Steps[bool]:
    """`[TOOL_CALLS]` and a list of objects, or a name, perhaps `[CALL_ID]` and an id, `[ARGS]`, and an object."""
    yield from text.blanks()
    if text.text.startswith(("{", "["), text.at):
        return (yield from read_objects(text, parts, "", end=""))
    name = yield from text.run(NAME)
    mark = yield from text.literal("[CALL_ID]", "[ARGS]", "{")
    call_id = ""
    if mark == "[CALL_ID]":
        call_id = yield from text.run(SHORT)
        mark = yield from text.literal("[ARGS]")
    text.at -= mark == "{"
    return mark != "" and (yield from _arguments(text, parts, name, call_id))


def _arguments(text: GrowingText, parts: Parts, name: str, call_id: str = "", *ends: str) -> Steps[bool]:
    """The object of a call whose name is known."""
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


def _deepseek(words: str) -> str:
    """A mark of DeepSeek's, with its wide bars and low blocks."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


CALLS, CALLS_END = _deepseek("tool calls begin"), _deepseek("tool calls end")
CALL, CALL_END, SEPARATOR = _deepseek("tool call begin"), _deepseek("tool call end"), _deepseek("tool sep")


def read_deepseek(text: GrowingText, parts: Parts, mark: str) -> Steps[bool]:
    """DeepSeek's: those of V3 (`function`, separator, name, a block of JSON), and of V3.1 (name, separator, JSON)."""
    return (yield from read_block(text, parts, mark, item=CALL, ends=(CALLS_END,), one=_deepseek_call))


def _deepseek_call(text: GrowingText, parts: Parts) -> Steps[bool]:
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
    if not (yield from _arguments(text, parts, name.strip(), "", CALL_END)):
        return False
    yield from _ending(text, CALL_END, "```")
    return True


def _ending(text: GrowingText, end: str, *before: str) -> Steps[None]:
    """What closes a call whose arguments are complete; may be missing."""
    try:
        yield from text.blanks()
        if before and (yield from text.literal(*before)):
            yield from text.blanks()
        yield from text.literal(end)
    except EndedError:
        text.to_end()
    text.forget()


SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_ARGUMENTS, KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def read_kimi(text: GrowingText, parts: Parts, mark: str) -> Steps[bool]:
    """Kimi K2's, whose ids are `functions.NAME:NUMBER`, and are the call's."""
    return (yield from read_block(text, parts, mark, item=KIMI_CALL, ends=(SECTION_END,), one=_kimi_call))


def _kimi_call(text: GrowingText, parts: Parts) -> Steps[bool]:
    named, mark = yield from text.until(KIMI_ARGUMENTS, most=MOST_KEY)
    call_id = named.strip()
    name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id.removeprefix("functions.")
    if not mark or not (yield from _arguments(text, parts, name, call_id, KIMI_END)):
        return False
    yield from _ending(text, KIMI_END)
    return True


def read_elements(text: GrowingText, parts: Parts, mark: str, *, end: str) -> Steps[bool]:
    """Qwen3-Coder's: `<function=NAME><parameter=KEY>VALUE</parameter></function>`, whose block ends with `end`."""
    one = partial(_element, end=end)
    return (yield from read_block(text, parts, mark, item="<function=", ends=(end,), one=one))


def _element(text: GrowingText, parts: Parts, *, end: str) -> Steps[bool]:
    name = yield from text.run(NAME)
    if not (yield from text.literal(">")) or not parts.knows(name):
        return False
    text.forget()
    parts.begin(name)
    written = Written(parts, name)
    while True:
        yield from text.blanks()
        tag = yield from text.literal("<parameter=", "</function>", end)
        if tag != "<parameter=":
            return _complete(text, written, ended=tag != "", back=len(tag) if tag == end else 0)
        key, mark = yield from text.until(">", most=MOST_KEY)
        if not mark:
            return _complete(text, written, ended=False)
        value = yield from _value(text, "</parameter>", ("<parameter=", "</function>", end))
        written.add(key.strip(), value.removeprefix("\n").removesuffix("\n"))
        text.forget()


def read_pairs(text: GrowingText, parts: Parts, _: str) -> Steps[bool]:
    """GLM-4.5's: `<tool_call>NAME`, then pairs of `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`."""
    yield from text.blanks()
    name = yield from text.run(NAME)
    yield from text.blanks()
    tag = yield from text.literal("<arg_key>", "</tool_call>")
    if not tag or not parts.knows(name):
        return False
    text.forget()
    parts.begin(name)
    written = Written(parts, name)
    while tag == "<arg_key>":
        key, mark = yield from text.until("</arg_key>", most=MOST_KEY)
        yield from text.blanks()
        if not mark or not (yield from text.literal("<arg_value>")):
            return _complete(text, written, ended=False)
        written.add(key.strip(), (yield from _value(text, "</arg_value>", ("<arg_key>", "</tool_call>"))))
        text.forget()
        yield from text.blanks()
        tag = yield from text.literal("<arg_key>", "</tool_call>")
    return _complete(text, written, ended=tag != "")


def _value(text: GrowingText, end: str, followers: tuple[str, ...]) -> Steps[str]:
    """A value up to the end mark that is followed by one of these: values may hold such marks themselves."""
    value = ""
    while True:
        more, _ = yield from text.until(end)
        value += more
        spaces = yield from text.blanks()
        tag = yield from text.literal(*followers)
        text.at -= len(tag)
        if tag:
            return value
        value += end + spaces


def _complete(text: GrowingText, written: Written, *, ended: bool, back: int = 0) -> bool:
    """A call of elements is over; it is broken where something else came than may come."""
    text.at -= back
    text.forget()
    if ended:
        written.end()
    else:
        written.parts.broken = True
    return True


class Written:
    """Arguments of a call that come as elements, written as JSON.

    Args:
        name: of the function, whose schema says which types the values have.
    """

    def __init__(self, parts: Parts, name: str) -> None:
        self.parts, self._schema, self._sign = parts, parts.schema(name), "{"

    def add(self, key: str, value: str) -> None:
        """One more."""
        found = json.dumps(typed_value(value, self._schema, key), ensure_ascii=False)
        self.parts.add(f"{self._sign}{json.dumps(key, ensure_ascii=False)}: {found}")
        self._sign = ", "

    def end(self) -> None:
        """All are there."""
        self.parts.add("{}" if self._sign == "{" else "}")
        self.parts.end()


def read_python(text: GrowingText, parts: Parts, mark: str, *, end: str) -> Steps[bool]:
    """A list of calls in Python, each whole; behind a mark there may be one without a list."""
    yield from text.blanks()
    if not (yield from text.literal("[")) and not mark:
        return False
    while True:
        yield from text.blanks()
        if not (yield from _python_call(text, parts)):
            return False
        try:
            yield from text.blanks()
            if (yield from text.literal(",", "]", end)) != ",":
                yield from _ending(text, end)
                return True
        except EndedError:
            text.to_end()
            return True
        text.forget()


def _python_call(text: GrowingText, parts: Parts) -> Steps[bool]:
    name = yield from text.run(CALL_HEAD)
    if not parts.knows(name) or not (yield from text.literal("(")):
        return False
    written = yield from call_end(text)
    try:
        arguments = keywords(written)
    except ValueError:
        return False
    return _called(text, parts, name, arguments)
