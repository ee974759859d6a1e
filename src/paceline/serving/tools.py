"""Function calls and thoughts in a model's text: how each family writes them, read while the text grows, and the
grammar that makes a model write them.

Formats: Hermes (Qwen, SmolLM2, many others): `<tool_call>{"name": ..., "arguments": ...}</tool_call>`; Llama 3:
`{"name": ..., "parameters": ...}`; Mistral: `[TOOL_CALLS][{"name": ..., "arguments": ...}]`; pythonic (Llama 3.2
and 4): `[name(key=value)]`. Which one is read off the chat template.
"""

from __future__ import annotations

import ast
import copy
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.serving.protocol import ApiError, Tool

THINK, THOUGHT = "<think>", "</think>"

Call = tuple[str, Any]
"""A function's name and its arguments."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written.

    Attributes:
        signs: what the chat templates of such models contain, all of them.
        begin: what starts calls; "" where they start the text.
        end: what ends one; "" where the text's end does.
        key: under which the arguments are.
        listed: calls are the items of one list.
        read: the calls in what stands between begin and end; raises ValueError or SyntaxError where it is none.
    """

    signs: tuple[str, ...]
    begin: str
    end: str
    key: str
    listed: bool
    read: Callable[[str], list[Call]]


def _named(value: Any) -> list[Call]:
    found = []
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            raise ValueError("no call")
        arguments = one.get("arguments", one.get("parameters", {}))
        found.append((one["name"], json.loads(arguments) if isinstance(arguments, str) else arguments))
    return found


def _of_json(text: str) -> list[Call]:
    return _named(json.loads(text))


def _several(text: str) -> list[Call]:
    """Objects one behind the other, with semicolons or blanks between."""
    found, decoder, at = list[Call](), json.JSONDecoder(), 0
    text = text.strip()
    while at < len(text):
        value, stop = decoder.raw_decode(text, at)
        found += _named(value)
        at = stop + len(text[stop:]) - len(text[stop:].lstrip(" ;\n\t"))
    return found


def _pythonic(text: str) -> list[Call]:
    tree = ast.parse(text.strip(), mode="eval").body
    found = []
    for one in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(one, ast.Call) or one.args:
            raise ValueError("no call")
        found.append((ast.unparse(one.func), {str(k.arg): ast.literal_eval(k.value) for k in one.keywords}))
    return found


FORMATS: Final[Mapping[str, ToolFormat]] = {
    "mistral": ToolFormat(("[TOOL_CALLS]",), "[TOOL_CALLS]", "", "arguments", True, _of_json),
    "hermes": ToolFormat(("<tool_call>",), "<tool_call>", "</tool_call>", "arguments", False, _of_json),
    "llama3_json": ToolFormat(('"parameters"',), "", "", "parameters", False, _several),
    "pythonic": ToolFormat(("[func_name1(",), "", "", "", True, _pythonic),
}


def format_of(template: str | None) -> str:
    """The format that a chat template speaks of; Hermes where it speaks of none."""
    for name, one in FORMATS.items():
        if template is not None and all(sign in template for sign in one.signs):
            return name
    return "hermes"


def calls_grammar(
    tools: Sequence[Tool], format_name: str, *, only: str | None, parallel: bool, strict: bool = False
) -> str:
    """In Lark's notation: one or more calls of these functions and nothing else.

    Args:
        only: the function that is to be called; None leaves the choice.
        strict: functions that do not say so are; of others, what cannot be enforced of their parameters is ignored.
    Raises:
        ApiError: no such function, or a format that cannot be enforced.
    """
    form = FORMATS[format_name]
    picked = [tool.function for tool in tools if only in (None, tool.function.name)]
    if not picked:
        raise ApiError(f"tool_choice names {only!r}, which is not among tools", param="tool_choice")
    if not form.key:
        raise ApiError(
            "tool_choice cannot be enforced in this model's format of calls; use 'auto'", param="tool_choice"
        )
    shapes = [
        {
            "type": "object",
            "properties": {"name": {"const": one.name}, form.key: copy.deepcopy(one.parameters or {"type": "object"})},
            "required": ["name", form.key],
            "additionalProperties": False,
        }
        for one in picked
    ]
    defined = _hoisted(shapes)
    schema: dict[str, Any] = {"anyOf": shapes} if len(shapes) > 1 else shapes[0]
    many = parallel and only is None
    if form.listed:
        schema = {"type": "array", "items": schema, "minItems": 1, **({} if many else {"maxItems": 1})}
    if not all(strict if one.strict is None else one.strict for one in picked):
        schema |= {"x-guidance": {"lenient": True, "coerce_one_of": True}}
    body = f"%json {json.dumps(schema | defined)}"
    begin, end = (json.dumps(mark) if mark else "" for mark in (form.begin, form.end))
    call = f'{begin} "\\n"? call "\\n"? {end}' if form.end else f"{begin} call"
    rest = f'("\\n"? {call})*' if many and form.end else ""
    return f"start: {call} {rest}\ncall: {body}\n"


