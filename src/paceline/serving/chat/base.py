"""What the module of a family of models says about its function calls (`ToolFormat`): by what its chat templates are
known, how calls are read while they are written, how they are written, and their grammar.

Grammars allow the texts that the published chat templates write into a conversation. White space is where such models
put some, and comes to an end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.serving.api_errors import ApiError
from paceline.serving.chat.grammar_rules import GrammarRules, one_of
from paceline.serving.chat.growing_text import GrowingText, Steps
from paceline.serving.chat.message_parts import MessageParts, new_id
from paceline.serving.protocol import Function, Tool

ANY_OBJECT: Final = {"type": "object"}
SHAPES: Final = frozenset(("type", "$ref", "anyOf", "oneOf", "allOf"))
"""Keywords that say of what type a value is."""

Calls = Sequence[tuple[str, Mapping[str, Any]]]
"""Names of functions and their arguments."""

Read = Callable[[GrowingText, MessageParts, str], Steps[bool]]
"""Reads calls behind the mark that is given; returns whether the last thing it read is a call. What began like a call
and is none goes on as content, to the letter.
"""


@dataclass(frozen=True, slots=True)
class TextSchema:
    """Says which JSON schema a text must satisfy, and how strictly.

    Attributes:
        value: of JSON Schema.
        strict: what cannot be enforced is rejected, and else ignored.
    """

    value: Any
    strict: bool


@dataclass(frozen=True, slots=True)
class AllowedCalls:
    """Says which functions may be called, whether one must be, and how many.

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

    @classmethod
    def of(cls, tools: Sequence[Tool], only: str | None, *, needed: bool, many: bool, strict: bool) -> AllowedCalls:
        """Choose among the functions of a request those that may be called.

        Args:
            only: the name of the one that is to be called, once; None leaves the choice.
        Raises:
            ApiError: no such function.
        """
        functions = [tool.function for tool in tools if only in (None, tool.function.name)]
        if not functions:
            raise ApiError(f"tool_choice names {only!r}, which is not among tools", param="tool_choice")
        return cls(functions, needed=needed, many=many and only is None, strict=strict)

    def arguments(self, rules: GrammarRules, function: Function) -> str:
        """Return the rule for the arguments of a function, as JSON."""
        return rules.json(schema_of(function), strict=self.strict_of(function))

    def strict_of(self, function: Function) -> bool:
        return self.strict if function.strict is None else function.strict

    def each(self, rules: GrammarRules, before: Callable[[str], str]) -> str:
        """Return the grammar of a call of any of the functions.

        Args:
            before: what stands before its arguments, of its name.
        """
        return one_of(f"{before(function.name)} {self.arguments(rules, function)}" for function in self.functions)

    def repeated(self, call: str, between: str) -> str:
        """Return the grammar of one call, or of several if they may be."""
        return f"{call} ({between} {call})*" if self.many else call


def schema_of(function: Function) -> dict[str, Any]:
    """Return the JSON schema of a function's parameters, which is an object's in any case."""
    schema = {key: value for key, value in (function.parameters or ANY_OBJECT).items() if key != "x-guidance"}
    return schema if SHAPES & schema.keys() else {**ANY_OBJECT, **schema}


@dataclass(frozen=True, slots=True)
class Opening:
    """Describes a way in which calls begin, as rules of a grammar.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls. Of one whose whole answer has a form of its own (`harmony`) this is all;
    where calls stand in a text, `CallFormat` says how they are found there.

    Attributes:
        signs: regular expressions that are found in the chat templates of such models, all of them.
        begins: marks of which one begins calls.
        marks: what else belongs to the format and may be a special token.
        write: returns the text of calls.
        ambiguous: marks of `begins` that may begin something else, too.
        make_id: returns a new id of a call, as the chat templates take it back.
    """

    signs: tuple[str, ...]
    begins: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    write: Callable[[Calls], str]
    ambiguous: tuple[str, ...] = ()
    make_id: Callable[[], str] = new_id

    @property
    def meaning(self) -> Iterator[str]:
        """Yields the marks that free text does not hold, since they can only belong to calls."""
        return (mark for mark in (*self.begins, *self.marks) if mark not in self.ambiguous)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat(ToolFormat):
    """How calls are written that stand in a text.

    Attributes:
        read: reads calls behind a mark of `begins`, or behind "" where they begin the text.
        openings: yields the ways in which calls may begin, as rules of a grammar.
        opens: characters of which one begins calls without a mark, at the beginning of the content.
        named: matches, in calls that begin without a mark, up to the name, once that is clear.
    """

    read: Read
    openings: Callable[[GrammarRules, AllowedCalls], Iterable[Opening]]
    opens: str = ""
    named: re.Pattern[str] | None = None


def as_json(value: Any) -> str:
    """Write a value as JSON, as chat templates do."""
    return json.dumps(value, ensure_ascii=False)
