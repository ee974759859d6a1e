"""Calls whose arguments stand between tags, texts as they are and everything else as JSON: read, value by value, and as
a grammar.

In the grammar, parameters come in the order of the schema, those that are not required may be left out, and none is
added; functions that declare none may get any. A text ends where the tag behind it stands. Lengths and patterns of
texts are enforced; what cannot be is rejected where a function is strict, and ignored where it is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline.grammar import rust_pattern
from paceline.serving.chat.base import AllowedCalls, as_json
from paceline.serving.chat.blocks import MOST_KEY
from paceline.serving.chat.grammar_rules import GrammarRules, literal, one_of
from paceline.serving.chat.growing_text import GrowingText, Steps
from paceline.serving.chat.message_parts import NAME as FUNCTION_NAME
from paceline.serving.chat.message_parts import MessageParts
from paceline.serving.chat.parameters import NUMBER, OBJECT, REAL, WHOLE, Parameters, Schema
from paceline.serving.chat.values import typed_value
from paceline.serving.protocol import Function

TEXT: Final = frozenset(("pattern", "minLength", "maxLength"))
KEYWORDS: Final[Mapping[str, frozenset[str]]] = {"string": TEXT, "number": NUMBER, "integer": NUMBER}
"""These keywords of a type are enforced here."""

ESCAPED: Final = re.compile(r"\\.|\[\^?(?:[^\\\]]|\\.)*\]")
"""What is escaped in a regular expression, or in a set, has no other meaning there."""

NAME: Final = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
"""A parameter that no schema declares may have such a name."""


class TaggedCall:
    """Writes a call that is being read: its arguments, of which each comes whole, become JSON.

    Args:
        name: of the function, whose schema says which types the values have.
    """

    def __init__(self, text: GrowingText, parts: MessageParts, name: str) -> None:
        self._text, self._parts, self._schema, self._sign = text, parts, parts.schema(name), "{"
        text.forget()
        parts.begin(name)

    def add(self, key: str, value: str) -> None:
        """Add one more argument."""
        written = as_json(typed_value(value, self._schema, key))
        self._parts.add(f"{self._sign}{as_json(key)}: {written}")
        self._sign = ", "
        self._text.forget()

    def over(self, *, whole: bool) -> bool:
        """End the call, whole or because something else came than may come; it is a call in any case, so True is
        returned.
        """
        self._text.forget()
        if whole:
            self._parts.add("{}" if self._sign == "{" else "}")
            self._parts.end()
        else:
            self._parts.broken = True
        return True


def read_value(text: GrowingText, end: str, followers: tuple[str, ...]) -> Steps[str]:
    """Read a value up to the end mark that is followed by one of these: values may hold such marks themselves."""
    value = ""
    while True:
        more, _ = yield from text.until(end)
        value += more
        spaces = yield from text.blanks()
        tag = yield from text.literal(*followers)
        text.at -= len(tag)
        if tag:
            return value
        value += end + spaces


def value_text(value: Any) -> str:
    """Return a value as it stands between tags."""
    return value if isinstance(value, str) else as_json(value)


@dataclass(frozen=True, slots=True)
class Elements:
    """Says between which marks calls and their arguments stand: `call`NAME`close`, then for each argument
    `parameter`KEY`close`VALUE`parameter_end`, then `call_end`.
    """

    call: str
    call_end: str
    parameter: str
    parameter_end: str
    close: str

    def read(self, text: GrowingText, parts: MessageParts, *, end: str) -> Steps[bool]:
        """Read one call behind `call`; returns whether it is one.

        Args:
            end: the mark behind all calls.
        """
        name = yield from text.run(FUNCTION_NAME)
        if not (yield from text.literal(self.close)) or not parts.knows(name):
            return False
        call = TaggedCall(text, parts, name)
        while True:
            yield from text.blanks()
            tag = yield from text.literal(self.parameter, self.call_end, end)
            if tag != self.parameter:
                text.at -= len(tag) if tag == end else 0
                return call.over(whole=tag != "")
            key, mark = yield from text.until(self.close, most=MOST_KEY)
            if not mark:
                return call.over(whole=False)
            value = yield from read_value(text, self.parameter_end, (self.parameter, self.call_end, end))
            call.add(key.strip(), value.removeprefix("\n").removesuffix("\n"))

    def written(self, name: str, arguments: Mapping[str, Any], around: str = "") -> str:
        """Return the text of one call, an argument a line.

        Args:
            around: what stands around each value.
        """
        values = "".join(
            f"{self.parameter}{key}{self.close}{around}{value_text(value)}{around}{self.parameter_end}\n"
            for key, value in arguments.items()
        )
        return f"{self.call}{name}{self.close}\n{values}{self.call_end}"


@dataclass(frozen=True, slots=True)
class Tags:
    """Says how a parameter is written between tags.

    Attributes:
        before: what stands before its value, of the rules and what the name is in them.
        end: the mark behind its value.
        after: what stands behind that.
        words: how constants are written beside JSON's way.
        wrong: signs that a name cannot have.
    """

    before: Callable[[GrammarRules, str], str]
    end: str
    after: str
    words: Mapping[str, str]
    wrong: str


def arguments_of(rules: GrammarRules, calls: AllowedCalls, tags: Tags) -> dict[str, str]:
    """Return the grammar of arguments, by function."""
    return {
        function.name: TaggedArguments(function, rules, tags, strict=calls.strict).text for function in calls.functions
    }


class TaggedArguments(Parameters):
    """Writes the parameters of one function as rules.

    Attributes:
        text: what is between its name and its end.
    """

    def __init__(self, function: Function, rules: GrammarRules, tags: Tags, *, strict: bool) -> None:
        super().__init__(function, strict=strict)
        self._rules, self._tags = rules, tags
        self._end, self._any = rules.mark(tags.end), rules.text_until(tags.end)
        self.limit(self.whole, OBJECT | {"type"})
        self.text = self._all()

    def _all(self) -> str:
        """Return the grammar of all parameters, in the order of the schema."""
        properties, required = self.whole.get("properties") or {}, self.whole.get("required") or ()
        if missing := sorted(set(required) - properties.keys()):
            raise self.wrong(f"require {missing[0]!r}, which is not among their properties")
        if not properties and self.whole.get("additionalProperties") is not False:
            return f"({self._one(NAME, self._any)})*"
        return " ".join(
            self._one(self._name(name), one_of(self._values(schema, ()))) + ("" if name in required else "?")
            for name, schema in properties.items()
        )

    def _name(self, name: str) -> str:
        if not name or any(sign in name for sign in self._tags.wrong):
            why = f"have the name {name!r}, which this model's format of calls cannot write"
            raise self.wrong(f"{why}; tool_choice cannot be enforced")
        return literal(name)

    def _one(self, name: str, value: str) -> str:
        return f"({self._tags.before(self._rules, name)} {value} {self._tags.after})"

    def _values(self, schema: Schema, seen: tuple[str, ...]) -> list[str]:
        """Return the texts that a value may be, the mark behind it included.

        Args:
            seen: references that led here.
        """
        texts = self._alternatives(schema, seen)
        if not texts:
            raise self.wrong("must be schemas that something satisfies")
        return [self._any] if self._any in texts else texts

    def _alternatives(self, schema: Schema, seen: tuple[str, ...]) -> list[str]:
        """Return the texts that a value may be, each of them a rule; none where nothing satisfies the schema."""
        if schema is True or schema == {}:
            return [self._any]
        if not isinstance(schema, Mapping):
            raise self.wrong("must be schemas that something satisfies")
        if (values := self.listed(schema)) is not None:
            return [f"{self._constant(value)} {self._end}" for value in values]
        if (target := schema.get("$ref")) is not None:
            self.limit(schema, frozenset(("$ref",)))
            if target in seen:
                raise self.wrong(f"refer to {target!r} in a circle")
            return self._alternatives(self.find(target), (*seen, target))
        if (choices := self.choices(schema)) is not None:
            return [text for choice in choices for text in self._alternatives(choice, seen)]
        kinds = self.kinds(schema)
        if not {"object", "array"} & set(kinds):  # of which JSON says what can be enforced
            self.limit(schema, frozenset(("type",)).union(*(KEYWORDS.get(kind, frozenset()) for kind in kinds)))
        return [self._of_kind(kind, schema) for kind in kinds] or [self._any]

    def _constant(self, value: Any) -> str:
        text = value if isinstance(value, str) else as_json(value)
        if self._tags.end in text:
            raise self.wrong(f"list {value!r}, which this model's format of calls cannot write")
        return self._word(text) if not isinstance(value, str) else literal(text) if text else ""

    def _word(self, text: str) -> str:
        """Return the grammar of a constant of JSON."""
        other = self._tags.words.get(text)
        return literal(text) if other is None else f"({literal(text)} | {literal(other)})"

    def _of_kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        """Return the grammar of a value of one type, the mark behind it included."""
        if kind == "string":
            return self._string(schema)
        if kind in ("object", "array"):
            inner = {key: self.whole[key] for key in ("$defs", "definitions") if key in self.whole}
            return f"{self._rules.json({**inner, **schema, 'type': kind}, strict=self.strict)} {self._end}"
        if kind in ("integer", "number"):
            return f"{self._number(kind, schema)} {self._end}"
        words = ("true", "false") if kind == "boolean" else ("null",)
        return f"{one_of(map(self._word, words))} {self._end}"

    def _number(self, kind: str, schema: Mapping[str, Any]) -> str:
        limits = {key: schema[key] for key in NUMBER & schema.keys()}
        if not limits:
            return WHOLE if kind == "integer" else REAL
        return self._rules.json({"type": kind, **limits}, strict=self.strict)

    def _string(self, schema: Mapping[str, Any]) -> str:
        patterns = []
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if low or high is not None:
            patterns.append(f"(?s:.{{{low},{'' if high is None else high}}})")
        if "pattern" in schema:
            patterns += self._pattern(schema["pattern"])
        return self._rules.text_until(self._tags.end, *patterns) if patterns else self._any

    def _pattern(self, pattern: Any) -> list[str]:
        """Return a regular expression of whole texts; none where the pattern is not one and need not be."""
        if not isinstance(pattern, str):
            raise self.wrong(f"have a pattern {pattern!r}, which is none")
        inside = pattern.removeprefix("^")
        whole = ESCAPED.sub("", inside).endswith("$")
        inside = inside[:-1] if whole else inside
        plain = ESCAPED.sub("", inside)
        if "^" in plain or "$" in plain or (inside != pattern and _has_alternatives(plain)):
            if self.strict:
                raise self.unenforced(f"the pattern {pattern!r}")
            return []
        before, after = "" if pattern.startswith("^") else "(?s:.*)", "" if whole else "(?s:.*)"
        return [f"{before}(?:{rust_pattern(inside)}){after}".replace(r"\/", "/").replace("/", r"\x{2f}")]


def _has_alternatives(plain: str) -> bool:
    """Tell whether an expression without sets and escapes is a choice, outside of groups."""
    depth = 0
    for sign in plain:
        depth += (sign == "(") - (sign == ")")
        if sign == "|" and depth == 0:
            return True
    return False
