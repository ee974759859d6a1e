"""Thoughts, content and function calls in a model's text are told apart while it grows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from paceline.serving.chat import harmony
from paceline.serving.chat.base import CallFormat, ToolFormat
from paceline.serving.chat.growing_text import BREAKS, EndedError, GrowingText, Steps
from paceline.serving.chat.message_parts import Delta, MessageParts, new_id
from paceline.serving.chat.reasoning import REASONING, TAGS, ReasoningFormat

MESSAGES: Final = (harmony.HARMONY, REASONING["harmony"])
"""Calls and thoughts in messages: either of these formats has the other with it."""


def marks_of(form: ToolFormat | None, reasoning: ReasoningFormat) -> frozenset[str]:
    """Return the marks that are read in a text, and may be special tokens of a tokenizer."""
    calls = (*form.begins, *form.marks) if form is not None else ()
    thoughts = harmony.MARKS if reasoning is REASONING["harmony"] else (reasoning.begin, reasoning.end)
    return frozenset((*calls, *thoughts))


class Reader:
    """Splits a growing text into thoughts, content and calls.

    Calls come while they are written, as far as their format lets one tell that they are some: those of JSON from
    their arguments on, those of elements value by value, those of Python whole.

    Args:
        form: of calls; None reads none.
        thinking: the text begins inside thoughts, as templates that write `<think>` themselves have it.
        functions: that may be called, with the JSON schemas of their parameters: what calls another one is content.
            None lets all be called.
        reasoning: form of thoughts.
        most: calls; further ones are dropped. None keeps all.
        hidden: marks that are special tokens, which are no content.
        prompt: of which the last header is read on, where an answer consists of messages.
    Attributes:
        called: how many calls there were.
        whole: there were some, and none was cut off, or has arguments that are no JSON.
    """

    def __init__(
        self,
        form: ToolFormat | None,
        *,
        thinking: bool = False,
        functions: Mapping[str, Any] | None = None,
        reasoning: ReasoningFormat = TAGS,
        most: int | None = None,
        hidden: Collection[str] = (),
        prompt: str = "",
    ) -> None:
        self._form, self._reasoning = form if isinstance(form, CallFormat) else None, reasoning
        make_id = new_id if form is None else form.make_id
        hidden = {*hidden, *reasoning.around}
        self._parts = MessageParts({} if form is None else functions, most=most, hidden=hidden, make_id=make_id)
        self._text = GrowingText()
        if form not in MESSAGES and reasoning not in MESSAGES:
            self._steps = self._answer(thinking)
            return
        self._steps = self._messages()
        if (begun := harmony.begun(prompt)) is not None:
            self.feed(begun, last=False)

    @property
    def called(self) -> int:
        return self._parts.called

    @property
    def whole(self) -> bool:
        return self._parts.called > 0 and not self._parts.broken

    def feed(self, text: str, *, last: bool, cut: bool = False) -> Delta:
        """Read on, and return what `text` adds; what may be the beginning of a mark is held back until it is clear, or
        the text ends.

        Args:
            cut: at the text's end: a stop text or a limit ended it; what began like a call is neither one nor content.
        """
        self._parts.delta = delta = Delta()
        self._text.grow(text, last=last, cut=cut)
        next(self._steps, None)
        return delta

    def _messages(self) -> Steps[None]:
        yield from harmony.read_messages(self._text, self._parts)
        self._parts.finish()

    def _answer(self, thinking: bool) -> Steps[None]:
        """Read thoughts, and then content and calls, to the text's end."""
        try:
            yield from self._thoughts(thinking)
        except EndedError:
            if thinking:
                self._text.to_end()
                self._parts.think(self._text.forget())
            else:
                self._text.at -= len(self._text.taken)
        yield from self._content()
        self._parts.finish()

    def _thoughts(self, thinking: bool) -> Steps[None]:
        """Read thoughts before the content, if there are some.

        Raises:
            EndedError: the text ends before that is clear.
        """
        text = self._text
        blanks = yield from text.blanks()
        begun = yield from text.literal(self._reasoning.begin)
        if begun:
            yield from text.blanks(BREAKS)
        elif thinking:
            self._parts.think(blanks)
        else:
            text.at -= len(blanks)
            return
        yield from self._inside()

    def _inside(self) -> Steps[None]:
        """Read thoughts up to their end, or to a call, where what begins one is a token that nothing else is."""
        text, form, hidden = self._text, self._form, self._parts.hidden
        begins = () if form is None else tuple(mark for mark in form.begins if mark in hidden)
        ends = (self._reasoning.end, *begins)
        mark = yield from text.flow(self._parts.think, *ends)
        if mark in begins:
            text.at -= len(mark)
        else:
            yield from text.blanks(BREAKS)
            text.forget()

    def _content(self) -> Steps[None]:
        """Read content and calls, and more thoughts, where what begins them is a token that nothing else is."""
        text, parts, form = self._text, self._parts, self._form
        if form is not None and form.opens:
            yield from text.blanks()
            opened = text.text[text.at : text.at + 1] in tuple(form.opens)
            text.at -= len(text.taken)
            if opened:
                yield from self._calls(form, "")
        thought = self._reasoning.begin
        begins = (*(() if form is None else form.begins), *((thought,) if thought in parts.hidden else ()))
        while mark := (yield from text.flow(parts.say, *begins)):
            if mark == thought:
                yield from text.blanks(BREAKS)
                yield from self._inside()
            elif form is not None:
                yield from self._calls(form, mark)

    def _calls(self, form: CallFormat, mark: str) -> Steps[None]:
        """Read calls. What turns out to be none is content; where something cut the text off within what can only be a
        call, what was read of it is nothing.
        """
        text, parts, before = self._text, self._parts, self._parts.called
        try:
            called = yield from form.read(text, parts, mark)
        except EndedError:
            text.to_end()
            name = None if form.named is None else form.named.match(text.taken)
            clear = mark != "" or parts.called > before or (name is not None and parts.knows(name[1]))
            called = text.cut and text.taken != "" and clear
            parts.broken = parts.broken or called
        if not called:
            parts.say(text.forget())
            return
        text.forget()
        yield from text.blanks(BREAKS)
        text.forget()