def _hoisted(shapes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Definitions of the functions' own schemas, moved to where their references look for them."""
    found: dict[str, Any] = {}
    for shape in shapes:
        for parameters in shape["properties"].values():
            for key in ("$defs", "definitions"):
                if key in parameters:
                    found.setdefault(key, {}).update(parameters.pop(key))
    return found


@dataclass(slots=True)
class Delta:
    """What a piece of text adds to a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class Reader:
    """Splits a growing text into thoughts, content and calls.

    Args:
        form: of calls; None reads none.
        thinking: the text begins inside thoughts, as templates that write `<think>` themselves have it.
        most: calls; further ones are dropped. None keeps all.
    Attributes:
        called: how many calls there were.
    """

    def __init__(self, form: ToolFormat | None, *, thinking: bool, most: int | None = None) -> None:
        self._form, self._held, self._between, self.called = form, "", False, 0
        self._most, self._state = most, "thoughts" if thinking else "start"

    def feed(self, text: str, *, last: bool) -> Delta:
        """What `text` adds; what may be the beginning of a mark is held back until it is clear, or the text ends."""
        self._held += text
        delta = Delta()
        while self._held and self._step(delta, last=last):
            pass
        return delta

    def _step(self, delta: Delta, *, last: bool) -> bool:
        """Take something off what is held; False where more text is needed."""
        if self._between:  # line breaks around marks are no text
            self._held = self._held.lstrip("\n")
            self._between = not self._held
            if not self._held:
                return False
        if self._state == "start":
            return self._start(last=last)
        if self._state == "thoughts":
            before, found = self._until(THOUGHT, last=last)
            delta.reasoning += before
            if found:
                self._state, self._between = "content", True
            return found
        if self._state == "calls":
            return self._call(delta, last=last)
        if self._form is None:
            delta.content, self._held = delta.content + self._held, ""
            return False
        return self._content(delta, self._form, last=last)

    def _start(self, *, last: bool) -> bool:
        head = self._held.lstrip()
        if not last and THINK.startswith(head) and head != THINK:
            return False
        thinks = head.startswith(THINK)
        self._state = "thoughts" if thinks else "content"
        self._held, self._between = head[len(THINK) :] if thinks else self._held, thinks
        return bool(self._held)

    def _content(self, delta: Delta, form: ToolFormat, *, last: bool) -> bool:
        if not form.begin:
            head = self._held.lstrip()
            if head and head[0] not in "{[":
                self._form = None  # an answer in words
            else:
                self._state = "calls"
            return bool(head)
        before, found = self._until(form.begin, last=last)
        delta.content += before
        if found:
            self._state = "calls"
        return found

    def _call(self, delta: Delta, *, last: bool) -> bool:
        form = self._form
        assert form is not None
        stop = self._held.find(form.end) if form.end else -1
        if stop < 0 and not last:
            return False
        text = self._held if stop < 0 else self._held[:stop]
        self._held = "" if stop < 0 else self._held[stop + len(form.end) :]
        self._state = "content"
        try:
            calls = form.read(text)
        except (ValueError, SyntaxError):
            delta.content += f"{form.begin}{text}{form.end if stop >= 0 else ''}"
            return bool(self._held)
        for name, arguments in calls if self._most is None else calls[: self._most - self.called]:
            delta.calls.append(
                {
                    "index": self.called,
                    "id": f"call_{secrets.token_hex(12)}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
                }
            )
            self.called += 1
        self._between = True
        return bool(self._held)

    def _until(self, mark: str, *, last: bool) -> tuple[str, bool]:
        """Text up to a mark, which is taken too, and whether it was there."""
        at = self._held.find(mark)
        if at >= 0:
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            return before, True
        keep = 0 if last else next((n for n in range(len(mark) - 1, 0, -1) if self._held.endswith(mark[:n])), 0)
        before, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return before, False
