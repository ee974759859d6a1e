"""How calls of functions are written, as rules of a grammar, by format.

The texts are those that the published chat templates write into a conversation. White space is where such models put
some, and comes to an end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.grammar import spelled
from paceline.serving.grammar_rules import Rules, literal, one_of
from paceline.serving.protocol import Function
from paceline.serving.python_calls import LITERALS, PythonArguments
from paceline.serving.tagged_calls import GLM, QWEN, SEED, TaggedArguments, Tags

ANYTHING: Final = {"type": "object"}
SHAPES: Final = frozenset(("type", "$ref", "anyOf", "oneOf", "allOf"))
"""Keywords that say of what type a value is."""

ANY_BLANKS: Final = r"[ \t\r\n]*"
"""White space in what is free text until it is clear that it is a call, as a regular expression."""

NEWLINE: Final = r'"\n"?'

PYTHON_TAG: Final = "<|python_tag|>"
"""Before calls of Llama 3, and before programs."""

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
"""Around calls of Llama 4, at times."""


@dataclass(frozen=True, slots=True)
class AllowedCalls:
    """Which functions may be called, and how.

    Attributes:
        functions: at least one.
        needed: there is no answer without a call.
        many: several may be called.
        strict: functions that do not say so are.
        beside_json: the answer may be JSON instead, which begins as calls in JSON do.
    """

    functions: Sequence[Function]
    needed: bool
    many: bool
    strict: bool
    beside_json: bool = False

    def arguments(self, rules: Rules, function: Function) -> str:
        """Those of a function, as JSON."""
        return rules.json(_schema(function), strict=self.strict_of(function))

    def strict_of(self, function: Function) -> bool:
        return self.strict if function.strict is None else function.strict

    def each(self, rules: Rules, before: Callable[[str], str]) -> str:
        """A call of any of the functions.

        Args:
            before: what stands before its arguments, of its name.
        """
        return one_of(f"{before(one.name)} {self.arguments(rules, one)}" for one in self.functions)

    def repeated(self, one: str, between: str) -> str:
        """One call, or several if they may be."""
        return f"{one} ({between} {one})*" if self.many else one


def _schema(function: Function) -> dict[str, Any]:
    """Of a function's parameters."""
    given = {key: value for key, value in (function.parameters or ANYTHING).items() if key != "x-guidance"}
    return given if SHAPES & given.keys() else {**ANYTHING, **given}


