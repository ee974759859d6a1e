"""gpt-oss: answers are messages with headers. `<|channel|>analysis<|message|>...<|end|>` are thoughts, the channels
commentary and final are content, and a header with `to=functions.NAME` begins a call's arguments.
"""

from __future__ import annotations

import re
from typing import Final

from paceline.serving.chat.base import AllowedCalls, Calls, TextSchema, ToolFormat, as_json
from paceline.serving.chat.grammar_rules import GrammarRules, Marks, literal, one_of
from paceline.serving.chat.growing_text import EndedError, GrowingText, Steps
from paceline.serving.chat.message_parts import MessageParts

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
ENDS: Final = (END, RETURN, CALL)
"""Marks of which one ends a message."""

MARKS: Final = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
BEHIND: Final = (START, CHANNEL, MESSAGE, *ENDS)
"""Marks that a message does not hold."""

ANSWER: Final = f"{START}assistant"
"""An answer begins with this, in its prompt."""

RECIPIENT: Final = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.-]{1,256})")
CHANNELS: Final = ("analysis", "commentary", "final")


def begun(prompt: str) -> str | None:
    """Return the message that a prompt ends in, from its header on; None where its answer begins behind a role."""
    last = prompt[prompt.rindex(START) :] if START in prompt else ""
    return last if MESSAGE in last or CHANNEL in last else None


def read_messages(text: GrowingText, parts: MessageParts) -> Steps[None]:
    """Read an answer, from its role or what is behind it on."""
    mark = ""
    try:
        while True:
            header, channel = yield from _header(text, mark)
            text.forget()
            mark = yield from _message(text, parts, header, channel)
            text.forget()
            if not mark:
                return
    except EndedError:
        text.to_end()
        rest = text.forget()
        if not any(known in rest for known in MARKS):
            parts.say(rest)
        parts.broken = parts.broken or (RECIPIENT.search(rest) is not None)


def _header(text: GrowingText, mark: str) -> Steps[tuple[str, str]]:
    """Read what stands before a message, and return all of it but the marks, and the channel, which may be "".

    Args:
        mark: was read last; "" is none.
    Raises:
        EndedError: the text ends before the message.
    """
    header = channel = ""
    if mark in ("", *ENDS):
        yield from text.blanks()
        mark = yield from text.literal(START, CHANNEL, MESSAGE, CONSTRAIN, "to=")
        text.at -= len(mark) if mark == "to=" else 0
        if not mark:  # no header, but text
            text.at -= len(text.taken)
            return header, channel
    while mark != MESSAGE:
        before = mark
        more, mark = yield from text.until(START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
        header += f" {more}"
        if before == CHANNEL:
            channel = next(iter(more.split()), "")
        if mark == START:
            header = channel = ""
    text.forget()
    if not channel:  # one that is marked as a message
        channel = (yield from text.literal(*(f"{name}{MESSAGE}" for name in CHANNELS))).removesuffix(MESSAGE)
    return header, channel


def _message(text: GrowingText, parts: MessageParts, header: str, channel: str) -> Steps[str]:
    """Read a message and the mark behind it, which is returned; "" at the text's end."""
    to = RECIPIENT.search(header)
    if to is not None and parts.knows(to[1]):
        return (yield from _call(text, parts, to[1]))
    parts.apart()
    sink = parts.think if channel == CHANNELS[0] else parts.say
    return (yield from text.flow(sink, *BEHIND))


def _call(text: GrowingText, parts: MessageParts, name: str) -> Steps[str]:
    """Read a call's arguments, of which what is no object is content; returns the mark behind them."""
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


def _write(calls: Calls) -> str:
    return ANSWER.join(
        f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}{as_json(arguments)}{CALL}"
        for name, arguments in calls
    )


def grammar(calls: AllowedCalls | None, schema: TextSchema | None, marks: Marks) -> str:
    """Write the grammar of messages in channels, the last of which is the answer, or a call.

    The prompt ends with `<|start|>assistant`. The recipient of a call stands before its channel or behind it.

    Args:
        calls: None allows none.
        schema: of the text; None leaves it free.
    """
    rules = GrammarRules(marks, MARKS)
    start, channel, message, constrain, called = map(rules.mark, (START, CHANNEL, MESSAGE, CONSTRAIN, CALL))
    kind = f'(" "? {constrain}? "json")?'
    answers = []
    if schema is not None:
        text = rules.json(schema.value, strict=schema.strict)
        answers.append(f'{channel} "final" {kind} {message} {text}')
    elif calls is None or not calls.needed:
        answers.append(f'{channel} "final" {message} {rules.free}')
    if calls is not None:
        for function in calls.functions:
            recipient = literal(f" to=functions.{function.name}")
            header = f'({channel} "commentary" {recipient} | {recipient} {channel} "commentary")'
            answers.append(f"{header} {kind} {message} {calls.arguments(rules, function)} {called}")
    thought = f'{channel} ("analysis" | "commentary") {message} {rules.until(END)} {start} "assistant"'
    return rules.written(f"({rules.rule(thought)})* {one_of(answers)}")


HARMONY: Final = ToolFormat(signs=(re.escape(START), re.escape(MESSAGE)), marks=MARKS, write=_write)
