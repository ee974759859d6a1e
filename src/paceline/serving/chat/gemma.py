"""Gemma 4: `call:NAME{key:value,...}` between two marks, with texts between two others, without quotes around keys.

In the grammar, parameters are as in `pythonic`. A text may hold anything but its mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from paceline.serving.api_errors import ApiError
from paceline.serving.chat.base import AllowedCalls, CallFormat, Calls, Opening
from paceline.serving.chat.blocks import add_call, read_block
from paceline.serving.chat.grammar_rules import GrammarRules, literal, one_of
from paceline.serving.chat.growing_text import GrowingText, Steps
from paceline.serving.chat.message_parts import NAME, MessageParts
from paceline.serving.chat.parameters import REAL, WHOLE
from paceline.serving.chat.pythonic import LiteralArguments, Notation

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CALL: Final = re.compile(rf"\s*call:\s*({NAME.pattern})\s*(?=\{{)")
KEY: Final = re.compile(r"[^\s:{}\[\],<>]{1,128}")
BARE: Final = re.compile(r"[^,{}\[\]]+")
WORDS: Final = {"true": True, "false": False, "null": None, "None": None}


def _read_call(text: GrowingText, parts: MessageParts) -> Steps[bool]:
    """Read a call, which ends at the first mark that no text holds."""
    written, quoted = "", False
    while True:
        piece, mark = yield from text.until(QUOTE, *(() if quoted else (END,)))
        written += piece
        if mark == END:
            break
        written, quoted = written + mark, not quoted
    head = CALL.match(written)
    try:
        arguments = _Written(written[head.end() :]).whole() if head is not None else None
    except (ValueError, RecursionError):
        return False
    return head is not None and add_call(text, parts, head[1], arguments)


class _Written:
    """Reads values as Gemma writes them.

    Raises:
        ValueError: by all methods, where there is something else.
    """

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def whole(self) -> Any:
        """Return the value that the whole text is."""
        value = self._value()
        if self._text[self._at :].strip():
            raise ValueError("more than a value")
        return value

    def _sign(self, *signs: str) -> str:
        """Read and return which of these comes next; "" where none does."""
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        found = next((sign for sign in signs if self._text.startswith(sign, self._at)), "")
        self._at += len(found)
        return found

    def _value(self) -> Any:
        sign = self._sign(QUOTE, "{", "[")
        if sign == QUOTE:
            return self._quoted()
        if sign == "{":
            return dict(self._members())
        if sign == "[":
            return list(self._items())
        word = self._matched(BARE).strip()
        return WORDS[word] if word in WORDS else _number_or_text(word)

    def _quoted(self) -> str:
        end = self._text.index(QUOTE, self._at)
        text, self._at = self._text[self._at : end], end + len(QUOTE)
        return text

    def _matched(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError("nothing that is known")
        self._at = match.end()
        return match[0]

    def _members(self) -> Iterator[tuple[str, Any]]:
        while not self._sign("}"):
            key = self._quoted() if self._sign(QUOTE) else self._matched(KEY)
            if not self._sign(":"):
                raise ValueError("a key without a value")
            yield key, self._value()
            self._separated("}")

    def _items(self) -> Iterator[Any]:
        while not self._sign("]"):
            yield self._value()
            self._separated("]")

    def _separated(self, end: str) -> None:
        if not self._sign(",") and not self._text.startswith(end, self._at):
            raise ValueError("values without a comma between")


def _number_or_text(word: str) -> Any:
    try:
        value = json.loads(word)
    except ValueError:
        return word
    return value if isinstance(value, int | float) else word


def written(value: Any) -> str:
    """Write a value."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{written(one)}' for key, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    return json.dumps(value)


def _write(calls: Calls) -> str:
    return "".join(f"{BEGIN}call:{name}{written(dict(arguments))}{END}" for name, arguments in calls)


def _key(name: str) -> str:
    if KEY.fullmatch(name) is None:
        why = f"the parameter {name!r} cannot be written in this model's format of calls; rename it"
        raise ApiError(why, param="tools")
    return literal(name)


def _notation(rules: GrammarRules) -> Notation:
    """Return how values are written, whose texts begin and end with marks."""
    quote = rules.mark(QUOTE)
    text = rules.rule(f"{quote} {rules.text_until(QUOTE)}")

    def value(one: Any) -> str:
        pieces = written(one).split(QUOTE)
        return f" {quote} ".join(literal(piece) if piece else "" for piece in pieces)

    rules.add(f"""
WHOLE: {WHOLE}
REAL: {REAL}
any_key: /[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/
any: {text} | REAL | "true" | "false" | "null" | any_list | any_dict
any_list: "[" (any ("," any)*)? "]"
any_dict: "{{" (any_key ":" any ("," any_key ":" any)*)? "}}"
""")
    return Notation(
        text=text,
        words=('"true"', '"false"', '"null"'),
        comma='","',
        equals='":"',
        colon='":"',
        key=_key,
        inner_key=_key,
        value=value,
    )


def _openings(rules: GrammarRules, calls: AllowedCalls) -> Iterator[Opening]:
    notation = _notation(rules)
    each = {one.name: LiteralArguments(one, rules, notation, strict=calls.strict).text for one in calls.functions}
    call = rules.rule(one_of(f'"call:{name}{{" {text} "}}"' for name, text in each.items()))
    end = rules.mark(END)
    yield Opening(calls.repeated(f"{call} {end}", rules.mark(BEGIN)), mark=BEGIN)


GEMMA4: Final = CallFormat(
    signs=(r"<\|tool_call>call:",),
    begins=(BEGIN,),
    marks=(END, QUOTE),
    read=partial(read_block, item=BEGIN, ends=(), read_call=_read_call),
    write=_write,
    openings=_openings,
)
