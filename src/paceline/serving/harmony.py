"""gpt-oss's answers, which are messages with headers: `<|channel|>analysis<|message|>...<|end|>` are thoughts, the
channels commentary and final are content, and a header with `to=functions.NAME` begins a call's arguments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from paceline.serving.growing_text import EndedError, GrowingText, Steps
from paceline.serving.message_parts import Parts

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
ENDS: Final = (END, RETURN, CALL)
"""Marks of which one ends a message."""

MARKS: Final = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
BEHIND: Final = (START, CHANNEL, MESSAGE, *ENDS)
"""Marks that a message does not hold."""

RECIPIENT: Final = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.-]{1,256})")
CHANNELS: Final = ("analysis", "commentary", "final")


@dataclass(slots=True)
class Header:
    """What stands before a message.

    Attributes:
        text: all of it but the marks.
    """

    text: str = ""
    channel: str = ""


def begun(prompt: str) -> str | None:
    """The message that a prompt ends in, from its header on; None where its answer begins behind a role."""
    last = prompt[prompt.rindex(START) :] if START in prompt else ""
    return last if MESSAGE in last or CHANNEL in last else None


def read_messages(text: GrowingText, parts: Parts) -> Steps[None]:
    """Read an answer, from its role or what is behind it on."""
    mark = ""
    try:
        while True:
            header = yield from _header(text, mark)
            text.forget()
            mark = yield from _message(text, parts, header)
            text.forget()
            if not mark:
                return
    except EndedError:
        text.to_end()
        rest = text.forget()
        if not any(one in rest for one in MARKS):
            parts.say(rest)
        parts.broken = parts.broken or (RECIPIENT.search(rest) is not None)


def _header(text: GrowingText, mark: str) -> Steps[Header]:
    """What stands before a message, and its mark.

    Args:
        mark: was read last; "" is none.
    Raises:
        EndedError: the text ends before the message.
    """
    header = Header()
    if mark in ("", *ENDS):
        yield from text.blanks()
        mark = yield from text.literal(START, CHANNEL, MESSAGE, CONSTRAIN, "to=")
        text.at -= len(mark) if mark == "to=" else 0
        if not mark:  # no header, but text
            text.at -= len(text.taken)
            return header
    while mark != MESSAGE:
        before = mark
        more, mark = yield from text.until(START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
        header.text += f" {more}"
        if before == CHANNEL:
            header.channel = next(iter(more.split()), "")
        if mark == START:
            header = Header()
    text.forget()
    if not header.channel:  # one that is marked as a message
        header.channel = (yield from text.literal(*(f"{one}{MESSAGE}" for one in CHANNELS))).removesuffix(MESSAGE)
    return header


def _message(text: GrowingText, parts: Parts, header: Header) -> Steps[str]:
    """A message, and the mark behind it, which is returned; "" at the text's end."""
    to = RECIPIENT.search(header.text)
    if to is not None and parts.knows(to[1]):
        return (yield from _call(text, parts, to[1]))
    parts.apart()
    sink = parts.think if header.channel == CHANNELS[0] else parts.say
    return (yield from text.flow(sink, *BEHIND))


def _call(text: GrowingText, parts: Parts, name: str) -> Steps[str]:
    """A call's arguments; what is no object is content."""
    try:
        yield from text.blanks()
        begun = yield from text.literal("{", *ENDS)
    except EndedError:
        text.to_end()
        text.forget()
        parts.broken = True
        return ""
    text.at -= len(begun)
    if not begun:
        parts.apart()
        text.at -= len(text.taken)
        return (yield from text.flow(parts.say, *BEHIND))
    parts.begin(name)
    if begun == "{":
        whole = yield from text.json(parts.add, START, *ENDS)
    else:
        parts.add("{}")
        whole = True
    if whole:
        parts.end()
    parts.broken = parts.broken or not whole
    return (yield from text.flow(lambda _: None, *BEHIND))
