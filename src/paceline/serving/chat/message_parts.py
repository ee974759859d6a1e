"""Thoughts, content and function calls are put together to a message, as they are read off a model's text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.serving.chat.growing_text import Without

NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}")
"""Functions may be called by such a name, where it is not known which there are."""

PARAGRAPH: Final = "\n\n"
"""It stands between messages of one answer."""


def new_id() -> str:
    """Return a new id of a call, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class Delta:
    """Holds what a piece of text adds to a message.

    Attributes:
        calls: as in OpenAI's deltas: the first of each call has its id and name, all have a part of its arguments.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def begin(self, index: int, name: str, call_id: str) -> None:
        """Add the beginning of a call."""
        function = {"name": name, "arguments": ""}
        self.calls.append({"index": index, "id": call_id, "type": "function", "function": function})

    def go_on(self, index: int, arguments: str) -> None:
        """Add more of the arguments of a call that has begun."""
        if arguments and not (self.calls and self.calls[-1]["index"] == index):
            self.calls.append({"index": index, "function": {"arguments": ""}})
        if arguments:
            self.calls[-1]["function"]["arguments"] += arguments


class MessageParts:
    """Puts what is read into the delta of the piece that is being read.

    Args:
        functions: those that may be called, with the JSON schemas of their parameters; None lets all be.
        most: calls; further ones are dropped. None keeps all.
        hidden: marks that are special tokens, which no client is to see.
        make_id: of calls that have none of the model's.
    Attributes:
        delta: of the piece.
        called: how many calls there were.
        broken: one of them is not whole: its arguments are no JSON, or the text ended within it.
        hidden: as given.
    """

    def __init__(
        self,
        functions: Mapping[str, Any] | None,
        *,
        most: int | None = None,
        hidden: Collection[str] = (),
        make_id: Callable[[], str] = new_id,
    ) -> None:
        self.delta, self.called, self.broken = Delta(), 0, False
        self._functions, self._most, self._make_id = functions, most, make_id
        self.hidden = tuple(hidden)
        self._content, self._reasoning = Without(hidden), Without(hidden)
        self._blanks, self._said = "", False  # white space that is content if other content follows; whether it did
        self._thought = self._thoughts_apart = self._paragraphs = False
        self._arguments, self._calling = list[str](), False  # of the last call; whether it goes on

    def knows(self, name: str) -> bool:
        """Tell whether this is a function that may be called."""
        return NAME.fullmatch(name) is not None if self._functions is None else name in self._functions

    def schema(self, name: str) -> Any:
        """Return the JSON schema of a function's parameters; {} where it is not known."""
        return (self._functions or {}).get(name) or {}

    def think(self, text: str) -> None:
        """Add text to the thoughts."""
        self._add_content(self._content.rest())
        self._add_thoughts(self._reasoning.feed(text))

    def say(self, text: str) -> None:
        """Add text to the content. White space is none where nothing but calls comes before or behind it."""
        self._add_thoughts(self._reasoning.rest())
        self._add_content(self._content.feed(text))

    def _flush(self) -> None:
        self._add_thoughts(self._reasoning.rest())
        self._add_content(self._content.rest())

    def _add_thoughts(self, text: str) -> None:
        if text and self._thoughts_apart:
            self.delta.reasoning += PARAGRAPH
        self._thought = self._thought or text != ""
        self._thoughts_apart = self._thoughts_apart and not text
        self.delta.reasoning += text

    def _add_content(self, text: str) -> None:
        text = self._blanks + text
        self._said = self._said or text.strip() != ""
        self._blanks = "" if self._said else text
        if self._said:
            self.delta.content += text

    def apart(self) -> None:
        """Let what comes next begin a paragraph, of the content or of the thoughts, if there is some before."""
        self._flush()
        self._thoughts_apart = self._thought
        if self._said:
            self._said, self._blanks, self._paragraphs = False, PARAGRAPH, True

    def begin(self, name: str, call_id: str = "") -> None:
        """Begin a call."""
        self._flush()
        self._blanks, self._said = "", False
        self.called += 1
        self._arguments, self._calling = [], True
        if self._most is None or self.called <= self._most:
            self.delta.begin(self.called - 1, name, call_id or self._make_id())

    def add(self, arguments: str) -> None:
        """Add more of the arguments of the call that has begun."""
        self._arguments.append(arguments)
        if self._most is None or self.called <= self._most:
            self.delta.go_on(self.called - 1, arguments)

    def end(self) -> None:
        """End the call, whose arguments are complete."""
        self.broken, self._calling = self.broken or not is_json("".join(self._arguments)), False

    def call(self, name: str, arguments: Any) -> None:
        """Add a call that is known as a whole.

        Raises:
            ValueError: JSON has no such arguments.
        """
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        self.begin(name)
        self.add(written)
        self.end()

    def finish(self) -> None:
        """Hand out what was held back, since the text has ended."""
        self._flush()
        self.broken = self.broken or self._calling
        if not self.called and not self._paragraphs:
            self.delta.content += self._blanks
        self._blanks = ""


def is_json(text: str) -> bool:
    """Tell whether a text is a value of JSON."""
    try:
        json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return False
    return True


def _no_number(text: str) -> None:
    raise ValueError(text)
