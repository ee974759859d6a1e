"""Thoughts, content and function calls in a model's text, told apart while it grows."""

from __future__ import annotations

import ast
import json
import re
import secrets
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.serving.tool_formats import ToolFormat

THINK, THOUGHT = "<think>", "</think>"

ARGUMENTS: Final = ("arguments", "parameters")
HEAD: Final = re.compile(
    r'\{\s{0,64}"name"\s{0,64}:\s{0,64}"([^"\\\x00-\x1f]{1,256})"\s{0,64},\s{0,64}"(?:arguments|parameters)"'
    r"\s{0,64}:\s{0,64}(?=\{)"
)
"""A call up to its arguments, as most models write it."""

BETWEEN: Final = re.compile(r"[\s\[\],;]*")
"""What may stand around calls."""

Call = tuple[str, Any]
"""A function's name and its arguments."""


def _of_json(text: str) -> Call:
    """The call that an object is.

    Raises:
        ValueError: it is none.
    """
    one = json.loads(text)
    if not isinstance(one.get("name"), str) or not (
        one.keys() & set(ARGUMENTS) or one.keys() <= {"name", "id", "type"}
    ):
        raise ValueError("no call")
    arguments: Any = next((one[key] for key in ARGUMENTS if key in one), {})
    return one["name"], json.loads(arguments) if isinstance(arguments, str) else arguments


def _of_python(text: str) -> list[Call]:
    """The calls of a list of them.

    Raises:
        ValueError, SyntaxError: it is none.
    """
    tree = ast.parse(text.strip(), mode="eval").body
    found = []
    for one in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(one, ast.Call) or one.args:
            raise ValueError("no call")
        found.append((ast.unparse(one.func), {str(k.arg): ast.literal_eval(k.value) for k in one.keywords}))
    return found


