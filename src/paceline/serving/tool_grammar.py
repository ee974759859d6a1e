"""The grammar of an answer: calls of functions in the format of the model's family, where they are asked for or where
the model begins one, and what the text must be otherwise.

Calls are the end of an answer: text and thoughts stand before them, as chat templates write them. Marks that begin
calls do so in free text, too, and what follows them there is what may follow. Formats without such a mark are known by
the beginning of a whole call, with the name of one of the functions, at the start of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from paceline.grammar import spelled
from paceline.serving.call_formats import ANY_BLANKS, CALL_FORMATS, AllowedCalls, Opening
from paceline.serving.grammar_rules import AS_TEXT, Marks, Rules, literal, one_of
from paceline.serving.protocol import ApiError, Function, Tool

BEHIND: Final = r"/[ \n]{1,4}/?"
"""What may stand behind thoughts."""


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How a model thinks before it answers.

    Attributes:
        begin, end: around the thoughts.
        opened: they have begun in the prompt.
    """

    begin: str = "<think>"
    end: str = "</think>"
    opened: bool = False


@dataclass(frozen=True, slots=True)
class TextSchema:
    """What a text must be.

    Attributes:
        value: of JSON Schema.
        strict: what cannot be enforced is rejected, and else ignored.
    """

    value: Any
    strict: bool


def calls_grammar(
    tools: Sequence[Tool],
    format_name: str,
    *,
    only: str | None,
    parallel: bool,
    strict: bool = False,
    marks: Marks = AS_TEXT,
    thoughts: Thoughts | None = None,
) -> str:
    """In llguidance's notation: one or more calls of these functions and nothing else.

    Args:
        only: the function that is to be called; None leaves the choice.
        strict: functions that do not say so are; of others, what cannot be enforced of their parameters is ignored.
        marks: how the tokenizer writes them.
        thoughts: that may come before.
    Raises:
        ApiError: no such function, or parameters that cannot be enforced in this format.
    """
    calls = AllowedCalls(picked(tools, only), needed=True, many=parallel and only is None, strict=strict)
    return answer_grammar(calls, None, format_name, marks=marks, thoughts=thoughts)


def picked(tools: Sequence[Tool], only: str | None) -> list[Function]:
    """The functions that are to be called.

    Args:
        only: the name of one; None leaves the choice.
    Raises:
        ApiError: no such function.
    """
    found = [tool.function for tool in tools if only in (None, tool.function.name)]
    if not found:
        raise ApiError(f"tool_choice names {only!r}, which is not among tools", param="tool_choice")
    return found


def answer_grammar(
    calls: AllowedCalls | None,
    schema: TextSchema | None,
    format_name: str,
    *,
    marks: Marks = AS_TEXT,
    thoughts: Thoughts | None = None,
) -> str:
    """In llguidance's notation: calls, or a text.

    Args:
        calls: None allows none.
        schema: of the text; None leaves it free.
        marks: how the tokenizer writes them.
        thoughts: that may come before.
    Raises:
        ApiError: parameters that cannot be enforced in this format.
    """
    if format_name == "openai":
        return _in_channels(calls, schema, marks)
    form = None if calls is None else CALL_FORMATS[format_name]
    thinking = () if thoughts is None else (thoughts.begin, thoughts.end)
    rules = Rules(marks, [*(() if form is None else form.marks), *thinking])
    free = schema is None and not (calls is not None and calls.needed)
    answers = [rules.free] if free else []
    if schema is not None:
        answers.append(rules.json(schema.value, strict=schema.strict))
    if calls is not None and form is not None:
        openings = form.openings(rules, replace(calls, beside_json=schema is not None))
        answers += [_opened(rules, one, free=free) for one in openings if free or not one.loose]
    answer = rules.rule(" | ".join(answers))
    return rules.written(answer if thoughts is None else _thinking(rules, answer, thoughts, free=free))


def _opened(rules: Rules, opening: Opening, *, free: bool) -> str:
    """Calls from their beginning on, or from that of the free text before them."""
    if opening.mark:
        return f"{rules.until(opening.mark) if free else rules.mark(opening.mark)} {opening.rest}"
    tag = f"({rules.free if free else ''} {rules.mark(opening.tag)})?" if opening.tag else ""
    if not free:
        return f"{tag} {opening.start} {opening.rest}"
    return f"{tag} {rules.rule(f'/{ANY_BLANKS}{opening.text}/', lazy=True)} {opening.rest}"


def _thinking(rules: Rules, answer: str, thoughts: Thoughts, *, free: bool) -> str:
    """An answer behind thoughts, if there are any."""
    thought = f"{rules.until(thoughts.end)} {'' if free else BEHIND} {answer}"
    thought = f"({thought} | {rules.free})" if free else thought
    if thoughts.opened:
        return thought
    begin = rules.mark(thoughts.begin)
    if not rules.silent(thoughts.begin):
        begin = rules.rule(rf"/[ \n]{{0,4}}{spelled(thoughts.begin)}/", lazy=True)
    return f"{answer} | {begin} {thought}"


HARMONY: Final = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|end|>", "<|return|>")


def _in_channels(calls: AllowedCalls | None, schema: TextSchema | None, marks: Marks) -> str:
    """Of gpt-oss: messages in channels, the last of which is the answer, or a call.

    The prompt ends with `<|start|>assistant`. The recipient of a call stands before its channel or behind it.
    """
    rules = Rules(marks, HARMONY)
    start, channel, message, constrain, called = (rules.mark(one) for one in HARMONY[:5])
    kind = f'(" "? {constrain}? "json")?'
    answers = []
    if schema is not None:
        text = rules.json(schema.value, strict=schema.strict)
        answers.append(f'{channel} "final" {kind} {message} {text}')
    elif calls is None or not calls.needed:
        answers.append(f'{channel} "final" {message} {rules.free}')
    if calls is not None:
        for one in calls.functions:
            recipient = literal(f" to=functions.{one.name}")
            header = f'({channel} "commentary" {recipient} | {recipient} {channel} "commentary")'
            answers.append(f"{header} {kind} {message} {calls.arguments(rules, one)} {called}")
    thought = f'{channel} ("analysis" | "commentary") {message} {rules.until("<|end|>")} {start} "assistant"'
    return rules.written(f"({rules.rule(thought)})* {one_of(answers)}")