@dataclass(frozen=True, slots=True)
class Opening:
    """A way in which calls begin.

    Attributes:
        rest: what follows up to their end.
        mark: that begins them, anywhere in a text.
        start: what begins them at the start where there is no mark.
        text: the same in free text, as a regular expression.
        tag: a special token that may stand before that text.
        loose: no way in which calls that must come are written.
    """

    rest: str
    mark: str = ""
    start: str = ""
    text: str = ""
    tag: str = ""
    loose: bool = False


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are written.

    Attributes:
        openings: ways to begin.
        marks: that mean something.
    """

    openings: Callable[[Rules, AllowedCalls], Iterator[Opening]]
    marks: Sequence[str] = ()


def _literals(*parts: str) -> str:
    """Parts of JSON, white space between them; "" is a place where some may stand."""
    return " BLANK? ".join(literal(part) if part else "" for part in parts)


def _objects(rules: Rules, calls: AllowedCalls, more: str = "") -> str:
    """A call that is an object.

    Args:
        more: what may stand behind its arguments.
    """
    start = _literals("{", '"name"', ":")
    each = calls.each(rules, lambda name: _literals(f'"{name}"', ",", '"arguments"', ":", ""))
    return rules.rule(f'{start} BLANK? {each} {more} BLANK? "}}"')


def _hermes(rules: Rules, calls: AllowedCalls) -> Iterator[Opening]:
    begin, end = rules.mark("<tool_call>"), rules.mark("</tool_call>")
    call = f"BLANK? {_objects(rules, calls)} BLANK? {end}"
    yield Opening(calls.repeated(call, f"BLANK? {begin}"), mark="<tool_call>")


def _mistral(rules: Rules, calls: AllowedCalls) -> Iterator[Opening]:
    name = r'(BLANK? "," BLANK? "\"id\"" BLANK? ":" BLANK? /"[A-Za-z0-9]{9}"/)?'
    listed = calls.repeated(_objects(rules, calls, name), 'BLANK? "," BLANK?')
    yield Opening(f'BLANK? "[" BLANK? {listed} BLANK? "]"', mark="[TOOL_CALLS]")


def _mistral_args(rules: Rules, calls: AllowedCalls) -> Iterator[Opening]:
    begin, arguments = rules.mark("[TOOL_CALLS]"), rules.mark("[ARGS]")
    name = f"({rules.mark('[CALL_ID]')} /[A-Za-z0-9]{{9}}/)?" if rules.silent("[CALL_ID]") else ""
    call = rules.rule(calls.each(rules, lambda one: f'"{one}" {name} {arguments}'))
    yield Opening(calls.repeated(call, begin), mark="[TOOL_CALLS]")


def _llama3_json(rules: Rules, calls: AllowedCalls) -> Iterator[Opening]:
    tag = PYTHON_TAG if rules.silent(PYTHON_TAG) else ""
    for one in calls.functions:
        if calls.beside_json:
            yield Opening(rules.json(_call_schema(one), strict=calls.strict_of(one)))
            continue
        key = _literals("", ",", '"parameters"', ":", "")
        rest = rules.rule(f'{key} {calls.arguments(rules, one)} BLANK? "}}"')
        named = ("{", '"name"', ":", f'"{one.name}"')
        text = ANY_BLANKS.join(map(spelled, named))
        yield Opening(rest, start=_literals(*named), text=text, tag=tag)
        yield Opening(f'{rest} BLANK? "]"', text=rf"\[{ANY_BLANKS}{text}", loose=True)


def _call_schema(function: Function) -> dict[str, Any]:
    """Of a whole call; definitions are where references look for them."""
    schema = _schema(function)
    moved: dict[str, Any] = {key: schema.pop(key) for key in ("$defs", "definitions") if key in schema}
    properties = {"name": {"const": function.name}, "parameters": schema}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **moved,
    }


def _pythonic(rules: Rules, calls: AllowedCalls) -> Iterator[Opening]:
    rules.add(LITERALS)
    arguments = {one.name: PythonArguments(one, rules, strict=calls.strict).text for one in calls.functions}
    call = rules.rule(one_of(f'"{name}(" {text} ")"' for name, text in arguments.items()))
    more = f"(COMMA {call})*" if calls.many else ""
    for name, text in arguments.items():
        yield Opening(f'{text} ")" {more} "]"', start=f'"[" "{name}("', text=spelled(f"[{name}("))
    if rules.silent(PYTHON_START):
        yield Opening(rf'"[" {call} {more} "]" {rules.mark(PYTHON_END)}', mark=PYTHON_START, loose=True)


def _tagged(rules: Rules, calls: AllowedCalls, tags: Tags) -> dict[str, str]:
    """Arguments between tags, by function."""
    return {one.name: TaggedArguments(one, rules, tags, strict=calls.strict).text for one in calls.functions}


def _elements(rules: Rules, calls: AllowedCalls, tags: Tags, marks: Sequence[str]) -> Iterator[Opening]:
    """Calls as `<function=NAME>` and what belongs to it, between two marks, which some models leave out at times."""
    begin, end = (rules.mark(mark) for mark in marks)
    texts = {name: rules.rule(rf'"\n" {text} "</function>"') for name, text in _tagged(rules, calls, tags).items()}
    each = one_of(f'"<function={name}>" {text}' for name, text in texts.items())
    call = rules.rule(rf'"\n" {each} "\n" {end}')
    yield Opening(calls.repeated(call, f"{NEWLINE} {begin}"), mark=marks[0])
    more = f"({NEWLINE} {begin} {call})*" if calls.many else ""
    for name, text in texts.items():
        yield Opening(rf'{text} ("\n" {end})? {more}', mark=f"<function={name}>", loose=True)


def _qwen3_coder(rules: Rules, calls: AllowedCalls) -> Iterator[Opening]:
    return _elements(rules, calls, QWEN, TAGS)


def _seed_oss(rules: Rules, calls: AllowedCalls) -> Iterator[Opening]:
    return _elements(rules, calls, SEED, SEED_TAGS)


def _glm45(rules: Rules, calls: AllowedCalls) -> Iterator[Opening]:
    begin, end = (rules.mark(mark) for mark in TAGS)
    each = (f'"{name}" {NEWLINE} {text}' for name, text in _tagged(rules, calls, GLM).items())
    call = rules.rule(f"{one_of(each)} {end}")
    yield Opening(calls.repeated(call, f"{NEWLINE} {begin}"), mark=TAGS[0])


def _section(rules: Rules, calls: AllowedCalls, call: str, between: str, marks: Sequence[str]) -> Iterator[Opening]:
    """Calls that each begin with a mark, all between two marks.

    Args:
        call: one of them, behind its mark.
        marks: those two, and that of a call.
    """
    begin = rules.mark(marks[2])
    yield Opening(f"{calls.repeated(f'{begin} {call}', between)} {rules.mark(marks[1])}", mark=marks[0])
    again = f"({between} {begin} {call})*" if calls.many else ""
    yield Opening(f"{call} {again} {rules.mark(marks[1])}?", mark=marks[2], loose=True)


def _deepseek_v3(rules: Rules, calls: AllowedCalls) -> Iterator[Opening]:
    separator, end = (rules.mark(one) for one in DEEPSEEK[3:])
    each = calls.each(rules, lambda name: rf'"{name}\n```json\n"')
    call = rules.rule(rf'"function" {separator} {each} "\n```" {end}')
    return _section(rules, calls, call, NEWLINE, DEEPSEEK)


def _deepseek_v31(rules: Rules, calls: AllowedCalls) -> Iterator[Opening]:
    separator, end = (rules.mark(one) for one in DEEPSEEK[3:])
    each = calls.each(rules, lambda name: f'"{name}" {separator}')
    call = rules.rule(f"{each} {end}")
    return _section(rules, calls, call, "", DEEPSEEK)


def _kimi_k2(rules: Rules, calls: AllowedCalls) -> Iterator[Opening]:
    separator, end = (rules.mark(one) for one in KIMI[3:])
    each = calls.each(rules, lambda name: f'"functions.{name}:" /[0-9]{{1,3}}/ {separator}')
    call = rules.rule(f"{each} {end}")
    return _section(rules, calls, call, "", KIMI)


TAGS: Final = ("<tool_call>", "</tool_call>")
SEED_TAGS: Final = ("<seed:tool_call>", "</seed:tool_call>")
PAIRS: Final = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
DEEPSEEK: Final = tuple(
    "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"
    for words in ("tool calls begin", "tool calls end", "tool call begin", "tool sep", "tool call end")
)
KIMI: Final = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)

CALL_FORMATS: Final[Mapping[str, CallFormat]] = {
    "hermes": CallFormat(_hermes, TAGS),
    "mistral": CallFormat(_mistral, ("[TOOL_CALLS]",)),
    "mistral_args": CallFormat(_mistral_args, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
    "llama3_json": CallFormat(_llama3_json),
    "pythonic": CallFormat(_pythonic, (PYTHON_START, PYTHON_END)),
    "qwen3_coder": CallFormat(_qwen3_coder, TAGS),
    "seed_oss": CallFormat(_seed_oss, SEED_TAGS),
    "glm45": CallFormat(_glm45, (*TAGS, *PAIRS)),
    "deepseek_v3": CallFormat(_deepseek_v3, DEEPSEEK),
    "deepseek_v31": CallFormat(_deepseek_v31, DEEPSEEK),
    "kimi_k2": CallFormat(_kimi_k2, KIMI),
}