@dataclass(slots=True)
class Delta:
    """What a piece of text adds to a message.

    Attributes:
        calls: as in OpenAI's deltas: the first of each call has its id and name, all have a part of its arguments.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def begin(self, index: int, name: str) -> None:
        """A call begins."""
        function = {"name": name, "arguments": ""}
        self.calls.append(
            {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        )

    def go_on(self, index: int, arguments: str) -> None:
        """More of the arguments of a call that has begun."""
        if arguments and not (self.calls and self.calls[-1]["index"] == index):
            self.calls.append({"index": index, "function": {"arguments": ""}})
        if arguments:
            self.calls[-1]["function"]["arguments"] += arguments


class Object:
    """Finds the end of a JSON object in a growing text.

    Args:
        mark: that ends it as well, outside of strings; "" is none.
        depth: brackets that are open at the start.
    Attributes:
        at: how much of the text belongs to it so far.
    """

    SIGNS: Final = re.compile(r'[{}\[\]"\\<]')

    def __init__(self, mark: str, depth: int = 0) -> None:
        self._mark, self._depth, self._quoted, self.at = mark, depth, False, 0

    def ends(self, text: str, *, last: bool) -> bool:
        """Whether it ends in this text, behind its first `at` characters."""
        while (sign := self.SIGNS.search(text, self.at)) is not None:
            at, found = sign.start(), sign[0]
            if found == "\\" and at + 1 == len(text) and not last:
                self.at = at  # what is behind it belongs to it
                return False
            if found == "<" and not self._quoted and self._marked(text[at : at + len(self._mark)], last=last):
                self.at = at
                return text.startswith(self._mark, at)
            self.at = at + 1 + (found == "\\")
            if found == '"':
                self._quoted = not self._quoted
            elif not self._quoted and found in "{}[]":
                self._depth += 1 if found in "{[" else -1
                if self._depth == 0:
                    return True
        self.at = len(text)
        return False

    def _marked(self, text: str, *, last: bool) -> bool:
        """Whether this is the mark, or may become it."""
        return self._mark != "" and (text == self._mark or (not last and self._mark.startswith(text)))


class Reader:
    """Splits a growing text into thoughts, content and calls.

    Calls come while they are written, as far as their format lets one tell that they are some: those of JSON from
    their arguments on, those of Python whole.

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
        self._object: Object | None = None  # that is being read
        self._before = 0  # calls before the mark that began these
        self._steps = {
            "start": self._start,
            "thoughts": self._thoughts,
            "content": self._content,
            "calls": self._call if form is None or form.key else self._python,
            "arguments": self._inside,
            "rest": self._inside,
        }

    def feed(self, text: str, *, last: bool) -> Delta:
        """What `text` adds; what may be the beginning of a mark is held back until it is clear, or the text ends."""
        self._held += text
        delta = Delta()
        while self._held and self._step(delta, last=last):
            pass
        if last and self._state == "calls" and self.called == self._before and self._form is not None:
            delta.content += self._form.begin  # with nothing behind it
        return delta

    def _step(self, delta: Delta, *, last: bool) -> bool:
        """Take something off what is held; False where more text is needed."""
        if self._between:  # line breaks around marks are no text
            self._held = self._held.lstrip("\n")
            self._between = not self._held
            if not self._held:
                return False
        return self._steps[self._state](delta, last=last)

    def _thoughts(self, delta: Delta, *, last: bool) -> bool:
        before, found = self._until(THOUGHT, last=last)
        delta.reasoning += before
        if found:
            self._state, self._between = "content", True
        return found

    def _start(self, _: Delta, *, last: bool) -> bool:
        head = self._held.lstrip()
        if not last and THINK.startswith(head) and head != THINK:
            return False
        thinks = head.startswith(THINK)
        self._state = "thoughts" if thinks else "content"
        self._held, self._between = head[len(THINK) :] if thinks else self._held, thinks
        return bool(self._held)

    def _content(self, delta: Delta, *, last: bool) -> bool:
        form = self._form
        if form is None:
            delta.content, self._held = delta.content + self._held, ""
            return False
        if not form.begin:
            head = self._held.lstrip()
            if head and head[0] not in "{[":
                self._form = None  # an answer in words
            else:
                self._state, self._before = "calls", self.called
            return bool(head)
        before, found = self._until(form.begin, last=last)
        delta.content += before
        if found:
            self._state, self._before = "calls", self.called
        return found

    def _call(self, delta: Delta, *, last: bool) -> bool:
        """The beginning of a call, or the end of calls."""
        form, around = self._form, BETWEEN.match(self._held)
        assert form is not None
        assert around is not None
        rest, some = self._held[around.end() :], self.called > self._before
        if some and form.end and rest.startswith(form.end):
            self._held, self._state, self._between = rest[len(form.end) :], "content", True
        elif not rest or (form.end and form.end.startswith(rest)):
            if last and some:
                self._held = ""
            return last and not some and self._no_call(delta, form)
        elif rest[0] != "{":
            return self._no_call(delta, form)
        elif (head := HEAD.match(rest)) is not None:
            self._begin(delta, head[1])
            self._held, self._object, self._state = rest[head.end() :], Object(form.end), "arguments"
        else:
            return self._whole(delta, form, rest, last=last)
        return True

    def _whole(self, delta: Delta, form: ToolFormat, text: str, *, last: bool) -> bool:
        """A call that is clear at its end only."""
        self._object = self._object or Object(form.end)
        if not self._object.ends(text, last=last):
            return last and self._no_call(delta, form)
        try:
            name, arguments = _of_json(text[: self._object.at])
        except ValueError:
            return self._no_call(delta, form)
        self._begin(delta, name)
        self._add(delta, json.dumps(arguments, ensure_ascii=False))
        self._held, self._object = text[self._object.at :], None
        return True

    def _inside(self, delta: Delta, *, last: bool) -> bool:
        """The arguments of a call, and what may follow them in its object."""
        assert self._form is not None
        assert self._object is not None
        ended = self._object.ends(self._held, last=last)
        if self._state == "arguments":
            self._add(delta, self._held[: self._object.at])
        self._held, self._object.at = self._held[self._object.at :], 0
        if ended:
            inner = self._state == "arguments"
            self._state, self._object = ("rest", Object(self._form.end, 1)) if inner else ("calls", None)
        return ended

    def _no_call(self, delta: Delta, form: ToolFormat) -> bool:
        """What began as a call is text."""
        if self.called == self._before:
            delta.content += form.begin
        self._object, self._state = None, "content"
        if not form.begin:
            self._form = None
        return True

    def _begin(self, delta: Delta, name: str) -> None:
        self.called += 1
        if self._most is None or self.called <= self._most:
            delta.begin(self.called - 1, name)

    def _add(self, delta: Delta, arguments: str) -> None:
        if self._most is None or self.called <= self._most:
            delta.go_on(self.called - 1, arguments)

    def _python(self, delta: Delta, *, last: bool) -> bool:
        if not last:
            return False
        try:
            for name, arguments in _of_python(self._held):
                self._begin(delta, name)
                self._add(delta, json.dumps(arguments, ensure_ascii=False))
        except (ValueError, SyntaxError):
            delta.content += self._held
        self._held = ""
        return False

    def _until(self, mark: str, *, last: bool) -> tuple[str, bool]:
        """Text up to a mark, which is taken too, and whether it was there."""
        at = self._held.find(mark)
        if at >= 0:
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            return before, True
        keep = 0 if last else next((n for n in range(len(mark) - 1, 0, -1) if self._held.endswith(mark[:n])), 0)
        before, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return before, False
