"""Arguments between tags, as Qwen3-Coder, Seed-OSS and GLM-4.5 write them: texts as they are, everything else as JSON.

Parameters come in the order of the schema, those that are not required may be left out, and none is added; functions
that declare none may get any. A text ends where the tag behind it stands. Lengths and patterns of texts are enforced;
what cannot be is rejected where a function is strict, and ignored where it is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline.grammar import rust_pattern
from paceline.serving.grammar_rules import Rules, literal, one_of
from paceline.serving.protocol import Function
from paceline.serving.tool_parameters import NUMBER, OBJECT, Parameters, Schema

TEXT: Final = frozenset(("pattern", "minLength", "maxLength"))
KEYWORDS: Final[Mapping[str, frozenset[str]]] = {"string": TEXT, "number": NUMBER, "integer": NUMBER}
"""Those of a type that are enforced here."""

ESCAPED: Final = re.compile(r"\\.|\[\^?(?:[^\\\]]|\\.)*\]")
"""What means nothing else in a regular expression."""

WHOLE: Final = "/-?(0|[1-9][0-9]{0,17})/"
REAL: Final = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?/"
NAME: Final = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
"""Of a parameter that no schema declares."""


@dataclass(frozen=True, slots=True)
class Tags:
    """How a parameter is written.

    Attributes:
        before: what stands before its value, of the rules and what the name is in them.
        end: the mark behind its value.
        after: what stands behind that.
        words: how constants are written beside JSON's way.
        wrong: signs that a name cannot have.
    """

    before: Callable[[Rules, str], str]
    end: str
    after: str
    words: Mapping[str, str]
    wrong: str


def _in_attribute(_: Rules, name: str) -> str:
    return rf'"<parameter=" {name} ">\n"'


def _in_element(_: Rules, name: str) -> str:
    return rf'"<parameter=" {name} ">"'


def _in_pairs(rules: Rules, name: str) -> str:
    opened, closed, value = (rules.mark(mark) for mark in ("<arg_key>", "</arg_key>", "<arg_value>"))
    return rf'{opened} {name} {closed} "\n"? {value}'


WORDS: Final = {"true": "True", "false": "False", "null": "None"}
QWEN: Final = Tags(_in_attribute, "\n</parameter>", r'"\n"', WORDS, ">\n")
SEED: Final = Tags(_in_element, "</parameter>", r'"\n"', WORDS, ">\n")
GLM: Final = Tags(_in_pairs, "</arg_value>", r'"\n"?', {}, "<\n")


class TaggedArguments(Parameters):
    """The parameters of one function as rules.

    Attributes:
        text: what is between its name and its end.
    """

    def __init__(self, function: Function, rules: Rules, tags: Tags, *, strict: bool) -> None:
        super().__init__(function, strict=strict)
        self._rules, self._tags = rules, tags
        self._end, self._any = rules.mark(tags.end), rules.text_until(tags.end)
        self.limit(self.whole, OBJECT | {"type"})
        self.text = self._all()

    def _all(self) -> str:
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
        """What a value may be, the mark behind it included.

        Args:
            seen: references that led here.
        """
        found = self._alternatives(schema, seen)
        if not found:
            raise self.wrong("must be schemas that something satisfies")
        return [self._any] if self._any in found else found

    def _alternatives(self, schema: Schema, seen: tuple[str, ...]) -> list[str]:
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
            return [text for one in choices for text in self._alternatives(one, seen)]
        kinds = self.kinds(schema)
        if not {"object", "array"} & set(kinds):  # of which JSON says what can be enforced
            self.limit(schema, frozenset(("type",)).union(*(KEYWORDS.get(kind, frozenset()) for kind in kinds)))
        return [self._of_kind(kind, schema) for kind in kinds] or [self._any]

    def _constant(self, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if self._tags.end in text:
            raise self.wrong(f"list {value!r}, which this model's format of calls cannot write")
        return self._word(text) if not isinstance(value, str) else literal(text) if text else ""

    def _word(self, text: str) -> str:
        """A constant of JSON."""
        other = self._tags.words.get(text)
        return literal(text) if other is None else f"({literal(text)} | {literal(other)})"

    def _of_kind(self, kind: str, schema: Mapping[str, Any]) -> str:
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
        """An expression of whole texts; none where it is not one and need not be."""
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
    """Whether an expression without sets and escapes is a choice, outside of groups."""
    depth = 0
    for sign in plain:
        depth += (sign == "(") - (sign == ")")
        if sign == "|" and depth == 0:
            return True
    return False
